r"""`predict(model, images, out)`: every image's answer in a table, however many images there are.

    done = unstride.predict("timm:resnet18", ["photos/", "shard-000.tar"], "predictions.parquet", recipe="flip")
    print(done)

A run that was killed goes on where it was when it is started again: rows are finished in parts, each a file of its own
beside OUT until the last one is done. Under torchrun the parts are dealt to the processes, and the rows are those of
one process with as many threads:

    torchrun --nproc-per-node 2 -m unstride predict SPEC INPUT... --out predictions.jsonl
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import DataError, OptionError, UnstrideError
from unstride.evaluation.loop import prepared
from unstride.models import LoadedModel
from unstride.models import load as load_model
from unstride.models.tasks import task_of
from unstride.models.weights import place
from unstride.predicting.inputs import Entry, Survey, entries, survey
from unstride.predicting.parts import PART, CountedRows, Parts, all_rows, check_out, finished, name_of, write_table
from unstride.predicting.reading import BYTES, Preparing, Reader, Ready, open_either
from unstride.predicting.rows import Columns, Row, over_image, write_map, write_mask
from unstride.tasks.tasks import task_named
from unstride.execution.prediction import Prediction
from unstride.recipe.files import to_data
from unstride.recipe.saving import task_said
from unstride.storage import locks, strict_json
from unstride.storage.artefacts import write_file
from unstride.storage.cache import Cache, RunKey, tell_reused
from unstride.storage.distributed import World, world
from unstride.storage.fingerprint import computation_key, digest, fingerprint, text_digest
from unstride.storage.progress import progress as show_progress
from unstride.storage.provenance import provenance, versions
from unstride.views.source import PILImages
from unstride.recipe.view import PLAIN

BATCH = 32  # images at once; of maps, which are large and of many sizes, one
_PLANS = 8  # captures kept: images of many sizes would otherwise fill the memory with them
_TRIED = 32  # images, to find one that can be read


@dataclass(frozen=True)
class Predicted:
    """What a run did. `waiting` is the share of its time in which the network waited for images."""

    out: str
    images: int
    errors: int
    changed: float  # share of the answers (segmentation: of the pixels) that are not the plain network's
    cost: float  # mean, in plain forwards
    seconds: float  # of this run; those before a crash are not in it
    waiting: float
    masks: str | None = None
    already: bool = False  # the table was there, from an earlier run whose figures these are
    before: int = 0  # of the images, those that a run before a crash had done

    def __str__(self) -> str:
        own = self.images - self.before
        rate = f" ({own / self.seconds:.1f} images/s)" if self.seconds and not self.already else ""
        why = ", see the column `error` of the table" if self.errors else ""
        lines = [
            *(["already done: nothing left to do"] * self.already),
            f"{self.images:,} images, {self.errors:,} of them could not be read or run{why}{rate}",
            f"{self.changed:.2%} changed, at {self.cost:.2f} plain forwards each",
            *([] if self.already else [f"{self.waiting:.0%} of the time was waiting for images"]),
            f"table: {self.out}",
        ]
        return "\n".join(lines + ([f"masks: {self.masks}"] if self.masks else []))


@dataclass(frozen=True, eq=False)
class Job:
    """One run: the model with its recipe, where the images are, and where the rows go."""

    loaded: LoadedModel
    better: Enhanced
    inputs: tuple[str, ...]
    out: Path
    columns: Columns
    batch_size: int
    example: Tensor  # an image as the model takes it

    @property
    def parts(self) -> Parts:
        return Parts.beside(self.out)

    @property
    def masks(self) -> Path | None:
        """Where the maps of the images go, masks or others, where there are any."""
        file = self.columns.file
        return None if file is None else self.out.with_name(f"{self.out.name}.{file}s")

    @property
    def record(self) -> Path:
        return self.out.with_name(self.out.name + ".run.json")


def predict(
    model: str | LoadedModel,
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    weights: str = "default",
    task: str | None = None,
    top: int = 5,
    batch_size: int | None = None,
    progress: bool = False,
    **options: Any,
) -> Predicted:
    """A row for every image in `out` (.jsonl, .csv or .parquet); of maps, a file for each as well: masks as PNG,
    depth and features as .npy. Vectors (an embedding, numbers) are in the row.

    inputs     image files, folders, "@list.txt" (a path on each line, relative to the list), tar
               shards of WebDataset, folders of a Hugging Face `save_to_disk`
    top        classes in each row
    options    what `enhance` takes: recipe, budget, ...

    An image that cannot be read is a row with its error. OUT.run.json says what made the table.
    """
    job = _job(model, inputs, Path(out), weights, task, top, batch_size, options)
    with world() as us:
        found = us.share(survey(job.inputs) if us.leads else Survey(0, ""))
        about = _about(job, found)
        key = RunKey("predict", about)
        if us.share(key.digest) != key.digest:
            raise OptionError("the processes disagree on the model, the images or the options; start all alike")
        before = us.share(_finished(job, key) if us.leads else None)
        if before is not None:
            return before
        if found.count == 0:
            raise DataError(f"{', '.join(job.inputs)}: there is no image")
        with locks.exclusive(job.parts.folder, us.leads):
            if us.leads:
                job.parts.check(key)
            cache = Cache.open(job.parts.folder, key)
            us.wait()
            start = time.perf_counter()
            count, waited, earlier = _work(job, cache, found, us, progress)
            us.wait()
            done = None
            if us.leads:
                seconds = time.perf_counter() - start
                cache.reload()
                if not count:
                    job.parts.remove()
                    raise DataError(f"{', '.join(job.inputs)}: there is no image")
                done = _join(job, cache, count, earlier, seconds, waited / max(seconds, 1e-9))
        if us.leads:
            job.parts.remove()
        told = us.share(done)
        assert told is not None
        return told


def _job(
    model: str | LoadedModel,
    inputs: Any,
    out: Path,
    weights: str,
    task: str | None,
    top: int,
    batch: int | None,
    options: Any,
) -> Job:
    check_out(out)
    if not isinstance(model, str | LoadedModel):
        raise OptionError(f"model is {type(model).__name__}; wanted a name, or what unstride.models.load gives")
    if top < 1 or (batch is not None and batch < 1):
        raise OptionError(f"top and batch_size: got {top} and {batch}, wanted at least 1 of each")
    loaded = load_model(model, weights) if isinstance(model, str) else model
    given = (str(inputs),) if isinstance(inputs, str | Path) else tuple(map(str, inputs))
    if not given:
        raise OptionError("inputs: none given; wanted images, folders, @LIST, tar shards or hf:FOLDER")
    device, dtype = place(loaded.model)
    task = task or task_said(options.get("recipe")) or loaded.task
    found = task_of(task, loaded.model, _example(loaded, given).to(device, dtype))
    meant = task_named(found.task)
    loaded = loaded.for_task(meant.name)
    if meant.maps and meant.name != "features" and loaded.preprocess.crop is not None:
        raise OptionError(
            f"the preprocessing crops to {loaded.preprocess.crop}, but a mask needs the whole image: use crop=None"
        )
    out = Path(os.path.realpath(out))  # what a link stands for, not the link
    example = _example(loaded, given).to(device, dtype)
    better = prepared(loaded.model, example, meant.name, {"preprocess": loaded.preprocess, **options})
    better.assumed = found.assumed
    shown = min(top, len(loaded.classes) or top)
    if not meant.classes and not meant.maps:  # all numbers of the answer
        shown = math.prod(better.plan.found.trace.shapes[better.plan.targets[0].leaf][1:])
    job = Job(loaded, better, given, out, Columns(meant.name, shown), batch or (1 if meant.maps else BATCH), example)
    _check(job)
    return job


def _check(job: Job) -> None:
    """What every image would stumble over is said before the first."""
    for stage in job.better.recipe.stages:
        if stage.gate is not None:
            stage.gate.opens(torch.ones(1))
    for given in map(Path, job.inputs):
        if job.columns.file == "mask" and given.is_dir() and job.out.is_relative_to(os.path.realpath(given)):
            raise OptionError(
                f"--out {job.out}: its masks would lie in {given}, among the images; give a name in another folder"
            )


def _example(loaded: LoadedModel, inputs: Sequence[str]) -> Tensor:
    """The first image that can be read, as the network sees it."""
    for entry in islice(entries(inputs), _TRIED):
        try:
            return loaded.preprocess(open_image(entry.fetch()))[None]
        except (DataError, OSError):
            continue
    return loaded.example()


def _about(job: Job, found: Survey) -> dict[str, Any]:
    """All that the rows depend on."""
    attention = job.better.attention
    return {
        "spec": job.loaded.spec,
        "weights": job.loaded.weights,
        "model": fingerprint(job.loaded.model),
        "computation": computation_key(job.loaded.model, job.example),
        "recipe": strict_json.loads(strict_json.dumps(to_data(job.better.recipe))),
        "attention": None if attention is None else digest(dict(attention.state_dict()))[:16],
        "preprocess": job.loaded.preprocess.to_json(),
        "inputs": list(job.inputs),
        "listing": found.digest,
        "columns": asdict(job.columns),
        "assumed": job.better.assumed,
        "device": place(job.loaded.model)[0].type,
        "versions": versions(),
        # Rows of maps once named their files from this folder, not from the table's: the two are not mixed.
        **({} if job.masks is None else {"files": f"{job.masks.name}/"}),
    }


def _finished(job: Job, key: RunKey) -> Predicted | None:
    """What the same run said when it was done; another's table is not written over."""
    if not job.out.exists() or job.parts.folder.exists():
        return None
    try:
        record = strict_json.loads(job.record.read_bytes())
        if record["run"] == key.digest:
            return replace(Predicted(**record["done"]), already=True)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise OptionError(f"{job.out}: is there already, from another run; remove it, or give another name")


