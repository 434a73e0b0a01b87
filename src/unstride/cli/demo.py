"""`unstride demo`: real figures and an image on a fresh machine, without any hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import AsJson
from unstride.cli.printing import screen
from unstride.storage import strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from unstride.demo import Part


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report and its images.")] = Path("unstride-demo"),
    as_json: AsJson = False,
) -> None:
    """Measure plain against enhanced on photographs and embedded networks, in a minute or two, and write a report.

    Exit code 3: some parts could not run; they are named, the others are done.
    """
    from unstride import demo as show
    from unstride.errors import OptionError
    from unstride.show.html import Note
    from unstride.storage.files import check_folder

    check_folder(out, "--out")
    console = screen(stderr=as_json)
    done: list[Part] = []
    try:
        with console.status("starting") as status:
            for part in show.run(out, status.update):
                done.append(part)
                if not as_json:
                    _show(console, part)
    except OSError as error:
        raise OptionError(f"--out {out}: cannot write there ({error.strerror or error})") from error
    skipped = {p.name: p.skipped for p in done if p.skipped}
    if as_json:
        figures: dict[str, Any] = {p.name: p.figures for p in done if not p.skipped}
        seconds = {p.name: round(p.seconds, 1) for p in done}
        notes = [b.text for p in done for b in p.blocks if isinstance(b, Note) and not p.skipped]
        typer.echo(strict_json.dumps({**figures, "skipped": skipped, "notes": notes, "seconds": seconds}))
    if skipped:
        raise typer.Exit(3)


def _show(console: "Console", part: "Part") -> None:
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
                for k, name in enumerate(columns):
                    number = html.numeric(rows, k)
                    table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
                for k, row in enumerate(rows):
                    table.add_row(*map(escape, row), style="bold" if k in strong else None)
                console.print(table)
                console.print(f"[dim]{escape(caption)}[/dim]", highlight=False)
    if part.seconds:
        console.print(f"[dim]{part.seconds:.0f} s[/dim]\n", highlight=False)
