"""Does it help on volumes and signals? `python -m benchmarks.volumes` writes docs/results-3d.md and results-3d.csv.

Networks are trained here, on synthetic data (`benchmarks.phantoms`); the test examples come from other seeds. Every
setting sees the same examples, so that gains are paired. Needs MONAI (`unstride[medical]`); about a quarter of an hour
of one core.
"""

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import unstride
from benchmarks import phantoms
from unstride import Enhanced, Gate, Recipe, Stage
from unstride.evaluation.benching import interleaved
from unstride.evaluation.metrics import bootstrap
from unstride.recipe import get
from unstride.views.policies import IDENTITY, View, parse_view

ROOT = Path(__file__).parent.parent
MIRROR = parse_view("mirror")
EIGHT, PLAIN = "eight mirrors", "plain"
CEILING = 3.0  # the goal: the quality of eight mirrors at three forwards
KINDS = {"volumes": "segmentation", "atlas": "segmentation", "signals": "classification"}
RIM = 4  # voxels along the sides of a block that do not count as inside
FIELDS = ["kind", "setting", "looks", "cost", "time", "score", "gain", "low", "high"]
FIELDS += ["against_eight", "eight_low", "eight_high", "inside", "inside_gain", "inside_low", "inside_high"]


@dataclass(frozen=True, eq=False)
class Row:
    """A setting over all networks and examples: what each example scored, and what it cost in plain forwards."""

    kind: str
    setting: str
    looks: int
    time: float  # over the plain eager forward
    scores: np.ndarray
    costs: np.ndarray
    inside: np.ndarray  # of what lies `RIM` voxels and more from the sides; of signals nothing

    @property
    def cost(self) -> float:
        return float(self.costs.mean())


def mirrors(count: int) -> tuple[View, ...]:
    turns = [c for k in range(4) for c in itertools.combinations(("FlipLR", "FlipUD", "FlipFB"), k)]
    return tuple(parse_view(" + ".join(c) or "plain") for c in turns)[:count]


def settings(kind: str, late: tuple[object, ...]) -> dict[str, tuple[Stage, ...]]:
    """What is compared. `late`: the states that move nothing but the last layer."""
    found: dict[str, tuple[Stage, ...]] = {PLAIN: ()}
    found |= {f"{n} near states": (Stage(states=f"near:{n}"),) for n in (2, 3, 4, 8)}
    found[f"{len(late)} states of the last layer"] = (Stage(states=late),)
    if kind == "signals":
        unsure = Gate("margin", below=0.5)
        found["reversed, too"] = (Stage((IDENTITY, MIRROR)),)
        found["default: 2 near states where unsure"] = get("default", axes=1).stages
        found["8 near states where unsure"] = (Stage(), Stage(states="near:8", gate=unsure))
        return found
    found |= {name: (Stage(mirrors(n)),) for name, n in (("mirror", 2), ("three mirrors", 3), (EIGHT, 8))}
    found["2 near states, and a mirror"] = (Stage(states="near:2"), Stage((MIRROR,)))
    found["2 near states, each mirrored"] = (Stage((IDENTITY, MIRROR), "near:2"),)
    found["4 near states, each mirrored"] = (Stage((IDENTITY, MIRROR), "near:4"),)
    found[f"{EIGHT} where unsure, {CEILING:g} forwards in the mean"] = (
        Stage(),
        Stage(mirrors(8)[1:], gate=Gate("margin", share=(CEILING - 1) / 7)),
    )
    return found


def dice(logits: Tensor, labels: Tensor) -> list[float]:
    """The mean Dice of both structures, volume by volume; a structure that is nowhere does not count."""
    seen = logits.argmax(1)
    out = []
    for guess, truth in zip(seen, labels, strict=True):
        found = []
        for k in (phantoms.TUBE, phantoms.BLOB):
            a, b = guess == k, truth == k
            if a.any() or b.any():
                found.append(float(2 * (a & b).sum() / (a.sum() + b.sum())))
        out.append(float(np.mean(found)) if found else 1.0)
    return out


