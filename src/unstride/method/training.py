"""Training of the learned aggregation (section 5.1 and the appendix). The network is frozen.

As printed: 30 states for each image, batches of 32, AdamW, cosine annealing over all steps, learning rate 1e-6 for
every trained parameter. At each step of the search a state of the queue is drawn with probability proportional to
1 / learned criterion of the current module, anew in every epoch. Validation searches by the learned criterion.

Not printed, as in the released code: 5 epochs; the kept epoch is the one with the best validation accuracy (ours: equal
ones are separated by their negative log-likelihood); weight decay is the default of AdamW. The untrained module, which
is the mean, is epoch 0 in the report and is never returned. At 1e-6 few images move the module very little: `moved`,
`changed` and `warning` say how far it is from the mean.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unstride.errors import DataError
from unstride.geometry.states import State, StateSpace
from unstride.method.attention import Attended, Attention
from unstride.method.criteria import training_draw
from unstride.method.search import BestFirst, Choose, lowest

STILL = 0.01  # logits that moved less than this from the mean's, and changed no answer, count as not trained


@dataclass(frozen=True)
class Schedule:
    """How the attention is trained. `paper` is the paper's; `fast` is ours, for a few hundred images."""

    name: str
    lr: float
    epochs: int = 5
    budget: int = 30
    batch_size: int = 32
    weight_decay: float = 0.01


SCHEDULES = {schedule.name: schedule for schedule in (Schedule("paper", 1e-6), Schedule("fast", 3e-3))}


class TrainingBatch(Protocol):
    """Some labelled images in the frozen network."""

    @property
    def labels(self) -> Tensor: ...  # (N,)
    def maps(self, requests: Sequence[tuple[int, State]]) -> Tensor: ...  # (row, state) -> aligned maps (R, C, ...)
    def logits(self, maps: Tensor) -> Tensor: ...  # aggregated maps (N, C, ...) -> (N, K), with gradients


