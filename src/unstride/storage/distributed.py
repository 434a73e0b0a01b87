"""The processes that torchrun started, as far as an evaluation cares: who I am, one value for all, wait for all.

    with world() as us:
        mine = us.share(todo)[us.rank :: us.size]

Only small Python values travel, so gloo serves on every device; images and scores stay in files.
"""

from __future__ import annotations

import os
import time
import uuid
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
        store, _, _ = next(dist.rendezvous("env://", timeout=_PATIENCE))
        fresh = fresh_store(store, us.rank, us.size)
        dist.init_process_group("gloo", store=fresh, rank=us.rank, world_size=us.size, timeout=_PATIENCE)
    else:
        us = replace(us, group=dist.new_group(backend="gloo", timeout=_PATIENCE))
    try:
        yield us
    finally:
        dist.destroy_process_group(None if started else us.group)


def fresh_store(store: Any, rank: int, size: int) -> dist.Store:
    """A part of the store that only the processes alive now write to.

    torchrun starts its workers again with the store of the attempt that failed, addresses of the dead included, and
    gloo would call those (pytorch issue 135712). So rank 0 answers whoever says hello with a new name, under a key that
    only the living one knows, and goes on when everybody has acknowledged that name.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"unstride/hello/{rank}", name)
        store.wait([f"unstride/answer/{name}"], _PATIENCE)
        name = store.get(f"unstride/answer/{name}").decode()
        store.set(f"unstride/received/{name}/{rank}", "yes")
    missing = set(range(1, size)) if rank == 0 else set()
    while missing:
        for r in missing:
            if store.check([f"unstride/hello/{r}"]):
                store.set(f"unstride/answer/{store.get(f'unstride/hello/{r}').decode()}", name)
        time.sleep(0.05)
        missing = {r for r in missing if not store.check([f"unstride/received/{name}/{r}"])}
    return dist.PrefixStore(name, store)
