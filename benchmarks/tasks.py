"""What looks bring to tasks without classes, on real weights: neighbours of embeddings, finer dense features.

    python -m benchmarks.tasks --assets DIR            # docs/results-tasks.csv and the page made of it
    python -m benchmarks.tasks --page                  # the page alone, from the rows that are there

Neighbours: penultimate features of the nets of `benchmarks.nets`, a gallery from one part of the images and queries
from another; the same looks for both. Dense features: MobileNetV2 at stride 16, a linear probe of CamVid's classes,
trained on some training frames and measured on test frames, at every second pixel. Every row has its cost.
"""

import argparse
import csv
import io
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import unstride
from benchmarks import nets
from unstride.evaluation import measures, metrics
from unstride.evaluation.benching import interleaved
from unstride.procedure.features import phases
from unstride.procedure.looks import Merged
from unstride.procedure.meaning import TASKS
from unstride.procedure.stitch import sample
from unstride.views.policies import View, parse_view

ROOT = Path(__file__).parent.parent
ROWS, PAGE = ROOT / "docs" / "results-tasks.csv", ROOT / "docs" / "results-tasks.md"
FIELDS = ("part", "net", "queries", "setting", "cost", "time", "measure")
FIELDS += ("value", "gain", "low", "high", "corrected", "corrupted")
PLAIN, MIRROR = parse_view("plain"), parse_view("mirror")
STATES = 4
TIMED = 8  # images of a batch that is timed
SETTINGS = {  # how many states of the plain image, of its mirror image and of a larger one are taken
    "plain": (1, 0, 0),
    "flip": (1, 1, 0),
    "larger": (1, 0, 1),
    "near:2": (2, 0, 0),
    "flip and larger": (1, 1, 1),
    "near:4": (4, 0, 0),
    "flip and near:4": (4, 1, 0),
    "flip in near:4": (4, 4, 0),
}
Views = tuple[View, View, View]


# -------------------------------------------------------------------------------------------------------- neighbours


def looks(better: unstride.Enhanced, images: Tensor, size: int = 50) -> dict[tuple[View, int], Tensor]:
    """View and number of the state -> vectors (N, C), of all images."""
    found: dict[tuple[View, int], list[Tensor]] = {}
    for start in range(0, len(images), size):
        for p in better.explain(images[start : start + size]):
            seen: Counter[View] = Counter()
            for v in p.states:
                found.setdefault((v.view, seen[v.view]), []).append(v.logits.flatten())
                seen[v.view] += 1
    return {look: torch.stack(vectors) for look, vectors in found.items()}


def merged(found: dict[tuple[View, int], Tensor], views: Views, counts: Sequence[int]) -> Tensor:
    out = Merged("directions", TASKS["embedding"])
    taken = dict(zip(views, counts, strict=True))
    for (view, state), vectors in found.items():
        if state < taken[view]:
            out.add(len(vectors), list(range(len(vectors))), vectors, 1.0, 1.0)
    return F.normalize(out.logits())


def stages(views: Views, counts: Sequence[int]) -> tuple[unstride.Stage, ...]:
    """States of one view share their prefixes."""
    return tuple(unstride.Stage((v,), f"near:{n}") for v, n in zip(views, counts, strict=True) if n)


def neighbours(
    name: str, model: nn.Module, gallery: Any, queries: Any, k: int, larger: str
) -> Iterator[dict[str, Any]]:
    (near, near_labels), (far, labels) = gallery, queries
    views = (PLAIN, MIRROR, parse_view(larger))
    every = stages(views, (STATES, STATES, 1))
    better = unstride.enhance(model, near[:1], recipe=unstride.Recipe(task="embedding", stages=every))
    one, other = looks(better, near), looks(better, far)
    asked = {s: better.with_options(stages=stages(views, counts)) for s, counts in SETTINGS.items()}
    times = timed(model, near[:TIMED], {s: mine for s, mine in asked.items() if s != "plain"})
    right: dict[str, Any] = {}
    for setting, counts in SETTINGS.items():
        cosine = merged(other, views, counts) @ merged(one, views, counts).T
        votes = near_labels[cosine.topk(k, 1).indices]
        right[setting] = (measures.voted(votes) == labels).numpy()
        change = right[setting].astype(np.float64) - right["plain"]
        spent = asked[setting].stage_costs(near[:1])[-1], times.get(setting, 1.0)
        counted = {"corrected": int((change > 0).sum()), "corrupted": int((change < 0).sum())}
        yield row("neighbours", name, setting, spent, f"{k}-NN accuracy", right[setting], change) | counted


