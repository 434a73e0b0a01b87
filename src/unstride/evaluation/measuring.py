"""Labelled images through pipelines, batch by batch: what counts of each image, its cost and its time.

measurements = measure([Variant("flip", pipeline)], data, scoring, folder)
scoring.metrics(measurements[0].stats)

Each finished batch is in the cache: more images, a kill or another process lose at most one batch. Images are decoded
once for all pipelines, a little ahead, by a few threads.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unstride.data.batches import FromBatches
from unstride.errors import DataError, InputError, ModelRaised
from unstride.evaluation.labelled import Data
from unstride.evaluation.metrics import Array
from unstride.evaluation.scoring import Scoring, Stats
from unstride.evaluation.timing import wait_for
from unstride.execution.runner import StageResult
from unstride.models.onnx_files import COST
from unstride.models.weights import place
from unstride.pipeline import Pipeline
from unstride.recipe.view import PLAIN
from unstride.storage.cache import Cache, RunKey, Values, tell_reused
from unstride.storage.distributed import World
from unstride.storage.progress import progress as show_progress
from unstride.storage.provenance import versions
from unstride.tasks.tasks import TASKS
from unstride.views.source import PILImages

SIDE = 224  # pixels: of images of this size, so many are one batch
BATCH = 32
CHUNK = 64  # images that one process takes at once
PACKED = 256  # images that pass gates together, so that those who go on fill whole batches
_READERS = 4
_OWN = ("cost", "macs", "seconds")  # of an image, beside its stats


@dataclass(frozen=True, eq=False)
class Variant:
    """What is measured. `budgets`: of a recipe that is one Search, the numbers of states at which it is measured."""

    name: str
    pipeline: Pipeline
    budgets: tuple[int, ...] = ()

    def names(self) -> list[str]:
        """Of its rows."""
        return [f"{self.name}, {b} state{'s' * (b > 1)}" for b in self.budgets] or [self.name]


@dataclass(frozen=True, eq=False)
class Measurement:
    """What one row rests on: arrays with a line for each image that was measured.

    Attributes:
        costs: in forward passes of the pipeline's base network; NaN where MACs cannot be counted.
        seconds: of an image; NaN where the first batch of its size was not timed.
        errors: of images that could not be measured, why.
    """

    name: str
    indices: NDArray[np.int64]
    stats: Stats
    costs: Array
    macs: Array
    seconds: Array
    errors: Mapping[int, str] = field(default_factory=dict)

    def only(self, indices: NDArray[np.int64]) -> Measurement:
        """Of some of its images."""
        rows = np.flatnonzero(np.isin(self.indices, indices))
        stats = {name: np.asarray(value)[rows] for name, value in self.stats.items()}
        arrays = (self.costs[rows], self.macs[rows], self.seconds[rows])
        return Measurement(self.name, self.indices[rows], stats, *arrays, self.errors)


def measure(
    variants: Sequence[Variant],
    data: Data,
    scoring: Scoring,
    keys: Sequence[str],
    folder: Path | None = None,
    batch_size: int | None = None,
    us: World | None = None,
    progress: bool = False,
) -> list[Measurement]:
    """Measure the images that are not in the cache; of several processes, each its share, and rank 0 gets the results.

    Args:
        keys: what identifies each image, as `data.keys()` gives it.
        folder: of the cache; None keeps everything in memory.
        us: the processes of this run, from `storage.distributed.world()`.
    """
    us = us or World()
    example = first_image(data)[None]
    caches = [Cache.open(folder, run_key(variant, scoring, example)) for variant in variants]
    size = batch_size or usual_batch(example)
    missing = [[v for v, cache in enumerate(caches) if key not in cache] for key in keys]
    missing = us.share(missing)
    if us.leads:
        tell_reused(sum(not own for own in missing), len(keys), folder)
    todo = [i for i, own in enumerate(missing) if own]
    together = max(size, PACKED) if any(map(_gates_images, variants)) else size
    chunk = max(CHUNK, together)
    chunks = [todo[start : start + chunk] for start in range(0, len(todo), chunk)][us.rank :: us.size]
    label = "evaluating" + (f" (process 1 of {us.size})" if us.size > 1 else "")
    run = _Run(variants, data, scoring, caches, keys, size, together)
    with show_progress(label, sum(map(len, chunks)), progress and us.leads) as advance:
        start, done = time.monotonic(), 0
        for indices in chunks:
            for count in run.chunk(indices, missing):
                done += count
                advance(count, f"{done / (time.monotonic() - start):.1f} images/s")
    us.wait()
    return [m for v, cache in zip(variants, caches, strict=True) for m in _read(v, cache, keys)] if us.leads else []


def run_key(variant: Variant, scoring: Scoring, example: Tensor) -> RunKey:
    """What the stats of an image depend on beside the image."""
    known = versions()
    settings = {
        **variant.pipeline.key(example),
        "task": scoring.task,
        "ignore": scoring.ignore,
        "budgets": list(variant.budgets),
        "versions": {name: known.get(name) for name in ("unstride", "torch")},
    }
    return RunKey("evaluation", settings)


def first_image(data: Data) -> Tensor:
    """The first image that can be read, as the base network takes it."""
    problem = ""
    for i in range(len(data)):
        try:
            return data.tensors(i)[0]
        except (DataError, OSError) as error:
            problem = problem or str(error)
    raise DataError(f"{data.name}: none of {len(data)} images can be read. The first: {problem}")


def usual_batch(example: Tensor) -> int:
    """Images for one batch, by their size."""
    return min(2 * BATCH, max(1, BATCH * SIDE**2 // math.prod(example.shape[2:])))


# ---------------------------------------------------------------- images
@dataclass(frozen=True, eq=False)
class _LabelledImage:
    index: int
    name: str
    pixels: Tensor
    target: int | Tensor
    image: Image.Image | None = None  # of which views are made


def _read_image(data: Data, index: int) -> _LabelledImage | str:
    """An image, or why there is none."""
    if isinstance(data, FromBatches):
        pixels, target = data.tensors(index)
        return _LabelledImage(index, f"image {index}", pixels, target)
    item = data[index]
    try:
        image, target = item.read()
        return _LabelledImage(index, item.id, data.preprocess(image), target, image)
    except (DataError, OSError) as error:
        return f"{item.id}: {error}"


def _read_ahead(data: Data, indices: Sequence[int], ahead: int) -> Iterator[tuple[int, _LabelledImage | str]]:
    """Images in order, decoded before they are needed."""
    one = partial(_read_image, data)
    with ThreadPoolExecutor(_READERS) as pool:
        rest = iter(indices)
        waiting: list[tuple[int, Future[_LabelledImage | str]]] = [
            (i, pool.submit(one, i)) for i in islice(rest, ahead)
        ]
        while waiting:
            index, future = waiting.pop(0)
            waiting += [(i, pool.submit(one, i)) for i in islice(rest, 1)]
            yield index, future.result()


def source_of(data: Data, images: Sequence[_LabelledImage], device: torch.device, dtype: torch.dtype) -> Any:
    """A batch as `better.run` takes it, on the device: copied from pinned memory while the processor goes on."""
    pixels = torch.stack([image.pixels for image in images])
    if device.type == "cuda":
        pixels = pixels.pin_memory()
    pixels = pixels.to(device, dtype, non_blocking=True)
    if isinstance(data, FromBatches):
        return pixels
    opened = [image.image for image in images if image.image is not None]
    return PILImages(opened, data.preprocess, pixels[:0], {PLAIN: pixels})


def outputs_of(variants: Sequence[Variant], data: Data, index: int) -> list[Tensor]:
    """What each variant gives for one image, computed again."""
    image = _read_image(data, index)
    if isinstance(image, str):
        raise DataError(image)
    source = source_of(data, [image], *place(variants[0].pipeline.better.model))
    return [variant.pipeline.better.run(source).output[0].cpu() for variant in variants]


# ---------------------------------------------------------------- batches
class _Run:
    """Runs images through every pipeline that needs them, and caches the results.

    `together` images start at once, in batches of `size`.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        data: Data,
        scoring: Scoring,
        caches: Sequence[Cache],
        keys: Sequence[str],
        size: int,
        together: int,
    ) -> None:
        self.variants, self.data, self.scoring, self.caches, self.keys = variants, data, scoring, caches, keys
        self.size, self.together = size, together
        self.place = place(variants[0].pipeline.better.model)
        self.warm: set[tuple[int, tuple[int, ...]]] = set()
        self.uncounted = [_uncounted(variant) for variant in variants]

    def chunk(self, indices: Sequence[int], missing: Sequence[Sequence[int]]) -> Iterator[int]:
        """The images of a chunk in groups of one shape; yields how many are done."""
        waiting: dict[Any, list[_LabelledImage]] = {}
        for index, image in _read_ahead(self.data, indices, min(64, 2 * self.size)):
            if isinstance(image, str):
                for v in missing[index]:
                    self.caches[v].put({self.keys[index]: {"error": image}})
                yield 1
                continue
            kind = (tuple(image.pixels.shape), tuple(missing[index]))
            waiting.setdefault(kind, []).append(image)
            if len(waiting[kind]) >= self.enough(kind[0]):
                yield self.batch(waiting.pop(kind), missing[index])
        for (_, wanted), images in waiting.items():
            yield self.batch(images, wanted)

    def enough(self, shape: tuple[int, ...]) -> int:
        """The first batch of a size warms up."""
        return self.together if any(shape == known for _, known in self.warm) else self.size

    def batch(self, images: Sequence[_LabelledImage], wanted: Sequence[int]) -> int:
        source = source_of(self.data, images, *self.place)
        for v in wanted:
            self.caches[v].put(self.results(v, images, source))
        return len(images)

    def results(self, v: int, images: Sequence[_LabelledImage], source: Any) -> dict[str, Values]:
        """The values of each image by its key; one that the model refuses is an error of its own."""
        try:
            return self.computed(v, images, source)
        except (InputError, DataError, ModelRaised) as error:
            if len(images) == 1:
                return {self.keys[images[0].index]: {"error": f"{images[0].name}: {error}"}}
            middle = len(images) // 2
            parts = [(part, source_of(self.data, part, *self.place)) for part in (images[:middle], images[middle:])]
            return {k: value for part, own in parts for k, value in self.results(v, part, own).items()}

    def computed(self, v: int, images: Sequence[_LabelledImage], source: Any) -> dict[str, Values]:
        variant = self.variants[v]
        result, seconds = self.timed(v, images, source)
        reported = result.returned()[COST].tolist() if _reports_cost(variant) else None
        outputs = result.at_budgets() if variant.budgets else {0: (result.output, reported or result.costs)}
        base = 0 if self.uncounted[v] else result.record.base_macs
        if any(self.uncounted) and math.isnan(seconds):  # time is the only cost there is
            _, seconds = self.timed(v, images, source)
        values: list[Values] = [{} for _ in images]
        for budget, (output, costs) in outputs.items():
            stats = self.scoring.split(self.scoring.stats(output, [image.target for image in images]))
            for own, stat, cost in zip(values, stats, costs, strict=True):
                cost = cost if cost > 0 and (base > 1 or reported is not None) else math.nan
                own_seconds = seconds if budget in (0, max(variant.budgets, default=0)) else math.nan
                numbers = {"cost": cost, "macs": cost * base if base > 1 and cost > 0 else 0.0, "seconds": own_seconds}
                tensors = {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
                own |= {f"{budget}.{name}": value for name, value in {**stat, **tensors}.items()}
        return {self.keys[image.index]: own for image, own in zip(images, values, strict=True)}

    def timed(self, v: int, images: Sequence[_LabelledImage], source: Any) -> tuple[StageResult, float]:
        """A batch through a pipeline, and the seconds of an image; NaN for the first batch of its size."""
        variant = self.variants[v]
        start = time.perf_counter()
        result = variant.pipeline.better.run(source, budgets=variant.budgets, batch_size=self.size)
        wait_for(self.place[0])
        seconds = (time.perf_counter() - start) / len(images)
        kind = (v, tuple(images[0].pixels.shape))
        first = kind not in self.warm
        self.warm.add(kind)
        return result, math.nan if first else seconds


def _gates_images(variant: Variant) -> bool:
    recipe = variant.pipeline.better.recipe
    return not TASKS[recipe.task].maps and any(stage.gate is not None for stage in recipe.stages)


def _uncounted(variant: Variant) -> bool:
    """Whether MACs of a network cannot be counted, as of quantised ones and of ONNX files."""
    better, loaded = variant.pipeline.better, variant.pipeline.base
    macs = []
    for name in better.recipe.networks:
        network = better.networks[name]
        with contextlib.suppress(Exception):  # it may want images of another kind; then the run itself counts
            macs.append(network.forward_macs(loaded.example().to(*place(network.model))))
    return min(macs, default=2) <= 1


def _reports_cost(variant: Variant) -> bool:
    """Whether it is one network as it is, which itself says what each image cost, as exported files do."""
    better = variant.pipeline.better
    stages = better.recipe.stages
    if len(stages) > 1 or stages[0].views != (PLAIN,) or stages[0].states is not None:
        return False
    return bool(getattr(better.networks[stages[0].network].model, "reports_cost", False))


def _read(variant: Variant, cache: Cache, keys: Sequence[str]) -> list[Measurement]:
    """What the cache holds of all images, a measurement for each budget."""
    cache.reload()
    parts: dict[int, list[Values]] = {budget: [] for budget in variant.budgets or (0,)}
    indices, errors = [], {}
    for i, key in enumerate(keys):
        values = cache.get(key)
        if values is None:
            raise DataError(f"{cache.folder}: image {i + 1} cannot be read back. Do all processes see the same folder?")
        if "error" in values:
            errors[i] = values["error"]
            continue
        indices.append(i)
        for budget, own in parts.items():
            own.append({n.partition(".")[2]: v for n, v in values.items() if n.partition(".")[0] == str(budget)})
    cache.close()
    if not indices:
        raise DataError(f"none of {len(keys)} images could be measured. The first: {next(iter(errors.values()))}")
    made = []
    for name, own in zip(variant.names(), parts.values(), strict=True):
        joined = {n: np.concatenate([np.asarray(one[n]) for one in own]) for n in own[0]}
        costs, macs, seconds = (joined.pop(n) for n in _OWN)
        made.append(Measurement(name, np.array(indices), joined, costs, macs, seconds, errors))
    return made
