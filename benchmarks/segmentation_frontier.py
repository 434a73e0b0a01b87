"""mIoU at each cost: `python -m benchmarks.segmentation_frontier --assets DIR --nets DIR`.

`--nets` is the folder that `python -m benchmarks.camvid` left its networks in. What the networks say at a sample of
pixels of every image, in every look, is kept in `--cache`, so a run goes on where it was. CamVid is tuned on val
frames and measured on test frames; VOC, which has no other images, on one half and the other, both ways. Writes
docs/results-segmentation-frontier.csv, a row per network and setting, and the page made of it; `--page` makes only it.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import unstride
from benchmarks import camvid
from benchmarks.frontier import merge_rows
from benchmarks.frontier_page import SEGMENTATION
from benchmarks.segmentation import Scenes, near_boundary, voc
from unstride.evaluation.benching import interleaved
from unstride.evaluation.metrics import IGNORE, Integers, compare_segmentation, summarise_areas
from unstride.procedure.calibrate import threshold
from unstride.procedure.gates import Gate, Stage
from unstride.recipe import Recipe
from unstride.storage.distributed import world
from unstride.tuning.candidates import Unit, candidates
from unstride.tuning.choose_pixels import Places, areas, choose_pixels, stages_of
from unstride.tuning.pixels import Pixels, Scene, gather_pixels, scenes, simulate_pixels
from unstride.views.policies import parse_view

NETS = ("mobilenet", "deeplab", "voc")
PIXELS = 6000  # of each image
CEILINGS = (1.5, 2.0, 3.0, 5.0)
OBJECTS = ("background", "plane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "table")
OBJECTS += ("dog", "horse", "motorbike", "person", "plant", "sheep", "sofa", "train", "monitor")
USUAL = {
    "flip": ["mirror"],
    "larger": ["1.5x"],
    "three scales": ["0.75x", "1.25x"],
    "two scales, flip": ["mirror", "1.25x", "mirror + 1.25x"],
}
PAGE = SEGMENTATION.with_suffix(".md")
FIELDS = ("net", "images", "setting", "cost", "miou", "gain", "low", "high")
FIELDS += ("band_miou", "band_gain", "band_low", "band_high", "aacc", "what", "iou", "note")
FIELDS += ("to_six", "to_six_low", "to_six_high")  # against six scales and a flip
FIELDS += ("time",)  # over the plain eager forward, of whole recipes
FIELDS += ("rival", "to_rival", "to_rival_low", "to_rival_high")  # against what it was tuned for the very cost of
TIMED = 4  # images, one at a time
AGAINST = "tuned for the cost of "

HEAD = """
# The frontier of segmentation

{answers}

mIoU at each cost, in plain forwards by MACs, and time over the plain eager forward, one image at a time: what people
do, near states, and what `unstride tune` chooses, looking again at whole images or only at tiles where the margin is
small ([tuning](tuning.md)). Made by `python -m benchmarks.segmentation_frontier --assets DIR --nets DIR` (networks and
images are not part of this project); the rows are in `results-segmentation-frontier.csv`. Align and stitch in the
paper's search, with and without a flip, are in [results on real networks](results-segmentation.md).

mIoU comes from one confusion matrix over a sample of 6,000 labelled pixels of each image, the same for all rows;
intervals are paired bootstrap intervals over images. The band is all pixels with another label within 3 pixels (VOC:
8). Rows of tiles are simulated from the whole image's maps, at the cost of the windows that would be computed,
context included; the last rows of a table compare that with a real run, where a network that pools over the whole
image, as these do, sees the window instead.

