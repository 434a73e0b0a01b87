"""`unstride compare BASE NEW IMAGES --out to_label.csv`: images on which two recipes disagree, and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import AsJson, BatchSize, Device, Seed, Weights, weights_named
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.predicting.compare import Comparison


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    base: Annotated[str, typer.Argument(help="The recipe in use: a .toml file of `tune`, or a name such as plain.")],
    new: Annotated[str, typer.Argument(help="The recipe that may replace it.")],
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Models by SPEC (default: those in each recipe file), then images without labels, as for "
            "unstride predict.",
            metavar="[SPEC]... IMAGES...",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write the images that have to be labelled there (.csv). Default: the file of --labels."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Read the labels from this file: names of classes, or neither.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Label in a browser, on this computer only; every label is saved at once.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page. Default: a free one.")] = 0,
    count: Annotated[
        int | None, typer.Option(min=1, help="Write at most this many images, drawn at random. Default: all.")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, max=100, help="Loss, in points, that is acceptable where the new recipe is cheaper.")
    ] = 0.5,
    weights: Weights = "default",
    device: Device = "auto",
    batch_size: BatchSize = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two recipes with few labels: only images on which they disagree need one.

    First run: writes these images in random order. Label them with --page, or in the file, from the first row on.
    Then --labels FILE tells the gain in accuracy over all images, with its 95 % confidence interval, and whether to
    use the new recipe. Whoever labels does not see which recipe gave which answer.
    """
    from unstride.cli.predict import split_inputs
    from unstride.predicting import compare as comparing

    if out is None and labels is None:
        raise typer.BadParameter("give --out FILE for the images to label, or --labels FILE with their labels")
    target = out or labels
    assert target is not None
    specs, images = split_inputs(inputs)
    options: dict[str, Any] = {
        "model": specs,
        "weights": weights_named(weights),
        "device": device,
        "batch_size": batch_size,
        "count": count,
        "margin": margin / 100,
        "seed": seed,
        "progress": not as_json,
    }
    result = comparing.compare(base, new, images, target, labels, **options)
    if page:
        typer.echo(str(result))
        result.serve(port)
        result = comparing.compare(base, new, images, target, _if_labelled(result), **options)
    typer.echo(strict_json.dumps(_plain(result)) if as_json else str(result))


def _if_labelled(result: Comparison) -> Path | None:
    from unstride.predicting import labels

    return result.out if any(row.label for row in labels.read(result.out).values()) else None


def _plain(result: Comparison) -> dict[str, Any]:
    decision, gain = result.decision, result.gain
    return {
        "images": result.images,
        "errors": result.errors,
        "disagreements": len(result.disagreements),
        "labelled": len(result.labels),
        "cost": result.cost,
        "gain": None if gain is None else {"estimate": gain.estimate, "low": gain.low, "high": gain.high},
        "verdict": None if decision is None else decision.verdict,
        "text": str(result),
        "out": str(result.out),
    }
