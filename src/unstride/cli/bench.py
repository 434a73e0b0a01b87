"""`unstride bench SPEC`: what the procedure costs on this machine."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def numbers(text: str) -> list[int]:
    """`4,10,15` -> [4, 10, 15]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise typer.BadParameter(f"{text!r}: wanted whole numbers separated by commas, such as 4,10,15")
    return [int(part) for part in parts]


def register(app: typer.Typer) -> None:
    @app.command()
    def bench(
        spec: Annotated[str, typer.Argument(help="torchvision:NAME, timm:NAME, ..., as for inspect.")],
        budget: Annotated[str, typer.Option(help="States per image, separated by commas.")] = "4,10,15,30",
        batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8",
        image_size: Annotated[
            int | None, typer.Option(min=1, help="Height and width; by default the model's own.")
        ] = None,
        weights: Annotated[
            str, typer.Option(help="none (random, no network), default (pretrained), or a file.")
        ] = "none",
        learned: Annotated[bool, typer.Option("--learned", help="With the learned aggregation and criterion.")] = False,
        growth: Annotated[
            bool, typer.Option(help="Also measure how cost grows with states (to 256), batch and image size.")
        ] = True,
        repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured; medians count.")] = 5,
        plot: Annotated[Path | None, typer.Option(help="Write a picture of it there.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Measure time, work and memory against the plain forward, and against flips and crops with as many views."""
        from unstride import models
        from unstride.proof import benching

        if plot is not None:
            from unstride.show.style import check_target

            check_target(plot)
        loaded = models.load(spec, weights=weights)
        result = benching.bench(
            loaded.model,
            loaded.example(image_size),
            numbers(budget),
            numbers(batch),
            task=loaded.task or "classification",
            learned=learned,
            growth=growth,
            repeats=repeats,
            progress=not as_json or sys.stderr.isatty(),
        )
        if plot is not None:
            from unstride.proof.cost import plot_bench

            plot_bench(result, spec).savefig(plot)
        if as_json:
            typer.echo(json.dumps({"spec": spec, **result.to_json()}))
            return
        _print(spec, result)
        if plot is not None:
            typer.echo(f"plot: {plot}")


def _print(spec: str, result: object) -> None:
    from rich.console import Console
    from rich.table import Table

    from unstride.proof.benching import Bench, BenchRow

    assert isinstance(result, Bench)
    console = Console()

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
        console.print(shown)

    where = f"{result.device}, {result.threads} thread{'s' * (result.threads != 1)}"
    table(f"{spec}: {result.plain_macs / 1e9:.2f} GMACs, {where}", result.rows)
    for kind, rows in result.growth.items():
        table(f"growth with {kind}", rows)
    console.print("x: times the plain forward of the same batch, medians of turns in this run")
    console.print(
        "work: MACs of the states' prefix trie; TTA: flips and crops, as many views; memory: beyond the weights"
    )
