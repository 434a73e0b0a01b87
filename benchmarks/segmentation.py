"""Measure segmentation on real images: `python -m benchmarks.segmentation --assets DIR --nets DIR` makes a page.

`--nets` is the folder that `python -m benchmarks.camvid` left its networks in. Every pass (one network, one way to
align) is cached image by image under `--cache`, so a killed run goes on where it was. `--only NET:WAY ...` runs some.
"""

import argparse
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import unstride
from benchmarks import camvid
from benchmarks.frontier_page import segmented
from benchmarks.nets import DeepLabVOC, give
from unstride import sample
from unstride.evaluation import benching
from unstride.evaluation.metrics import areas, compare_segmentation, confusion, summarise_areas
from unstride.storage.fingerprint import fingerprint

BUDGETS = (1, 4, 10)
WAYS: dict[str, dict[str, object]] = {
    "align": {},
    "stitch": {"align": "stitch"},
    "cost": {"align": "stitch", "order": "cost"},
}
NAMES = {
    "align": "align=True",
    "stitch": 'align="stitch"',
    "cost": 'align="stitch", order="cost"',
}
FLIPPED = ("align", "stitch")  # measured with a flip, too
REGIONS = ("all", "band", "interior")


@dataclass(frozen=True, eq=False)
class Scenes:
    """A network and labelled images for it.

    `read(i)`: the normalised image (3, H, W) and its mask (H, W), padded alike, and how many columns are no padding.
    """

    name: str
    model: nn.Module
    classes: int
    void: int
    radius: int  # pixels this near to another label are the band
    count: int
    read: Callable[[int], tuple[Tensor, Tensor, int]]
    note: str


def voc(assets: Path, nets: Path | None) -> Scenes:
    model = DeepLabVOC()
    model.load_state_dict(load_file(assets / "voc" / "deeplabv3_mobilenet_v2_os8.safetensors"))
    archive = zipfile.ZipFile(assets / "voc" / "val_dev.zip")
    names = sorted(n for n in archive.namelist() if n.endswith(".png"))

    def read(i: int) -> tuple[Tensor, Tensor, int]:
        mask = torch.from_numpy(np.array(Image.open(io.BytesIO(archive.read(names[i])))))
        photo = names[i].replace("SegmentationClass", "JPEGImages").replace(".png", ".jpg")
        pixels = np.array(Image.open(io.BytesIO(archive.read(photo))).convert("RGB"))
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1
        space = (0, 513 - mask.shape[1], 0, 513 - mask.shape[0])
        return F.pad(image, space), F.pad(mask.long(), space, value=255), mask.shape[1]

    note = "third party's weights; these images were among its training data, so its level says nothing"
    return Scenes("VOC MobileNetV2-DeepLab, stride 8", model.eval(), 21, 255, 8, len(names), read, note)


def street(net: str, title: str, split: str = "test") -> Callable[[Path, Path | None], Scenes]:
    def scenes(assets: Path, nets: Path | None) -> Scenes:
        if nets is None or not camvid.weights(nets, net).is_file():
            raise SystemExit(f"--nets: no {net}.safetensors there; run python -m benchmarks.camvid --net {net} first")
        images, masks = camvid.load_split(assets / "camvid" / "camvid_240x180.zip", split)

        def read(i: int) -> tuple[Tensor, Tensor, int]:
            return camvid.preprocess(images[i], net), camvid.pad_mask(masks[i], net), masks.shape[2]

        third = (
            "a third party's network for Pascal VOC, fine-tuned" if camvid.NETS[net].start else "trained from scratch"
        )
        note = f"{third} by `benchmarks.camvid` on the train split, chosen on val; these are the {split} frames"
        model = camvid.load(nets, net)
        return Scenes(title, model, len(camvid.CLASSES), camvid.VOID, 3, len(images), read, note)

    return scenes


def embedded(assets: Path, nets: Path | None) -> Scenes:
    scenes, masks = sample.segmentation_sample()
    images = sample.preprocess_segmentation(scenes)

    def read(i: int) -> tuple[Tensor, Tensor, int]:
        return images[i], torch.from_numpy(masks[i]).long(), masks.shape[2]

    note = "the network and the composed test scenes that come with unstride; they are no photographs"
    classes = len(sample.SCENE_CLASSES)
    return Scenes("embedded segmenter", sample.load_segmenter(), classes, 255, 3, len(images), read, note)


