"""Why segmentation gains what it gains: every state of CamVid's val frames, put together in many ways.

    python -m benchmarks.segmentation_study --assets DIR --nets DIR --only mobilenet deeplab

All 64 states of a frame are computed once; then searches over different layers, and different ways to put their states
together, are compared. Test frames play no part, so what is learned here may be used there. `sample` has no val split:
it stands for a check. Each frame is cached under `--cache`, so a killed run goes on.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unstride
from benchmarks import camvid
from benchmarks.nets import give
from benchmarks.segmentation import CAMVID, REGIONS, Scenes, embedded, near_boundary, street
from unstride.evaluation.metrics import areas, compare_segmentation, confusion, summarise_areas
from unstride.geometry.states import State
from unstride.procedure.aggregate import ALL, WeightedMean, entropy
from unstride.procedure.align import Offset, align, align_covered, coverage
from unstride.procedure.search import Search
from unstride.procedure.stitch import Stitched
from unstride.procedure.tasks import Plan
from unstride.storage.fingerprint import fingerprint

BUDGETS = (4, 10, 20, 64)
MANY = BUDGETS[1:]  # enough states for choices to matter
DEFAULT = ("mobilenet", "deeplab", "sample")
BEFORE = "weighed by entropy before Align"  # on its own grid
LAYERS = {"all": (1, 2, 3), "all, cost": (1, 2, 3), "last two": (2, 3), "last": (3,)}


@dataclass(frozen=True)
class Way:
    """How the states that a search visits become one map."""

    align: bool | str = True
    weight: str = "entropy"
    space: str = "logits"
    layers: str = "all"

    def __str__(self) -> str:
        parts = [f"align={self.align!r}"]
        parts += {"entropy": [], "equal": ["equal weights"]}.get(self.weight, [self.weight])
        parts += [self.space] if self.space != "logits" else []
        parts += ["order='cost'"] if self.layers == "all, cost" else []
        parts += [f"layers={LAYERS[self.layers]}"] if not self.layers.startswith("all") else []
        return ", ".join(parts)


WAYS = (
    *(Way(a) for a in (True, "stitch", False)),
    *(Way(a, "equal") for a in (True, "stitch")),
    Way(True, BEFORE),
    *(Way(a, space="probabilities") for a in (True, "stitch")),
    *(Way(a, layers=name) for name in ("all, cost", "last two", "last") for a in (True, "stitch")),
)


def cases() -> Iterator[tuple[Way, int]]:
    for way in WAYS:
        most = 4 ** len(LAYERS[way.layers])
        yield from ((way, b) for b in BUDGETS if b <= most)


def visited(plan: Plan, name: str, scores: dict[State, float]) -> list[State]:
    """In which order a search of these layers asks for states."""
    order, costs = "cost" if name.endswith("cost") else "paper", [layer.cost for layer in plan.found.layers]
    search = Search(plan.found.space, LAYERS[name], max(BUDGETS), order, costs)
    while search.next([scores[s] for s in search.visited]):
        pass
    return search.visited


def together(
    plan: Plan, maps: dict[State, Tensor], order: list[State], way: Way, size: torch.Size
) -> dict[int, Tensor]:
    """Class maps (H, W) of the first 4, 10, ... states."""
    target = plan.targets[0]
    total = Stitched(target, (size[0], size[1])) if way.align == "stitch" else WeightedMean()
    out = {}
    for count, state in enumerate(order, 1):
        add(total, maps[state][None], plan.offset(state, target) if way.align else None, way)
        if count in BUDGETS:
            value = total.value()
            full = value if way.align == "stitch" else target.finish(value)
            out[count] = full[0].argmax(0)
    return out


def add(total: Stitched | WeightedMean, f: Tensor, offset: Offset | None, way: Way) -> None:
    """One more map (1, K, h, w)."""
    if way.space == "probabilities":
        inside: float | Tensor = 1.0
        if offset is not None and way.align is True:
            inside, f, offset = coverage((f.shape[2], f.shape[3]), offset, f), align_covered(f, offset), None
        total.add(ALL, f.softmax(1), (1 - entropy(f)) * inside, offset)
    elif way.weight == BEFORE and offset is not None:
        weight = 1 - entropy(f)[None]
        moved = align(weight, offset)
        total.add(ALL, align(f * weight, offset) / moved.clamp(min=1e-12), moved[0], None)
    elif way.weight == "equal":
        total.add(ALL, f, torch.ones(1), offset)
    else:
        total.add_by_entropy(ALL, f, offset)


def study(scenes: Scenes, better: unstride.Enhanced, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Pixels (1 + cases, region, 3, K), the plain network first, and MACs / plain (cases)."""
    plan = better.prepare(image[None])
    target, zero = plan.targets[0], plan.found.space.zero
    with torch.no_grad():
        run = plan.engine.start(image[None])
        rest = [s for s in plan.found.space.states() if s != zero]
        values = run.add([(0, s) for s in rest])[plan.engine.taps.index(target.tap)]
        maps = {zero: run.plain[target.tap][0]} | dict(zip(rest, values, strict=True))
    scores = {s: float(entropy(f[None]).mean()) for s, f in maps.items()}
    orders = {name: visited(plan, name, scores) for name in LAYERS}
    band = near_boundary(mask, scenes.radius, scenes.void)
    regions = (mask, mask.masked_fill(~band, scenes.void), mask.masked_fill(band, scenes.void))
    answers = {way: together(plan, maps, orders[way.layers], way, mask.shape) for way in WAYS}
    guesses = [target.finish(maps[zero][None])[0].argmax(0), *(answers[way][b] for way, b in cases())]
    rows = [[areas(confusion(g, r, scenes.classes, scenes.void)) for r in regions] for g in guesses]
    macs = [plan.engine.trie_macs(orders[way.layers][:b]) / plan.engine.trie_macs([zero]) for way, b in cases()]
    return {"pixels": torch.from_numpy(np.array(rows, np.int64)), "macs": torch.tensor(macs)}


