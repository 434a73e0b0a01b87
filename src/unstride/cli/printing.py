"""What several commands print alike: within the width of the terminal, and everything in a pipe."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 150  # columns of a file, which has no edge to wrap at


def screen(stderr: bool = False) -> "Console":
    """Wraps at the terminal's edge, or at COLUMNS where somebody set it."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(stderr=stderr, soft_wrap=True, width=WIDE)


def print_table(console: "Console", table: "Table") -> None:
    """The table, or where it is wider than the screen, its rows as lists of `name value`: no figure is cut off."""
    from rich.markup import escape
    from rich.padding import Padding

    needed = console.measure(table, options=console.options.update(max_width=10_000)).minimum
    if needed <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(f"[bold]{escape(str(table.title))}[/bold]")
    heads = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        pairs = [f"{head} {cell}".strip() for head, cell in zip(heads, cells, strict=True) if str(cell)]
        console.print(Padding(", ".join(pairs), (0, 0, 0, 2)), highlight=False)
