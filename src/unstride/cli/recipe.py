"""`unstride recipe [NAME|FILE]`: what a recipe does; a recipe file to edit; the fields that --set changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import AsJson, Task
from unstride.cli.recipes import Set, parsed
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.recipe.recipe import Recipe


def register(app: typer.Typer) -> None:
    app.command()(recipe)


def recipe(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="A name such as paper, or a .toml file. Default: list all names."),
    ] = None,
    task: Task = None,
    settings: Set = None,
    policy: Annotated[
        str | None, typer.Option(help="Views of a TTA policy: standard, expanded, segmentation, or a .toml file.")
    ] = None,
    views: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="With --policy: its first views. Default: 30, or all.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the recipe there (.toml or .json).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a recipe does, or write it into a file.

    Without a name, list all recipes and the fields that --set changes.

    Examples: `unstride recipe paper --set budget=4 --out mine.toml`; test-time augmentation with the first 30 views of
    a policy: `unstride recipe plain --policy expanded --views 30 --out tta.toml`.
    """
    from unstride.recipe.files import read, to_data, write
    from unstride.recipe.presets import get

    if name is None:
        if settings or policy is not None or out is not None:
            raise typer.BadParameter("NAME is missing: name the recipe that --set, --policy or --out is for.")
        _list(task, as_json)
        return
    if views is not None and policy is None:
        raise typer.BadParameter("--views is the number of views of --policy. Give --policy, too.")
    stored = read(name) if name.endswith((".toml", ".json")) else None
    chosen = get(name, task)
    figures = {} if stored is None else dict(stored.figures)
    if policy is not None:
        chosen = _with_policy(chosen, policy, views)
    changes = parsed(settings or [])
    chosen = chosen.changed(**changes)
    if changes or policy is not None:
        figures = {}  # they were measured for the recipe as it was
    if out is not None:
        _copy_fitted(name, chosen.tensors, out)
        write(out, chosen, None if stored is None else stored.networks, figures, stored.cost_of if stored else "base")
    if as_json:
        written = {} if out is None else {"out": str(out)}
        typer.echo(strict_json.dumps({"recipe": to_data(chosen), "text": str(chosen), "figures": figures, **written}))
        return
    typer.echo(str(chosen))
    for key, value in figures.items():
        if isinstance(value, str | int | float):
            typer.echo(f"  {key}: {value}")
    if out is not None:
        typer.echo(f"wrote {out}")


def _copy_fitted(name: str, tensors: str | None, out: Path) -> None:
    """What was fitted is beside the recipe's file, so it goes along into another folder."""
    if tensors is not None and Path(name).parent.resolve() != out.parent.resolve():
        from unstride.storage.artefacts import write_file

        write_file(out.parent / tensors, (Path(name).parent / tensors).read_bytes())


def _with_policy(recipe: Recipe, name: str, count: int | None) -> Recipe:
    """The recipe with a policy's views in place of its own."""
    from unstride.errors import OptionError
    from unstride.recipe import policies

    if len(recipe.stages) > 1:
        raise OptionError(
            f"--policy: it needs a recipe of one stage, such as plain or paper, and {recipe.name or 'this one'} has "
            f"{len(recipe.stages)}."
        )
    policy = policies.get(name)
    chosen = policy.first(min(30, len(policy)) if count is None else count)
    stage = replace(recipe.stages[0], views=chosen, weights=(), temperatures=())
    return recipe.changed(stages=(stage,), name=f"{recipe.name}, {policy.name} policy")


def _list(task: str | None, as_json: bool) -> None:
    """Every recipe that has a name, then the fields."""
    from unstride.recipe.presets import PRESETS, get

    recipes = {name: str(get(name, task)) for name in PRESETS}
    if as_json:
        typer.echo(strict_json.dumps({"recipes": recipes, "fields": _fields()}))
        return
    for text in recipes.values():
        typer.echo(f"{text}\n")
    for noun, values in _fields().items():
        typer.echo(f"{noun}: " + ", ".join(f"{name}={_shown(value)}" for name, value in values.items()))


def _shown(value: Any) -> str:
    return "(usual)" if value == "" else str(value).lower() if value is None else str(value)


def _fields() -> dict[str, dict[str, Any]]:
    """The fields of each noun with their defaults."""
    from dataclasses import fields

    from unstride.recipe.recipe import Recipe
    from unstride.recipe.stage import STATE_FIELDS, Gate, Near, Search, Stage

    nouns = {"Recipe": Recipe, "Search": Search, "Near": Near, "Gate": Gate}
    found = {noun: {f.name: f.default for f in fields(kind)} for noun, kind in nouns.items()}
    found["Recipe"].pop("stages")
    return {**found, "Stage with states": {f.name: f.default for f in fields(Stage) if f.name in STATE_FIELDS}}
