"""`unstride recipe NAME|FILE`: what a recipe does."""

from typing import Annotated

import typer

from unstride.cli.options import AsJson, Task
from unstride.storage import strict_json


def register(app: typer.Typer) -> None:
    app.command()(recipe)


def recipe(
    name: Annotated[str, typer.Argument(help="A preset such as paper, or a .toml file.", metavar="NAME|FILE")],
    task: Task = None,
    as_json: AsJson = False,
) -> None:
    """Show what a recipe does: its stages, how passes are combined, and what its file says of its gain."""
    from unstride.recipe.files import read, to_data
    from unstride.recipe.presets import get

    chosen = get(name, task)
    stored = read(name) if name.endswith((".toml", ".json")) else None
    figures = {} if stored is None else dict(stored.figures)
    if as_json:
        typer.echo(strict_json.dumps({"recipe": to_data(chosen), "text": str(chosen), "figures": figures}))
        return
    typer.echo(str(chosen))
    for key, value in figures.items():
        if isinstance(value, str | int | float):
            typer.echo(f"  {key}: {value}")
