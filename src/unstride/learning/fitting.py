"""Trains the attention aggregation of an enhanced model: the network is frozen, so that its maps are computed once."""

import math
import time
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.data.batches import reusable
from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.learning.pools import batches
from unstride.learning.report import FitReport
from unstride.learning.sources import Job, Source
from unstride.learning.training import Schedule, Training
from unstride.procedure.tasks import Plan
from unstride.storage.distributed import World, world


def fit(
    better: Enhanced,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    familiar: bool = True,
    epochs: int = 20,
    lr: float = 1e-4,
    batch_size: int = 32,
    budget: int = 30,
    weight_decay: float = 0.01,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    cache_bytes: int = 8 << 30,
    resume: bool = True,
    show: bool = True,
) -> FitReport:
    """Train w_q, w_k and w_o; then `better.with_options(aggregate="attention", criterion="learned")` uses them.

    Example: `unstride.fit(better, train_loader, val_loader, cache_dir="work")`; loaders give (images, labels), with the
    model's own preprocessing.

    `familiar`: the network was trained on these images. It knows them by heart in its plain state, so that they teach
    to trust that state and to be surer; therefore their coarse light is redrawn, and w_o goes only half the way. Say
    `familiar=False` of images that the network has never seen.

    The paper trains ImageNet networks with lr=1e-6 on 20,000 images; with fewer that moves nothing, so the default is
    larger. Kept is the epoch of the best validation likelihood among those whose accuracy is not below the mean's
    (epoch 0). With `cache_dir`, a killed run goes on where it was; without, maps are kept in memory. Maps that need
    more than `cache_bytes` are computed anew in each epoch. Under torchrun the processes share out the maps.
    """
    _check(better, familiar, epochs, lr, batch_size, budget, weight_decay)
    for what, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
        reusable(loader, what)
    first, _ = next(batches(train_loader, "train_loader"))
    plan = better.prepare(first)
    job = Job(better, plan, better.options(plan), budget, seed, familiar)
    schedule = Schedule(epochs, lr, batch_size, weight_decay)
    folder = Path(cache_dir) if cache_dir is not None else None
    started = time.monotonic()
    with world() as us:
        if us.size > 1 and folder is None:
            raise OptionError("cache_dir: none given, but several processes need a folder that all of them see")
        train = Source(job, train_loader, "train", folder, cache_bytes, us, show)
        val = Source(job, val_loader, "val", folder, cache_bytes, us, show)
        run = Training(job, train, val, schedule)
        resumed = _train(run, folder, us, resume, show)
    _give(better, plan, run.best_state)
    return FitReport(
        epochs=tuple(run.history),
        best=run.best,
        plain=run.plain,
        train_images=len(train.keys),
        val_images=len(val.keys),
        budget=budget,
        states=run.states,
        channels=run.attention.channels,
        seed=seed,
        familiar=familiar,
        cached=train.cached and val.cached,
        resumed=resumed,
        seconds=time.monotonic() - started,
    )


def _train(run: Training, folder: Path | None, us: World, resume: bool, show: bool) -> int:
    """One process trains, the others take over what it has found; returns epochs taken over from an earlier run."""
    name = run.job.key(*astuple(run.schedule), run.train.keys, run.val.keys)
    checkpoint = folder / f"{name}.safetensors" if folder is not None else None
    resumed = run.restore(checkpoint) if checkpoint is not None and resume else 0
    if us.leads:
        run.go_on(checkpoint, show)
    us.wait()
    if not us.leads and checkpoint is not None:
        run.restore(checkpoint)
    return resumed


def _check(
    better: Any, familiar: bool, epochs: int, lr: float, batch_size: int, budget: int, weight_decay: float
) -> None:
    if not isinstance(better, Enhanced):
        raise OptionError(f"better: got {type(better).__name__}, wanted what unstride.enhance(model, example) returns")
    if better.task != "classification":
        raise OptionError(f"task={better.task!r}: the attention is for classification; segmentation is learning-free")
    if not isinstance(familiar, bool):
        raise OptionError(f"familiar: got {familiar!r}, wanted True (the network was trained on the images) or False")
    for name, value, least in (("epochs", epochs, 1), ("batch_size", batch_size, 1), ("budget", budget, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(f"{name}: got {value!r}, wanted a whole number of at least {least}")
    for name, number, low in (("lr", lr, True), ("weight_decay", weight_decay, False)):
        if not isinstance(number, int | float) or not math.isfinite(number) or number < 0 or (low and number == 0):
            raise OptionError(f"{name}: got {number!r}, wanted a {'positive' if low else 'non-negative'} number")


def _give(better: Enhanced, plan: Plan, state: dict[str, Tensor]) -> None:
    with torch.random.fork_rng(devices=[]):
        better.make_attention(plan)
    assert better.attention is not None
    better.attention.load_state_dict(state)
    better.attention.requires_grad_(False)
