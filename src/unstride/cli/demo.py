"""`unstride demo`: what unstride does, measured on this machine in about a minute, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstride.cli.options import AsJson
from unstride.cli.printing import print_table, screen
from unstride.storage import strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from unstride.demo.parts import DemoPart

PARTS = 6


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report, the recipe and the exported file.")] = Path(
        "unstride-demo"
    ),
    as_json: AsJson = False,
) -> None:
    """Show what unstride does, measured here on embedded networks, and write a report, a recipe and an ONNX file.

    It takes about a minute, and needs no network connection. Exit code 3: some parts could not run; they are named.
    """
    from unstride.demo.story import run
    from unstride.storage.files import check_folder

    check_folder(out, "--out")
    console, errors = screen(stderr=as_json), screen(stderr=True)
    done: list[DemoPart] = []

    def say(text: str) -> None:
        errors.print(f"[dim]part {len(done) + 1} of {PARTS}: {text}[/dim]", highlight=False)

    for part in run(out, say=say):
        done.append(part)
        if not as_json:
            _show(console, part)
    skipped = {part.name: part.skipped for part in done if part.skipped}
    if as_json:
        figures = {part.name: part.figures for part in done if not part.skipped}
        seconds = {part.name: round(part.seconds, 1) for part in done}
        typer.echo(strict_json.dumps({**figures, "skipped": skipped, "seconds": seconds}))
    if skipped:
        raise typer.Exit(3)


def _show(console: Console, part: DemoPart) -> None:
    """What the report shows in text, as text."""
    from rich.markup import escape
    from rich.table import Table

    from unstride.show import html

    console.rule(f"[bold]{escape(part.title)}", align="left")
    for block in part.blocks:
        match block:
            case html.Text(text):
                console.print(escape(text), highlight=False)
            case html.Note(text):
                console.print(f"[yellow]{escape(text)}[/yellow]", highlight=False)
            case html.Table(columns, rows, caption, strong):
                table = Table(box=None, padding=(0, 1, 0, 0))
                for name, right in zip(columns, block.right, strict=True):
                    table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
                for k, row in enumerate(rows):
                    table.add_row(*map(escape, row), style="bold" if k in strong else None)
                print_table(console, table)
                console.print(f"[dim]{escape(caption)}[/dim]", highlight=False)
    if part.seconds:
        console.print(f"[dim]{part.seconds:.0f} s[/dim]\n", highlight=False)