class TrainingImages(Protocol):
    """Labelled images by name, and the states of the network they run through."""

    @property
    def keys(self) -> Sequence[str]: ...  # a name for each image; order and draws depend on it
    @property
    def space(self) -> StateSpace: ...
    @property
    def layers(self) -> tuple[int, ...]: ...  # that are searched
    @property
    def channels(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def batch(self, keys: Sequence[str]) -> TrainingBatch: ...


@dataclass(frozen=True)
class TrainingEpoch:
    """One pass over the training images, measured on the validation images. Epoch 0 is the untrained module."""

    epoch: int
    lr: float  # of the last step
    loss: float | None  # over the training images
    accuracy: float  # from 0 to 1
    nll: float
    moved: float  # norm of (logits - logits of the plain mean), as a share of the latter
    changed: float  # share of images with another class than by the plain mean


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The trained module and what training did. `warning` is not None where it stayed at the mean."""

    tensors: dict[str, Tensor]  # of the kept epoch, for `Attention.load_state_dict`
    epochs: tuple[TrainingEpoch, ...]
    kept: int
    plain: float  # validation accuracy of state 0 alone
    schedule: Schedule
    seed: int
    heads: int
    states: int  # of each image; less than the budget in a small space

    @property
    def best(self) -> TrainingEpoch:
        return self.epochs[self.kept]

    @property
    def warning(self) -> str | None:
        """Why this module is no more than the plain mean, or None."""
        if self.best.changed or self.best.moved >= STILL:
            return None
        faster = ", or schedule 'fast'" if self.schedule.name == "paper" else ""
        return (
            f"Training did not move the attention: its logits differ by {self.best.moved:.2g} of their size from the "
            f"plain mean's and no predicted class changed. Results are those of the mean. Schedule "
            f"'{self.schedule.name}' has lr {self.schedule.lr:g}: use more images or more epochs{faster}."
        )

    def __str__(self) -> str:
        best, start = self.best, self.epochs[0]
        line = (
            f"epoch {self.kept} of {len(self.epochs) - 1} kept: validation accuracy {best.accuracy:.2%} (mean "
            f"{start.accuracy:.2%}, base model {self.plain:.2%}), NLL {best.nll:.4f} (mean {start.nll:.4f}), moved "
            f"{best.moved:.2g} from the mean, {best.changed:.2%} of the predictions changed"
        )
        return line if self.warning is None else f"{line}\n{self.warning}"


class AttentionTraining:
    """One training from one seed, epoch by epoch; `checkpoint` and `restore` let it continue after a kill."""

    def __init__(
        self, train: TrainingImages, val: TrainingImages, schedule: Schedule, seed: int = 0, heads: int = 1
    ) -> None:
        for name, images in (("training", train), ("validation", val)):
            if not images.keys:
                raise DataError(f"{name} images: got none, expected at least 1")
        self.train, self.val, self.schedule, self.seed = train, val, schedule, seed
        self.attention = Attention(train.channels, heads, seed).to(train.device)
        self.optimiser = torch.optim.AdamW(
            self.attention.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay
        )
        self.epochs: list[TrainingEpoch] = []
        self.kept, self.tensors = 0, _copied(self.attention.state_dict())
        self.plain, self.states = 0.0, 0

    @property
    def done(self) -> bool:
        return len(self.epochs) > self.schedule.epochs

    def run(self, after: Callable[[TrainingEpoch], object] | None = None) -> TrainingResult:
        """Train to the last epoch; `after` is called after each one, for progress and checkpoints."""
        while not self.done:
            epoch = self.epoch()
            if after is not None:
                after(epoch)
        return self.result()

    def epoch(self) -> TrainingEpoch:
        """Train for one epoch and validate. Epoch 0 only validates."""
        number = len(self.epochs)
        loss, lr = self._optimise(number) if number else (None, 0.0)
        epoch = self._validate(number, loss, lr)
        self.epochs.append(epoch)
        best = self.epochs[self.kept]
        if number == 1 or (number and (epoch.accuracy, -epoch.nll) > (best.accuracy, -best.nll)):
            self.kept, self.tensors = number, _copied(self.attention.state_dict())
        return epoch

    def result(self) -> TrainingResult:
        if not self.kept:
            raise DataError("nothing was trained: run at least 1 epoch")
        return TrainingResult(
            tensors=self.tensors,
            epochs=tuple(self.epochs),
            kept=self.kept,
            plain=self.plain,
            schedule=self.schedule,
            seed=self.seed,
            heads=self.attention.heads,
            states=self.states,
        )

    def _optimise(self, number: int) -> tuple[float, float]:
        """Mean loss and last learning rate of an epoch."""
        order = sorted(self.train.keys)
        random.Random(f"{self.seed} {number}").shuffle(order)
        steps = math.ceil(len(order) / self.schedule.batch_size)
        total, lr = 0.0, self.schedule.lr
        for step, keys in enumerate(self._batches(order), (number - 1) * steps):
            lr = cosine_annealed(self.schedule.lr, step, self.schedule.epochs * steps)
            for group in self.optimiser.param_groups:
                group["lr"] = lr
            draws = [training_draw(f"{self.seed} {number} {key}") for key in keys]
            batch = self.train.batch(keys)
            maps = search_maps(self.train, batch, self.attention, self.schedule.budget, draws)
            labels = batch.labels.to(maps.device)
            loss = cross_entropy(batch.logits(self.attention(maps)).float(), labels)
            self._step(loss)
            total += float(loss.detach()) * len(keys)
        if not math.isfinite(total):
            raise DataError(f"epoch {number}: the loss is {total}; use a lower lr than {self.schedule.lr:g}")
        return total / len(order), lr

    def _step(self, loss: Tensor) -> None:
        """One step of AdamW. Gradients of the attention alone: the network is frozen."""
        parameters = list(self.attention.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        self.optimiser.step()
        self.optimiser.zero_grad()

    @torch.no_grad()
    def _validate(self, number: int, loss: float | None, lr: float) -> TrainingEpoch:
        right = plain = changed = 0
        nll = distance = size = 0.0
        for keys in self._batches(self.val.keys):
            batch = self.val.batch(keys)
            maps = search_maps(self.val, batch, self.attention, self.schedule.budget, [lowest] * len(keys))
            labels = batch.labels.to(maps.device)
            learned, mean = (batch.logits(f).float() for f in (self.attention(maps), maps.mean(1)))
            right += int((learned.argmax(1) == labels).sum())
            plain += int((batch.logits(maps[:, 0]).argmax(1) == labels).sum())
            changed += int((learned.argmax(1) != mean.argmax(1)).sum())
            nll += float(cross_entropy(learned, labels, reduction="sum"))
            distance += float((learned - mean).double().square().sum())
            size += float(mean.double().square().sum())
            self.states = maps.shape[1]
        count = len(self.val.keys)
        self.plain = plain / count
        moved = math.sqrt(distance / size) if size else 0.0
        return TrainingEpoch(number, lr, loss, right / count, nll / count, moved, changed / count)

    def _batches(self, keys: Sequence[str]) -> Iterator[Sequence[str]]:
        for start in range(0, len(keys), self.schedule.batch_size):
            yield keys[start : start + self.schedule.batch_size]

    # -- to continue after a kill
    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next epoch needs: tensors, and what fits in JSON."""
        tensors = {f"now.{name}": tensor for name, tensor in _copied(self.attention.state_dict()).items()}
        tensors |= {f"kept.{name}": tensor for name, tensor in self.tensors.items()}
        for i, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{name}": tensor.clone() for name, tensor in state.items()}
        epochs = [asdict(epoch) for epoch in self.epochs]
        return tensors, {"epochs": epochs, "kept": self.kept, "plain": self.plain, "states": self.states}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Continue from a checkpoint of the same training."""
        self.attention.load_state_dict(_part(tensors, "now."))
        self.tensors = _part(tensors, "kept.")
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _part(tensors, "optimiser.").items():
            index, _, field = name.partition(".")
            states.setdefault(int(index), {})[field] = tensor
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": states})
        self.epochs = [TrainingEpoch(**epoch) for epoch in meta["epochs"]]
        self.kept, self.plain, self.states = meta["kept"], meta["plain"], meta["states"]


@torch.no_grad()
def search_maps(
    images: TrainingImages, batch: TrainingBatch, attention: Attention, budget: int, choose: Sequence[Choose]
) -> Tensor:
    """Search each image by the learned criterion of `attention`: the maps (N, S, C, ...) of the visited states."""
    searches = [BestFirst(images.space, images.layers, budget, choose=own) for own in choose]
    attended = Attended(attention, len(searches))
    active = list(range(len(searches)))
    attended.add(active, batch.maps([(i, images.space.zero) for i in active]))
    while active:
        criteria = zip(active, attended.criteria(active), strict=True)
        proposed = {i: searches[i].propose(dict(zip(searches[i].visited, own, strict=True))) for i, own in criteria}
        active = [i for i in active if proposed[i]]
        requests = [(i, state) for i in active for state in proposed[i]]
        if requests:
            attended.add([i for i, _ in requests], batch.maps(requests))
        for i, states in proposed.items():
            searches[i].observe(states)
    return torch.stack([torch.stack(own) for own in attended.maps])  # the same space: equally many states each


def cosine_annealed(lr: float, step: int, steps: int) -> float:
    """The learning rate of step `step` of `steps`, from 0: it starts at `lr` and falls to 0 along half a cosine."""
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