def right(logits: Tensor, labels: Tensor) -> list[float]:
    return (logits.argmax(1) == labels).double().tolist()


def measured(kind: str, model: nn.Module, test: tuple[Tensor, Tensor], spare: Tensor, together: int) -> list[Row]:
    """Every setting on every example of one network; gates are set on `spare` examples, without labels."""
    x, y = test
    task, score = KINDS[kind], right if kind == "signals" else dice
    better = unstride.enhance(model, x[:1], recipe="plain", task=task)
    space = better.plan.found.space
    last = len(space.rates)
    late = tuple(space.zero.at(last, s) for s in space.natural(last))
    asked = {}
    for name, stages in settings(kind, late).items():
        merge = "probabilities" if task == "segmentation" else "logits"
        asked[name] = better.with_options(recipe=Recipe(name, task, stages, merge=merge))
        if any(s.gate is not None and s.gate.below is None for s in stages):
            asked[name].calibrate(spare)
    few, rows = x[: 4 * together], []
    with torch.no_grad():
        calls = {name: partial(mine, few) for name, mine in asked.items() if name != PLAIN}
        times = {PLAIN: 1.0} | interleaved(partial(model, few), calls, 3)[1]
    for name, mine in asked.items():
        rows.append(_row(kind, name, mine, score, x, y, together, times[name]))
        print(f"{kind}: {name}: {rows[-1].scores.mean():.4f} at {rows[-1].cost:.2f}", flush=True)
    return rows


def _row(
    kind: str,
    name: str,
    better: Enhanced,
    score: Callable[[Tensor, Tensor], list[float]],
    x: Tensor,
    y: Tensor,
    together: int,
    time: float,
) -> Row:
    scores: list[float] = []
    costs: list[float] = []
    inside: list[float] = []
    core = (slice(RIM, -RIM),) * 3
    for part in torch.arange(len(x)).split(together):
        with torch.no_grad():
            logits, cost = better.looks(x[part]) if better.recipe.stages else (better(x[part]), [1.0] * len(part))
        scores += score(logits, y[part])
        inside += score(logits[(..., *core)], y[part][(..., *core)]) if kind != "signals" else []
        costs += cost
    looks = max(1, len({(v, s) for stage in better.recipe.stages for v in stage.views for s in _states(better, stage)}))
    return Row(kind, name, looks, time, np.array(scores), np.array(costs), np.array(inside))


def _states(better: Enhanced, stage: Stage) -> tuple[object, ...]:
    return stage.chosen(better.plan.found.space)


def joined(parts: list[list[Row]]) -> list[Row]:
    """The rows of several networks as those of one: all examples, one after the other."""

    def whole(same: tuple[Row, ...]) -> Row:
        values = {name: np.concatenate([getattr(r, name) for r in same]) for name in ("scores", "costs", "inside")}
        return replace(same[0], time=float(np.mean([r.time for r in same])), **values)

    return [whole(same) for same in zip(*parts, strict=True)]


# ---------------------------------------------------------------------------------------------------------- the tables
def compared(row: Row, base: Row, of: str = "scores") -> tuple[float, float, float]:
    change = getattr(row, of) - getattr(base, of)
    return float(change.mean()), *bootstrap(change)


def cells(row: Row, rows: list[Row]) -> dict[str, object]:
    base = rows[0]
    eight = next((r for r in rows if r.setting == EIGHT), None)
    nothing = ("", "", "")
    to_eight = compared(row, eight) if eight is not None else nothing
    inside = (float(row.inside.mean()), *compared(row, base, "inside")) if len(row.inside) else ("", *nothing)
    values = [row.kind, row.setting, row.looks, row.cost, row.time, float(row.scores.mean()), *compared(row, base)]
    return dict(zip(FIELDS, [*values, *to_eight, *inside], strict=True))


