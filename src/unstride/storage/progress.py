"""Progress on stderr: a bar in a terminal, plain lines with the time left in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS = 10.0  # between two plain lines


@contextmanager
def progress(label: str, total: int | None, show: bool = True) -> Iterator[Callable[[int, str], None]]:
    """`with progress("views", 100) as advance: advance(1, "note")`."""
    if not show:
        yield lambda step, note: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(label, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda step, note: bar.update(task, advance=step, note=note)


def _lines(label: str, total: int | None) -> Callable[[int, str], None]:
    start = shown = time.monotonic()
    done = 0

    def advance(step: int, note: str) -> None:
        nonlocal shown, done
        done += step
        now = time.monotonic()
        if now - shown < _SECONDS and done != total:
            return
        shown = now
        left = f", {(now - start) / done * (total - done):.0f} s left" if total and done else ""
        print(
            f"{label}: {done}{f'/{total}' if total else ''}{left}{'  ' + note if note else ''}",
            file=sys.stderr,
            flush=True,
        )

    return advance
