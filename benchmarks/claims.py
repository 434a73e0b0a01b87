"""Which claims of the paper hold on public networks? Measures them; `benchmarks.claims_page` writes the page.

    python -m benchmarks.claims --assets DIR [--nets ...]      # DIR: see benchmarks/nets.py

Each exhibit is a list of recipes that differ in one switch, measured on the same images; a row compares two of them.
The exhibits of all networks that need no learning come first. Runs are kept in `build/claims`, so that a killed one
continues. `camvid` needs the network that `python -m benchmarks.camvid --net mobilenet --out build/camvid` trains.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import unstride
from benchmarks import camvid, nets
from unstride.evaluation.intervals import PairedCounts, paired_gain
from unstride.evaluation.rows import Row
from unstride.learning.images import LearningImages, learning_images
from unstride.learning.tta import combined, fit_views, view_logits, views_of
from unstride.models import LoadedModel
from unstride.pipeline import open_pipeline
from unstride.recipe.files import read
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Search, Stage
from unstride.storage.contents import FileDigests
from unstride.storage.distributed import world
from unstride.views.images import Preprocess

ROWS = nets.ROOT / "docs/results/paper_claims.csv"
BUILD = nets.ROOT / "build/claims"
SEEDS = 5
VOID = 255  # no class


@dataclass(frozen=True)
class Plan:
    """What is affordable for a network: images, states, views."""

    images: int
    budgets: tuple[int, ...] = (4, 10, 15, 30)
    side: int | None = None  # pixels
    tta_images: int = 300
    tta_train: int = 150  # images that learned TTA learns from
    train: int = 1000  # images that the attention learns from, a fifth of them to choose the epoch by; 0: none
    # (total, views, states), the paper's budgets
    standard: tuple[tuple[int, int, int], ...] = ((30, 15, 2), (75, 15, 5), (150, 15, 10))
    expanded: tuple[tuple[int, int, int], ...] = ((30, 10, 3), (100, 10, 10), (150, 10, 15))

    def at_most(self, images: int | None) -> Plan:
        """With fewer images: a first look. More images later reuse the runs of these."""
        if images is None:
            return self
        few = {"images": images, "tta_images": images, "tta_train": images, "train": 2 * images}
        return replace(self, **{name: min(getattr(self, name), most) for name, most in few.items()})


SHORT = ((30, 15, 2),)
PLANS = {
    "resnet20": Plan(1000, side=32),
    "resnet56": Plan(400, (4, 10, 15, 30), 32, 100, 0, 500, SHORT, ()),
    "mobilenetv2": Plan(200, (4, 10), 224, 100, 0, 0, SHORT, ()),
    "lite0": Plan(200, (4, 10), 224, 100, 0, 0, SHORT, ()),
    "resnet50": Plan(100, (4, 10), 224, 50, 0, 0, SHORT, ()),
    "camvid": Plan(233, (4, 10)),
}


@dataclass(frozen=True)
class ClaimRow:
    """A recipe on a network; `gain` is over `against` on the same images, in points with its 95 % interval.

    `accuracy` is mIoU for camvid. `cost` is in forward passes; for views their number times that of the states.
    `learned_on` is how many images the recipe learned from, 0 where it learned nothing; `moved` is 0 where learning
    left the weights at the mean.
    """

    network: str
    exhibit: str
    recipe: str
    against: str
    seed: int
    images: int
    accuracy: float
    nll: float
    cost: float
    gain: float
    low: float
    high: float
    learned_on: int = 0
    moved: int = 1


def paper(name: str = "as printed", **changes: Any) -> Recipe:
    """The paper's recipe, learning-free, with one switch changed."""
    recipe = Recipe((Stage(states=Search(10), aggregate="entropy"),), name=name)
    return recipe.changed(**changes) if changes else recipe


def switched(**changes: str) -> Recipe:
    return paper(", ".join(f"{k}={v}" for k, v in changes.items()), **changes)


