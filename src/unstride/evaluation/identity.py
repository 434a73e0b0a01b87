"""What identifies an evaluation, and the scores of one image in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from unstride.data import Dataset
from unstride.data.batches import FromBatches
from unstride.errors import DataError
from unstride.evaluation.runner import describe
from unstride.evaluation.work import Job
from unstride.models.weights import place
from unstride.recipe.files import to_data
from unstride.recipe.recipe import SEARCH
from unstride.storage.cache import RunKey
from unstride.storage.contents import FileDigests
from unstride.storage.distributed import launched
from unstride.storage.fingerprint import computation_key, digest, fingerprint
from unstride.storage.provenance import versions

CACHE = "cache"  # folder of `out`


def first_image(dataset: Dataset | FromBatches) -> Tensor:
    """The first image that can be read, as the model takes it."""
    problem = ""
    for i in range(len(dataset)):
        try:
            return dataset.tensors(i)[0]
        except (DataError, OSError) as error:
            problem = problem or str(error)
    raise DataError(f"{dataset.name}: none of {len(dataset)} images can be read; the first: {problem}")


def file_digests(job: Job, out: str | Path | None, progress: bool) -> FileDigests:
    """The contents of all files of the data; those that an earlier run has read are known."""
    digests = FileDigests(None if out is None else Path(out) / CACHE)
    digests.read(job.dataset.files(), progress and launched().leads)
    return digests


def run_key(job: Job, about: Mapping[str, Any]) -> RunKey:
    """What the scores of one image depend on beside the image: another data set may have some of the same images."""
    wide = None if job.wide is None else job.wide.to_json()
    seed = job.better.recipe.seed if job.better.recipe.criterion == "random" else None
    settings = {name: value for name, value in about.items() if name not in ("data_fingerprint", "seed")}
    return RunKey("evaluation", {**settings, "seed": seed, "wide": wide})


def describe_run(job: Job, data_fingerprint: str) -> dict[str, Any]:
    """All that the numbers depend on; its hash names the run. Names, paths, batches and processes are not in it."""
    better, device = job.better, place(job.better.model)[0]
    plan = better.plan
    asked = {n: getattr(better.recipe, n) for n in SEARCH if n not in ("budget", "seed", "stop")}
    asked |= to_data(better.recipe.changed(name="", budget=1, seed=0))
    asked |= {"layers": list(better.options(plan).layers), "space": plan.space}
    attention = better.attention
    return {
        "task": job.task,
        "budgets": list(job.runner.budgets),
        "options": {
            **asked,
            "optimise": better.optimise,
            "attention": None if attention is None else digest(dict(attention.state_dict()))[:16],
            "tta": describe(job.runner.tta),
            **({"assumed": better.assumed} if better.assumed else {}),
        },
        "seed": job.seed,
        "model": fingerprint(better.model)[:16],
        "computation": computation_key(better.model, first_image(job.dataset)[None].to(*place(better.model)))[:16],
        "data_fingerprint": data_fingerprint,
        "preprocess": {} if job.dataset.preprocess is None else job.dataset.preprocess.to_json(),
        "device": device.type,
        "versions": versions(),
    }
