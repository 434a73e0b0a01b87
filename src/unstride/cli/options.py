"""The options that several commands take: each defined, documented and read once; a command adds only its default."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

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
Budgets = Annotated[str, typer.Option(help="States per image, such as 4,10; 1 is the plain network.")]
Criterion = Annotated[
    str | None,
    typer.Option(help="What the search follows: entropy (the usual one), displacement, random, or learned (fitted)."),
]
Aggregate = Annotated[
    str | None,
    typer.Option(help="How states are joined: entropy (the usual one), mean, max, or attention (fitted)."),
]
Order = Annotated[str | None, typer.Option(help="paper (the usual one), or cost: cheap late layers first.")]
Layers = Annotated[str | None, typer.Option(help="Layers to search, such as 2-4; by default the paper's.")]
Align = Annotated[str | None, typer.Option(help="on (the usual one), off, or stitch (segmentation).")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn at random.")]

# ---------------------------------------------------------------- what comes out
Plot = Annotated[Path | None, typer.Option(help="Write a picture there (.png, .pdf, .svg, .jpg or .webp).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

ALIGNS: dict[str, bool | str] = {"on": True, "off": False, "stitch": "stitch"}


def numbers(name: str, text: str) -> list[int]:
    """`1,4,10` or `2-4` -> what it lists."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)(?:-(\d+))?\s*", part)
        if match is None:
            raise typer.BadParameter(f"{name} is {text!r}; wanted whole numbers from 1 on, such as 1,4,10 or 2-4")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def given(
    criterion: str | None = None,
    aggregate: str | None = None,
    order: str | None = None,
    layers: str | None = None,
    align: str | None = None,
) -> dict[str, Any]:
    """What was asked of the procedure, as `enhance` takes it; what was not asked is left to its defaults."""
    if align is not None and align not in ALIGNS:
        raise typer.BadParameter(f"--align is {align}; wanted {', '.join(ALIGNS)}")
    asked = {
        "criterion": criterion,
        "aggregate": aggregate,
        "order": order,
        "layers": None if layers is None else tuple(numbers("--layers", layers)),
        "align": None if align is None else ALIGNS[align],
    }
    return {name: value for name, value in asked.items() if value is not None}