ABLATIONS = {
    "aggregation": [switched(aggregate=value) for value in ("mean", "max", "entropy-unaligned")],
    "align": [switched(align="none"), switched(align="nearest"), switched(border="renormalise")],
    "criterion": [
        switched(criterion=value) for value in ("displacement", "random", "random-per-image", "entropy-unaligned")
    ],
    "stop": [switched(stop="literal")],
}


FAST = "learned, fast schedule"
FITS: dict[str, tuple[int, dict[str, Any]]] = {  # seeds, and options of the fit
    FAST: (SEEDS, {"schedule": "fast"}),
    "learned, paper schedule": (SEEDS, {"schedule": "paper"}),
    "learned, fast, 4 heads": (1, {"schedule": "fast", "heads": 4}),
    "learned, fast, no Align": (1, {"schedule": "fast", "align": "none"}),
}


@dataclass(frozen=True)
class Network:
    """A network, the images it is measured on, and where its runs are kept."""

    name: str
    plan: Plan
    model: LoadedModel
    data: Any
    assets: Path
    folder: Path

    # -- recipes by `evaluate`
    def rows(self, exhibit: str, recipes: Sequence[Recipe | Path], against: Recipe | None = None) -> Iterator[ClaimRow]:
        """Each recipe over another one, by default the network alone."""
        several = [*recipes] if against is None else [against, *recipes]
        measured = unstride.evaluate(
            self.model, self.data, recipe=several, against=against, out=self.folder, progress=False
        )
        reference = "base model" if against is None else against.name
        for row in measured:
            if row.gain is not None and row.name != self.model.spec:
                yield self.row(exhibit, row, reference)

    def row(self, exhibit: str, row: Row, against: str, recipe: str = "", **learning: int) -> ClaimRow:
        assert row.gain is not None
        return ClaimRow(
            self.name,
            exhibit,
            recipe or row.name.removeprefix(f"{self.model.spec} + "),
            against,
            learning.pop("seed", 0),
            row.images,
            100 * row.metrics[row.metric],
            row.metrics.get("NLL", 0.0),
            row.cost.estimate,
            *(100 * value for value in (row.gain.estimate, row.gain.low, row.gain.high)),
            **learning,
        )


# ---------------------------------------------------------------- exhibits
def learning_free(net: Network) -> Iterator[ClaimRow]:
    """Figure 5 and the tables of the ablation, without learning."""
    budgets = [paper(f"B = {budget}", budget=budget) for budget in net.plan.budgets]
    yield from net.rows("budget", budgets)
    yield from net.rows("budget", budgets[-1:], against=budgets[0])
    for exhibit, recipes in ABLATIONS.items():
        yield from net.rows(exhibit, recipes, against=paper())
    count = len(unstride.inspect(net.model.model, net.model.example(net.plan.side)).layers)
    whole = paper("layers 1 to L", layers=tuple(range(1, count + 1)))
    parts = {"1 to L-1": (1, count), "2 to L": (2, count + 1), "2 to L-1": (2, count)}
    limited = [paper(f"layers {name}", layers=tuple(range(*part))) for name, part in parts.items() if part[0] < part[1]]
    yield from net.rows("search space", limited, against=whole)


def learned(net: Network) -> Iterator[ClaimRow]:
    """Learned against learning-free with both schedules over several seeds; several heads; without Align."""
    for name, (seeds, _) in FITS.items():
        for seed in range(seeds):
            file = fitted(net, name, seed)
            for against in (paper(), switched(aggregate="mean")):
                *_, row = unstride.evaluate(
                    net.model, net.data, recipe=[against, file], against=against, out=net.folder, progress=False
                )
                yield net.row("learned", row, against.name, name, seed=seed, **learning_of(net, file))
    file = fitted(net, FAST, 0)
    for criterion in ("entropy", "displacement", "random"):
        *_, row = unstride.evaluate(
            net.model, net.data, recipe=file, against=file, out=net.folder, progress=False, criterion=criterion
        )
        if row.gain is not None:
            yield net.row("learned criterion", row, "learned", f"criterion={criterion}", **learning_of(net, file))


