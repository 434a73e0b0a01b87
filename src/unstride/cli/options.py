"""The options that several commands take: each defined, documented and read once; a command adds only its default."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unstride.models import LoadedModel

# ---------------------------------------------------------------- the model
Spec = Annotated[
    str,
    typer.Argument(
        help="torchvision:NAME, timm:NAME, smp:ARCH:ENCODER, hf:CONFIG_OR_PATH, paper:NAME, file.py:function, or, "
        "without a hub, sample, sample-segmentation, efficientnet-lite0."
    ),
]
Weights = Annotated[str, typer.Option(help="default (pretrained), random (which says nothing of accuracy), or a file.")]
AnyWeights = Annotated[
    str | None, typer.Option(help="default (pretrained), random, or a file; what is here, where none are named.")
]
Task = Annotated[
    str | None,
    typer.Option(
        help="classification, multilabel, segmentation, multilabel-segmentation, regression, dense (or depth), "
        "embedding or features; by default what the data or the model is for."
    ),
]
ImageSize = Annotated[int | None, typer.Option(min=1, max=4096, help="Height and width; by default the model's own.")]

# ---------------------------------------------------------------- the data
Data = Annotated[
    str,
    typer.Option(
        help="imagenet, flowers102, cifar10, cifar100, folder, csv, npz, hf, cityscapes, ade20k, masks, depth, labels, "
        "values or pairs, each as KIND:PATH; or sample, sample-segmentation."
    ),
]
Split = Annotated[str | None, typer.Option(help="Part of --data; by default the kind's usual one.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many images, spread over the whole.")]

# ---------------------------------------------------------------- the procedure
Budgets = Annotated[
    str | None, typer.Option(help="States per image of the recipe's Search, such as 4,10; 1 is the base model.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of everything that is drawn at random.")]

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto: a GPU where there is one.")]

# ---------------------------------------------------------------- what comes out
Plot = Annotated[Path | None, typer.Option(help="Write an image there (.png, .pdf, .svg, .jpg or .webp).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


MOST = 1_000_000  # that a count may be: of states, of images in a batch
SEVERAL = 1000  # counts in one list


def numbers(name: str, text: str, most: int = MOST) -> list[int]:
    """`1,4,10` or `2-4`: whole numbers from 1 to `most`."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= most:
            wanted = f"whole numbers from 1 to {most:,} such as 1,4,10 or 2-4"
            raise typer.BadParameter(f"{name} is {text[:60]!r}; wanted {wanted}")
        if len(found) + last - first >= SEVERAL:
            raise typer.BadParameter(f"{name} is {text[:60]!r}; wanted at most {SEVERAL:,} of them")
        found += range(first, last + 1)
    return found


def on_device(loaded: "LoadedModel", device: str = "auto") -> "LoadedModel":
    """The model on a device: `auto` is this process's GPU where there is one, else the CPU."""
    import torch

    if device == "auto":
        rank = int(os.environ.get("LOCAL_RANK", 0))
        device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", device):
        raise typer.BadParameter(f"--device: got {device[:40]!r}, expected cpu, cuda, cuda:1, mps or auto.")
    kind, _, index = device.partition(":")
    there = {"cpu": 1, "mps": int(torch.backends.mps.is_available()), "cuda": torch.cuda.device_count()}[kind]
    if int(index or 0) >= there:
        raise typer.BadParameter(f"--device: {device} is not available here; torch finds {there} {kind} device(s).")
    if device != "cpu":
        loaded.model.to(device)
    return loaded
