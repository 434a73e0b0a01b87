"""mIoU at each cost: `python -m benchmarks.segmentation_frontier --assets DIR --nets DIR`.

`--nets` is the folder that `python -m benchmarks.camvid` left its networks in. What the networks say at a sample of
pixels of every picture, in every look, is kept in `--cache`, so a run goes on where it was. CamVid is tuned on val
frames and measured on test frames; VOC, which has no other pictures, on one half and the other, both ways. Writes
docs/results-segmentation-frontier.csv, a row per network and setting, and the page made of it; `--page` makes only the page.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import unstride
from benchmarks import camvid
from benchmarks.segmentation import Scenes, voc
from unstride.jobs.distributed import world
from unstride.procedure.gates import Gate
from unstride.tuning.candidates import Unit, candidates
from unstride.tuning.pixels import IGNORE, Pixels, Scene, gather_pixels, scenes

NETS = ("mobilenet", "deeplab", "voc")
PIXELS = 6000  # of each picture


@dataclass(frozen=True, eq=False)
class Given:
    """A network with pictures to tune on and others to measure on."""

    name: str
    note: str
    model: nn.Module
    classes: tuple[str, ...]
    gate: Gate
    radius: int  # pixels this near to another label are the band
    tune: list[tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]


def street(net: str, assets: Path, nets: Path, frames: tuple[int, int]) -> Given:
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
    note = f"fitted by `benchmarks.camvid` on train frames, tuned on {len(splits[0])} val frames; {len(splits[1])} test frames"
    gate = Gate(share=1.0, tile=16, context=32)
    return Given(f"CamVid {net}", note, camvid.load(nets, net), camvid.CLASSES, gate, 3, splits[0], splits[1])


def photographs(assets: Path, count: int) -> Given:
    """Landscape pictures, their middle of 321 x 481 pixels."""
    found: Scenes = voc(assets, None)
    kept = []
    for i in range(found.count):
        image, mask, width = found.read(i)
        height = int((mask != 255).any(1).nonzero().max()) + 1
        if width >= 481 and height >= 321 and len(kept) < count:
            top, left = (height - 321) // 2, (width - 481) // 2
            kept.append((image[:, top : top + 321, left : left + 481], mask[top : top + 321, left : left + 481]))
    names = tuple("background plane bicycle bird boat bottle bus car cat chair cow table dog horse motorbike person plant "
                  "sheep sofa train monitor".split())  # fmt: skip
    note = (
        f"{len(kept)} val pictures, which were among its training data, so its level says nothing; tuned on one half, "
    )
    note += "measured on the other, both ways"
    return Given("VOC mobilenet", note, found.model, names, Gate(share=1.0, tile=32, context=64), 8, kept, kept)


def pool(given: Given, part: list[tuple[Tensor, Tensor]], cache: Path) -> tuple[Pixels, list[Scene]]:
    """Six scales with and without mirror, and the nearest states."""
    own = list(scenes([(x[None], y[None]) for x, y in part], part[0][0].new_zeros(())))
    better = unstride.enhance(given.model, part[0][0][None], recipe="plain", task="segmentation")
    units = candidates(own[0].source, "large", "segmentation")
    with world() as us:
        return gather_pixels(better, own, units, given.gate, PIXELS, cache, us, True), own


def given_nets(args: argparse.Namespace) -> Iterator[Given]:
    for net in args.only:
        yield (
            photographs(args.assets, args.pictures)
            if net == "voc"
            else street(net, args.assets, args.nets, args.frames)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="folder with the networks and pictures")
    parser.add_argument("--nets", type=Path, help="folder of the networks that benchmarks.camvid trained")
    parser.add_argument("--cache", type=Path, default=Path("runs/segmentation-frontier"))
    parser.add_argument("--only", nargs="+", default=["mobilenet", "voc"], choices=NETS)
    parser.add_argument("--frames", nargs=2, type=int, default=(101, 233), metavar=("VAL", "TEST"))
    parser.add_argument("--pictures", type=int, default=40, help="of VOC")
    args = parser.parse_args()
    for given in given_nets(args):
        pool(given, given.tune, args.cache)
        pool(given, given.test, args.cache)


if __name__ == "__main__":
    main()