def learning_of(net: Network, file: Path) -> dict[str, int]:
    return {"learned_on": net.plan.train, "moved": int(read(file).figures["moved"])}


def fitted(net: Network, name: str, seed: int) -> Path:
    """The recipe file of a fit; made once."""
    file = net.folder / f"fits-{net.plan.train}" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.toml"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        train = nets.images_of(net.assets, net.name, train=True)
        usual: dict[str, Any] = {
            "seed": seed,
            "limit": net.plan.train,
            "cache": net.folder / "maps",
            "out": file,
            "progress": False,
        }
        result = unstride.fit(net.model, train, **usual, **FITS[name][1])
        print(result, flush=True)
    return file


def with_views(net: Network) -> Iterator[ClaimRow]:
    """TTA with and without ours at the same number of passes: every view runs once, and methods only weigh them."""
    plan = net.plan
    chosen = nets.spread(net.data, plan.tta_images)
    for total, views, states in plan.standard:
        for method in ("meantta", "maxtta"):
            without = Views(net, f"standard:{total}", None, 1).correct(chosen, method)
            own = Views(net, f"standard:{views}", paper(), states).correct(chosen, method)
            yield compared(net, "TTA, standard", method, total, (views, states), without, own)
    if plan.standard:
        without = Views(net, "expanded:30", None, 1).correct(chosen, "meantta")
        budget = min(30, plan.budgets[-1])
        own = Views(net, "standard:1", paper(), budget).correct(chosen, "meantta")
        yield compared(net, "TTA, expanded", "meantta", 30, (1, budget), without, own)
    attention = fitted(net, FAST, 0) if plan.expanded else None
    for total, views, states in plan.expanded:
        for method in ("gps-shanmugam", "augtta", "classtta"):
            without = Views(net, f"expanded:{total}", None, 1).correct(chosen, method)
            own = Views(net, f"expanded:{views}", attention, states).correct(chosen, method)
            yield compared(net, "TTA, learned", method, total, (views, states), without, own)


@dataclass(frozen=True)
class Views:
    """The first views of a policy, with a search of `states` inside each."""

    net: Network
    policy: str
    recipe: Recipe | Path | None
    states: int

    def correct(self, data: Any, method: str) -> tuple[Tensor, float]:
        """Which images are right, and the NLL, with the weights that the method learned on training images."""
        net = self.net
        changes: dict[str, Any] = {} if self.recipe is None else {"budget": self.states}
        pipeline = open_pipeline(net.model, recipe=self.recipe or "plain", **changes)
        digests = FileDigests(net.folder)
        parts = [LearningImages("test", data, tuple(range(len(data))), pipeline, digests)]
        learns = method not in ("meantta", "maxtta")
        if learns:
            train = nets.images_of(net.assets, net.name, train=True)
            parts += learning_images(pipeline, train, seed=0, limit=net.plan.tta_train, digests=digests)
        views = views_of(self.policy)
        with world() as us:
            test, *fitting = view_logits(
                pipeline,
                pipeline.better.recipe,
                views,
                parts,
                batch_size=20,
                folder=net.folder / "views",
                us=us,
                show=False,
            )
        weights, how = torch.full((len(views),), 1 / len(views)), "max" if method == "maxtta" else "logits"
        if learns:
            fit = fit_views(method, *fitting)
            weights, how = fit.weights, fit.combine
        pairs = [(combined(logits, weights, how), labels) for logits, labels in test]
        answers, labels = torch.cat([p for p, _ in pairs]), torch.cat([p for _, p in pairs])
        return answers.argmax(1) == labels, float(cross_entropy(answers, labels))


