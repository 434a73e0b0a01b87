"""The tables that need runs, as cells."""

from __future__ import annotations

from unstride.paper import numbers
from unstride.paper.exhibits import Cell, Exhibit, Run
from unstride.paper.numbers import FOUR, MORE, NON_LEARNED_TOTALS, TTA_TOTALS, lines, number

METHODS = {"GPS": "gps-shanmugam", "ClassTTA": "classtta", "AugTTA": "augtta", "MeanTTA": "mean", "MaxTTA": "max"}
_GPS_POOL = 30  # our choice: the paper's GPS without ours is the same at every total, but it does not name the pool
_WORDS = {"yes": True, "no": False}


def learned_run(model: str, data: str, policy: str, method: str, ours: bool, total: int) -> Run:
    """The appendix's budget configuration: (B_tta, B_ours) = (10, total / 10) with ours, (total, 1) without."""
    if ours:
        return Run(model, data, total // 10, True, 10, policy, METHODS[method])
    return Run(model, data, 1, False, _GPS_POOL if method == "GPS" else total, policy, METHODS[method])


def _tta(name: str, where: str, title: str, data: str, policy: str, block: str, models: tuple[str, ...]) -> Exhibit:
    cells = []
    for method, with_ours, *words in lines(block):
        for i, model in enumerate(models):
            for j, total in enumerate(TTA_TOTALS):
                run = learned_run(model, data, policy, method, _WORDS[with_ours], total)
                cells.append(Cell((method, with_ours, model), f"B = {total}", run, "top1", number(words[3 * i + j])))
    return Exhibit(name, where, title, ("TTA", "ours", "model"), tuple(cells))


def _non_learned(name: str, where: str, title: str, policy: str, block: str) -> Exhibit:
    """Standard: (15, total / 15) with ours. Expanded: ours alone, 30 states; the paper leaves higher totals empty."""
    cells = []
    for method, with_ours, *words in lines(block):
        for i, model in enumerate(FOUR):
            for j, total in enumerate(NON_LEARNED_TOTALS):
                paper = number(words[3 * i + j])
                if paper is None:
                    continue
                if not _WORDS[with_ours]:
                    run = Run(model, "imagenet", 1, False, total, policy, METHODS[method])
                elif method == "-":
                    run = Run(model, "imagenet", 30)
                else:
                    run = Run(model, "imagenet", total // 15, False, 15, policy, METHODS[method])
                cells.append(Cell((method, with_ours, model), f"B = {total}", run, "top1", paper))
    return Exhibit(name, where, title, ("TTA", "ours", "model"), tuple(cells))


def _computation(name: str, where: str, model: str, block: str) -> Exhibit:
    measures = {"top-1 %": "top1", "GMACs": "gmacs", "MACs, x plain": "macs", "time, x plain": "latency"}
    cells = []
    for total, method, with_ours, *words in lines(block):
        if method == "-":
            run = Run(model, "imagenet")
        else:
            run = learned_run(model, "imagenet", "expanded", method, _WORDS[with_ours], int(total))
        for (column, measure), word in zip(measures.items(), words, strict=True):
            cells.append(Cell((total, method, with_ours), column, run, measure, number(word)))
    return Exhibit(
        name,
        where,
        f"Computation of {model} on ImageNet",
        ("B_total", "TTA", "ours"),
        tuple(cells),
        notes=("The paper counts MACs in another way and timed an A6000: docs/macs.md explains each difference.",),
    )


def _segmentation() -> Exhibit:
    cells = []
    for data, flip, *words in lines(numbers.SEGMENTATION):
        views = {"views": 2, "policy": "flip", "method": "mean"} if _WORDS[flip] else {}
        for i, model in enumerate(numbers.SEGMENTATION_MODELS):
            for j, budget in enumerate((1, 4, 10)):
                run = Run(model, data, budget, **views)  # type: ignore[arg-type]
                cells.append(Cell((data, flip, model), f"B = {budget}", run, "miou", number(words[3 * i + j])))
    return Exhibit("segmentation", "Table 6", "Cityscapes and ADE20K", ("data", "flip", "model"), tuple(cells))


def _antialiased() -> Exhibit:
    cells = []
    for model, *words in lines(numbers.ANTIALIASED):
        for budget, word in zip((1, 4, 10), words, strict=True):
            run = Run(f"antialiased {model}", "imagenet", budget)
            cells.append(Cell((model,), f"B = {budget}", run, "top1", number(word)))
    return Exhibit("antialiased", "Table A8", "Anti-aliased CNNs on ImageNet", ("model",), tuple(cells))


def _ablation(name: str, where: str, title: str, label: str, runs: dict[str, tuple[Run, float]]) -> Exhibit:
    cells = []
    for row, (run, paper) in runs.items():
        cells.append(Cell((row,), "top-1 %", run, "top1", paper))
        cells.append(Cell((row,), "time, x plain", run, "latency"))
    note = "The paper's accuracies are on 5,000 images of its own choice from ImageNet's training split."
    return Exhibit(name, where, title, (label,), tuple(cells), notes=(note,))


def _ours(**changes: object) -> Run:
    return Run("ResNet18", "imagenet-train", 30, **{"learned": True, **changes})  # type: ignore[arg-type]


def _range(first: int, less: int) -> str:
    return f"{first} .. L{'-1' if less else ''}"


ABLATIONS = (
    _ablation(
        "ablation-search",
        "Table 3",
        "Ablation: layers that are searched",
        "layers",
        {_range(*span): (_ours(span=span), paper) for span, paper in numbers.ABLATION_SEARCH.items()},
    ),
    _ablation(
        "ablation-aggregation",
        "Table 4",
        "Ablation: aggregation",
        "aggregation",
        {
            "mean": (_ours(learned=False, aggregate="mean"), numbers.ABLATION_AGGREGATION["mean"]),
            "entropy": (_ours(learned=False), numbers.ABLATION_AGGREGATION["entropy"]),
            "attention, no align": (_ours(align=False), numbers.ABLATION_AGGREGATION["attention, no align"]),
            "attention": (_ours(), numbers.ABLATION_AGGREGATION["attention"]),
        },
    ),
    _ablation(
        "ablation-criterion",
        "Table 5",
        "Ablation: criterion of the search",
        "criterion",
        {name: (_ours(criterion=name), paper) for name, paper in numbers.ABLATION_CRITERION.items()},
    ),
)

TABLES = (
    _tta(
        "imagenet-expanded", "Table 1", "ImageNet, expanded TTA policy", "imagenet", "expanded",
        numbers.IMAGENET_EXPANDED, FOUR,
    ),
    _tta(
        "flowers-expanded", "Table 2", "Flowers102, expanded TTA policy", "flowers102", "expanded",
        numbers.FLOWERS_EXPANDED, FOUR,
    ),
    *ABLATIONS,
    _segmentation(),
    _tta(
        "imagenet-standard", "Table A1", "ImageNet, standard TTA policy", "imagenet", "standard",
        numbers.IMAGENET_STANDARD, FOUR,
    ),
    _tta(
        "flowers-standard", "Table A2", "Flowers102, standard TTA policy", "flowers102", "standard",
        numbers.FLOWERS_STANDARD, FOUR,
    ),
    _tta(
        "imagenet-architectures", "Table A3", "ImageNet, more architectures", "imagenet", "expanded",
        numbers.IMAGENET_MORE, MORE,
    ),
    _computation("computation-resnet18", "Table A4", "ResNet18", numbers.COMPUTATION_RESNET18),
    _computation("computation-mobilenetv2", "Table A5", "MobileNetV2", numbers.COMPUTATION_MOBILENETV2),
    _non_learned(
        "imagenet-expanded-nonlearned", "Table A6", "ImageNet, expanded policy, without learning", "expanded",
        numbers.EXPANDED_NON_LEARNED,
    ),
    _non_learned(
        "imagenet-standard-nonlearned", "Table A7", "ImageNet, standard policy, without learning", "standard",
        numbers.STANDARD_NON_LEARNED,
    ),
    _antialiased(),
)  # fmt: skip
