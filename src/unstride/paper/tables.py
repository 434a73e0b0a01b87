"""The paper's tables that need measurements, as cells."""

from __future__ import annotations

from typing import Any

from unstride.paper import numbers
from unstride.paper.exhibits import PRINTED, Cell, Exhibit, Run
from unstride.paper.numbers import FOUR, MORE, NON_LEARNED_TOTALS, TTA_TOTALS, lines, number

METHODS = {"GPS": "gps-shanmugam", "ClassTTA": "classtta", "AugTTA": "augtta", "MeanTTA": "mean", "MaxTTA": "max"}
_GPS_POOL = 30  # our choice: the paper's GPS is the same at every total, but the pool is not printed
_WORDS = {"yes": True, "no": False}


def learned_run(model: str, data: str, policy: str, method: str, ours: bool, total: int) -> Run:
    """The appendix's budget pairs (B_tta, B_ours): (10, total / 10) with ours, (total, 1) without."""
    if ours:
        return Run(model, data, total // 10, True, 10, policy, METHODS[method])
    return Run(model, data, 1, False, _GPS_POOL if method == "GPS" else total, policy, METHODS[method])


def _tta(name: str, where: str, title: str, data: str, policy: str, block: str, models: tuple[str, ...]) -> Exhibit:
    cells = []
    for method, ours, *words in lines(block):
        for i, model in enumerate(models):
            for j, total in enumerate(TTA_TOTALS):
                run = learned_run(model, data, policy, method, _WORDS[ours], total)
                cells.append(Cell((method, ours), model, f"B = {total}", run, "top1", number(words[3 * i + j])))
    return Exhibit(name, where, title, ("TTA", "ours"), tuple(cells), compare="ours")


def _non_learned(name: str, where: str, title: str, policy: str, block: str) -> Exhibit:
    """Standard: (15, total / 15) with ours. Expanded: ours alone, 30 states; the paper leaves higher totals empty."""
    cells = []
    for method, ours, *words in lines(block):
        for i, model in enumerate(FOUR):
            for j, total in enumerate(NON_LEARNED_TOTALS):
                paper = number(words[3 * i + j])
                if paper is None:
                    continue
                if not _WORDS[ours]:
                    run = Run(model, "imagenet", 1, False, total, policy, METHODS[method])
                elif method == "-":
                    run = Run(model, "imagenet", 30)
                else:
                    run = Run(model, "imagenet", total // 15, False, 15, policy, METHODS[method])
                cells.append(Cell((method, ours), model, f"B = {total}", run, "top1", paper))
    return Exhibit(name, where, title, ("TTA", "ours"), tuple(cells), compare="ours")


def _computation(name: str, where: str, model: str, block: str) -> Exhibit:
    columns = {
        "top-1 %": "top1",
        "GMACs": "gmacs",
        "MACs, x base": "macs",
        "ms / image": "milliseconds",
        "time, x base": "time",
    }
    cells = []
    for total, method, ours, *words in lines(block):
        run = Run(model, "imagenet")
        if method != "-":
            run = learned_run(model, "imagenet", "expanded", method, _WORDS[ours], int(total))
        for (column, measure), word in zip(columns.items(), words, strict=True):
            cells.append(Cell((total, method, ours), "", column, run, measure, number(word)))
    note = "The paper counts MACs in another way and measured time on an A6000: docs/paper.md explains the differences."
    labels = ("B_total", "TTA", "ours")
    return Exhibit(
        name, where, f"Computation of {model} on ImageNet", labels, tuple(cells), compare="ours", notes=(note,)
    )


def _segmentation() -> Exhibit:
    cells = []
    for data, flip, *words in lines(numbers.SEGMENTATION):
        views: dict[str, Any] = {"views": 2, "policy": "flip", "method": "mean"} if _WORDS[flip] else {}
        for i, model in enumerate(numbers.SEGMENTATION_MODELS):
            for j, budget in enumerate((1, 4, 10)):
                run = Run(model, data, budget, **views)
                cells.append(Cell((data, flip), model, f"B = {budget}", run, "miou", number(words[3 * i + j])))
    title = "Cityscapes and ADE20K, mIoU"
    return Exhibit("segmentation", "Table 6", title, ("data", "flip"), tuple(cells), compare="group")


def _antialiased() -> Exhibit:
    cells = []
    for model, *words in lines(numbers.ANTIALIASED):
        for budget, word in zip((1, 4, 10), words, strict=True):
            run = Run(f"antialiased {model}", "imagenet", budget)
            cells.append(Cell(("anti-aliased",), model, f"B = {budget}", run, "top1", number(word)))
    title = "Anti-aliased CNNs on ImageNet"
    return Exhibit("antialiased", "Table A8", title, ("networks",), tuple(cells), compare="group")


def _ablation(
    name: str, where: str, title: str, label: str, runs: dict[str, tuple[Run, tuple[float, float]]]
) -> Exhibit:
    cells = []
    for row, (run, (accuracy, latency)) in runs.items():
        cells.append(Cell((row,), "", "top-1 %", run, "top1", accuracy))
        cells.append(Cell((row,), "", "latency, as printed", run, PRINTED, latency))
        cells.append(Cell((row,), "", "time, x base", run, "time"))
        cells.append(Cell((row,), "", "NLL", run, "nll"))
    note = "The paper's accuracies are on 5,000 images of ImageNet's training split that it does not name."
    return Exhibit(name, where, title, (label,), tuple(cells), compare="column", notes=(note,))


def _ours(**changes: Any) -> Run:
    return Run("ResNet18", "imagenet-train", 30, **{"learned": True, **changes})


ABLATIONS = (
    _ablation(
        "ablation-search",
        "Table 3",
        "Ablation: layers that are searched",
        "layers",
        {
            f"{first} .. L{'-1' * less}": (_ours(span=(first, less)), paper)
            for (first, less), paper in numbers.ABLATION_SEARCH.items()
        },
    ),
    _ablation(
        "ablation-aggregation",
        "Table 4",
        "Ablation: aggregation",
        "aggregation",
        dict(
            zip(
                numbers.ABLATION_AGGREGATION,
                zip(
                    (_ours(learned=False, aggregate="mean"), _ours(learned=False), _ours(align="none"), _ours()),
                    numbers.ABLATION_AGGREGATION.values(),
                    strict=True,
                ),
                strict=True,
            )
        ),
    ),
    _ablation(
        "ablation-criterion",
        "Table 5",
        "Ablation: criterion of the search",
        "criterion",
        {name: (_ours(criterion=name), paper) for name, paper in numbers.ABLATION_CRITERION.items()},
    ),
)


def _policy_table(name: str, where: str, data: str, policy: str, block: str, models: tuple[str, ...] = FOUR) -> Exhibit:
    title = f"{'ImageNet' if data == 'imagenet' else 'Flowers102'}, {policy} TTA policy"
    return _tta(name, where, title + ", more architectures" * (models is MORE), data, policy, block, models)


TABLES = (
    _policy_table("imagenet-expanded", "Table 1", "imagenet", "expanded", numbers.IMAGENET_EXPANDED),
    _policy_table("flowers-expanded", "Table 2", "flowers102", "expanded", numbers.FLOWERS_EXPANDED),
    *ABLATIONS,
    _segmentation(),
    _policy_table("imagenet-standard", "Table A1", "imagenet", "standard", numbers.IMAGENET_STANDARD),
    _policy_table("flowers-standard", "Table A2", "flowers102", "standard", numbers.FLOWERS_STANDARD),
    _policy_table("imagenet-architectures", "Table A3", "imagenet", "expanded", numbers.IMAGENET_MORE, MORE),
    _computation("computation-resnet18", "Table A4", "ResNet18", numbers.COMPUTATION_RESNET18),
    _computation("computation-mobilenetv2", "Table A5", "MobileNetV2", numbers.COMPUTATION_MOBILENETV2),
    _non_learned(
        "imagenet-expanded-nonlearned",
        "Table A6",
        "ImageNet, expanded policy, without learning",
        "expanded",
        numbers.EXPANDED_NON_LEARNED,
    ),
    _non_learned(
        "imagenet-standard-nonlearned",
        "Table A7",
        "ImageNet, standard policy, without learning",
        "standard",
        numbers.STANDARD_NON_LEARNED,
    ),
    _antialiased(),
)
