"""`unstride inspect SPEC`: the subsampling layers of a model, and what one forward pass throws away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from unstride.cli.options import AsJson, Device, ImageSize, Spec, Task, Weights, weights_named
from unstride.cli.printing import print_table, screen
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from torch import Tensor

    from unstride.geometry.report import Report
    from unstride.pipeline import Pipeline


def register(app: typer.Typer) -> None:
    app.command()(inspect)


@takes_recipe
def inspect(
    spec: Spec,
    recipe: RecipeOptions,
    image_size: ImageSize = None,
    weights: Weights = "any",
    task: Task = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show what one forward pass of a model throws away.

    Each subsampling layer keeps one activation of several. A state says which one. The table lists the layers, what
    each keeps, and what one more state costs. With --recipe, it also describes the recipe, and its cost if every image
    passes every gate.
    """
    import unstride
    from unstride import models
    from unstride.models.devices import device_named

    if recipe:
        pipeline = recipe.pipeline([spec], weights, task, device)
        loaded = pipeline.base
    else:
        loaded = models.load(spec, weights_named(weights))
        loaded.model.to(device_named(device))
    example = loaded.example(image_size).to(device_named(device))
    report = unstride.inspect(loaded.model, example)
    costs = _costs(pipeline, example) if recipe else []
    if as_json:
        more = {"recipe": {"text": str(pipeline.better.recipe), "costs": costs}} if recipe else {}
        typer.echo(strict_json.dumps({**report.to_json(), **more}))
        return
    _show(spec, report)
    if recipe:
        typer.echo(str(pipeline.better.recipe))
        by_stage = ", ".join(f"{cost:.2f}" for cost in costs)
        typer.echo(f"Cost of each stage, in forward passes of the base model: {by_stage}.")


def _costs(pipeline: Pipeline, example: Tensor) -> list[float]:
    """Of each stage, in forward passes of the base model, with all gates open."""
    record = pipeline.better.run(example, open_gates=True).record
    return [sum(work) / len(work) / record.base_work for work in record.stage_work]


def _show(spec: str, report: Report) -> None:
    from unstride.geometry.grids import by

    console = screen()
    console.print(
        f"{spec} at {by(report.image)}: {report.macs / 1e9:.2f} GMACs. One forward pass uses 1 of {report.states:,} "
        "states.",
        markup=False,
        highlight=False,
    )
    print_table(console, _table(report))
    lines = [f"The features end at {report.features.op}. The head follows."] if report.features is not None else []
    lines += [f"Not used: {skipped.op}: {skipped.reason}." for skipped in report.left_out]
    lines += [f"Unknown op: {op}. Strided ops after it may be missing here." for op in report.unknown]
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _table(report: Report) -> Any:
    from math import prod

    from rich.table import Table

    from unstride.geometry.grids import by

    table = Table()
    for name in ("layer", "keeps", "rate", "ops", "stride", "map", "one more state costs"):
        table.add_column(name, overflow="fold")
    for layer in report.layers:
        table.add_row(
            str(layer.index),
            f"1 of {prod(layer.rate)}",
            by(layer.rate),
            "\n".join(f"{path} ({kind})" for path, kind in layer.ops),
            by(layer.stride),
            by(layer.map),
            f"{layer.cost:.0%} of a forward pass",
        )
    return table
