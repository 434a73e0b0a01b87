"""What tuning will take before it starts, and how long recipes take beside the user's own network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unstride.enhanced import Enhanced
from unstride.procedure.looks import Look
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, View
from unstride.storage.distributed import launched
from unstride.tuning.pool import Work
from unstride.tuning.tuned import Line
from unstride.views.source import Source

SECONDS = 15.0  # for timing all recipes together
PAPER_FORWARDS = 8.0  # of the paper's ten states, roughly: only for the estimate


def estimate(
    better: Enhanced,
    source: Source,
    kept: int,
    looks: Sequence[Look],
    work: dict[View, Work],
    images: int,
    paper: bool,
) -> str:
    """`2,000 images in 17 looks: 15.2 plain forwards each; about 12 min, 130 MB of files`.

    `kept`: bytes of each image in each look.
    """
    plain = work[PLAIN].macs(work[PLAIN].near[:1])
    by_view = {look.view: [x.state for x in looks if x.view == look.view] for look in looks}
    each = sum(work[v].macs(states) for v, states in by_view.items()) / plain + (PAPER_FORWARDS if paper else 0.0)
    few = source.rows(range(min(8, len(source))))
    engine = better.fitted(few.render(PLAIN))[1].engine_for(())  # quicker than the user's own forward
    out = _seconds(lambda: engine.start(few.render(PLAIN))) / len(few) * each * images
    size = kept * images * len(looks) / 1e6
    beside = ", the paper's search beside them" if paper else ""
    return (
        f"{images:,} images in {len(looks)} looks{beside}: {each:.1f} plain forwards each; "
        f"about {_duration(out)}, {max(size, 0.1):.1f} MB of files"
    )


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _seconds(run: Callable[[], Any], warm: int = 1) -> float:
    with torch.no_grad():
        for _ in range(warm):
            run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def timed(recipes: Sequence[Enhanced], costs: Sequence[float], source: Source) -> tuple[list[float], int]:
    """Each recipe's time on images as multiples of the user's own plain forward on them, in turns in one run; and
    how many images went through together: at most 64, as many as go through all recipes twice in about 15 seconds.
    """
    model = recipes[0].plans.plain
    each = _seconds(lambda: model(source.rows([0]).render(PLAIN)))
    count = int(SECONDS / max(1e-9, each * 2 * (sum(costs) + len(costs))))
    some = source.rows(range(max(1, min(64, len(source), count))))
    fastest: list[list[float]] = [[] for _ in recipes]
    plain: list[float] = []
    for turn in range(2):
        for k, better in enumerate(recipes):
            plain.append(_seconds(lambda: model(some.render(PLAIN)), warm=0))
            fastest[k].append(_seconds(lambda better=better: better(some), warm=1 - turn))  # type: ignore[misc]
    return [min(own) / min(plain) for own in fastest], len(some)


def with_times(
    lines: Sequence[Line], recipes: Mapping[str, Recipe], better: Enhanced, source: Source
) -> tuple[list[Line], str]:
    """The lines with the time that their recipes take here, and what that time is of, in words. Of several processes
    only the first measures: they would slow each other.
    """
    if not launched().leads:
        return list(lines), ""
    there = [line for line in lines if line.name in recipes]
    ready = [better.with_options(recipe=recipes[line.name]) for line in there]
    ratios, count = timed(ready, [x.cost for x in there], source)
    by = dict(zip([x.name for x in there], ratios, strict=True))
    note = (
        f"time: over your network's own forward of the same {count} images together, on this machine; of other "
        "batches: unstride bench SPEC --recipe FILE --batch 1,8,32. Ceilings beyond the asked one, and the paper's "
        "search, are not timed"
    )
    return [replace(line, time=by.get(line.name)) for line in lines], note