CAMVID = {
    "mobilenet": "CamVid MobileNetV2-DeepLab, stride 8",
    "deeplab": "CamVid DeepLab, stride 8",
    "unet": "CamVid U-Net, stride 2",
}
NETS: dict[str, Callable[[Path, Path | None], Scenes]] = {
    **{net: street(net, title) for net, title in CAMVID.items()},
    "voc": voc,
    "sample": embedded,
}


def near_boundary(mask: Tensor, radius: int, void: int) -> Tensor:
    """(H, W): does the square of this radius around a pixel hold two labels? Void is no label, and not looked at."""
    labels, known = mask[None, None].float(), (mask != void)[None, None]
    size = 2 * radius + 1
    highest = F.max_pool2d(labels.masked_fill(~known, -1), size, 1, radius)
    lowest = -F.max_pool2d((-labels).masked_fill(~known, -1e6), size, 1, radius)
    return (highest > lowest)[0, 0] & known[0, 0]


def mirrored(x: Tensor, width: int) -> Tensor:
    """(..., H, W) with its first `width` columns flipped: what is padded stays where it is."""
    return torch.cat([x[..., :width].flip(-1), x[..., width:]], -1)


@dataclass(frozen=True, eq=False)
class Pass:
    """Pixels (N, budget, flip, region, 3, K) right, predicted and labelled, MACs / plain (N, budget), and time."""

    scenes: Scenes
    pixels: np.ndarray
    cost: np.ndarray
    times: dict[int, float]  # over the plain eager forward

    def areas(self, budget: int, flip: bool = False, region: str = "all") -> np.ndarray:
        return self.pixels[:, BUDGETS.index(budget), int(flip), REGIONS.index(region)]

    def miou(self, budget: int, flip: bool = False, region: str = "all") -> float:
        return 100 * summarise_areas(self.areas(budget, flip, region).sum(0)).miou

    def aacc(self, budget: int, flip: bool = False, region: str = "all") -> float:
        return 100 * summarise_areas(self.areas(budget, flip, region).sum(0)).aacc

    def macs(self, budget: int) -> float:
        return float(self.cost[:, BUDGETS.index(budget)].mean())


def run_passes(
    net: str, ways: list[str], assets: Path, nets: Path | None, cache: Path, limit: int | None
) -> dict[str, Pass]:
    scenes = NETS[net](assets, nets)
    shuffled = torch.randperm(scenes.count, generator=torch.Generator().manual_seed(0))
    chosen = shuffled[:limit].sort().values.tolist()  # of two limits, the larger one goes on from the smaller
    example = scenes.read(0)[0][None]
    base = unstride.enhance(scenes.model, example, max(BUDGETS), task="segmentation")
    models, folders = {way: base.with_options(**WAYS[way]) for way in ways}, {}
    for way, better in models.items():
        about = [net, way, BUDGETS, better.signature, fingerprint(scenes.model)]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
        folders[way] = cache / f"{net}-{way}-{key}"
        folders[way].mkdir(parents=True, exist_ok=True)
    for done, i in enumerate(chosen, 1):
        for way, better in models.items():
            file = folders[way] / f"{i:06d}.safetensors"
            if not file.exists():
                save_file(measure(scenes, better, way in FLIPPED, *scenes.read(i)), file.with_suffix(".tmp"))
                file.with_suffix(".tmp").rename(file)
        if done % 10 == 0:
            print(f"{net}: {done} of {len(chosen)} images", flush=True)
    passes = {}
    for way in ways:
        found = [load_file(folders[way] / f"{i:06d}.safetensors") for i in chosen]
        pixels, cost = (np.stack([f[part].numpy() for f in found]) for part in ("pixels", "cost"))
        passes[way] = Pass(scenes, pixels, cost, _times(scenes, way, folders[way] / "times.json"))
    return passes


def _times(scenes: Scenes, way: str, file: Path) -> dict[int, float]:
    """Of each budget over the plain eager forward of one image, in turns."""
    if not file.exists():
        image = scenes.read(0)[0][None]
        better = unstride.enhance(scenes.model, image, max(BUDGETS), task="segmentation", **WAYS[way])  # type: ignore[arg-type]
        rows = benching.measure(better, image, BUDGETS[1:], tta=False, memory=False, repeats=5)
        file.write_text(json.dumps({row.budget: row.time for row in rows}), encoding="utf-8")
    return {1: 1.0} | {int(b): t for b, t in json.loads(file.read_text(encoding="utf-8")).items()}