def run(net: str, scenes: Scenes, frames: int, cache: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (frames, 1 + cases, region, 3, K) and MACs (frames, cases)."""
    better = unstride.enhance(scenes.model, scenes.read(0)[0][None], 2, task="segmentation")
    about = [net, [str(w) for w in WAYS], BUDGETS, better.signature, fingerprint(scenes.model)]
    folder = cache / f"study-{net}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for i in np.linspace(0, scenes.count - 1, min(frames, scenes.count)).round().astype(int).tolist():
        file = folder / f"{i:06d}.safetensors"
        if not file.exists():
            image, mask, _ = scenes.read(i)
            save_file(study(scenes, better, image, mask), file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)
            print(f"{net}: frame {i}", flush=True)
        found.append(load_file(file))
    return np.stack([f["pixels"].numpy() for f in found]), np.stack([f["macs"].numpy() for f in found])


def row(name: str, plain: np.ndarray, now: np.ndarray, macs: float) -> str:
    gain = compare_segmentation(plain[:, 0], now[:, 0])
    cells = [name, f"{100 * gain.gain:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"]
    for r in range(1, len(REGIONS)):
        before, after = (100 * summarise_areas(p[:, r].sum(0)).miou for p in (plain, now))
        cells.append(f"{after - before:+.2f}")
    before, after = (100 * summarise_areas(p[:, 0].sum(0)).aacc for p in (plain, now))
    return "| " + " | ".join([*cells, f"{after - before:+.2f}", f"{macs:.2f}"]) + " |"


def render(net: str, scenes: Scenes, found: np.ndarray, macs: np.ndarray) -> str:
    plain = found[:, 0]
    total = summarise_areas(plain[:, 0].sum(0))
    plainly = f"plain mIoU {100 * total.miou:.2f} %, aAcc {100 * total.aacc:.2f} %"
    out = [
        f"## {scenes.name}",
        "",
        f"{len(found)} images, {plainly}. All columns are differences to it, in points.",
        "",
    ]
    out += ["| | B | mIoU, 95 % interval | mIoU of the band | of the interior | aAcc | MACs / plain |"]
    out += ["|---|---|---|---|---|---|---|"]
    out += [row(f"{way} | {b}", plain, found[:, k], macs[:, k - 1].mean()) for k, (way, b) in enumerate(cases(), 1)]
    if net in camvid.NETS:
        out += ["", "| IoU % | " + " | ".join(camvid.CLASSES) + " |", "|---" * (len(camvid.CLASSES) + 1) + "|"]
        for k, (way, b) in enumerate(cases(), 1):
            if way in WAYS[:2]:
                before, after = (100 * np.array(summarise_areas(found[:, j, 0].sum(0)).iou) for j in (0, k))
                out.append(f"| {way}, B = {b} | " + " | ".join(f"{v:+.2f}" for v in after - before) + " |")
    return "\n".join(out) + "\n"


def answer(page: str) -> str:
    """What the choices are worth, from the rows of the page: differences of mIoU at the same number of states."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 7 and cells[0].startswith("align="):
            found.setdefault((cells[0], cells[1]), []).append(float(cells[2].split()[0]))

    def gain(now: Way, than: Way) -> str:
        pairs = [(found[str(now), str(b)], found[str(than), str(b)]) for b in MANY]
        each = [a - b for some, others in pairs for a, b in zip(some, others, strict=True)]
        return f"{sum(each) / len(each):+.2f} points of mIoU (better in {sum(d > 0 for d in each)} of {len(each)} rows)"

    own = Way()
    return (
        f"In the mean, with {MANY[0]} states or more: Align is worth {gain(own, Way(False))} over none, a stitched map "
        f"{gain(Way('stitch'), own)} over an averaged one. Equal weights are worth {gain(Way(weight='equal'), own)} "
        f"over weights by entropy, probabilities {gain(Way(space='probabilities'), own)} over logits."
    )


HEAD = """# Segmentation: what its gains depend on

{answer} A larger look gains more than any of these choices: see
[the frontier of segmentation](results-segmentation-frontier.md).

Made by `{command}`.
All 64 states of each image, put together in many ways: the choices of this project, and those it did not take. CamVid
frames are of its val split, so that nothing here looks at test frames; the embedded scenes have no val split. Intervals
are paired bootstrap intervals over images. The band is all pixels with another label within 3 pixels.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument(
        "--nets", type=Path, required=True, help="folder of the networks that benchmarks.camvid trained"
    )
    parser.add_argument("--only", nargs="*", default=list(DEFAULT))
    parser.add_argument("--frames", type=int, default=51, help="spread over the val frames")
    parser.add_argument("--cache", type=Path, default=Path("runs/segmentation"))
    parser.add_argument("--out", type=Path, default=None, help="where to write the tables (default: print them)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    only = f" --only {' '.join(args.only)}" if args.only != list(DEFAULT) else ""
    parts: list[str] = []
    for net in args.only:
        make = embedded if net == "sample" else street(net, CAMVID[net], split="val")
        scenes = make(args.assets, args.nets)
        parts.append(render(net, scenes, *run(net, scenes, args.frames, args.cache)))
    command = f"python -m benchmarks.segmentation_study --assets DIR --nets DIR{only}"
    give("\n".join([HEAD.format(answer=answer("\n".join(parts)), command=command), *parts]), args.out)


if __name__ == "__main__":
    main()
