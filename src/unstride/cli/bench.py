"""`unstride bench SPEC`: what the procedure costs on this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from unstride.cli.parsing import numbers
from unstride.cli.printing import print_table, screen
from unstride.jobs import strict

BATCH, SIDE = 4096, 4096  # the most that is measured


def register(app: typer.Typer) -> None:
    @app.command()
    def bench(
        spec: Annotated[str, typer.Argument(help="torchvision:NAME, timm:NAME, ..., as for inspect.")],
        budget: Annotated[str, typer.Option(help="States per image, separated by commas.")] = "4,10,15,30",
        batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8",
        image_size: Annotated[
            int | None, typer.Option(min=1, max=SIDE, help="Height and width; by default the model's own.")
        ] = None,
        weights: Annotated[
            str | None, typer.Option(help="default (pretrained), random, or a file. [what is here: time is the same]")
        ] = None,
        learned: Annotated[bool, typer.Option("--learned", help="With the learned aggregation and criterion.")] = False,
        growth: Annotated[
            bool, typer.Option(help="Also measure how cost grows with states (to 256), batch and image size.")
        ] = True,
        repeats: Annotated[
            int, typer.Option(min=1, max=1000, help="Times that everything is measured; medians count.")
        ] = 5,
        plot: Annotated[Path | None, typer.Option(help="Write a picture of it there.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Measure time, work and memory against the plain forward, and against flips and crops with as many views."""
        budgets, batches = numbers("--budget", budget), numbers("--batch", batch, BATCH)

        from unstride import models
        from unstride.proof import benching

        if plot is not None:
            from unstride.show.style import check_target

            check_target(plot)
        loaded = models.load(spec, weights=weights)
        result = benching.bench(
            loaded.model,
            loaded.example(image_size),
            budgets,
            batches,
            task=loaded.task or "classification",
            learned=learned,
            growth=growth,
            repeats=repeats,
            progress=not as_json or sys.stderr.isatty(),
        )
        if plot is not None:
            from unstride.proof.cost import plot_bench
            from unstride.show.style import save

            plot = save(plot_bench(result, spec), plot)
        if as_json:
            typer.echo(strict.dumps({"spec": spec, **result.to_json()}))
            return
        _print(spec, result)
        if plot is not None:
            typer.echo(f"plot: {plot}")


def _print(spec: str, result: object) -> None:
    from rich.table import Table

    from unstride.proof.benching import Bench, BenchRow

    assert isinstance(result, Bench)
    console = screen()

    def table(title: str, rows: tuple[BenchRow, ...]) -> None:
        full = any(row.tta is not None or row.memory is not None for row in rows)
        sizes = len({row.image for row in rows}) > 1
        names = [*(["image"] if sizes else []), "batch", "states", "time", "work", "time/work", "images/s"]
        shown = Table(title=title)
        for name in names + (["TTA time", "memory"] if full else []):
            shown.add_column(name, justify="right")
        plain: tuple[int, tuple[int, int]] | None = None
        for row in rows:
            at = [f"{row.image[0]}x{row.image[1]}"] * sizes + [str(row.batch)]
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
        print_table(console, shown)

    where = f"{result.device}, {result.threads} thread{'s' * (result.threads != 1)}"
    table(f"{spec}: {result.plain_macs / 1e9:.2f} GMACs, {where}", result.rows)
    for kind, rows in result.growth.items():
        table(f"growth with {kind}", rows)
    console.print("x: times the plain forward of the same batch, medians of turns in this run")
    console.print(
        "work: MACs of the states' prefix trie; TTA: flips and crops, as many views; memory: beyond the weights"
    )
