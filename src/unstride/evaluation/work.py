"""The work of an evaluation: images in shards, shards dealt to processes, each finished one a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

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
from unstride.procedure.aggregate import two_class
from unstride.procedure.prediction import at_size
from unstride.storage import outputs
from unstride.storage.distributed import World
from unstride.storage.progress import progress as show_progress
from unstride.views.canvas import PILImages
from unstride.views.images import Preprocess

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


def work(job: Job, folder: Path, run: str, us: World, progress: bool) -> list[Shard]:
    """Makes the shards that are missing, each process its share; returns all of them (on rank 0)."""
    parts = job.parts()
    files = [folder / f"{number:06d}.safetensors" for number in range(len(parts))]
    todo = [n for n in range(len(parts)) if Shard.load(files[n], run, parts[n]) is None] if us.leads else []
    todo = us.share(todo)
    mine = todo[us.rank :: us.size]
    label = "evaluating" + (f" (process 1 of {us.size})" if us.size > 1 else "")
    if len(todo) < len(parts):
        label += f", {len(parts) - len(todo)} of {len(parts)} shards were done"
    start, done = time.monotonic(), 0
    with show_progress(label, sum(len(parts[n]) for n in mine), progress and us.leads) as advance:
        for n in mine:
            for count, result in _shard(job, parts[n], n < TIMED):
                if result is not None:
                    result.save(files[n], run)
                if count:
                    done += count
                    advance(count, f"{done / (time.monotonic() - start):.1f} images/s")
    us.wait()
    if not us.leads:
        return []
    outputs.sweep(folder)
    shards = [Shard.load(file, run, part) for file, part in zip(files, parts, strict=True)]
    lost = [file.name for file, shard in zip(files, shards, strict=True) if shard is None]
    if lost:
        raise DataError(f"{folder}: {', '.join(lost[:3])} cannot be read back; do all processes see the same folder?")
    return [shard for shard in shards if shard is not None]


def _shard(job: Job, part: range, timed: bool) -> Iterator[tuple[int, Shard | None]]:
    """Steps of (images done, None); at last (0, the shard)."""
    images: list[tuple[int, dict[str, Array]]] = []
    errors: dict[int, str] = {}
    seconds: list[float] = []
    timed_images = seen = 0
    for batch in _batches(job, part, errors):
        seen += len(batch)
        found = _scored(job, batch, errors)
        images += found
        if timed and found and not seconds:
            seconds, timed_images = _timed(job, batch), len(batch)
        yield len(batch), None
    yield len(part) - seen, None  # those that could not be read
    memory = _peak_memory(place(job.better.model)[0])
    yield 0, Shard.of(images, errors=errors, seconds=seconds, timed_images=timed_images, memory=memory)


@dataclass(frozen=True, eq=False)
class _Image:
    index: int
    name: str
    x: Tensor
    wide: Tensor | None
    target: int | Tensor
    image: Image.Image | None = None  # where views are made from it


def _batches(job: Job, part: range, errors: dict[int, str]) -> Iterator[list[_Image]]:
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


def _read(job: Job, part: range) -> Iterator[tuple[int, _Image | str]]:
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