def table(rows: list[Row], what: str) -> list[str]:
    plain, eight = rows[0], next((r for r in rows if r.setting == EIGHT), None)
    heads = ["setting", "looks", "cost", "time", f"{what} %", "gain", "verdict"]
    heads += ["against eight mirrors", "inside %", "gain inside"] if eight else []
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in sorted(rows, key=lambda r: (r.setting != PLAIN, r.cost)):
        gain, low, high = compared(row, plain)
        said = "" if row is plain else "helps" if low > 0 else "hurts" if high < 0 else "no measurable effect"
        shown = [row.setting, str(row.looks), f"{row.cost:.2f}", f"{row.time:.2f}", f"{100 * row.scores.mean():.2f}"]
        shown += ["" if row is plain else _points(gain, low, high), said]
        if eight is not None:
            shown.append("" if row is eight else _points(*compared(row, eight)))
            shown.append(f"{100 * row.inside.mean():.2f}")
            shown.append("" if row is plain else _points(*compared(row, plain, "inside")))
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def _points(gain: float, low: float, high: float) -> str:
    return f"{100 * gain:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"


def told(rows: list[Row], of: str = "scores") -> str:
    """Whether the quality of eight mirrors came out at three forwards."""
    plain, eight = rows[0], next(r for r in rows if r.setting == EIGHT)
    gain, low, high = compared(eight, plain, of)
    if low <= 0:
        return f"Eight mirrors themselves gain nothing measurable ({_points(gain, low, high)})."
    cheap = [r for r in rows if 1 < r.cost <= CEILING + 0.05]
    level = [r for r in cheap if compared(r, eight, of)[2] >= 0]

    def shares(some: list[Row]) -> str:
        return "; ".join(f"{r.setting} ({compared(r, plain, of)[0] / gain:.0%} of that gain)" for r in some)

    head = f"Eight mirrors gain {_points(gain, low, high)} points of Dice at {eight.cost:.0f} forwards. "
    if level:
        head += f"At {CEILING:g} forwards or fewer, not measurably below them: {shares(level)}. "
    else:
        head += f"Nothing at {CEILING:g} forwards or fewer reaches them: the goal is not met. "
    below = [r for r in cheap if r not in level]
    return head + (f"Measurably below: {shares(below)}." if below else "")


def in_short(rows: dict[str, list[Row]]) -> str:
    """What came out, in three sentences."""
    mirrored = [r for kind in ABOUT if kind in rows for r in [rows[kind]]]
    met = sum("the goal is not met" not in told(r) for r in mirrored)
    words = f"The quality of eight mirrors at {CEILING:g} forwards is reached on {met} of {len(mirrored)} data sets. "
    signals = [rows["signals"]] if "signals" in rows else []
    words += f"Measurably better and worse than plain, of {len(mirrored)} data sets of volumes: a mirror on "
    words += f"{counted(mirrored, 'mirror')}, four near states on {counted(mirrored, '4 near states')}. Of "
    words += f"{len(signals)} of signals: the default on {counted(signals, 'default: 2 near states where unsure')}, "
    return words + f"reversed signals on {counted(signals, 'reversed, too')}."


def counted(kinds: list[list[Row]], setting: str) -> str:
    """On how many data sets a setting is measurably better than plain, and on how many worse."""
    gains = [compared(next(r for r in rows if r.setting == setting), rows[0]) for rows in kinds]
    return f"{sum(low > 0 for _, low, _ in gains)} and {sum(high < 0 for _, _, high in gains)}"


NET = "MONAI's UNet with 16, 32 and 64 channels, trained with random mirroring along every axis, as nnU-Net does. "
NET += "Dice: the mean of both structures, block by block; *inside* is what lies four voxels and more from the sides: "
NET += "a state loses some of the border, to which windows that overlap give little weight."
ABOUT = {
    "volumes": (
        "Tubes and blobs",
        f"Synthetic: drawn at twice the resolution and averaged (partial-volume borders), a bias field, noise. {NET}",
    ),
    "atlas": (
        "Gray and white matter",
        "Blocks of the mean T1 image of 152 heads (ICBM 152, in nilearn's wheel) with its tissue maps; the noise is "
        f"ours. One network learned the back of the head and was tested on the front, one the other way. {NET}",
    ),
}


