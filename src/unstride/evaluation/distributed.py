"""The processes that torchrun started, as far as an evaluation cares: who I am, one value for all, wait for all.

    with world() as us:
        mine = us.share(todo)[us.rank :: us.size]

Only small Python values travel, so gloo serves on every device; images and scores stay in files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
# A process may wait for the others as long as their work takes; that one of them died is for torchrun to notice.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes; alone it is 0 of 1."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, value: _T) -> _T:
        """What rank 0 passes, for everybody."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def wait(self) -> None:
        """Until everybody is here."""
        if self.size > 1:
            dist.barrier(group=self.group)


def launched() -> World:
    """What is known without connecting: torchrun sets RANK and WORLD_SIZE."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


@contextmanager
def world() -> Iterator[World]:
    """Connects the processes; alone, nothing is connected, and a caller's own process group is left as it is."""
    us = launched()
    if us.size == 1:
        yield us
        return
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    else:
        us = replace(us, group=dist.new_group(backend="gloo", timeout=_PATIENCE))
    try:
        yield us
    finally:
        dist.destroy_process_group(None if started else us.group)