def compared(
    net: Network,
    exhibit: str,
    method: str,
    total: int,
    own: tuple[int, int],
    without: tuple[Tensor, float],
    ours: tuple[Tensor, float],
) -> ClaimRow:
    gain = paired_gain(PairedCounts.from_correct(np.asarray(without[0]), np.asarray(ours[0])))
    return ClaimRow(
        net.name,
        exhibit,
        f"{method}, {own[0]} x {own[1]}",
        f"{method}, {total} x 1",
        0,
        len(ours[0]),
        100 * float(ours[0].float().mean()),
        ours[1],
        own[0] * own[1],
        *(100 * value for value in (gain.estimate, gain.low, gain.high)),
        net.plan.tta_train if exhibit == "TTA, learned" else 0,
    )


def segmentation(net: Network) -> Iterator[ClaimRow]:
    """Table 6 on CamVid: the search with and without a flip."""
    flip = Recipe((Stage(("plain", "flip")),), "segmentation", name="flip")
    free = [paper(f"B = {budget}", budget=budget, task="segmentation") for budget in net.plan.budgets]
    flipped = [
        Recipe(
            (Stage(("plain", "flip"), Search(budget), aggregate="entropy"),), "segmentation", name=f"flip, B = {budget}"
        )
        for budget in net.plan.budgets
    ]
    yield from net.rows("segmentation", [*free, flip])
    yield from net.rows("segmentation", flipped, against=flip)


# ---------------------------------------------------------------- networks
def opened(assets: Path, name: str, plan: Plan) -> Network:
    folder = BUILD / name
    if name != "camvid":
        data = nets.spread(nets.images_of(assets, name), plan.images)
        return Network(name, plan, nets.loaded(assets, name), data, assets, folder)
    images, masks = camvid.load_split(assets / "camvid/camvid_240x180.zip", "test")
    model = LoadedModel(name, camvid.load(nets.ROOT / "build/camvid", "mobilenet"), Preprocess(), "segmentation")
    targets = camvid.pad_mask(masks, "mobilenet")
    targets[targets == camvid.VOID] = VOID
    pixels = camvid.preprocess(images, "mobilenet")
    return Network(name, plan, model, list(zip(pixels.split(8), targets.split(8), strict=True)), assets, folder)


def steps(net: Network) -> list[Callable[[Network], Iterator[ClaimRow]]]:
    if net.name == "camvid":
        return [segmentation]
    return [learning_free, learned, with_views] if net.plan.train else [learning_free, with_views]


# ---------------------------------------------------------------- rows
def write_rows(path: Path, rows: Iterable[ClaimRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [f.name for f in fields(ClaimRow)], lineterminator="\n")
        table.writeheader()
        table.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in rows)


def read_rows(path: Path = ROWS) -> list[ClaimRow]:
    types: dict[str, Any] = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in fields(ClaimRow)}
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [ClaimRow(**{k: types[k](v) for k, v in row.items()}) for row in csv.DictReader(file)]


def collect() -> None:
    """The rows of all networks as one table; a network without a run here keeps those it has."""
    earlier = read_rows()
    rows = []
    for name in PLANS:
        own = read_rows(BUILD / f"{name}.csv")
        rows += own or [row for row in earlier if row.network == name]
    write_rows(ROWS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--nets", nargs="*", choices=PLANS, default=list(PLANS), help="none: only collect the rows")
    parser.add_argument("--limit", type=int, help="a first look at so many images")
    args = parser.parse_args()
    torch.set_num_threads(1)
    networks = [opened(args.assets, name, PLANS[name].at_most(args.limit)) for name in args.nets]
    measured: dict[str, list[ClaimRow]] = {name: [] for name in args.nets}
    for step in (learning_free, segmentation, learned, with_views):
        for net in networks:
            for row in step(net) if step in steps(net) else ():
                measured[net.name].append(row)
                write_rows(BUILD / f"{net.name}.csv", measured[net.name])
                print(row, flush=True)
        collect()


if __name__ == "__main__":
    main()
