r"""`predict(model, images, out)`: every image's answer in a table, however many images there are.

    print(unstride.predict("timm:resnet18", ["photos/", "shard-000.tar"], "predictions.parquet", recipe="flip"))

Images are computed in parts of 256, each saved when it is done. A run that was killed goes on from its parts when it
is started again, and ends with the same bytes. Under torchrun, and on Ray, the parts are shared out:

    torchrun --nproc-per-node 2 -m unstride predict SPEC IMAGES --out predictions.jsonl
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from unstride.errors import DataError, LeftOut, ModelChanged, OptionError, UnstrideWarning
from unstride.execution.independence import warn_of_batch_dependence
from unstride.models.weights import place
from unstride.pipeline import Pipeline, open_pipeline
from unstride.predicting.drift import drifted_gates
from unstride.predicting.inputs import ImageInputs, Survey
from unstride.predicting.parts import BATCH, PART, PartRunner, output_width
from unstride.predicting.reading import ImageReader
from unstride.predicting.rows import Columns
from unstride.predicting.summary import PartList, PredictSummary, TableTotals
from unstride.predicting.tables import check_table, write_table
from unstride.recipe.recipe import Recipe
from unstride.storage import files, locks, strict_json
from unstride.storage.artefacts import write_file
from unstride.storage.cache import Cache, RunKey, tell_reused
from unstride.storage.distributed import World, world
from unstride.storage.fingerprint import fingerprint, text_digest
from unstride.storage.progress import progress as show_progress
from unstride.storage.provenance import provenance, versions
from unstride.tasks.tasks import task_named

_MANY = 64  # images, for which checks of the model pay
_VERSIONS = ("unstride", "torch", "numpy", "pillow")
_FIGURES = ("images", "errors", "changed", "cost", "passed", "base_macs")  # that do not depend on how often it stopped


@dataclass(frozen=True, eq=False)
class PredictJob:
    """One run: what runs, on which images, and where the rows go."""

    runner: PartRunner
    inputs: ImageInputs
    out: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def pipeline(self) -> Pipeline:
        return self.runner.pipeline

    @property
    def folder(self) -> Path:
        """Of the finished parts, while the table is not written."""
        return self.out.with_name(self.out.name + ".parts")

    @property
    def record(self) -> Path:
        """What made the table."""
        return self.out.with_name(self.out.name + ".run.json")


def predict(
    model: Any,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    recipe: str | Path | Recipe = "default",
    weights: str | Path | None = "default",
    task: str | None = None,
    device: str | None = None,
    top: int = 5,
    batch_size: int | None = None,
    ray: str | None = None,
    progress: bool = False,
    **changes: Any,
) -> PredictSummary:
    """Write a table with exactly one row for each image; of maps, also a file for each.

    Args:
        model: as `enhance` takes it, or by name ("timm:resnet18"); None: the networks that the recipe file names.
        images: files, folders, globs, "@list.txt" (a path on each line, relative to the list), tar shards, Parquet
            files with images as bytes, folders of a Hugging Face `save_to_disk`, s3:// and gs:// addresses.
        out: the table: .jsonl, .csv or .parquet. OUT.run.json says what made it. Masks (.png) and other maps (.npy) go
            to the folder OUT.masks or OUT.maps.
        top: classes in each row, at most those of the model.
        batch_size: images that run together. By default 32; of maps 1, on an accelerator 8.
        ray: "local", or the address of a Ray cluster whose workers run the parts. They must see the folder of OUT.
        changes: fields of the recipe, as in `enhance`.

    An image that cannot be read is a row with its error.
    """
    arguments = {"model": model, "recipe": recipe, "weights": weights, "task": task, "device": device, **changes}
    if not isinstance(ray, str | None) or ray == "":
        raise OptionError(f"ray: got {ray!r:.60}, expected 'local' or the address of a cluster, HOST:PORT.")
    job = open_job(images, files.as_path(out, "out"), top, batch_size, **arguments)
    with world() as us:
        survey = us.share(job.inputs.survey() if us.leads else Survey(0, ""))
        key = RunKey("predict", job.settings)
        if us.share(key.digest) != key.digest:
            raise OptionError("the processes disagree on the model, the recipe or the options; start all alike")
        before = us.share(_finished(job, key, survey) if us.leads else None)
        if before is not None:
            return before
        if survey.count == 0:
            raise DataError(f"{_shown(job)}: there is no image")
        if us.leads and (survey.count is None or survey.count >= _MANY):
            example = job.pipeline.base.example().to(*place(job.pipeline.better.model))
            warn_of_batch_dependence(job.pipeline.better.networks, example)
        with locks.exclusive(job.folder, us.leads):
            if us.leads:
                _check_parts(job, key)
            cache = Cache.open(job.folder, key)
            us.wait()
            summary = us.share(_run(job, cache, survey, us, ray, arguments, progress))
        if us.leads:
            _remove_parts(job.folder)
        assert summary is not None
        return summary


def open_job(
    images: str | Path | Sequence[str | Path], out: Path, top: Any, batch_size: Any, *, model: Any, **options: Any
) -> PredictJob:
    """Everything that every image would stumble over is checked here, before the first."""
    check_table(out)
    for name, value in (("top", top), ("batch_size", batch_size)):
        if (name, value) != ("batch_size", None) and (type(value) is not int or value < 1):
            raise OptionError(f"{name}: got {value!r}, expected a whole number from 1 on.")
    inputs = ImageInputs(images)
    pipeline = model if isinstance(model, Pipeline) else open_pipeline(model, **options)
    for stage in pipeline.better.recipe.stages:
        if stage.gate is not None and stage.gate.below is None:
            raise OptionError(
                f"the recipe has a gate without a threshold ({stage.gate}). Call better.calibrate(images) with "
                "unlabelled images and save the recipe, or give a threshold: Gate(below=0.5)."
            )
    out = Path(os.path.realpath(out))  # the target of a link, not the link
    runner = open_runner(pipeline, top, batch_size, out)
    _check_masks(runner, inputs, out)
    about = {**pipeline.key(pipeline.base.example()), "classes": list(pipeline.classes)}
    known = versions()
    settings = {
        "spec": pipeline.spec,
        "pipeline": strict_json.loads(strict_json.dumps(about)),
        "assumed": pipeline.better.assumed,
        "columns": asdict(runner.columns),
        "files": None if runner.masks is None else runner.masks.name,
        "part": PART,
        "versions": {name: known.get(name) for name in _VERSIONS},
    }
    return PredictJob(runner, inputs, out, settings)


def open_runner(pipeline: Pipeline, top: int = 5, batch_size: int | None = None, out: Path | None = None) -> PartRunner:
    """What computes rows. `out`: of the table, whose maps lie beside it."""
    task = task_named(pipeline.task)
    preprocess = pipeline.base.preprocess
    if task.maps and task.name != "features" and preprocess.crop is not None:
        raise OptionError(
            f"the preprocessing crops to {preprocess.crop}, but a mask needs the whole image: use crop=None"
        )
    width = output_width(pipeline)
    top = width if width is not None and not task.classes else min(top, width or top)
    columns = Columns(task.name, top)
    usual = BATCH if not task.maps else 1 if place(pipeline.better.model)[0].type == "cpu" else 8
    masks = None if out is None or columns.file is None else out.with_name(f"{out.name}.{columns.file}s")
    return PartRunner(pipeline, columns, batch_size or usual, masks)


def _check_masks(runner: PartRunner, inputs: ImageInputs, out: Path) -> None:
    for folder in map(Path, inputs.texts):
        inside = folder.is_dir() and out.is_relative_to(os.path.realpath(folder))
        if runner.columns.file == "mask" and inside:
            raise OptionError(
                f"--out {out}: its masks would lie in {folder}, among the images; give a name in another folder"
            )


def _shown(job: PredictJob) -> str:
    return ", ".join(job.inputs.texts)[:200]


def _finished(job: PredictJob, key: RunKey, survey: Survey) -> PredictSummary | None:
    """What the same run returned when it was done; the table of another run is not written over."""
    shutil.rmtree(_removed(job.folder), ignore_errors=True)  # of a run that was killed as it ended
    if not job.out.exists() or job.folder.exists():
        return None
    try:
        record = strict_json.loads(job.record.read_bytes())
        if (record["run"], record["listing"]) == (key.digest, survey.digest):
            done = {**record["done"], "passed": tuple(record["done"]["passed"])}
            return PredictSummary(str(job.out), **done, masks=_text(job.runner.masks), already=True)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise OptionError(f"{job.out}: is there already, from another run; remove it, or give another name")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _check_parts(job: PredictJob, key: RunKey) -> None:
    """The parts of another run are not touched."""
    others = [path for path in job.folder.glob("predict-*") if path.name != f"predict-{key.digest}"]
    if any(any(path.glob("*.safetensors")) for path in others):
        raise OptionError(
            f"{job.folder}: has finished parts of another run (another model, recipe or version). Start that one "
            "again, give another --out, or remove the folder"
        )


def _remove_parts(folder: Path) -> None:
    """All at once, so that a crash here leaves no half of a run."""
    removed = _removed(folder)
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _removed(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.removed")


# ------------------------------------------------------------------------------------------------------------ the work


def _run(
    job: PredictJob, cache: Cache, survey: Survey, us: World, ray: str | None, arguments: Any, show: bool
) -> PredictSummary | None:
    """All parts, then the table. Of several processes, only the first one has a summary."""
    start, models = time.perf_counter(), _fingerprints(job)
    finished = us.share(set(cache) if us.leads else set())
    parts = PartList(job.inputs, finished, us if ray is None else World())
    total = None if survey.count is None else max(0, survey.count - len(finished) * PART) // us.size
    with show_progress("predicting", total, show and us.leads) as advance:

        def done(images: int, waited: float) -> None:
            spent = time.perf_counter() - start
            advance(images, f"{waited / spent:.0%} of the time waiting for images")

        if ray is None:
            waited = _work(job.runner, cache, parts, done)
        else:
            from unstride.predicting.ray import work_on_ray

            waited = work_on_ray(job, cache, parts, ray, arguments, done)
    us.wait()
    if not us.leads:
        return None
    cache.reload()
    if not parts.count:
        raise DataError(f"{_shown(job)}: there is no image")
    if _fingerprints(job) != models:
        cache.clear()
        raise ModelChanged("the model's weights were changed while predict was running, so nothing was written.")
    tell_reused(len(parts.reused), len(parts.keys), job.folder, f"parts of {PART} images")
    _tell(job)
    seconds = time.perf_counter() - start
    return _join(job, cache, parts, survey, seconds, waited / max(seconds, 1e-9))


def _work(runner: PartRunner, cache: Cache, parts: PartList, done: Any) -> float:
    """The parts of this process; the seconds that the network waited for images."""
    reader = ImageReader(runner.preparation)
    wanted = ((k, index, entry) for k, entries in parts for index, entry in entries)
    for part, images in groupby(reader(wanted), key=lambda pair: pair[0]):
        result = runner.run(part, (image for _, image in images))
        cache.put({parts.keys[part]: asdict(result)})
        done(len(result.rows), reader.waited)
    return reader.waited


def _fingerprints(job: PredictJob) -> list[str]:
    return [fingerprint(loaded.model) for loaded in job.pipeline.networks.values()]


def _tell(job: PredictJob) -> None:
    """What was in the inputs and has no row of its own."""
    count, first = job.inputs.repeated
    if count:
        what = "1 image is" if count == 1 else f"{count:,} images are"
        warnings.warn(f"{what} given more than once ({first}); each has one row", UnstrideWarning, stacklevel=2)
    count, first = job.inputs.links
    if count:
        what = "1 link in a tar is" if count == 1 else f"{count:,} links in tars are"
        warnings.warn(f"{what} left out ({first}): only the images in a tar have rows", LeftOut, stacklevel=2)


# --------------------------------------------------------------------------------------------------------- the results


def _join(
    job: PredictJob, cache: Cache, parts: PartList, survey: Survey, seconds: float, waiting: float
) -> PredictSummary:
    """The parts as one table, and what made it beside it."""
    masks = job.runner.masks
    totals = TableTotals(cache, parts, masks)
    whole = job.folder / job.out.name  # what a crash leaves of it is removed with the parts
    write_table(whole, job.runner.columns, totals.rows())
    os.replace(whole, job.out)
    good = max(1, totals.good)
    summary = PredictSummary(
        out=str(job.out),
        images=parts.count,
        errors=totals.errors,
        changed=totals.changed / good,
        cost=totals.cost / good,
        seconds=seconds,
        waiting=waiting,
        masks=_text(masks),
        passed=tuple(count / max(1, totals.images) for count in totals.passed),
        base_macs=totals.base_macs,
        before=sum(parts.reused.values()),
    )
    for sentence in drifted_gates(job.pipeline, totals.passed, totals.images):
        warnings.warn(sentence, UnstrideWarning, stacklevel=2)
    record = {
        "run": cache.key.digest,
        "listing": survey.digest,
        **cache.key.settings,
        "inputs": job.inputs.texts,
        **provenance(),
        "read": text_digest(totals.read),
        "done": {name: getattr(summary, name) for name in _FIGURES},
    }
    record_file = job.folder / job.record.name
    write_file(record_file, (strict_json.dumps(record) + "\n").encode())
    os.replace(record_file, job.record)
    return summary
