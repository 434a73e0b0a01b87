"""Trains the attention aggregation of an enhanced model: the network is frozen, so that its maps are computed once."""

import hashlib
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, DataError, InputError, OptionError
from unstride.jobs.artefacts import read_artefact, write_artefact
from unstride.jobs.distributed import World, world
from unstride.jobs.fingerprint import fingerprint
from unstride.jobs.progress import progress
from unstride.learning.pools import (
    Pool,
    SampledSearch,
    Store,
    batches,
    check_labels,
    draw_pools,
    image_key,
    reusable,
    unfamiliar,
)
from unstride.procedure.aggregate import Attention, two_class
from unstride.procedure.options import Options
from unstride.procedure.search import Search
from unstride.procedure.tasks import Plan

KIND = "attention-checkpoint"
SCALE = 100  # how much faster the common part of w_o learns than its channels, up to a step of FASTEST
FASTEST = 1e-2
HALFWAY = 0.5  # of w_o, where the images only stand in for those of the test


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images; epoch 0 is the untrained module, which is the mean. Accuracies from 0 to 1.

    Validation is of the weights that would be kept.
    """

    epoch: int
    lr: float
    loss: float | None  # over the training images
    val_accuracy: float
    val_nll: float


@dataclass(frozen=True)
class FitReport:
    """What training did: every epoch, which one was kept, and validation accuracy of the plain network beside it."""

    epochs: tuple[Epoch, ...]
    best: int
    plain: float
    train_images: int
    val_images: int
    budget: int
    states: int  # most states of any training image: less than the budget in a small space
    channels: int
    seed: int
    familiar: bool  # accuracies are those on images made unfamiliar
    cached: bool  # maps were computed once, not in every epoch
    resumed: int  # epochs taken over from an earlier, ended run
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.epochs[self.best].val_accuracy

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy}

    def __str__(self) -> str:
        start = self.epochs[0].val_accuracy
        return (
            f"epoch {self.best} of {len(self.epochs) - 1} kept: validation accuracy {self.accuracy:.2%} "
            f"(plain {self.plain:.2%}, mean {start:.2%}; {self.val_images} {'unfamiliar ' * self.familiar}images), "
            f"negative log-likelihood {self.epochs[self.best].val_nll:.4f} (mean {self.epochs[0].val_nll:.4f}), "
            f"{self.seconds:.0f} s"
        )


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
    options = better.options(plan)
    job = _Job(better, plan, options, budget, seed, familiar)
    folder = Path(cache_dir) if cache_dir is not None else None
    started = time.monotonic()
    with world() as us:
        if us.size > 1 and folder is None:
            raise OptionError("cache_dir: none given, but several processes need a folder that all of them see")
        train = Source(job, train_loader, "train", folder, cache_bytes, us, show)
        val = Source(job, val_loader, "val", folder, cache_bytes, us, show)
        run = _Training(job, train, val, epochs, lr, batch_size, weight_decay)
        name = job.key(epochs, lr, batch_size, weight_decay, train.keys, val.keys)
        checkpoint = folder / f"{name}.safetensors" if folder is not None else None
        resumed = run.restore(checkpoint) if checkpoint is not None and resume else 0
        if us.leads:
            run.go_on(checkpoint, show)
        us.wait()
        if not us.leads and checkpoint is not None:
            run.restore(checkpoint)
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


@dataclass(frozen=True, eq=False)
class _Job:
    """What maps depend on: the model, its options, how states are drawn."""

    better: Enhanced
    plan: Plan
    options: Options
    budget: int
    seed: int
    familiar: bool

    def pools(self, images: Tensor, labels: list[int], part: str, epoch: int) -> list[Pool]:
        check_labels(labels, max(2, self.plan.found.trace.shapes[self.plan.targets[0].leaf][1]))
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

    def key(self, *more: Any) -> str:
        o, found = self.options, self.plan.found
        what = [fingerprint(self.better.model), found.space.rates, found.space.strides, self.plan.space, self.budget]
        what += [self.familiar, self.seed, o.layers, o.align, o.border, str(self.plan.graph.dtype), *more]
        return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


class Source:
    """Pools of a loader's images: computed once and kept where they fit `limit` bytes, otherwise anew in each epoch."""

    def __init__(
        self, job: _Job, loader: Iterable[Any], part: str, folder: Path | None, limit: int, us: World, show: bool
    ) -> None:
        self.job, self.loader, self.part, self.cached = job, loader, part, True
        self.keys: list[str] = []
        self.store = Store(folder / f"{part}-{job.key()}" if folder is not None else None)
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
                        self.store.add({keys[i]: p for i, p in zip(fresh, pools, strict=True)})
                advance(1, "")
        us.wait()
        self.store.scan()
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
                yield [self.store[k] for k in order[i : i + size]]
            return
        for images, labels in self._batches():
            for i in range(0, len(labels), size):
                yield self.job.pools(images[i : i + size], labels[i : i + size], self.part, epoch)


