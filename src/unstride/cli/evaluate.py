"""`unstride evaluate SPEC --data KIND:PATH`: what it gains on your data, what it costs, and whether to use it."""

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import (
    MOST,
    AsJson,
    Budgets,
    Data,
    Limit,
    Plot,
    Seed,
    Spec,
    Split,
    Task,
    Weights,
    numbers,
    on_device,
)
from unstride.cli.printing import print_table, screen
from unstride.cli.recipes import Asked, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.evaluation import Row
    from unstride.models import LoadedModel

PLAIN, PARTLY = 0, 3


def register(app: typer.Typer) -> None:
    app.command()(evaluate)


@takes_recipe("budget")
def evaluate(
    spec: Spec,
    data: Data,
    asked: Asked,
    budget: Budgets = None,
    task: Task = None,
    fitted: Annotated[Path | None, typer.Option(help="What `unstride fit` saved for this model.")] = None,
    flip: Annotated[bool, typer.Option("--flip", help="The same as --tta flip.")] = False,
    tta: Annotated[
        str | None, typer.Option(help="flip, POLICY:VIEWS such as standard:15, or the file of a fitted TTA.")
    ] = None,
    tta_method: Annotated[str, typer.Option(help="mean or max.")] = "mean",
    weights: Weights = "default",
    split: Split = None,
    limit: Limit = None,
    batch_size: Annotated[int | None, typer.Option(min=1, max=MOST, help="Images at once.")] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the rows, and of what a killed run goes on from; by default runs/SPEC-KIND."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page (.html) with the curves and the images that changed.")
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure on labelled images what unstride gains and costs, and say in words whether it helps.

    The recipe (the default one, or --recipe) beside the plain network; or, with --budget, the paper's search, all
    budgets from one pass. Start it again to go on after a crash. Several processes: torchrun --nproc-per-node 2
    -m unstride evaluate ... (--out must be a folder that all of them see).

    Exit codes: 0 done; 1 an error, explained; 2 wrong usage; 3 done, but some images could not be evaluated (under
    torchrun 0, too: it takes any other code for a crash).
    """
    if flip and tta is not None:
        raise typer.BadParameter("--flip is --tta flip; give one of them")
    if fitted is not None and asked.recipe is not None:
        raise typer.BadParameter("--fitted brings its own recipe; give it without --recipe, or as --recipe FILE")
    budgets = None if budget is None else numbers("--budget", budget)
    folder = out if out is not None else Path("runs") / _slug(spec, data)

    from unstride import evaluation, show

    if plot is not None:
        show.check_target(plot)
    rows = evaluation.evaluate(
        _loaded(spec, weights, fitted),
        data,
        budgets,
        task=task,
        tta="flip" if flip else tta,
        tta_method=tta_method,
        out=folder,
        report=report,
        batch_size=batch_size,
        limit=limit,
        split=split,
        seed=seed,
        progress=True,
        **asked.options(),
    )
    if int(os.environ.get("RANK", 0)) == 0:
        if plot is not None:
            plot = show.save(evaluation.plot_rows(rows), plot)
        written = {"report": report, "plot": plot}
        made = {name: str(path) for name, path in written.items() if path is not None}
        if as_json:
            typer.echo(strict_json.dumps({"rows": [row.to_json() for row in rows], "out": str(folder), **made}))
        else:
            _show(rows, folder, made)
    # torchrun would take any other code for a crash, and start the finished run again
    raise typer.Exit(PARTLY if rows[0].errors and "TORCHELASTIC_RUN_ID" not in os.environ else PLAIN)


def _slug(spec: str, data: str) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{Path(spec).name}-{data.partition(':')[0]}")


def _loaded(spec: str, weights: str, fitted: Path | None) -> "LoadedModel":
    """The model, on this process's GPU where there is one, with what was fitted for it."""
    from unstride import enhanced, models

    loaded = on_device(models.load(spec, weights))
    if fitted is None:
        return loaded
    better = enhanced.load(fitted, loaded.model, preprocess=loaded.preprocess)
    return dataclasses.replace(loaded, model=better)


def _show(rows: list["Row"], folder: Path, made: dict[str, str]) -> None:
    from unstride.evaluation.words import advice, verdict

    console = screen()
    if rows[0].task == "segmentation" and rows[0].recipe is None:
        print_table(console, _paper_table(rows))
    print_table(console, _table(rows))
    for row in rows:
        if not row.plain:
            console.print(verdict(row), markup=False, highlight=False)
    console.print(advice(rows), markup=False, highlight=False)
    if rows[0].errors:
        count = rows[0].errors
        console.print(f"{count:,} image{'s' * (count > 1)} could not be evaluated:", markup=False, highlight=False)
        for name in rows[0].error_names:
            console.print(f"  {name}", markup=False, highlight=False)
    for name, path in ({"rows": str(folder / "rows.jsonl")} | made).items():
        console.print(f"{name}: {path}", markup=False, highlight=False)


def _table(rows: list["Row"]) -> Any:
    from rich.table import Table

    from unstride.evaluation.measures import PERCENT

    first = rows[0]
    shown = {key: head for head, key in first.measure.columns if key in first.metrics}  # older rows have no Dice
    scale, digits = (100, ".2f") if first.measure.percent else (1, ".4g")
    looks = first.recipe is not None
    several = not looks and any(row.views > 1 for row in rows)
    table = Table(title=f"{first.spec} on {first.data}: {first.images:,} images")
    heads = [*(["views"] if several else []), "recipe" if looks else "budget", *shown.values()]
    heads += ["gain", "+", "-", "MACs", "time", "verdict"]
    for head in heads:
        table.add_column(head, justify="left" if head == "verdict" else "right", no_wrap=True)
    for row in rows:
        values = [f"{row.metrics[k] * 100:.2f}" if k in PERCENT else f"{row.metrics[k]:.4f}" for k in shown]
        g, counted = row.gain, not row.plain and bool(row.measure.counted)
        low, gain, high = (f"{g[k] * scale:+{digits}}" for k in ("low", "gain", "high"))
        table.add_row(
            *([str(row.views)] if several else []),
            "plain" if row.plain else row.recipe or str(row.budget),
            *values,
            "" if row.plain else rf"{gain} \[{low}, {high}]",
            f"{g['corrected']:,}" if counted else "",
            f"{g['corrupted']:,}" if counted else "",
            f"{row.macs:.2f}x",
            "" if row.latency is None else f"{row.latency:.2f}x",
            _remarks(row),
        )
    return table


def _remarks(row: "Row") -> str:
    from unstride.evaluation.words import untrained

    random = untrained(row)
    parts = [row.verdict * (not row.plain), f"({random})" * bool(random), "(recommended)" * row.recommended]
    return " ".join(part for part in parts if part)


def _paper_table(rows: list["Row"]) -> Any:
    """mIoU in the shape of the paper's table: with and without the views, budget by budget."""
    from rich.table import Table

    from unstride.evaluation.words import untrained

    tta = rows[0].options["tta"]
    name = "TTA" if tta is None else tta["policy"]
    table = Table(title=f"mIoU: {rows[0].spec} on {rows[0].data}")
    budgets = list(dict.fromkeys(row.budget for row in rows))
    for head in (name, *("plain" if b == 1 else f"B = {b}" for b in budgets)):
        table.add_column(head, justify="right", no_wrap=True)
    for views in dict.fromkeys(row.views for row in rows):
        cells = [f"{row.metrics['miou'] * 100:.2f}" for row in rows if row.views == views]
        random = f" ({untrained(rows[0])})" if untrained(rows[0]) else ""
        table.add_row(("without" if views == 1 else "with") + random, *cells)
    return table
