"""Printing for all commands: no line is wider than the terminal, and nothing is cut off in a pipe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 150  # columns of a file or pipe


def screen(stderr: bool = False) -> Console:
    """A console that wraps at the terminal's width, or at the environment variable COLUMNS."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(stderr=stderr, soft_wrap=True, width=WIDE)


def terminal_width() -> int | None:
    """Columns of the terminal; None for a file or a pipe, where lines may be long."""
    console = screen()
    return None if console.soft_wrap else console.width


def print_table(console: Console, table: Table) -> None:
    """Print a table; where it is wider than the screen, each row as a list of `name value`."""
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
