"""Every forward pass of every image, computed once and cached image by image: recipes are simulated from it.

Each group of passes has a run of its own in the cache, so that another ceiling, seed, more images or one more network
reuse what is there. A process that is killed loses at most the batch that it was working on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstride.data.batches import FromBatches
from unstride.errors import DataError
from unstride.evaluation.labelled import Data
from unstride.pipeline import Pipeline
from unstride.storage.cache import Cache, RunKey, tell_reused
from unstride.storage.contents import FileDigests
from unstride.storage.distributed import World
from unstride.storage.progress import progress as show_progress
from unstride.tasks.tasks import TASKS
from unstride.tuning import pixels
from unstride.tuning.candidates import Groups, PassGroup
from unstride.tuning.passes import PassRunner, Values
from unstride.tuning.pixels import MapPixels
from unstride.tuning.reading import Batch, LabelledReader
from unstride.views.source import Source


@dataclass(frozen=True, eq=False)
class Pool:
    """The outputs of all passes.

    Args:
        groups: of passes, the plain pass of the first network first.
        counts: of each group, how many passes it has.
        outputs: (S, N, K), or (S, N, K, 1, P) of maps: all passes in the order of the groups.
        macs: (G, N), multiply-accumulates of each group.
        seconds: (G,), of an image; 0 where it is not known.
        targets: as the data gives them; of maps, at the pixels.
        keys: of the images with their labels.
        rows: the images of the data that could be read.
    """

    task: str
    groups: Groups
    counts: tuple[int, ...]
    outputs: Tensor
    macs: Tensor
    seconds: Tensor
    targets: Tensor
    keys: tuple[str, ...]
    rows: tuple[int, ...]
    maps: MapPixels | None = None
    timed: bool = False  # cost is measured time, because MACs cannot be counted

    def __len__(self) -> int:
        return self.outputs.shape[1]

    def passes(self, group: PassGroup) -> Tensor:
        """(S, N, ...) of one group."""
        number = self.groups.index(group)
        start = sum(self.counts[:number])
        return self.outputs[start : start + self.counts[number]].float()

    def costs(self, group: PassGroup) -> Tensor:
        """(N,), in forward passes of the first network."""
        number = self.groups.index(group)
        if self.timed:
            return (self.seconds[number] / self.seconds[0]).expand(len(self))
        return self.macs[number] / self.macs[0]

    def times(self, group: PassGroup) -> float:
        """The measured time, as a multiple of the first network's forward pass."""
        return float(self.seconds[self.groups.index(group)] / self.seconds[0])

    def some(self, chosen: Sequence[int] | Tensor | NDArray[np.int64]) -> Pool:
        """The same for some of the images."""
        at = torch.as_tensor(chosen)
        numbers = at.tolist()
        return replace(
            self,
            outputs=self.outputs[:, at],
            macs=self.macs[:, at],
            targets=self.targets[at],
            keys=tuple(self.keys[i] for i in numbers),
            rows=tuple(self.rows[i] for i in numbers),
            maps=None if self.maps is None else self.maps.rows(numbers),
        )


# ---------------------------------------------------------------- all images, through the cache
class PoolStore:
    """The runs of a pool in the cache, one for each group."""

    def __init__(
        self, pipeline: Pipeline, data: Data, folder: Path | None, example: Tensor, show: bool = False
    ) -> None:
        self.pipeline, self.data, self.folder = pipeline, data, folder
        self.runner = PassRunner(pipeline.better)
        key = pipeline.key(example)
        self.networks, self.device = key["networks"], key["device"]
        self.names = {name: name for name in self.networks} | {"base": next(iter(self.networks))}
        digests = FileDigests(folder)
        digests.read(data.files(), show)
        self.keys = data.keys(digests)
        self.maps = TASKS[pipeline.task].maps

    def settings(self, network: str, what: Mapping[str, Any]) -> dict[str, Any]:
        base = self.networks[self.names["base"]]
        own = {"task": self.pipeline.task, "network": self.networks[self.names[network]], "device": self.device}
        return {**own, **what, "prepared": base["preprocess"], **({"base": base} if self.maps else {})}

    def open(self, group: PassGroup) -> Cache:
        states = None if group.states is None else group.states.count
        what = {"view": str(group.view), "states": states}
        return Cache.open(self.folder, RunKey("pool", self.settings(group.network, what)))

    def values(self, groups: Sequence[PassGroup], batch: Batch) -> dict[PassGroup, dict[str, Values]]:
        """Of each group, by the key of the image, what is kept."""
        rows, source, targets = batch
        found: dict[PassGroup, dict[str, Values]] = {}
        for group, values in self.runner.run(source, groups).items():
            for k, row in enumerate(rows):
                output = values["output"][:, k]
                if not bool(output.isfinite().all()):
                    raise DataError(f"image {row}: {group} returns values that are not finite. Leave the image out.")
                own = {"output": output.float(), "macs": int(values["macs"][k]), "seconds": float(values["seconds"])}
                if self.maps:
                    own["output"] = torch.stack([self.kept(one, targets[k], row) for one in output])
                    own |= self._of_map(group, output, source, torch.as_tensor(targets[k]), row)
                    own["padded"] = bool(values.get("padded"))
                found.setdefault(group, {})[self.keys[row]] = own
        return found

    def kept(self, output: Tensor, target: Any, row: int) -> Tensor:
        """Of one image's output what is kept: of a map, some pixels."""
        if not self.maps:
            return output.float()
        shape, count, places = self._places(output, torch.as_tensor(target), row)
        return pixels.at_places(output, shape, places, count)

    def _places(self, output: Tensor, target: Tensor, row: int) -> tuple[tuple[int, ...], int, Tensor]:
        count = pixels.pixel_count(output.shape[-3] if output.ndim >= 3 else 1)
        return tuple(target.shape[-2:]), count, pixels.sampled(target, self.keys[row], count, self.pipeline.task)

    def _of_map(self, group: PassGroup, output: Tensor, source: Source, target: Tensor, row: int) -> Values:
        task = self.pipeline.task
        shape, count, places = self._places(output[0], target, row)
        size, kept = (int(source.size[0]), int(source.size[1])), Values()
        if group.plain and TASKS[task].gates:
            kept["tiles"] = pixels.tile_confidence(output[:1].float(), size, task)
        if group == PassGroup("base"):
            kept["labels"] = pixels.labels_at(target, places, count, task)
            kept["at"] = pixels.tile_places(size, shape, places, count)
            kept |= {"height": size[0], "width": size[1], "labelled": len(places)}
        return kept


