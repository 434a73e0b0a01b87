"""`unstride bench SPEC`: what the procedure costs on this machine."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import AnyWeights, AsJson, Budgets, ImageSize, Plot, Spec, numbers
from unstride.cli.printing import print_table, screen
from unstride.cli.recipes import Asked, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.evaluation.benching import Bench, BenchRow


def register(app: typer.Typer) -> None:
    app.command()(bench)


@takes_recipe("budget")
def bench(
    spec: Spec,
    asked: Asked,
    budget: Budgets = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,4",
    image_size: ImageSize = None,
    weights: AnyWeights = None,
    learned: Annotated[bool, typer.Option("--learned", help="With the learned aggregation and criterion.")] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Then also how cost grows with states (to 256), batch and image size.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, help="Times that everything is measured; medians count.")
    ] = 5,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time for it (without --growth): fewer repeats, and what does not fit is said.")
    ] = 40,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure time, work and memory against the plain forward, and against flips and crops with as many views.

    Without --budget: 4 and 10 states of the paper's search, or as many as a recipe of your own asks for; one with
    stages of looks is measured after each stage.
    """
    from unstride import models
    from unstride.evaluation import benching

    if plot is not None:
        from unstride.show.style import check_target

        check_target(plot)
    budgets = None if budget is None else numbers("--budget", budget)
    loaded = models.load(spec, weights=weights)
    result = benching.bench(
        loaded.model,
        loaded.example(image_size),
        budgets,
        numbers("--batch", batch, 4096),
        task=loaded.task or "classification",
        learned=learned,
        growth=growth,
        repeats=repeats,
        seconds=seconds,
        progress=not as_json or sys.stderr.isatty(),
        **{"preprocess": loaded.preprocess, **asked.options()},
    )
    if plot is not None:
        from unstride.evaluation.cost import plot_bench
        from unstride.show.style import save

        plot = save(plot_bench(result, spec), plot)
    if as_json:
        typer.echo(strict_json.dumps({"spec": spec, **result.to_json()}))
        return
    _show(spec, result)
    if plot is not None:
        typer.echo(f"plot: {plot}")


def _show(spec: str, result: "Bench") -> None:
    console = screen()
    where = f"{result.device}, {result.threads} thread{'s' * (result.threads != 1)}"
    print_table(console, _table(f"{spec}: {result.plain_macs / 1e9:.2f} GMACs, {where}", result.rows))
    for kind, rows in result.growth.items():
        print_table(console, _table(f"growth with {kind}", rows))
    for size, states in result.left_out:
        console.print(f"left out: {states} states at batch {size}; give more --seconds")
    console.print("x: times the plain forward of the same batch, medians of turns in this run")
    console.print(
        "work: MACs of the states' prefix trie; TTA: flips and crops, as many views; memory: beyond the weights"
    )


def _table(title: str, rows: Sequence["BenchRow"]) -> Any:
    from rich.table import Table

    full = any(row.tta is not None or row.memory is not None for row in rows)
    sizes = len({row.image for row in rows}) > 1
    names = [*(["image"] if sizes else []), "batch", "states", "time", "work", "time/work", "images/s"]
    shown = Table(title=title)
    for name in names + (["TTA time", "memory"] if full else []):
        shown.add_column(name, justify="right")
    plain: tuple[int, tuple[int, ...]] | None = None
    for row in rows:
        at = ["x".join(map(str, row.image))] * sizes + [str(row.batch)]
        if plain != (row.batch, row.image):
            plain = (row.batch, row.image)
            shown.add_section()
            shown.add_row(*at, "plain", f"{row.plain_ms:.1f} ms", "", "", f"{row.batch / row.plain_ms * 1e3:.1f}")
        cells = [*at, str(row.budget), f"{row.time:.2f}x", f"{row.macs:.2f}x", f"{row.overhead:.2f}"]
        cells.append(f"{row.images_per_second:.1f}")
        if full:
            cells.append("-" if row.tta is None else f"{row.tta:.2f}x")
            cells.append("-" if row.memory is None else f"{row.memory:.2f}x")
        shown.add_row(*cells)
    return shown