def measure(
    scenes: Scenes, better: unstride.Enhanced, flip: bool, image: Tensor, mask: Tensor, width: int
) -> dict[str, Tensor]:
    """Areas and cost of one image at each budget, without and with the mirrored image; logits are averaged."""
    here = better.costs(image[None], BUDGETS)
    band = near_boundary(mask, scenes.radius, scenes.void)
    regions = (mask, mask.masked_fill(~band, scenes.void), mask.masked_fill(band, scenes.void))
    sums = [{b: v[0][0] for b, v in here.items()}]
    if flip:
        there = better.curve(mirrored(image, width)[None], BUDGETS)
        sums.append({b: sums[0][b] + mirrored(there[b][0], width) for b in BUDGETS})
    rows = [
        [[areas(confusion(s[b].argmax(0), r, scenes.classes, scenes.void)) for r in regions] for s in sums]
        for b in BUDGETS
    ]
    return {
        "pixels": torch.from_numpy(np.array(rows, np.int64)),
        "cost": torch.tensor([here[b][1][0] for b in BUDGETS]),
    }


# ---------------------------------------------------------------- the page
HEAD = (
    "| network | flip | B | | mIoU % | aAcc % | gain in mIoU, 95 % interval | verdict | MACs / plain | time / plain |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def interval(plain: np.ndarray, better: np.ndarray) -> tuple[str, str]:
    gain = compare_segmentation(plain, better)
    return f"{100 * gain.gain:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]", gain.verdict


def main_rows(found: dict[str, Pass]) -> list[str]:
    rows = []
    for flip in (False, True):
        for b in BUDGETS:
            for way in ("align", "stitch", "cost"):
                if way not in found or (b == 1 and way != "align") or (flip and way not in FLIPPED):
                    continue
                p = found[way]
                gain, verdict = interval(found["align"].areas(1, flip), p.areas(b, flip)) if b > 1 else ("", "")
                cells = [
                    f"{p.scenes.name} (n = {len(p.pixels)})",
                    "yes" if flip else "no",
                    str(b),
                    f"`{NAMES[way]}`" if b > 1 else "flip alone" if flip else "plain",
                    f"{p.miou(b, flip):.2f}",
                    f"{p.aacc(b, flip):.2f}",
                    gain,
                    verdict,
                    f"{p.macs(b) * (1 + flip):.2f}",
                    f"{p.times[b] * (1 + flip):.2f}",
                ]
                rows.append("| " + " | ".join(cells) + " |")
    return rows


def answer(found: dict[tuple[str, str], Pass], nets: list[str]) -> str:
    """How often ten states, a flip, and ten states in a flip are measurably better, in a sentence each."""
    plain = {n: found[n, "align"] for n in nets}
    states = [compare_segmentation(p.areas(1), p.areas(10)) for p in plain.values()]
    flips = [compare_segmentation(p.areas(1), p.areas(1, True)) for p in plain.values()]
    both = [compare_segmentation(p.areas(1, True), p.areas(10, True)) for p in plain.values()]
    told = [
        f"{100 * min(g.gain for g in some):+.2f} to {100 * max(g.gain for g in some):+.2f} points of mIoU, "
        f"measurable on {sum(g.low > 0 for g in some)} of {len(nets)} networks"
        for some in (states, flips, both)
    ]
    cost = max(p.macs(10) for p in plain.values())
    return (
        f"Ten states of the paper's search gain {told[0]}, at up to {cost:.1f} forwards; a flip, at 2, gains "
        f"{told[1]}. Ten states inside a flip gain {told[2]}, over the flip alone. What scales, gates and tuning gain "
        "stands in the first table, and at each cost in [the frontier of segmentation]"
        "(results-segmentation-frontier.md)."
    )


def beside() -> list[str]:
    """What a user would do instead, on the same networks, from the rows of the frontier."""
    out = ["## On the same networks: what one would do instead", ""]
    out += [
        "From [the frontier of segmentation](results-segmentation-frontier.md), on the same frames of CamVid and on"
    ]
    return [*out, "other parts of VOC's images; mIoU over a sample of their pixels.", "", *segmented()]


def render(found: dict[tuple[str, str], Pass], arguments: str) -> str:
    command = f"python -m benchmarks.segmentation --assets DIR --nets DIR{arguments}"
    nets = [n for n in NETS if (n, "align") in found]
    trained = [n for n in nets if n in CAMVID]
    out = [
        "# Semantic segmentation on real networks",
        "",
        answer(found, nets),
        "",
        f"Made by `{command}`.",
        *[f"`python -m benchmarks.camvid --assets DIR --out DIR --net {n}` trained a network for it." for n in trained],
        "Images and weights are not part of this project. Nothing was tuned on CamVid's test frames or on VOC; the",
        "embedded scenes took part in the [study of all states](results-segmentation-why.md) of val frames, which says",
        "what gains depend on. mIoU and aAcc come from one confusion matrix over all images; intervals are paired",
        "bootstrap intervals over images; MACs count every state, as a multiple of one plain forward; time is over the",
        "plain eager forward of one image, in turns (a flip doubles both).",
        "",
    ]
    out += [f"- {found[n, 'align'].scenes.name}: {found[n, 'align'].scenes.note}." for n in nets]
    out += ["", *beside()]
    out += ["", "## Budgets, without and with flip", "", "Gains are over the same network at B = 1 with as many flips."]
    out += ["", HEAD]
    for n in nets:
        out += main_rows({way: found[n, way] for way in WAYS if (n, way) in found})
    pairs = [(n, b) for n in nets if (n, "stitch") in found for b in BUDGETS[1:]]
    if pairs:
        out += ["", "## Stitch or align", "", "The band is all pixels with another label within 3 pixels, or 8 pixels"]
        out += ["(VOC, whose borders are void); the interior is the rest. Stitch minus align, the same images:", ""]
        out += ["| network | B | mIoU, all pixels | mIoU, band | mIoU, interior |", "|---|---|---|---|---|"]
    for n, b in pairs:
        one, other = found[n, "align"], found[n, "stitch"]
        cells = [interval(one.areas(b, region=r), other.areas(b, region=r))[0] for r in REGIONS]
        out.append(f"| {one.scenes.name} | {b} | " + " | ".join(cells) + " |")
    for n in trained:
        out += ["", f"{found[n, 'align'].scenes.name}, IoU % of each class without flip:", ""]
        out += ["| | " + " | ".join(camvid.CLASSES) + " |", "|---" * (len(camvid.CLASSES) + 1) + "|"]
        rows = [("share of the pixels", 100 * share(found[n, "align"])), ("plain", iou(found[n, "align"], 1))]
        rows += [
            (f"B = 10, `{NAMES[w]}`", iou(found[n, w], 10)) for w in ("align", "stitch", "cost") if (n, w) in found
        ]
        out += [f"| {name} | " + " | ".join(f"{v:.1f}" for v in values) + " |" for name, values in rows]
    return "\n".join(out) + "\n"


def iou(p: Pass, budget: int) -> np.ndarray:
    return 100 * np.array(summarise_areas(p.areas(budget).sum(0)).iou)


def share(p: Pass) -> np.ndarray:
    labelled = p.areas(1).sum(0)[2]
    return labelled / labelled.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--nets", type=Path, default=None, help="folder of the networks that benchmarks.camvid trained")
    parser.add_argument("--cache", type=Path, default=Path("runs/segmentation"))
    parser.add_argument("--limit", nargs="*", default=[], metavar="NET=N", help="images of a network (default: all)")
    parser.add_argument("--only", nargs="*", default=None, help="passes such as deeplab:stitch (default: all)")
    parser.add_argument("--out", type=Path, default=None, help="where to write the page (default: print it)")
    args = parser.parse_args()
    limits = {net: int(n) for net, n in (part.split("=") for part in args.limit)}
    found, wanted = {}, dict[str, list[str]]()
    for name in args.only or [f"{n}:{way}" for n in NETS for way in WAYS]:
        net, way = name.split(":")
        wanted.setdefault(net, []).append(way)
    for net, ways in wanted.items():
        for way, one in run_passes(net, ways, args.assets, args.nets, args.cache, limits.get(net)).items():
            found[net, way] = one
    said = {"--limit": args.limit, "--only": args.only}
    page = render(found, "".join(f" {name} {' '.join(values)}" for name, values in said.items() if values))
    give(page, args.out)


if __name__ == "__main__":
    main()