How a recipe is taken (the best of all that are surely better than plain) was settled after a look at earlier rows of
these images and of a network that was trained less: read them with that in mind.
"""


@dataclass(frozen=True, eq=False)
class Given:
    """A network with images to tune on and others to measure on."""

    name: str
    note: str
    model: nn.Module
    classes: tuple[str, ...]
    gate: Gate
    radius: int  # pixels this near to another label are the band
    tune: list[tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]


def street(net: str, assets: Path, nets: Path, frames: tuple[int, int], epochs: str = "") -> Given:
    """The frames' upper left part, of a size that the network's upsampling lays right: 8 n, or 8 n + 1."""
    odd = camvid.NETS[net].padding[1]
    splits = []
    for split, count in zip(("val", "test"), frames, strict=True):
        images, masks = camvid.load_split(assets / "camvid" / "camvid_240x180.zip", split)
        x = camvid.NETS[net].normalise(images.float() / 255)[:, :, : 176 + odd, : 232 + odd]
        y = masks[:, : 176 + odd, : 232 + odd].long()
        y[y == camvid.VOID] = IGNORE
        spread = torch.linspace(0, len(x) - 1, min(count, len(x))).round().long().tolist()
        splits.append([(x[i], y[i]) for i in spread])
    note = "trained by `benchmarks.camvid` on train frames" + (f" ({epochs} epochs), " if epochs else ", ")
    note += f"tuned on {len(splits[0])} val frames, measured on {len(splits[1])} test frames"
    gate = Gate(share=1.0, tile=16, context=16)
    return Given(f"CamVid {net}", note, camvid.load(nets, net), camvid.CLASSES, gate, 3, splits[0], splits[1])


def photographs(assets: Path, count: int) -> Given:
    """Landscape images, their middle of 321 x 481 pixels."""
    found: Scenes = voc(assets, None)
    kept = []
    for i in range(found.count):
        image, mask, width = found.read(i)
        height = int((mask != 255).any(1).nonzero().max()) + 1
        if width >= 481 and height >= 321 and len(kept) < count:
            top, left = (height - 321) // 2, (width - 481) // 2
            kept.append((image[:, top : top + 321, left : left + 481], mask[top : top + 321, left : left + 481]))
    note = f"{len(kept)} val images, which were among its training data, so its level says nothing; tuned on one half, "
    note += "measured on the other, both ways"
    return Given("VOC mobilenet", note, found.model, OBJECTS, Gate(share=1.0, tile=32, context=32), 8, kept, kept)


def pool(given: Given, part: list[tuple[Tensor, Tensor]], cache: Path) -> tuple[Pixels, list[Scene]]:
    """Six scales with and without mirror, and the nearest states."""
    own = list(scenes([(x[None], y[None]) for x, y in part], part[0][0].new_zeros(())))
    better = unstride.enhance(given.model, part[0][0][None], recipe="plain", task="segmentation")
    units = candidates(own[0].source, "large", "segmentation")
    with world() as us:
        return gather_pixels(better, own, units, given.gate, PIXELS, cache, us, True), own


@dataclass(frozen=True, eq=False)
class Outcome:
    """A setting on the test images: pixels (N, 3, K) of all and of the band, and costs (N,)."""

    setting: str
    whole: Integers
    band: Integers
    costs: Tensor
    what: str = ""
    stages: tuple[Stage, ...] = ()  # what runs it, where that is timed

    @classmethod
    def of(
        cls, setting: str, pool: Pixels, band: Tensor, p: Tensor, costs: Tensor, what: str = "",
        stages: tuple[Stage, ...] = (),
    ) -> "Outcome":  # fmt: skip
        kept = replace(pool, p=pool.p[:, :0], labels=pool.labels[band], image=pool.image[band])
        return cls(setting, areas(pool, p), areas(kept, p[band]), costs, what, stages)


def fixed(pool: Pixels) -> dict[str, list[int]]:
    """What people do, by the numbers of its units."""
    number = {str(u): k for k, u in enumerate(pool.units)}
    at = {k: [number[str(Unit(parse_view(v)))] for v in views] for k, views in USUAL.items()}
    return {**at, "six scales, flip": [k for k, u in enumerate(pool.units) if u.states == "plain"]}


def outcomes(given: Given, tune: Pixels, test: Pixels, band: Tensor) -> Iterator[Outcome]:
    """Everything that is measured; `tune` is empty where halves of `test` are tuned on in turn."""
    yield Outcome.of("plain", test, band, test.p[0], torch.ones(len(test)))
    usual = fixed(test)
    for name, units in {**usual, "near states": [len(test.units) - 1]}.items():
        seen = simulate_pixels(test, units)
        looks = ", ".join(str(test.units[u]) for u in units)
        yield Outcome.of(name, test, band, seen.p, seen.costs, looks, stages_of(Places(tuple(units)), test))
    tiles = torch.cat([s.sure.flatten() for s in tune.said])
    for name in ("larger", "two scales, flip", "six scales, flip"):
        for share in (0.05, 0.1, 0.2):
            seen = simulate_pixels(test, usual[name], threshold(tiles, share))
            yield Outcome.of(f"{name}, at {share:.0%} of tiles", test, band, seen.p, seen.costs)
    for objective in ("likelihood", "miou"):
        for ceiling in CEILINGS:
            yield tuned(given, tune, test, band, ceiling, objective)
    for name, units in usual.items():
        cost = float(simulate_pixels(test, units).costs.mean())
        yield replace(tuned(given, tune, test, band, cost + 1e-6, "miou"), setting=f"{AGAINST}{name}", stages=())


def folds(given: Given, tune: Pixels, test: Pixels) -> Iterator[tuple[Pixels, list[int]]]:
    """What is tuned on, and the test images it is measured on."""
    if given.tune is not given.test:
        yield tune, list(range(len(test)))
        return
    halves = [list(range(k, len(test), 2)) for k in (0, 1)]
    yield from ((test.rows(one), other) for one, other in (halves, halves[::-1]))


def tuned(given: Given, tune: Pixels, test: Pixels, band: Tensor, ceiling: float, objective: str) -> Outcome:
    p, costs, told = torch.empty_like(test.p[0]), torch.ones(len(test), dtype=torch.float64), []
    stages: tuple[Stage, ...] = ()
    for fitted, rows in folds(given, tune, test):
        places = choose_pixels(fitted, ceiling, objective)
        seen = simulate_pixels(test.rows(rows), places.units, places.below)
        mine = torch.zeros(len(test), dtype=torch.bool)
        mine[rows] = True
        p[mine[test.image]], costs[rows] = seen.p, seen.costs
        told.append(places.told(fitted))
        stages = stages_of(places, fitted)
    what = "; ".join(dict.fromkeys(told))
    return Outcome.of(f"tuned for {ceiling:g}, {objective}", test, band, p, costs, what, stages)


def clocked(given: Given, found: list[Outcome]) -> dict[str, float]:
    """Setting -> time over the plain eager forward of some images, one at a time, in turns."""
    rows = torch.linspace(0, len(given.test) - 1, TIMED).round().long().tolist()
    images = [given.test[i][0][None] for i in rows]
    better = unstride.enhance(given.model, images[0], recipe="plain", task="segmentation")

    def each(call: Callable[[Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for image in images:
                    call(image)

        return run

    recipes = {one.setting: Recipe("", "segmentation", one.stages, "probabilities") for one in found if one.stages}
    calls = {name: each(better.with_options(recipe=recipe)) for name, recipe in recipes.items()}
    return {"plain": 1.0} | interleaved(each(given.model), calls, 3)[1]


def run(given: Given, tune: Pixels, test: Pixels, band: Tensor, count: int) -> Iterator[Outcome]:
    """Some gated recipes really run on some images, beside what was simulated for the same ones."""
    rows = torch.linspace(0, len(test) - 1, min(count, len(test))).round().long().tolist()
    few = test.rows(rows)
    near = band[torch.cat([(test.image == i).nonzero()[:, 0] for i in rows])]
    better = unstride.enhance(given.model, given.test[0][0][None], recipe="plain", task="segmentation")
    tiles = torch.cat([s.sure.flatten() for s in tune.said])
    share = 0.05
    below = threshold(tiles, share)
    places = Places(tuple(fixed(test)["larger"]), share, below)
    recipe = Recipe("", "segmentation", stages_of(places, test), "probabilities")
    seen = simulate_pixels(few, places.units, below)
    name = f"larger, at {share:.0%} of tiles, {len(rows)} images"
    yield Outcome.of(f"{name}: plain", few, near, few.p[0], torch.ones(len(few)))
    yield Outcome.of(f"{name}: simulated", few, near, seen.p, seen.costs)
    p, costs = [], []
    for i, said in zip(rows, few.said, strict=True):
        logits, cost = better.with_options(recipe=recipe).looks(given.test[i][0][None])
        p.append(logits[0].softmax(0).flatten(1)[:, said.pixels].T)
        costs += cost
    yield Outcome.of(f"{name}: run", few, near, torch.cat(p), torch.tensor(costs))


def rows_of(given: Given, found: list[Outcome]) -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    times = clocked(given, found)
    plain, by = found[0], {one.setting: one for one in found}
    six = by["six scales, flip"]
    for one in found:
        plain = one if one.setting.endswith("plain") else plain
        gain, near = compare_segmentation(plain.whole, one.whole), compare_segmentation(plain.band, one.band)
        whole, band = summarise_areas(one.whole.sum(0)), summarise_areas(one.band.sum(0))
        values = (given.name, len(one.whole), one.setting, round(float(one.costs.mean()), 3))
        values += tuple(round(v, 5) for v in (whole.miou, gain.gain, gain.low, gain.high))
        values += tuple(round(v, 5) for v in (band.miou, near.gain, near.low, near.high, whole.aacc))
        iou = " ".join(f"{c}={v:.4f}" for c, v in zip(given.classes, whole.iou, strict=True) if v == v)
        to = compare_segmentation(six.whole, one.whole) if len(six.whole) == len(one.whole) else None
        against = ("",) * 3 if to is None else tuple(round(v, 5) for v in (to.gain, to.low, to.high))
        spent = round(times[one.setting], 3) if one.setting in times else ""
        rival = one.setting.removeprefix(AGAINST) if one.setting.startswith(AGAINST) else ""
        own = compare_segmentation(by[rival].whole, one.whole) if rival else None
        behind = ("",) * 3 if own is None else tuple(round(v, 5) for v in (own.gain, own.low, own.high))
        out.append(
            dict(zip(FIELDS, (*values, one.what, iou, given.note, *against, spent, rival, *behind), strict=True))
        )
    return out


def measure(given: Given, cache: Path, count: int) -> list[dict[str, object]]:
    tune, _ = pool(given, given.tune, cache)
    test, own = pool(given, given.test, cache) if given.test is not given.tune else (tune, _)
    flags = [near_boundary(s.mask, given.radius, IGNORE).flatten() for s in own]
    band = torch.cat([flag[said.pixels] for flag, said in zip(flags, test.said, strict=True)])
    found = []
    for one in outcomes(given, tune, test, band):
        found.append(one)
        print(given.name, one.setting, round(float(one.costs.mean()), 2), one.what, flush=True)
    return rows_of(given, [*found, *run(given, tune, test, band, count)])


def page() -> str:
    """docs/results-segmentation-frontier.md from the rows alone."""
    with SEGMENTATION.open(newline="") as file:
        rows = list(csv.DictReader(file))
    nets = {net: [r for r in rows if r["net"] == net] for net in dict.fromkeys(r["net"] for r in rows)}
    answers = "\n".join(f"- {net}: {goal(mine)}" for net, mine in nets.items())
    out = [HEAD.strip().format(answers=answers)]
    for net, mine in nets.items():
        out += ["", f"## {net}", "", f"{mine[0]['note'].capitalize()}.", ""]
        out += [
            "| setting | cost | time | mIoU % | gain | band mIoU % | gain in the band | aAcc % | looks |",
            "|---" * 9 + "|",
        ]
        for r in (r for r in mine if not r["rival"]):
            told = ["" if r["setting"].endswith("plain") else _interval(r, prefix) for prefix in ("", "band_")]
            cells = (
                r["setting"],
                f"{float(r['cost']):.2f}",
                f"{float(r['time']):.2f}" if r["time"] else "",
                _percent(r["miou"]),
                told[0],
                _percent(r["band_miou"]),
                told[1],
            )
            out.append("| " + " | ".join((*cells, _percent(r["aacc"]), r["what"])) + " |")
        out += ["", *classes(mine)]
    return "\n".join(out) + "\n"


def _percent(value: str) -> str:
    return f"{100 * float(value):.2f}"


def _interval(r: dict[str, str], prefix: str) -> str:
    gain, low, high = (100 * float(r[prefix + k]) for k in ("gain", "low", "high"))
    return f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]"


def goal(rows: list[dict[str, str]]) -> str:
    """What was tuned for 5 and for 2 forwards, beside six scales and a flip, and beside a flip."""
    by = {r["setting"]: r for r in rows}
    most, flip, five, two = (
        by[k] for k in ("six scales, flip", "flip", "tuned for 5, likelihood", "tuned for 2, likelihood")
    )
    low, high = (100 * float(five[k]) for k in ("to_six_low", "to_six_high"))
    return (
        f"Six scales and a flip gain {_gained(most)}, what was tuned for 5 {_gained(five)}: a difference of "
        f"{100 * float(five['to_six']):+.2f} [{low:+.2f}, {high:+.2f}]. A flip gains {_gained(flip)}, "
        f"what was tuned for 2 {_gained(two)}."
    )


def _gained(r: dict[str, str]) -> str:
    return f"{100 * float(r['gain']):+.2f} at {float(r['cost']):.2f} forwards"


def classes(rows: list[dict[str, str]]) -> list[str]:
    names = [part.split("=")[0] for part in rows[0]["iou"].split()]
    out = ["IoU % of each class:", "", "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    shown = ["plain", "flip", "two scales, flip", "six scales, flip", "near states"]
    for r in rows:
        if r["setting"] in shown or r["setting"] in ("tuned for 2, miou", "tuned for 5, miou"):
            own = dict(part.split("=") for part in r["iou"].split())
            out.append(
                f"| {r['setting']} | " + " | ".join(f"{100 * float(own.get(n, 'nan')):.1f}" for n in names) + " |"
            )
    return out


def given_nets(args: argparse.Namespace) -> Iterator[Given]:
    for net in args.only:
        yield (
            photographs(args.assets, args.images)
            if net == "voc"
            else street(net, args.assets, args.nets, args.frames, args.epochs)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="folder with the networks and images")
    parser.add_argument("--nets", type=Path, help="folder of the networks that benchmarks.camvid trained")
    parser.add_argument("--cache", type=Path, default=Path("runs/segmentation-frontier"))
    parser.add_argument("--only", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--frames", nargs=2, type=int, default=(101, 233), metavar=("VAL", "TEST"))
    parser.add_argument(
        "--epochs", default="", help="for the page, where a network was not trained to the end: '5 of 20'"
    )
    parser.add_argument("--page", action="store_true", help="only make the page, from the rows that are there")
    parser.add_argument("--run", type=int, default=20, help="images on which a gated recipe is run, too")
    parser.add_argument("--images", type=int, default=40, help="of VOC")
    args = parser.parse_args()
    for given in () if args.page else given_nets(args):
        merge_rows(SEGMENTATION, FIELDS, measure(given, args.cache, args.run))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