def row(
    part: str, net: str, setting: str, spent: tuple[float, float], measure: str, values: Any, change: Any
) -> dict[str, Any]:
    """A setting's mean and its gain over plain, with cost and time."""
    low, high = metrics.bootstrap(change)
    told = (part, net, len(values), setting, *spent, measure, float(np.mean(values)), float(change.mean()), low, high)
    return dict(zip(FIELDS, (*told, "", ""), strict=True))


def timed(model: nn.Module, x: Tensor, calls: Mapping[str, Callable[[Tensor], Any]]) -> dict[str, float]:
    """Of each call over the plain eager forward of the same images, in turns."""
    return interleaved(lambda: model(x), {name: partial(call, x) for name, call in calls.items()}, 3)[1]


def headless(model: nn.Module, attribute: str) -> nn.Module:
    """Without its classifier: the penultimate features are what it returns."""
    owner: Any = model
    *path, last = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, nn.Identity())
    return model


def some(pair: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    step = max(1, len(pair[0]) // count)
    return pair[0][::step][:count], pair[1][::step][:count]


def of_cifar(depth: int) -> Callable[[Path, float], Iterator[dict[str, Any]]]:
    def rows(assets: Path, scale: float) -> Iterator[dict[str, Any]]:
        bench = nets.cifar(assets, depth)
        parts = some(bench.fit, round(5000 * scale)), some(bench.test, round(5000 * scale))
        yield from neighbours(bench.name, headless(bench.model, "linear"), *parts, 20, "1.125x")

    return rows


def of_imagenet(name: str, attribute: str, stats: Any) -> Callable[[Path, float], Iterator[dict[str, Any]]]:
    def rows(assets: Path, scale: float) -> Iterator[dict[str, Any]]:
        model, folder = headless(nets.imagenet(assets, name, 1).model, attribute), assets / "imagenet"
        zips = ("val_1k_256.zip", "val_1k_b_256.zip")
        pairs = [nets.zipped(folder / z, stats, round(1000 * scale)) for z in zips]
        assert torch.equal(pairs[0][1], pairs[1][1])  # an image of each class in the gallery, another as the query
        yield from neighbours(f"ImageNet {name}", model, *pairs, 1, "1.15x")

    return rows


# ----------------------------------------------------------------------------------------------------- dense features


def frames(assets: Path, split: str, count: int) -> tuple[Tensor, Tensor]:
    """CamVid images (N, 3, 176, 240), prepared for MobileNetV2, and their masks (N, 176, 240), 11 is void."""
    images, masks = [], []
    with zipfile.ZipFile(assets / "camvid" / "camvid_240x180.zip") as archive:
        names = sorted(n for n in archive.namelist() if f"{split}/images/" in n and n.endswith(".jpg"))
        for name in names[:: max(1, len(names) // count)][:count]:
            image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            mask = Image.open(io.BytesIO(archive.read(name.replace("/images/", "/masks/").replace(".jpg", ".png"))))
            images.append(torch.from_numpy(np.asarray(image)[2:178].copy()).permute(2, 0, 1))
            masks.append(torch.from_numpy(np.asarray(mask)[2:178].astype(np.int64)))
    return nets.normalise(torch.stack(images), nets.HALF), torch.stack(masks)


def pixels(features: Tensor, finer: int, size: tuple[int, int]) -> Tensor:
    """Features (B, C, f h, f w) at every second pixel: cell i of a finer map lies at i / f of the plain map's."""
    at = []
    for n, extent in zip(features.shape[2:], size, strict=True):
        cells = n / finer
        at.append((((torch.arange(0, extent, 2) + 0.5) * cells / extent - 0.5) * finer).clamp(0, n - 1))
    return sample(features.float(), at)


Way = tuple[str, float, Callable[[Tensor], Tensor]]


def ways(model: nn.Module, example: Tensor) -> list[Way]:
    """(name, cost in plain forwards, images -> features at every second pixel)."""
    better = unstride.enhance(model, example, task="features")
    plain = better.with_options(stages=(unstride.Stage(),))
    size = (int(example.shape[2]), int(example.shape[3]))
    out: list[Way] = [("plain, bilinear", 1.0, lambda x: pixels(plain.features(x), 1, size))]
    plan = better.plan
    for finer in (2, 4):
        spent = plan.engine.trie_macs(phases(plan, finer)) / plan.engine.trie_macs([plan.found.space.zero])
        out.append((f"stitched, finer={finer}", spent, lambda x, f=finer: pixels(better.features(x, finer=f), f, size)))
    out.append(("near:4, averaged", better.stage_costs(example)[-1], lambda x: pixels(better.features(x), 1, size)))
    flip = better.with_options(recipe="flip")
    out.append(("flip, averaged", 2.0, lambda x: pixels(flip.features(x), 1, size)))
    for scale in (1.5, 2.0):
        larger = [round(n * scale / 16) * 16 for n in size]

        def enlarged(x: Tensor, larger: list[int] = larger) -> Tensor:
            return pixels(plain.features(F.interpolate(x, larger, mode="bicubic", antialias=True)), 1, size)

        out.append((f"{scale:g} times larger input", larger[0] * larger[1] / (size[0] * size[1]), enlarged))
    return out


def boundary(masks: Tensor, reach: int = 2) -> Tensor:
    """Pixels within `reach` of one with another label."""
    padded = F.pad(masks.float()[:, None], (reach,) * 4, mode="replicate")
    side = 2 * reach + 1
    return (F.max_pool2d(padded, side, 1) != -F.max_pool2d(-padded, side, 1))[:, 0]


def probe(train: tuple[Tensor, Tensor], classes: int = 11, steps: int = 300) -> Callable[[Tensor], Tensor]:
    """A linear classifier of feature vectors (N, C), the same start and steps for every way."""
    torch.manual_seed(0)
    x, y = train
    mean, std = x.mean(0), x.std(0).clamp(min=1e-6)
    layer = nn.Linear(x.shape[1], classes)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.02, weight_decay=1e-3)
    x = (x - mean) / std
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(layer(x), y).backward()
            optimiser.step()
    return lambda z: layer((z - mean) / std)


def labelled(way: Way, images: Tensor, masks: Tensor, each: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(vectors (P, C), labels (P,), near a boundary (P,)) of each frame; `each`: so many pixels, spread evenly."""
    edges = boundary(masks)
    for i in range(len(images)):
        vectors = way[2](images[i : i + 1])[0].flatten(1).T
        label, edge = (t[i, ::2, ::2].flatten() for t in (masks, edges))
        known = (label < 11).nonzero()[:, 0]
        known = known if each is None else known[:: max(1, len(known) // each)]
        yield vectors[known], label[known], edge[known]


def dense(assets: Path, scale: float) -> Iterator[dict[str, Any]]:
    import timm

    model = timm.create_model("mobilenetv2_100", pad_type="same", features_only=True, out_indices=(3,))
    weights = nets.load_file(assets / "imagenet" / "mobilenetv2_100_same.safetensors")
    model.load_state_dict(weights, strict=False)
    train, test = (frames(assets, s, max(4, round(n * scale))) for s, n in (("train", 60), ("test", 40)))
    scores: dict[str, dict[str, Any]] = {}
    every = ways(model.eval(), train[0][:1])
    times = timed(model, test[0][:1], {name: see for name, _, see in every})
    for way in every:
        parts = list(labelled(way, *train, 300))
        classify = probe((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])))
        right = {"pixel accuracy": [], "boundary accuracy": []}
        for vectors, label, edge in labelled(way, *test, None):
            same = (classify(vectors).argmax(1) == label).double()
            right["pixel accuracy"].append(float(same.mean()))
            right["boundary accuracy"].append(float(same[edge].mean()))
        scores[way[0]] = right
        for measure, values in right.items():
            change = np.array(values) - np.array(scores["plain, bilinear"][measure])
            net = "MobileNetV2, stride 16, CamVid"
            yield row("dense features", net, way[0], (way[1], times[way[0]]), measure, values, change)


# ------------------------------------------------------------------------------------------------------------ the page


def page(rows: list[dict[str, str]]) -> str:
    lines = [
        "# Tasks without classes, measured",
        "",
        _answer(rows),
        "",
        "Made by `python -m benchmarks.tasks --assets DIR` (the networks and images are not in the project); the "
        "rows are in `results-tasks.csv`. Gains are paired, with 95 % bootstrap intervals over queries, or over "
        "frames. Cost is in plain forwards, time over the plain eager forward, in turns. `--scale` says how many "
        "images are taken; each heading says how many were, and intervals over few of them are wide.",
    ]
    for part, words in (("neighbours", NEIGHBOURS), ("dense features", DENSE)):
        lines += ["", f"## {part.capitalize()}", "", words]
        mine = [r for r in rows if r["part"] == part]
        for net, measure in dict.fromkeys((r["net"], r["measure"]) for r in mine):
            chosen = [r for r in mine if (r["net"], r["measure"]) == (net, measure)]
            lines += ["", f"### {net}, {measure}, {int(chosen[0]['queries']):,} {UNITS[part]}", ""]
            lines += ["| setting | cost | time | % | gain, points | verdict |", "|---|---|---|---|---|---|"]
            lines += [_line(r) for r in chosen]
            lines += ["", _in_short(chosen)]
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[Path, float], Iterator[dict[str, Any]]]] = {
    "dense": dense,
    "cifar20": of_cifar(20),
    "cifar56": of_cifar(56),
    "mobilenetv2": of_imagenet("mobilenetv2", "classifier", nets.HALF),
    "resnet50": of_imagenet("resnet50", "net.fc", nets.CAFFE),
}
UNITS = {"neighbours": "queries", "dense features": "frames"}
NEIGHBOURS = (
    "The label that most of a query's nearest gallery images have (20 on CIFAR-10; on ImageNet one, because the "
    "gallery has one image of each class). Gallery and queries take the same looks; vectors are merged as unit "
    "vectors."
)
DENSE = (
    "A linear probe on the features of every pixel: bilinear between the cells of the plain map, between those of a "
    "stitched one, or of a larger input. Boundary accuracy is of the pixels within two of another label."
)


def _verdict(r: dict[str, str]) -> str:
    return "helps" if float(r["low"]) > 0 else "hurts" if float(r["high"]) < 0 else "no measurable effect"


def _in_short(rows: list[dict[str, str]]) -> str:
    """Which settings help, which do not, and which are best for what they cost: in a sentence made from the rows."""
    told = []
    for verdict in ("helps", "hurts", "no measurable effect"):
        names = [r["setting"] for r in rows[1:] if _verdict(r) == verdict]
        if names:
            told.append(f"{verdict}: {', '.join(names)}")
    best = max(rows, key=lambda r: (float(r["value"]), -float(r["cost"])))
    return (
        f"{'; '.join(told).capitalize()}. The best is {best['setting']}, at {float(best['cost']):.2f} plain forwards."
    )


def _answer(rows: list[dict[str, str]]) -> str:
    """Over all networks and measures, how often each kind of look helped."""

    def often(part: str, setting: str) -> str:
        mine = [r for r in rows if r["part"] == part and setting in r["setting"]]
        return f"{sum(_verdict(r) == 'helps' for r in mine)} of {len(mine)}"

    near, dense = "neighbours", "dense features"
    told = f"Neighbours: a flip helps measurably in {often(near, 'flip')} rows, a larger look in "
    told += f"{often(near, 'larger')}, near states in {often(near, 'near')}. "
    told += f"Dense features: stitched to a finer grid in {often(dense, 'stitched')}, a larger "
    return told + f"input in {often(dense, 'larger')}. Where an interval covers zero, nothing was shown."


def _line(r: dict[str, str]) -> str:
    gain, low, high = (100 * float(r[k]) for k in ("gain", "low", "high"))
    told = "" if float(r["cost"]) == 1 else f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]"
    verdict = _verdict(r) if told else ""
    spent = f"{float(r['cost']):.2f} | {float(r['time']):.2f}"
    return f"| {r['setting']} | {spent} | {100 * float(r['value']):.2f} | {told} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="folder with the networks and images")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of images")
    parser.add_argument("--only", choices=PARTS, help="one part; the rows of the others are kept")
    parser.add_argument("--page", action="store_true", help="only make the page, from the rows that are there")
    asked = parser.parse_args()
    if not asked.page:
        if asked.assets is None:
            parser.error("--assets: wanted the folder with the networks and images")
        torch.set_num_threads(1)
        for part, rows in PARTS.items():
            if asked.only in (None, part):
                with torch.no_grad():
                    _write(rows(asked.assets, asked.scale))
    PAGE.write_text(page(_read()), encoding="utf-8")


def _write(rows: Iterator[dict[str, Any]]) -> None:
    """Each row as it is made, in the place of an older one of the same kind."""
    for row in rows:
        print(row, flush=True)
        new = {k: str(round(v, 5) if isinstance(v, float) else v) for k, v in row.items()}
        key = ("part", "net", "setting", "measure")
        kept = [r for r in _read() if any(r[k] != new[k] for k in key)]
        with ROWS.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*kept, new])


def _read() -> list[dict[str, str]]:
    if not ROWS.is_file():
        return []
    with ROWS.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


if __name__ == "__main__":
    main()
