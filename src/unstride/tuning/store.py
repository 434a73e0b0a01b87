"""What the tuner computes of each image, kept in the one cache: later runs on more images, or with another ceiling,
reuse it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import DataError
from unstride.models.weights import place
from unstride.storage.cache import Cache, RunKey, tell_reused
from unstride.storage.distributed import World
from unstride.storage.fingerprint import computation_key, digest
from unstride.storage.progress import progress as show_progress
from unstride.storage.provenance import versions
from unstride.views.source import Source
from unstride.recipe.view import PLAIN

Make = Callable[[int, list[int]], Mapping[str, Mapping[str, Tensor]]]


def run_key(kind: str, better: Enhanced, source: Source, **settings: Any) -> RunKey:
    """What is computed of each image: by which network, with which recipe, where."""
    learned = "" if better.attention is None else digest(dict(better.attention.state_dict()))
    model = computation_key(better.model, source.rows([0]).see(PLAIN))
    device = place(better.model)[0].type
    settings |= {"model": model, "task": better.task, "recipe": better.signature, "learned": learned, "device": device}
    return RunKey(f"tuning-{kind}", {**settings, "versions": versions()})


def compute_missing(
    make: Make,
    key: RunKey,
    groups: Sequence[Sequence[str]],
    folder: Path,
    us: World,
    label: str,
    message: Callable[[int], str] | None = None,
) -> Cache:
    """The cache with the values of all images; those that it lacks are computed, each process its share.

    groups   item keys of the images that are computed together: always the same ones, whatever was killed before
    make     (number of a group, which of it are missing) -> values by item key
    message  what to print before the start, given how many images are missing
    """
    cache = Cache.open(folder, key)
    todo = us.share(_missing(cache, groups) if us.leads else [])
    mine = todo[us.rank :: us.size]
    missing, images = _count(todo), sum(map(len, groups))
    if us.leads:
        tell_reused(images - missing, images, cache.folder)
    if message is not None and label and us.leads and missing:
        print(message(missing), file=sys.stderr, flush=True)
    with show_progress(label, _count(mine), bool(label) and us.leads and bool(mine)) as advance:
        for number, rows in mine:
            cache.put(make(number, rows))
            advance(len(rows), "")
    us.wait()
    cache.reload()
    return cache


def stored(cache: Cache, items: Iterable[str]) -> list[dict[str, Tensor]]:
    """The values of these images, in their order."""
    found = [cache.get(item) for item in items]
    if None in found:
        raise DataError(f"{cache.folder}: not all images can be read back; do all processes see the same folder?")
    return [values for values in found if values is not None]


def _missing(cache: Cache, groups: Sequence[Sequence[str]]) -> list[tuple[int, list[int]]]:
    rows = [[row for row, item in enumerate(group) if item not in cache] for group in groups]
    return [(number, missing) for number, missing in enumerate(rows) if missing]


def _count(todo: Sequence[tuple[int, list[int]]]) -> int:
    return sum(len(rows) for _, rows in todo)
