"""Loader -> pools: what a training's maps depend on (`Job`), and where they are kept (`Source`)."""

import random
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.data.items import check_labels
from unstride.enhanced import Enhanced
from unstride.errors import InputError
from unstride.learning.pools import (
    Pool,
    SampledSearch,
    batches,
    draw_pools,
    image_key,
    unfamiliar,
)
from unstride.models.weights import place
from unstride.procedure.options import Options
from unstride.procedure.search import Search
from unstride.procedure.tasks import Plan
from unstride.storage.cache import Cache, RunKey, tell_reused
from unstride.storage.distributed import World
from unstride.storage.fingerprint import computation_key, text_digest
from unstride.storage.progress import progress
from unstride.storage.provenance import versions


@dataclass(frozen=True, eq=False)
class Job:
    """What maps depend on: the model, its options, how states are drawn."""

    better: Enhanced
    plan: Plan
    options: Options
    budget: int
    seed: int
    familiar: bool

    def pools(self, images: Tensor, labels: list[int], part: str, epoch: int) -> list[Pool]:
        check_labels([f"{part}, image {i} of a batch" for i in range(len(labels))], labels, self.plan.classes)
        space, layers = self.plan.found.space, self.options.layers
        if self.familiar:
            images = unfamiliar(images, [f"{self.seed} {image_key(x, y)}" for x, y in zip(images, labels, strict=True)])

        def draw(key: str) -> Search:
            if part == "val":  # as at test time
                return Search(space, layers, self.budget)
            return SampledSearch(space, layers, self.budget, seed=f"{self.seed} {epoch} {key}")

        at_once = self.better.images_at_once(self.plan, replace(self.options, budget=self.budget))
        out: list[Pool] = []
        for i in range(0, len(labels), at_once):
            part_of = slice(i, i + at_once)
            out += draw_pools(self.plan, images[part_of], labels[part_of], draw, self.options)
        return out

    def settings(self) -> dict[str, Any]:
        """What the maps of an image depend on, beside the image."""
        o, found, graph = self.options, self.plan.found, self.plan.graph
        probe = torch.zeros(1, graph.channels, *graph.size).to(*place(self.better.model))
        what = [found.space.rates, found.space.strides, self.plan.space, self.budget, self.familiar, self.seed]
        what += [o.layers, o.align, o.border, str(graph.dtype)]
        return {"model": computation_key(self.better.model, probe), "maps": what, "versions": versions()}

    def key(self, *more: Any) -> str:
        return text_digest([self.settings(), more])[:24]


class Source:
    """Pools of a loader's images: computed once and kept where they fit `limit` bytes, otherwise anew in each epoch."""

    def __init__(
        self, job: Job, loader: Iterable[Any], part: str, folder: Path | None, limit: int, us: World, show: bool
    ) -> None:
        self.job, self.loader, self.part, self.cached = job, loader, part, True
        self.keys: list[str] = []
        self.store = Cache.open(folder, RunKey(part, job.settings()))
        earlier = set(self.store)
        total = len(loader) if isinstance(loader, Sized) else None
        with progress(f"maps of {part} images", total, show and us.leads) as advance:
            for number, (images, labels) in enumerate(self._batches()):
                keys = [image_key(x, y) for x, y in zip(images, labels, strict=True)]
                self.keys += keys
                fresh = [i for i, k in enumerate(keys) if k not in self.store]
                if self.cached and fresh and number % us.size == us.rank:
                    pools = job.pools(images[fresh], [labels[i] for i in fresh], part, 0)
                    expected = sum(p.bytes for p in pools) * (total or 1) if number < us.size else 0
                    self.cached = max(self.store.bytes, expected) <= limit
                    if self.cached:
                        self.store.put({keys[i]: p.values() for i, p in zip(fresh, pools, strict=True)})
                advance(1, "")
        us.wait()
        self.store.reload()
        if us.leads:
            tell_reused(sum(key in earlier for key in self.keys), len(self.keys), self.store.folder)
        self.cached &= all(k in self.store for k in self.keys)
        us.wait()
        if not self.cached and us.leads:
            self.store.clear()
        self.keys.sort()  # whatever order the loader has

    def _batches(self) -> Iterator[tuple[Tensor, list[int]]]:
        shape = (self.job.plan.graph.channels, *self.job.plan.graph.size)
        for images, labels in batches(self.loader, f"{self.part}_loader"):
            if tuple(images.shape[1:]) != shape:
                raise InputError(f"{self.part}_loader: images {tuple(images.shape[1:])} after {shape}; wanted one size")
            yield images, labels

    def groups(self, epoch: int, size: int, shuffled: bool) -> Iterator[list[Pool]]:
        """Pools of `size` images at a time."""
        if self.cached:
            order = list(self.keys)
            if shuffled:
                random.Random(f"{self.job.seed} {epoch}").shuffle(order)
            for i in range(0, len(order), size):
                yield [Pool.cached(self.store, k) for k in order[i : i + size]]
            return
        for images, labels in self._batches():
            for i in range(0, len(labels), size):
                yield self.job.pools(images[i : i + size], labels[i : i + size], self.part, epoch)
