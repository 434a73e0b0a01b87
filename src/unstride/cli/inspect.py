"""`unstride inspect SPEC`: the subsampling layers of a model, and what its states cost."""

from typing import TYPE_CHECKING, Any

import typer

from unstride.cli.options import AnyWeights, AsJson, ImageSize, Spec
from unstride.cli.printing import print_table, screen
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.geometry.report import Report


def register(app: typer.Typer) -> None:
    app.command()(inspect)


@takes_recipe
def inspect(
    spec: Spec,
    recipe: RecipeOptions,
    image_size: ImageSize = None,
    weights: AnyWeights = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model subsamples, what one more state costs, and what was left out and why.

    With --recipe, also what the recipe does, and its cost if every image passes every gate.
    """
    import unstride
    from unstride import models

    loaded = models.load(spec, weights=weights)
    example = loaded.example(image_size)
    report = unstride.inspect(loaded.model, example)
    better = recipe.enhanced(loaded, example) if recipe else None
    costs: list[float] = []
    if better is not None:
        record = better.run(example, open_gates=True).record
        costs = [sum(macs) / len(macs) / record.base_macs for macs in record.stage_macs]
    if as_json:
        more = {} if better is None else {"recipe": {"text": str(better.recipe), "costs": costs}}
        typer.echo(strict_json.dumps({**report.to_json(), **more}))
        return
    _show(spec, report)
    if better is not None:
        typer.echo(str(better.recipe))
        shown = ", ".join(f"{cost:.2f}" for cost in costs)
        typer.echo(f"cost of each stage: {shown} forward passes of the base model")


def _show(spec: str, report: "Report") -> None:
    console = screen()
    print_table(console, _table(spec, report))
    if report.features is not None:
        console.print(f"features end at {report.features}; what follows is the head")
    for x in report.left_out:
        console.print(f"left out: {x.op}: {x.reason}", markup=False)
    for u in report.unknown:
        console.print(f"unknown: {u}; strided ops after it may be left out", markup=False)


def _table(spec: str, report: "Report") -> Any:
    from rich.table import Table

    from unstride.geometry.grids import by

    table = Table(title=f"{spec}: {report.states} states, {report.macs / 1e9:.2f} GMACs, {by(report.image)}")
    for name in ("layer", "rate", "ops", "stride", "map", "one more state costs"):
        table.add_column(name, overflow="fold")
    for layer in report.layers:
        table.add_row(
            str(layer.index),
            by(layer.rate),
            "\n".join(f"{path} ({kind})" for path, kind in layer.ops),
            by(layer.stride),
            by(layer.map),
            f"{layer.cost:.0%} of a forward",
        )
    return table
