"""`unstride evaluate SPEC --data KIND:PATH`: what a recipe gains on labelled images, and what it costs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstride.cli.options import (
    AsJson,
    BatchSize,
    Budgets,
    Data,
    Device,
    Limit,
    Seed,
    Specs,
    Split,
    Task,
    Weights,
    numbers,
    weights_named,
)
from unstride.cli.printing import terminal_width
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.evaluation.rows import Row


def register(app: typer.Typer) -> None:
    app.command()(evaluate)


@takes_recipe
def evaluate(
    recipe: RecipeOptions,
    data: Data,
    specs: Specs = None,
    against: Annotated[
        str | None,
        typer.Option(help="What gains are compared with: a network, or a recipe. Default: the first network alone."),
    ] = None,
    budgets: Budgets = None,
    metric: Annotated[
        str | None, typer.Option(help="What is compared, such as NLL or Dice. Default: the usual one of the task.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(min=0, help="Loss that is acceptable where a recipe is cheaper. Default: half a point."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Column of csv data: patient, video or site. Intervals are by group.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the rows and of the cache. Default: runs/SPEC-KIND.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page (.html): decision, images and classes.")] = None,
    batch_size: BatchSize = None,
    split: Split = None,
    limit: Limit = None,
    weights: Weights = "default",
    task: Task = None,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure on labelled images what a recipe gains over the base model, and what it costs.

    The table has each network alone, then the recipe. A sentence says whether to use it. Start the command again to
    continue after a crash. Several processes: torchrun --nproc-per-node 2 -m unstride evaluate ... --out FOLDER.

    Exit codes: 0 done; 1 an error; 2 wrong usage; 3 done, but some images could not be measured.
    """
    import unstride
    from unstride.evaluation.rows import decision_of

    folder = out if out is not None else Path("runs") / _slug(specs, recipe, data)
    rows = unstride.evaluate(
        _one_or_several(specs),
        data,
        against=against,
        budgets=None if budgets is None else numbers("--budgets", budgets),
        metric=metric,
        margin=margin,
        group=group,
        out=folder,
        report=report,
        weights=weights_named(weights),
        task=task,
        device=device,
        batch_size=batch_size,
        limit=limit,
        split=split,
        seed=seed,
        **recipe.keywords(),
    )
    if int(os.environ.get("RANK", 0)) != 0:
        return
    decisions = {row.name: str(decision_of(row, rows, margin)) for row in rows if row.gain is not None}
    written = {} if report is None or not report.is_file() else {"report": str(report)}
    if as_json:
        values = {"rows": [row.to_json() for row in rows], "decisions": decisions, "out": str(folder), **written}
        typer.echo(strict_json.dumps(values))
        return
    _show(rows, decisions)
    for name, path in {"rows": str(folder / "rows.jsonl"), **written}.items():
        typer.echo(f"{name}: {path}")


def _one_or_several(specs: Sequence[str] | None) -> str | list[str] | None:
    if not specs:
        return None
    return specs[0] if len(specs) == 1 else list(specs)


def _slug(specs: Sequence[str] | None, recipe: RecipeOptions, data: str) -> str:
    """A folder name of the models, or of the recipe file, and the kind of data."""
    what = "-".join(Path(spec).name for spec in specs) if specs else Path(recipe.recipe or "recipe").stem
    return re.sub(r"[^\w.-]+", "-", f"{what}-{data.partition(':')[0]}")


def _show(rows: Sequence[Row], decisions: dict[str, str]) -> None:
    from unstride.evaluation.rows import table

    data = rows[0].provenance.get("data", "")
    typer.echo(f"{data}: {rows[0].images:,} images. Costs in {rows[-1].cost_unit}.\n")
    typer.echo(table(rows, terminal_width()))
    for name, sentence in decisions.items():
        typer.echo(f"\n{name}: {sentence}" if len(decisions) > 1 else f"\n{sentence}")
