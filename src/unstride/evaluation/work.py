"""The work of an evaluation: images in shards, shards dealt to processes, each finished batch in the cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unstride.data import Dataset
from unstride.data.batches import FromBatches
from unstride.enhanced import Enhanced
from unstride.errors import DataError, InputError, UnstrideError
from unstride.evaluation import measures, metrics
from unstride.evaluation.runner import Outcome, Runner, Setting
from unstride.evaluation.shards import Array, Shard
from unstride.models.weights import place
from unstride.tasks.confidence import two_class
from unstride.execution.prediction import at_size
from unstride.storage.cache import Cache, Values, tell_reused
from unstride.storage.distributed import World
from unstride.storage.progress import progress as show_progress
from unstride.views.images import Preprocess
from unstride.views.source import PILImages

TIMED = 2  # shards, at their first batch
_AHEAD = 64  # images decoded before they are needed, at most
_READERS = 4


@dataclass(frozen=True, eq=False)
class Job:
    runner: Runner
    dataset: Dataset | FromBatches
    wide: Preprocess | None
    batch_size: int
    seed: int

    @property
    def better(self) -> Enhanced:
        return self.runner.better

    @property
    def images(self) -> Dataset:
        """The data set with its images; batches have none, and nobody asks them."""
        assert isinstance(self.dataset, Dataset)
        return self.dataset

    @property
    def task(self) -> str:
        return self.better.task

    def parts(self) -> list[range]:
        """The images of each shard; they do not depend on the batch size, so a run may be resumed with another."""
        size, total = measures.measure_of(self.task).shard, len(self.dataset)
        return [range(i, min(i + size, total)) for i in range(0, total, size)]


def work(job: Job, cache: Cache, keys: Sequence[str], us: World, progress: bool) -> list[Shard]:
    """Evaluates the images that are not in the cache, each process its share; returns all of them (on rank 0)."""
    parts = job.parts()
    todo = us.share([[i for i in part if keys[i] not in cache] for part in parts] if us.leads else [])
    mine = [n for n, missing in enumerate(todo) if missing][us.rank :: us.size]
    label = "evaluating" + (f" (process 1 of {us.size})" if us.size > 1 else "")
    if us.leads:
        tell_reused(len(keys) - sum(map(len, todo)), len(keys), cache.folder)
    start, done = time.monotonic(), 0
    with show_progress(label, sum(len(todo[n]) for n in mine), progress and us.leads) as advance:
        for n in mine:
            timing = f"timing {n}"
            wanted = n < TIMED and timing not in cache
            for batch in _evaluated(job, todo[n], wanted):
                values = {keys[i]: value for i, value in batch.values.items()}
                cache.put({**values, **({timing: batch.timing} if batch.timing else {})})
                done += len(values)
                advance(len(values), f"{done / (time.monotonic() - start):.1f} images/s")
    us.wait()
    if not us.leads:
        return []
    cache.reload()
    return [_shard(cache, part, keys, number) for number, part in enumerate(parts)]


def _shard(cache: Cache, part: range, keys: Sequence[str], number: int) -> Shard:
    """What the cache holds of these images."""
    images, errors, memory = [], {}, 0
    for i in part:
        values = cache.get(keys[i])
        if values is None:
            raise DataError(f"{cache.folder}: image {i + 1} cannot be read back; do all processes see the same folder?")
        memory = max(memory, values.pop("memory"))
        if "error" in values:
            errors[i] = values["error"]
        else:
            images.append((i, {name: value.numpy() for name, value in values.items()}))
    timing = (cache.get(f"timing {number}") if number < TIMED else None) or {"seconds": [], "images": 0}
    return Shard.of(images, errors=errors, seconds=timing["seconds"], timed_images=timing["images"], memory=memory)


@dataclass(frozen=True, eq=False)
class _Batch:
    """What the cache keeps of some images, by index, and the seconds that they took, where these were measured."""

    values: dict[int, Values]
    timing: Values | None = None


def _evaluated(job: Job, part: Sequence[int], timed: bool) -> Iterator[_Batch]:
    """The images of a shard, batch by batch; at last those that cannot be read."""
    unreadable: dict[int, str] = {}
    device = place(job.better.model)[0]
    for batch in _batches(job, part, unreadable):
        errors: dict[int, str] = {}
        found = _scored(job, batch, errors)
        timing = None
        if timed and found:
            timing, timed = {"seconds": _timed(job, batch), "images": len(batch)}, False
        memory = {"memory": _peak_memory(device)}
        values: dict[int, Values] = {i: {"error": text, **memory} for i, text in errors.items()}
        for i, scores in found:
            values[i] = {**{n: torch.from_numpy(np.array(v)) for n, v in scores.items()}, **memory}
        yield _Batch(values, timing)
    if unreadable:
        yield _Batch({i: {"error": text, "memory": _peak_memory(device)} for i, text in unreadable.items()})


@dataclass(frozen=True, eq=False)
class _Image:
    index: int
    name: str
    x: Tensor
    wide: Tensor | None
    target: int | Tensor
    image: Image.Image | None = None  # where views are made from it


def _batches(job: Job, part: Sequence[int], errors: dict[int, str]) -> Iterator[list[_Image]]:
    """Batches of images of one size. Those that cannot be read go to `errors`."""
    buckets: dict[tuple[int, ...], list[_Image]] = {}
    for index, image in _read(job, part):
        if isinstance(image, str):
            errors[index] = image
            continue
        shape = (*image.x.shape, *(() if image.wide is None else image.wide.shape))
        bucket = buckets.setdefault(shape, [])
        bucket.append(image)
        if len(bucket) == job.batch_size:
            yield buckets.pop(shape)
    yield from buckets.values()


def _read_one(job: Job, index: int) -> _Image | str:
    """An image, or why there is none."""
    data = job.dataset
    if isinstance(data, FromBatches):
        x, target = data.tensors(index)
        return _Image(index, f"image {index}", x, None, target)
    item = data[index]
    try:
        image, truth = item.read()
        wide = None if job.wide is None else job.wide(image)
        kept = image if job.better.recipe.stages and isinstance(image, Image.Image) else None
        return _Image(index, item.id, data.preprocess(image), wide, truth, kept)
    except (DataError, OSError) as error:
        return f"{item.id}: {error}"


def answered(job: Job, index: int) -> dict[Setting, Outcome]:
    """What one image is answered in every setting, as when it was evaluated."""
    image = _read_one(job, index)
    if isinstance(image, str):
        raise DataError(image)
    x, wide = _stacked(job, [image])
    return job.runner(x, wide, _images(job, [image], x))


def _read(job: Job, part: Sequence[int]) -> Iterator[tuple[int, _Image | str]]:
    """Images in order, decoded a little ahead by a few threads."""

    one = partial(_read_one, job)
    ahead = min(_AHEAD, 2 * job.batch_size)
    with ThreadPoolExecutor(_READERS) as pool:
        rest = iter(part)
        waiting: list[tuple[int, Future[_Image | str]]] = [(i, pool.submit(one, i)) for i in islice(rest, ahead)]
        while waiting:
            index, future = waiting.pop(0)
            waiting += [(i, pool.submit(one, i)) for i in islice(rest, 1)]
            yield index, future.result()


def _stacked(job: Job, batch: Sequence[_Image]) -> tuple[Tensor, Tensor | None]:
    device, dtype = place(job.better.model)
    wide = [image.wide for image in batch if image.wide is not None]
    x = torch.stack([image.x for image in batch]).to(device, dtype)
    return x, torch.stack(wide).to(device, dtype) if wide else None


def _images(job: Job, batch: Sequence[_Image], like: Tensor) -> PILImages | None:
    images = [image.image for image in batch if image.image is not None]
    if isinstance(job.dataset, FromBatches) or len(images) < len(batch):
        return None
    return PILImages(images, job.dataset.preprocess, like)


def _scored(job: Job, batch: list[_Image], errors: dict[int, str]) -> list[tuple[int, dict[str, Array]]]:
    """The values of each image; one that the model refuses is an error of its own, not of its batch."""
    try:
        x, wide = _stacked(job, batch)
        found = job.runner(x, wide, _images(job, batch, x))
        logits = [found[setting].logits for setting in job.runner.settings]
        values = _values(job.task, logits, batch)
        macs = np.array([found[setting].macs for setting in job.runner.settings]).T
        plain = job.runner.plain_macs(x)
    except UnstrideError as error:
        if len(batch) > 1:
            return [scored for image in batch for scored in _scored(job, [image], errors)]
        errors[batch[0].index] = f"{batch[0].name}: {error}"
        return []
    return [
        (image.index, {**values[k], "macs": macs[k], "plain_macs": np.array(plain, np.int64)})
        for k, image in enumerate(batch)
    ]


def _values(task: str, logits: Sequence[Tensor], batch: Sequence[_Image]) -> list[dict[str, Array]]:
    own = {"classification": _classified, "segmentation": _segmented}
    if task in own:
        return own[task](logits, batch)
    return measures.score(task, logits, [image.target for image in batch])


def _classified(logits: Sequence[Tensor], batch: Sequence[_Image]) -> list[dict[str, Array]]:
    labels = [int(image.target) for image in batch]
    scores = [metrics.score(two_class(one), labels) for one in logits]
    return [
        {
            name: np.array([getattr(s, name)[k] for s in scores])
            for name in ("top1", "top5", "nll", "brier", "confidence")
        }
        for k in range(len(batch))
    ]


def _segmented(logits: Sequence[Tensor], batch: Sequence[_Image]) -> list[dict[str, Array]]:
    values = []
    for k, image in enumerate(batch):
        assert isinstance(image.target, Tensor)
        maps = []
        for one in logits:
            scores = two_class(one[k : k + 1])
            if not bool(torch.isfinite(scores).all()):
                raise InputError("logits are not finite; half precision may have overflowed, try float32")
            same = scores.shape[2:] == image.target.shape
            maps.append((scores if same else at_size(scores.float(), image.target.shape)).argmax(1)[0].cpu())
        classes = max(2, logits[0].shape[1])
        areas = [metrics.areas(metrics.confusion(one, image.target, classes)) for one in maps]
        flips = [metrics.changed(maps[0], one, image.target) for one in maps]
        values.append({"areas": np.stack(areas), "flips": np.array(flips, np.int64)})
    return values


def _timed(job: Job, batch: Sequence[_Image]) -> list[float]:
    """Seconds of each setting on a batch that was just run; the plain network before and after the others."""
    x, wide = _stacked(job, batch)
    plain, *others = job.runner.settings
    before = job.runner.seconds(x, wide, plain)
    middle = [job.runner.seconds(x, wide, setting, _images(job, batch, x)) for setting in others]
    return [(before + job.runner.seconds(x, wide, plain)) / 2, *middle]


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
