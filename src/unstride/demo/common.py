"""What the parts of the demo share."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import UnstrideError
from unstride.evaluation import metrics
from unstride.show.html import Block, Figure, Note, Table
from unstride.storage.files import write_atomic

BUDGET = 10  # of what is shown in detail

Say = Callable[[str], None]
Column = tuple[str, str, Callable[[float], str]]  # heading, key of a result, how it is written


def result(method: str, budget: int, cost: float, gain: metrics.Gain, **values: float) -> dict[str, Any]:
    """One budget's figures, as the JSON has them. Shares are in 0..1, cost in plain forwards."""
    return {
        "method": method,
        "budget": budget,
        **values,
        "gain": gain.gain,
        "low": gain.low,
        "high": gain.high,
        "corrected": gain.corrected,
        "corrupted": gain.corrupted,
        "cost": cost,
        "verdict": "the plain network" if budget == 1 else gain.verdict,
    }


def results_table(results: Sequence[dict[str, Any]], shown: Sequence[Column]) -> Table:
    """One method's budgets, what matters most first: it is what a narrow window shows. What helps is stressed."""
    first, *others = shown
    rows = tuple(
        (
            str(r["budget"]),
            first[2](r[first[1]]),
            f"{100 * r['gain']:+.2f} [{100 * r['low']:+.2f}, {100 * r['high']:+.2f}]",
            f"{r['corrected']:,} / {r['corrupted']:,}",
            f"{r['cost']:.1f}x",
            f"{r['time']:.1f}x",
            *(write(r[key]) for _, key, write in others),
        )
        for r in results
    )
    names = ("gain, points", "corrected /\ncorrupted", "cost", "time")
    columns = ("budget", first[0], *names, *(name for name, _, _ in others))
    told = [f"{r['budget']} states: {r['verdict']}" for r in results if r["budget"] > 1]
    caption = f"{results[0]['method']}. {'; '.join(told)}."
    return Table(columns, rows, caption, frozenset(k for k, r in enumerate(results) if r["verdict"] == "helps"))


GAIN = "Gain: over the plain network on the same images, with its 95 % bootstrap interval."
READING = f"{GAIN} Cost in MACs and time measured now, both in plain forwards."


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def time_ratios(results: Sequence[dict[str, Any]], better: Enhanced, model: torch.nn.Module, x: Tensor) -> None:
    """Adds each budget's "time", in plain forwards: the fastest of three rounds, so that other work disturbs little.

    Budget 1 is the model, so its rounds are plain forwards, too, and its time is 1.
    """
    runs: list[Callable[[Tensor], Any]] = [model, *(better.with_options(budget=r["budget"]) for r in results)]
    fastest = [float("inf")] * len(runs)
    for _ in range(3):
        for k, run in enumerate(runs):
            started = time.perf_counter()
            with torch.no_grad():
                run(x)
            fastest[k] = min(fastest[k], time.perf_counter() - started)
    plain = min(fastest[0], *(t for r, t in zip(results, fastest[1:], strict=True) if r["budget"] == 1))
    for r, seconds in zip(results, fastest[1:], strict=True):
        r["time"] = 1.0 if r["budget"] == 1 else seconds / plain


def drawn(path: Path, figure: Callable[[], Any], caption: str) -> Block:
    """The image, in a file of its own, too; a note where there is no plot library."""
    try:
        stream = io.BytesIO()
        figure().savefig(stream, format=path.suffix[1:])
        write_atomic(path, stream.getvalue())
    except (UnstrideError, OSError) as error:
        return Note(f"Without this image: {error}")
    return Figure(stream.getvalue(), caption, f"{caption} ({path.name})")
