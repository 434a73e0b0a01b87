"""The options that several commands take: each defined, documented and read once; a command adds only its default."""

import re
from pathlib import Path
from typing import Annotated

import typer

# ---------------------------------------------------------------- the model
_SPEC = (
    "timm:NAME, torchvision:NAME, smp:ARCH:ENCODER, hf:CONFIG_OR_PATH, paper:NAME, file.py:function, file.onnx, "
    "efficientnet-lite0, or, embedded here, sample, sample-large, sample-segmentation"
)
Spec = Annotated[str, typer.Argument(help=f"The model: {_SPEC}.")]
Specs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SPEC]...", help=f"One to five models: {_SPEC}. Default: those in the recipe file."),
]
Weights = Annotated[
    str,
    typer.Option(
        help="default (pretrained), random (accuracy means nothing), a weights file, or any (where only the structure "
        "counts)."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="classification, multilabel, segmentation, multilabel-segmentation, regression, dense (or depth), "
        "embedding or features. Default: the task of the data or the model."
    ),
]
ImageSize = Annotated[int | None, typer.Option(min=1, max=4096, help="Height and width. Default: the model's own.")]

# ---------------------------------------------------------------- the data
_DATA = typer.Option(
    metavar="KIND:PATH",
    help="KIND is imagenet, flowers102, cifar10, cifar100, folder, csv, npz, hf, cityscapes, ade20k, "
    "masks, depth, labels, values or pairs; or sample, sample-segmentation.",
)
Data = Annotated[str, _DATA]
DataOrNone = Annotated[str | None, _DATA]
Split = Annotated[str | None, typer.Option(help="Part of --data. Default: the usual one of its kind.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most this many images.")]
BatchSize = Annotated[int | None, typer.Option(min=1, max=100_000, help="Images per batch. Default: by image size.")]

# ---------------------------------------------------------------- the recipe
Budgets = Annotated[str | None, typer.Option(help="Budgets of the recipe's Search, in states per image, such as 4,10.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Seed of every random draw.")]

# ---------------------------------------------------------------- the machine
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto: a GPU (CUDA, MPS) if there is one.")]

# ---------------------------------------------------------------- what comes out
Plot = Annotated[Path | None, typer.Option(help="Write an image there (.png, .pdf, .svg, .jpg or .webp).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MOST = 1_000_000  # the largest count: of states, of images in a batch
SEVERAL = 1000  # counts in one list


def weights_named(name: str) -> str | None:
    """`--weights` as `models.load` takes it: None for any weights."""
    return None if name == "any" else name


def numbers(name: str, text: str, most: int = MOST) -> list[int]:
    """`1,4,10` or `2-4`: whole numbers from 1 to `most`."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= most:
            wanted = f"whole numbers from 1 to {most:,} such as 1,4,10 or 2-4"
            raise typer.BadParameter(f"{name}: got {text[:60]!r}, expected {wanted}.")
        if len(found) + last - first >= SEVERAL:
            raise typer.BadParameter(f"{name}: got {text[:60]!r}, expected at most {SEVERAL:,} numbers.")
        found += range(first, last + 1)
    return found