def page(rows: dict[str, list[Row]], about: str) -> str:
    lines = [
        "# Volumes and signals",
        "",
        in_short(rows),
        "",
        "Made by `python -m benchmarks.volumes`; the rows are in `results-3d.csv`. **Nearly all of it is synthetic**, "
        "drawn by the program (`benchmarks/phantoms.py`); only the anatomy of the atlas is real. Networks are small, "
        "and were trained here. Gains are paired over the test examples, in points, with 95 % bootstrap intervals; "
        "cost is in MACs of a plain forward, time over the plain eager forward, in turns. Mirrors are what people do "
        "on volumes. " + about,
    ]
    for kind, (title, text) in ABOUT.items():
        if kind in rows:
            lines += ["", f"## {title}", "", text, "", *table(rows[kind], "Dice"), ""]
            lines += ["**The quality of eight mirrors at three forwards?** " + told(rows[kind])]
            lines += ["", "Inside: " + told(rows[kind], "inside")]
    if "signals" in rows:
        text = "Synthetic: ramps, decays and chirps, forwards or backwards, somewhere in noise. A 1-D ResNet."
        lines += ["", "## Signals: six kinds of events", "", text, "", *table(rows["signals"], "accuracy"), ""]
        lines += [
            "A reversed signal is another signal: that row is why the default recipe of models with one axis has near "
            "states instead of a mirror."
        ]
    return "\n".join(lines) + "\n"


def kept(kind: str, seed: int, args: argparse.Namespace) -> list[Row]:
    """The rows of one network, from the work folder where they are known."""
    path = args.work / f"rows-{kind}-{seed}-{args.epochs}-{args.count}-{args.test}.json"
    if not path.exists():
        rows = one_network(kind, seed, args)
        plain = [
            [r.kind, r.setting, r.looks, r.time, *(v.tolist() for v in (r.scores, r.costs, r.inside))] for r in rows
        ]
        path.write_text(json.dumps(plain))
    return [Row(*row[:4], *map(np.array, row[4:])) for row in json.loads(path.read_text())]


def one_network(kind: str, seed: int, args: argparse.Namespace) -> list[Row]:
    if kind == "signals":
        model = phantoms.trained(kind, seed, args.work, args.epochs // 2, 25 * args.count)
        return measured(kind, model, phantoms.signals(10_000 + seed, 30 * args.test), torch.empty(0), 64)
    model = phantoms.trained(kind, seed, args.work, args.epochs, args.count)
    if kind == "volumes":
        test, spare = phantoms.phantoms(10_000 * (seed + 1), args.test), phantoms.phantoms(5_000, 24)[0]
    else:
        learned, other = seed % 2 == 1, seed % 2 == 0  # of the front, of the back
        test, spare = phantoms.atlas(other, None, 10_000 + seed), phantoms.atlas(learned, 24, 5_000)[0]
    return measured(kind, model, test, spare, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="networks of each kind")
    parser.add_argument("--test", type=int, default=64, help="test volumes of each network; signals: 30 times as many")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--count", type=int, default=120, help="training volumes; signals: 25 times as many")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--work", type=Path, default=ROOT / "build/volumes")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for kind in args.kinds:
        count = max(2, args.seeds) if kind == "atlas" else args.seeds  # of the front and of the back
        found[kind] = joined([kept(kind, seed, args) for seed in range(count)])
    about = (
        f"This page: `python -m benchmarks.volumes {' '.join(sys.argv[1:])}`. Networks of each kind: {args.seeds} (of "
        f"the atlas one for each half at least), with {args.count} training and {args.test} test volumes each, "
        f"{25 * args.count:,} and {30 * args.test:,} signals."
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results-3d.md").write_text(page(found, about))
    with (args.out / "results-3d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for rows in found.values():
            writer.writerows(
                {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells(r, rows).items()} for r in rows
            )


if __name__ == "__main__":
    main()