def gather_pool(
    store: PoolStore, groups: Sequence[PassGroup], us: World, batch_size: int | None = None, show: bool = False
) -> Pool:
    """All passes of all images: what is in the cache is taken from there, the rest is computed."""
    caches = {group: store.open(group) for group in groups}
    missing = {group: {key for key in store.keys if key not in cache} for group, cache in caches.items()}
    todo = [i for i, key in enumerate(store.keys) if any(key in keys for keys in missing.values())]
    passes = sum(len(keys) * (1 if g.states is None else g.states.count) for g, keys in missing.items())
    if show and us.leads and store.folder is not None:
        tell_reused(len(store.keys) - len(todo), len(store.keys), store.folder)
    reader = LabelledReader(store.data, store.pipeline.better, batch_size)
    share = todo[us.rank :: us.size]
    with show_progress("passes", len(share), show and us.leads and bool(share)) as advance:
        start, first = time.perf_counter(), True
        for batch in reader.batches(share):
            wanted = [g for g, keys in missing.items() if any(store.keys[i] in keys for i in batch[0])]
            for group, values in store.values(wanted, batch).items():
                caches[group].put(values)
            if show and us.leads and first:
                spent = time.perf_counter() - start
                print(_estimate(passes, len(todo), spent * len(share) / len(batch[0])), file=sys.stderr, flush=True)
                first = False
            advance(len(batch[0]), "")
    us.wait()
    for cache in caches.values():
        cache.reload()
    readable = [i for i, key in enumerate(store.keys) if all(key in cache for cache in caches.values())]
    if not readable:
        raise DataError(f"data: none of {len(store.keys)} images could be read.")
    return _joined(store, caches, readable)


def _estimate(passes: int, images: int, seconds: float) -> str:
    minutes = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"{passes:,} forward passes of {images:,} images, about {minutes}"


def _joined(store: PoolStore, caches: Mapping[PassGroup, Cache], rows: Sequence[int]) -> Pool:
    """Everything from the cache, in the order of the data."""
    outputs: list[Tensor] = []
    counts, macs, seconds = [], [], []
    base = next(iter(caches))
    tiles: dict[str, list[Tensor]] = {}
    first: list[Values] = []
    for group, cache in caches.items():
        own = [cache.get(store.keys[i]) or {} for i in rows]
        outputs.append(torch.stack([v["output"] for v in own], 1))
        counts.append(len(outputs[-1]))
        macs.append([v["macs"] for v in own])
        seconds.append(median(v["seconds"] for v in own))
        if "tiles" in own[0]:
            tiles[group.network] = [v["tiles"] for v in own]
        first = first if group != base else [{k: v for k, v in o.items() if k != "output"} for o in own]
        cache.close()
    joined = torch.cat(outputs)
    if not store.maps:
        targets = _targets(store.data, rows)
    else:
        joined, targets = joined[:, :, :, None, :], torch.stack([v["labels"] for v in first])[..., None, :]
    work = torch.tensor(macs, dtype=torch.float64)
    return Pool(
        task=store.pipeline.task,
        groups=tuple(caches),
        counts=tuple(counts),
        outputs=joined,
        macs=work,
        seconds=torch.tensor(seconds, dtype=torch.float64),
        targets=targets,
        keys=tuple(store.keys[i] for i in rows),
        rows=tuple(rows),
        maps=_map_pixels(first, tiles) if store.maps else None,
        timed=bool((work == 0).any()),
    )


def _targets(data: Data, rows: Sequence[int]) -> Tensor:
    """The labels, without decoding an image."""
    found = []
    for i in rows:
        target = data.tensors(i)[1] if isinstance(data, FromBatches) else data[i].target
        found.append(target() if callable(target) else target)
    return torch.stack([torch.as_tensor(target) for target in found])


def _map_pixels(first: Sequence[Values], tiles: dict[str, list[Tensor]]) -> MapPixels:
    at = torch.stack([v["at"] for v in first])
    valid = torch.arange(at.shape[1])[None] < torch.tensor([v["labelled"] for v in first])[:, None]
    sizes = [(int(v["height"]), int(v["width"])) for v in first]
    return MapPixels(at, valid, tiles, sizes, [bool(v["padded"]) for v in first])
