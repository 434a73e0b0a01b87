"""Pools -> attention weights: the optimisation, which goes on where it was after a kill."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from unstride.errors import ArtefactError, DataError
from unstride.learning.pools import Pool, finish
from unstride.learning.report import Epoch
from unstride.learning.sources import Job, Source
from unstride.procedure.aggregate import Attention
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.progress import progress

KIND = "attention-checkpoint"
SCALE = 100  # how much faster the common part of w_o learns than its channels, up to a step of FASTEST
FASTEST = 1e-2
HALFWAY = 0.5  # of w_o, where the images only stand in for those of the test


@dataclass(frozen=True)
class Schedule:
    """How the weights are moved: AdamW, with `lr` falling to 0 along a cosine over the epochs."""

    epochs: int
    lr: float
    batch_size: int
    weight_decay: float


class Training:
    """The optimisation, one epoch at a time; all that it is can be written to a file and read back."""

    def __init__(self, job: Job, train: Source, val: Source, schedule: Schedule) -> None:
        self.job, self.train, self.val, self.schedule = job, train, val, schedule
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            self.attention = Attention(job.plan.channels).to(job.plan.graph.device)
            nn.init.zeros_(self.attention.query.weight)  # no preference that was not learned
            nn.init.zeros_(self.attention.query.bias)
        self.scale = nn.Parameter(torch.zeros((), device=job.plan.graph.device))  # what all channels of w_o share
        groups: list[dict[str, Any]] = [
            {"params": [*self.attention.parameters()], "weight_decay": schedule.weight_decay}
        ]
        self.optimiser = torch.optim.AdamW([*groups, {"params": [self.scale], "weight_decay": 0.0}], lr=schedule.lr)
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
        with progress("epochs", self.schedule.epochs, show) as advance:
            advance(max(0, len(self.history) - 1), "")
            while len(self.history) <= self.schedule.epochs:
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
        steps = math.ceil(len(self.train.keys) / self.schedule.batch_size)
        total, seen, lr = 0.0, 0, self.schedule.lr
        for step, pools in enumerate(self.train.groups(number, self.schedule.batch_size, shuffled=True)):
            done = min(1.0, (number - 1 + step / steps) / self.schedule.epochs)
            lr = self.schedule.lr * (1 + math.cos(math.pi * done)) / 2
            for group, step_size in zip(self.optimiser.param_groups, (lr, lr * _faster(self.schedule.lr)), strict=True):
                group["lr"] = step_size
            logits, labels = self._logits(pools, self.weights())
            loss = cross_entropy(logits, labels)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            total, seen = total + float(loss.detach()) * len(labels), seen + len(labels)
        if not math.isfinite(total):
            raise DataError(f"epoch {number}: the loss is {total}; use a lower lr than {self.schedule.lr:g}")
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
        for pools in self.val.groups(0, self.schedule.batch_size, shuffled=False):
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


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in state.items()}