class _Training:
    """The optimisation, one epoch at a time; all that it is can be written to a file and read back."""

    def __init__(self, job: _Job, train: Source, val: Source, epochs: int, lr: float, size: int, decay: float) -> None:
        self.job, self.train, self.val, self.epochs, self.lr, self.size = job, train, val, epochs, lr, size
        channels = attention_channels(job.plan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            self.attention = Attention(channels).to(job.plan.graph.device)
            nn.init.zeros_(self.attention.query.weight)  # no preference that was not learned
            nn.init.zeros_(self.attention.query.bias)
        self.scale = nn.Parameter(torch.zeros((), device=job.plan.graph.device))  # what all channels of w_o share
        groups: list[dict[str, Any]] = [{"params": [*self.attention.parameters()], "weight_decay": decay}]
        self.optimiser = torch.optim.AdamW([*groups, {"params": [self.scale], "weight_decay": 0.0}], lr=lr)
        self.history: list[Epoch] = []
        self.best, self.plain, self.states = 0, 0.0, 0
        self.best_state = self.kept()

    def weights(self) -> dict[str, Tensor]:
        """The attention as it is now, with gradients."""
        return {**dict(self.attention.named_parameters()), "out": self.attention.out + self.scale}

    def kept(self) -> dict[str, Tensor]:
        """What would be given to the user: halfway from the mean, where the images are stand-ins."""
        found = _copied(self.weights())
        return {**found, "out": found["out"] * (HALFWAY if self.job.familiar else 1.0)}

    def go_on(self, checkpoint: Path | None, show: bool) -> None:
        """Train from where it is to the last epoch."""
        with progress("epochs", self.epochs, show) as advance:
            advance(max(0, len(self.history) - 1), "")
            while len(self.history) <= self.epochs:
                row = self.epoch()
                if checkpoint is not None:
                    self.save(checkpoint)
                advance(1 if row.epoch else 0, f"validation {row.val_accuracy:.2%}, nll {row.val_nll:.4f}")

    def epoch(self) -> Epoch:
        """Epoch 0 only validates."""
        number = len(self.history)
        loss, lr = self._pass(number) if number else (None, 0.0)
        state = self.kept()
        accuracy, nll = self._validate(state)
        row = Epoch(number, lr, loss, accuracy, nll)
        self.history.append(row)
        if accuracy >= self.history[0].val_accuracy and nll < self.history[self.best].val_nll:
            self.best, self.best_state = number, state
        return row

    def _pass(self, number: int) -> tuple[float, float]:
        steps = math.ceil(len(self.train.keys) / self.size)
        total, seen, lr = 0.0, 0, self.lr
        for step, pools in enumerate(self.train.groups(number, self.size, shuffled=True)):
            done = min(1.0, (number - 1 + step / steps) / self.epochs)
            lr = self.lr * (1 + math.cos(math.pi * done)) / 2
            for group, step_size in zip(self.optimiser.param_groups, (lr, lr * _faster(self.lr)), strict=True):
                group["lr"] = step_size
            logits, labels = self._logits(pools, self.weights())
            loss = cross_entropy(logits, labels)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            total, seen = total + float(loss.detach()) * len(labels), seen + len(labels)
        if not math.isfinite(total):
            raise DataError(f"epoch {number}: the loss is {total}; use a lower lr than {self.lr:g}")
        return total / seen, lr

    def _logits(self, pools: Sequence[Pool], weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        plan, device = self.job.plan, self.job.plan.graph.device
        maps = torch.stack([p.maps for p in pools]).to(device).float()
        self.states = maps.shape[1]
        labels = torch.tensor([p.label for p in pools], device=device)
        return finish(plan, functional_call(self.attention, weights, (maps,))), labels

    @torch.no_grad()
    def _validate(self, weights: dict[str, Tensor]) -> tuple[float, float]:
        right, plain, nll, seen = 0, 0, 0.0, 0
        for pools in self.val.groups(0, self.size, shuffled=False):
            logits, labels = self._logits(pools, weights)
            right += int((logits.argmax(1) == labels).sum())
            nll += float(cross_entropy(logits, labels, reduction="sum"))
            if not self.history:
                own = torch.stack([p.maps[0] for p in pools]).to(logits.device).float()
                plain += int((finish(self.job.plan, own).argmax(1) == labels).sum())
            seen += len(labels)
        if not self.history:
            self.plain = plain / seen
        return right / seen, nll / seen

    # -- to go on after a kill
    def save(self, path: Path) -> None:
        tensors = {"scale": self.scale.detach()} | {f"now.{k}": v for k, v in self.attention.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best_state.items()}
        for i, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{k}": v for k, v in state.items()}
        rows = [asdict(row) for row in self.history]
        meta = {"kind": KIND, "history": rows, "best": self.best, "plain": self.plain, "states": self.states}
        write_artefact(path, tensors, meta)

    def restore(self, path: Path) -> int:
        """Trained epochs taken over from a file; 0 where there is none that is whole."""
        if not path.is_file():
            return 0
        try:
            tensors, meta = read_artefact(path, KIND)
        except ArtefactError:
            return 0  # damaged by the disk, not by a kill: train again
        part = lambda name: {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}  # noqa: E731
        self.attention.load_state_dict(part("now."))
        with torch.no_grad():
            self.scale.copy_(tensors["scale"])
        self.best_state = part("best.")
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in part("optimiser.").items():
            i, _, field = name.partition(".")
            states.setdefault(int(i), {})[field] = value
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": states})
        self.history = [Epoch(**row) for row in meta["history"]]
        self.best, self.plain, self.states = meta["best"], meta["plain"], meta["states"]
        return len(self.history) - 1


def _faster(lr: float) -> float:
    """By how much the common part of w_o is faster: it moves all logits alike, and many steps would be needed."""
    return max(1.0, min(float(SCALE), FASTEST / lr))


def attention_channels(plan: Plan) -> int:
    """Channels of the map that is aggregated, in whatever layout."""
    target = plan.targets[0]
    shape = (1, *plan.found.trace.shapes[target.tap][1:])
    return plan.maps(torch.empty(shape, device="meta"), target).shape[1]


def finish(plan: Plan, maps: Tensor) -> Tensor:
    """Aggregated maps -> logits (N, K) through the network's own head, with gradients."""
    target = plan.targets[0]
    like = torch.empty((len(maps), *plan.found.trace.shapes[target.tap][1:]), dtype=plan.graph.dtype, device="meta")
    values = plan.unmap(maps, like, target)
    logits = values if target.head is None else target.head(len(maps), (), [values])[0]
    return two_class(logits.float())


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in state.items()}
