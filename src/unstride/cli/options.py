"""The options that several commands take: each defined, documented and read once; a command adds only its default."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unstride.models import Loaded

# ---------------------------------------------------------------- the model
Spec = Annotated[
    str,
    typer.Argument(
        help="torchvision:NAME, timm:NAME, smp:ARCH:ENCODER, hf:CONFIG_OR_PATH, file.py:function, sample, "
        "or efficientnet-lite0, which needs no hub."
    ),
]
Weights = Annotated[str, typer.Option(help="default (pretrained), none (random, no network), or a file.")]
Task = Annotated[
    str | None, typer.Option(help="classification or segmentation; by default what the data or the model is for.")
]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Height and width; by default the model's own.")]

# ---------------------------------------------------------------- the data
Data = Annotated[
    str,
    typer.Option(
        help="imagenet, flowers102, cifar10, cifar100, folder, csv, npz, hf, cityscapes, ade20k or masks, "
        "each as KIND:PATH; or sample, sample-segmentation."
    ),
]
Split = Annotated[str | None, typer.Option(help="Part of --data; by default the kind's usual one.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many images, spread over the whole.")]

# ---------------------------------------------------------------- the procedure
Budgets = Annotated[str | None, typer.Option(help="States per image, such as 4,10; 1 is the plain network.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn at random.")]

# ---------------------------------------------------------------- what comes out
Plot = Annotated[Path | None, typer.Option(help="Write a picture there (.png, .pdf, .svg, .jpg or .webp).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def numbers(name: str, text: str) -> list[int]:
    """`1,4,10` or `2-4` -> what it lists."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)(?:-(\d+))?\s*", part)
        if match is None:
            raise typer.BadParameter(f"{name} is {text!r}; wanted whole numbers from 1 on, such as 1,4,10 or 2-4")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def on_device(loaded: "Loaded") -> "Loaded":
    """The model on this process's GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        loaded.model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}")
    return loaded
