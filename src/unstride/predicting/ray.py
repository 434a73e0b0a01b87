"""Predictions on Ray: `unstride predict ... --ray ADDRESS`, and a class for pipelines of Ray Data.

ray.data.read_images("s3://bucket", include_paths=True).map_batches(
    RayPredictor, fn_constructor_kwargs={"model": "timm:resnet18", "recipe": "flip"}, batch_size=64, concurrency=2
)
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from unstride.errors import DataError, InputError, OptionError
from unstride.pipeline import open_pipeline
from unstride.predicting.containers import Entry
from unstride.predicting.reading import ImageReader, Preparation, PreparedImage
from unstride.predicting.run import open_runner
from unstride.predicting.summary import PartList
from unstride.storage.cache import Cache
from unstride.storage.fingerprint import text_digest

if TYPE_CHECKING:
    from unstride.predicting.run import PredictJob

_AHEAD = 2  # parts that wait for each worker


class RayPredictor:
    """For `map_batches`: adds the columns of `unstride.predict` to a batch, and leaves out the pixels.

    Args:
        model, recipe, options: as `unstride.predict` takes them.
        top: classes in each row.

    A batch has a column `bytes` (of `ray.data.read_binary_files`) or `image` (of `ray.data.read_images`). The names of
    the images are in the column `path`, with `include_paths=True`. Only `bytes` are decoded by unstride itself, with
    their orientation and 16-bit values: the rows are then those of `unstride.predict`.
    """

    def __init__(self, model: Any = None, top: int = 5, batch_size: int | None = None, **options: Any) -> None:
        self.runner = open_runner(open_pipeline(model, **options), top, batch_size)
        if self.runner.columns.file is not None:
            raise OptionError(
                f"RayPredictor: task {self.runner.columns.task!r} gives a map for each image, which has no place in a "
                "table. Use unstride predict --ray, which writes files."
            )
        self.prepare = self.runner.preparation

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of columns with the rows of its images."""
        names = [str(name) for name in batch["path"]] if "path" in batch else None
        images = [self._prepared(k, image, names) for k, image in enumerate(_images(batch))]
        rows = self.runner.run(0, images).rows
        titles, cells = self.runner.columns.flat_names, [self.runner.columns.flat(row) for row in rows]
        others = {name: values for name, values in batch.items() if name not in ("image", "bytes", "path")}
        columns = {name: _column([row[k] for row in cells]) for k, name in enumerate(titles)}
        return {**others, **columns}

    def _prepared(self, index: int, image: Any, names: list[str] | None) -> PreparedImage:
        name = names[index] if names is not None else f"{index:08d}"
        if isinstance(image, bytes):
            return self.prepare(index, Entry(name, lambda: image, name))
        try:
            return self.prepare.prepared(index, name, image)
        except DataError as error:
            return PreparedImage(index, name, error=str(error))


def _images(batch: Mapping[str, Any]) -> Iterator[Image.Image | bytes]:
    if "bytes" in batch:
        yield from (bytes(data) for data in batch["bytes"])
    elif "image" in batch:
        for pixels in batch["image"]:
            array = np.asarray(pixels)
            yield Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)
    else:
        raise InputError(f"RayPredictor: got the columns {', '.join(batch)}, expected one called image or bytes.")


def _column(values: list[Any]) -> np.ndarray[Any, Any]:
    """An array of numbers or of objects: None where a row has no value."""
    plain = all(isinstance(v, bool) for v in values) or all(type(v) in (int, float) for v in values)
    return np.array(values) if plain else np.array(values, dtype=object)


# ------------------------------------------------------------------------------------------- unstride predict --ray


def work_on_ray(
    job: PredictJob, cache: Cache, parts: PartList, address: str, arguments: Mapping[str, Any], done: Callable[..., Any]
) -> float:
    """Every part on a worker of the cluster, saved here. A part whose worker dies is computed again by another one.

    Returns the seconds that the networks waited for images, a mean over the workers.
    """
    ray = _library()
    with _connected(ray, address):
        count = _workers(ray)
        options = {**arguments, "top": job.runner.columns.top, "batch_size": job.runner.batch_size, "out": job.out}
        digest = text_digest(job.settings["pipeline"]) if _by_name(arguments["model"]) else None
        remote = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=1)(PartWorker)
        workers = [remote.remote(digest, torch.get_num_threads(), options) for _ in range(count)]
        waiting: dict[Any, tuple[int, int]] = {}  # (part, worker) by reference
        free, waited = deque(k for _ in range(_AHEAD) for k in range(count)), 0.0

        def collect() -> None:
            """Save the next part that is ready; its worker is free."""
            nonlocal waited
            ready, _ = ray.wait(list(waiting), num_returns=1)
            part, worker = waiting.pop(ready[0])
            values, seconds = _result(ray, ready[0])
            waited += seconds / count
            cache.put({parts.keys[part]: values})
            done(len(values["rows"]), waited)
            free.append(worker)

        for part, entries in parts:
            while not free:
                collect()
            worker = free.popleft()
            waiting[workers[worker].run.remote(part, entries)] = part, worker
        while waiting:
            collect()
    return waited


def _by_name(model: Any) -> bool:
    """True if workers load the networks themselves: other models travel to them as they are."""
    several = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else [model]
    return all(entry is None or isinstance(entry, str | Path) for entry in several)


class PartWorker:
    """A process of the cluster with the networks of a run. `digest`: of the networks that it loads by name."""

    def __init__(self, digest: str | None, threads: int, options: Mapping[str, Any]) -> None:
        torch.set_num_threads(threads)  # another number of threads rounds differently
        keywords = dict(options)
        top, batch_size, out = (keywords.pop(name) for name in ("top", "batch_size", "out"))
        pipeline = open_pipeline(keywords.pop("model"), **keywords)
        about = {**pipeline.key(pipeline.base.example()), "classes": list(pipeline.classes)}
        if digest is not None and text_digest(about) != digest:
            raise OptionError("a worker of the cluster has other networks or another recipe than this process.")
        self.runner = open_runner(pipeline, top, batch_size, Path(out))
        self.prepare: Preparation = self.runner.preparation

    def run(self, part: int, entries: list[tuple[int, Entry]]) -> tuple[dict[str, Any], float]:
        """A part as plain values, and the seconds of waiting. Maps go to the folder that all processes see."""
        reader = ImageReader(self.prepare)
        read = reader(iter([(part, index, entry) for index, entry in entries]))
        return asdict(self.runner.run(part, (image for _, image in read))), reader.waited


def _result(ray: Any, reference: Any) -> tuple[dict[str, Any], float]:
    """What a worker returned; errors of the worker are errors here."""
    try:
        values, seconds = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from error
    except ray.exceptions.RayActorError as error:  # it could not load the networks
        raise OptionError(f"--ray: a worker cannot start ({str(error).strip().splitlines()[-1]}).") from error
    return values, seconds


def _library() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise OptionError("--ray needs Ray: pip install 'unstride[ray]'") from error


@contextlib.contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """Connected to a cluster; a caller's own connection is used, and left as it is."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError(f"--ray {address}: cannot connect ({error}). Give local, auto, or HOST:PORT.") from error
    try:
        yield
    finally:
        ray.shutdown()


def _workers(ray: Any) -> int:
    """One for each CPU of the cluster."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))