# ------------------------------------------------------------------------------------------------------------ the work


def _work(job: Job, cache: Cache, found: Survey, us: World, progress: bool) -> tuple[int, float, int]:
    """Makes the parts that are missing, each process its share: how many images there are, the seconds waited, and
    how many of them were done before.
    """
    done_before = us.share(finished(cache) if us.leads else set())
    if us.leads:
        total_parts = -(-found.count // PART) if found.count is not None else len(done_before)
        tell_reused(len(done_before), total_parts, job.parts.folder, f"parts of {PART} images")
    seen = _Dealt(entries(job.inputs), done_before, us)
    reader = Reader(Preparing(job.loaded.preprocess, job.better.recipe))
    start, done = time.perf_counter(), 0
    total = None
    if found.count is not None:
        total = max(0, found.count - len(done_before) * PART) // us.size
    label = "predicting" + (f" (process 1 of {us.size})" if us.size > 1 else "")
    with show_progress(label, total, progress and us.leads) as advance:
        for number, images in groupby(reader(iter(seen)), key=lambda ready: ready.part):
            rows: dict[int, Row] = {}
            contents: dict[int, str] = {}
            # asked once for the part, which is not saved if the model was written meanwhile
            with job.better.unchanged():
                for batch in _batches(job, images):
                    rows |= _answers(job, batch)
                    contents |= {ready.index: ready.content for ready in batch}
                    done += len(batch)
                    spent = time.perf_counter() - start
                    advance(len(batch), f"{done / spent:.1f} images/s, {reader.waited / spent:.0%} waiting for them")
            read = text_digest([contents[index] for index in sorted(contents)])
            cache.put({name_of(number): {"rows": [rows[index] for index in sorted(rows)], "read": read}})
    return seen.count, reader.waited, sum(min(PART, seen.count - part * PART) for part in done_before)


class _Dealt:
    """(part, index, entry) of the images that are this process's to do; `count` is of all, when it is through."""

    def __init__(self, found: Iterator[Entry], finished: set[int], us: World) -> None:
        self.found, self.finished, self.us, self.count = found, finished, us, 0

    def __iter__(self) -> Iterator[tuple[int, int, Entry]]:
        turn = -1
        for index, entry in enumerate(self.found):
            part = index // PART
            turn += index % PART == 0 and part not in self.finished
            self.count = index + 1
            if part not in self.finished and turn % self.us.size == self.us.rank:
                yield part, index, entry


def _batches(job: Job, images: Iterator[Ready]) -> Iterator[list[Ready]]:
    """Images of one size together, those without one as they come; never more than so many, or so many bytes."""
    buckets: dict[tuple[int, ...], list[Ready]] = {}
    held = 0
    for ready in images:
        if ready.error:
            yield [ready]
            continue
        shape = tuple(ready.made[PLAIN].shape)
        bucket = buckets.setdefault(shape, [])
        bucket.append(ready)
        held += ready.bytes
        if len(bucket) == job.batch_size:
            held -= sum(one.bytes for one in bucket)
            yield buckets.pop(shape)
        elif held > BYTES:
            yield from buckets.values()
            buckets, held = {}, 0
    yield from buckets.values()


def _answers(job: Job, batch: list[Ready]) -> dict[int, Row]:
    """A row for each; one that the model refuses is an error of its own, not of its batch."""
    first = batch[0]
    if first.error:
        return {first.index: job.columns.error(first.name, first.error)}
    while len(job.better.plans) > _PLANS:
        del job.better.plans[next(iter(job.better.plans))]
    try:
        found = job.better.explain(_source(job, batch))
    except UnstrideError as error:
        if len(batch) == 1:
            return {first.index: job.columns.error(first.name, str(error))}
        return {index: row for ready in batch for index, row in _answers(job, [ready]).items()}
    return {ready.index: _row(job, ready, p) for ready, p in zip(batch, found, strict=True)}


def _source(job: Job, batch: Sequence[Ready]) -> Tensor | PILImages:
    device, dtype = place(job.better.model)
    made = {view: torch.stack([ready.made[view] for ready in batch]) for view in batch[0].made}
    images = [ready.image for ready in batch if ready.image is not None]
    if not images:
        return made[PLAIN].to(device, dtype)
    return PILImages(images, job.loaded.preprocess, torch.empty(0, device=device, dtype=dtype), made)


def _row(job: Job, ready: Ready, p: Prediction) -> Row:
    if p.problem is not None:
        return job.columns.error(ready.name, p.problem)
    if job.masks is None:
        return job.columns.row(ready.name, p, job.loaded.classes)
    p = over_image(p, ready.size)
    if job.columns.file == "mask":
        return job.columns.row(ready.name, p, job.loaded.classes, write_mask(job.masks, ready, p, job.loaded.classes))
    return job.columns.row(ready.name, p, job.loaded.classes, write_map(job.masks, ready, p))


# --------------------------------------------------------------------------------------------------------- the results


def _join(job: Job, cache: Cache, count: int, before: int, seconds: float, waiting: float) -> Predicted:
    """The parts as one table, and what made it beside it."""
    counted = CountedRows(all_rows(cache, count))
    whole = job.parts.folder / job.out.name  # what a crash leaves of it is swept away with the parts
    write_table(whole, job.columns, iter(counted))
    os.replace(whole, job.out)
    good = max(1, counted.good)
    done = Predicted(
        str(job.out), count, counted.errors, counted.changed / good, counted.cost / good, seconds, waiting,
        None if job.masks is None else str(job.masks), before=before,
    )  # fmt: skip
    read = text_digest([(cache.get(name_of(number)) or {})["read"] for number in range(-(-count // PART))])
    record = {"run": cache.key.digest, **cache.key.settings, **provenance(), "read": read, "done": asdict(done)}
    write_file(job.record, (strict_json.dumps(record) + "\n").encode())
    return done
