"""What each image loses under sequences of passes: computed once for all images, whatever the gates, shares and folds.

A gate only decides which of two answers counts for an image. So the losses of the answers with and without each step,
and the confidence before it, are all that choosing needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstride.evaluation.metrics import IGNORE
from unstride.evaluation.scoring import Scoring
from unstride.tasks.tasks import TASKS, two_class
from unstride.tasks.temperature import fit_temperature
from unstride.tuning.candidates import Candidate, Groups, PassGroup
from unstride.tuning.pool import Pool

CLASSES = 48  # the most probable ones of each image and its label: enough to choose by
SHARPER = (0.7, 0.85, 1.0, 1.2, 1.4, 1.7)  # what combined logits are multiplied by; the best fits the images
KEPT = 1 << 29  # bytes of outcomes
OBJECTIVES = ("nll", "accuracy")
Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Outcome:
    """All images after the same passes.

    Args:
        losses: (B, N, Q) at B temperatures; Q is 1, or the pixels of a map.
        confidence: by measure, (N, Q); empty where the task has no gates.
    """

    losses: NDArray[np.float32]
    confidence: Mapping[str, NDArray[np.float32]]

    @classmethod
    def of(cls, losses: Tensor, confidence: Mapping[str, Tensor]) -> Outcome:
        return cls(losses.float().numpy(), {by: c.float().numpy() for by, c in confidence.items()})

    @property
    def nbytes(self) -> int:
        return self.losses.nbytes + sum(c.nbytes for c in self.confidence.values())


@dataclass(eq=False)
class Outcomes:
    """The outcomes of a pool, computed when they are asked for. One temperature per network makes them comparable.

    Args:
        objective: "nll", or "accuracy" for the share of errors. Tasks without classes have an error of their own.
    """

    pool: Pool
    scoring: Scoring
    objective: str = "nll"
    _known: OrderedDict[Any, Outcome] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def __post_init__(self) -> None:
        self.task = TASKS[self.pool.task]
        self.costs = {g: self.pool.costs(g) for g in self.pool.groups}
        self.prices = {g: float(c.mean()) for g, c in self.costs.items()}
        self.times = {g: self.pool.times(g) for g in self.pool.groups}
        self.table = _table_for(self)

    def __len__(self) -> int:
        return len(self.pool)

    @property
    def measures(self) -> tuple[str, ...]:
        """By which gates may decide."""
        return self.table.measures

    @property
    def valid(self) -> NDArray[np.bool_] | None:
        """Which pixels (N, Q) count; None: all."""
        return None if self.pool.maps is None or not self.table.by_pixel else self.pool.maps.valid.numpy()

    def of(self, candidate: Candidate, steps: int) -> Outcome:
        """After so many steps, without any gate."""
        taken = tuple((s.groups, s.weight, s.join) for s in candidate.steps[:steps])
        key = (taken, candidate.combine)
        if key not in self._known:
            self._known[key] = self.table.outcome(taken, candidate.combine)
            self._bytes += self._known[key].nbytes
            while self._bytes > KEPT and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1].nbytes
        self._known.move_to_end(key)
        return self._known[key]


Taken = tuple[tuple[Groups, float, str], ...]


class _Table:
    """Encoded passes, and how a mean of them is judged."""

    measures: tuple[str, ...] = ()
    by_pixel = False

    def __init__(self, outcomes: Outcomes) -> None:
        self.pool, self.scoring, self.objective = outcomes.pool, outcomes.scoring, outcomes.objective
        self.task = outcomes.task
        self._encoded: dict[Any, Tensor] = {}

    def encode(self, group: PassGroup, combine: str) -> Tensor:
        """The sum of a group's passes, encoded: (N, ...)."""
        raise NotImplementedError

    def outcome(self, taken: Taken, combine: str) -> Outcome:
        total, weight = self.mean(taken, combine)
        return self.judge(total / weight, combine, tuple(g for groups, _, _ in taken for g in groups))

    def mean(self, taken: Taken, combine: str) -> tuple[Tensor, float]:
        total, weight = torch.zeros(()), 0.0
        for groups, each, join in taken:
            total, weight = (torch.zeros(()), 0.0) if join == "replace" else (total, weight)
            for group in groups:
                total = total + each * self.encode(group, combine)
                weight += each * self.pool.counts[self.pool.groups.index(group)]
        return total, weight

    def judge(self, mean: Tensor, combine: str, groups: Groups) -> Outcome:
        raise NotImplementedError


class ClassTable(_Table):
    """One of several classes: the most probable ones of each image, at one temperature per network."""

    measures = ("margin", "probability", "entropy", "agreement")

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__(outcomes)
        pool = self.pool
        self.labels = pool.targets.long()
        plain = {g.network: two_class(pool.passes(g)[0]) for g in pool.groups if g.plain}
        self.temperatures = {name: fit_temperature(z, self.labels) for name, z in plain.items()}
        classes = next(iter(plain.values())).shape[1]
        self.top: Tensor | None = None
        self.at = self.labels[:, None]
        if classes > CLASSES:
            mean = torch.stack([(z / self.temperatures[n]).softmax(1) for n, z in plain.items()]).mean(0)
            self.top = mean.scatter(1, self.labels[:, None], torch.inf).topk(CLASSES, 1).indices
            self.at = (self.top == self.labels[:, None]).long().argmax(1, keepdim=True)
        self.answers: dict[PassGroup, Tensor] = {}

    def encode(self, group: PassGroup, combine: str) -> Tensor:
        key = (group, combine)
        if key not in self._encoded:
            passes = [two_class(z) / self.temperatures[group.network] for z in self.pool.passes(group)]
            self.answers[group] = torch.stack([z.argmax(1) for z in passes])
            values = [z.softmax(1) if combine == "probabilities" else z.log_softmax(1) for z in passes]
            kept = [v if self.top is None else v.gather(1, self.top) for v in values]
            self._encoded[key] = torch.stack(kept).sum(0)
        return self._encoded[key]

    def judge(self, mean: Tensor, combine: str, groups: Groups) -> Outcome:
        z = mean.clamp(min=1e-12).log() if combine == "probabilities" else mean
        p = z.softmax(1)
        first, second = p.topk(2, 1).values.unbind(1)
        best = z.argmax(1)
        classes = best if self.top is None else self.top.gather(1, best[:, None])[:, 0]
        same = torch.cat([self.answers[g] == classes for g in groups]).float().mean(0)
        log_p = p.clamp(min=1e-12).log()
        confidence = {
            "margin": first - second,
            "probability": first,
            "entropy": 1 + (p * log_p).sum(1) / np.log(z.shape[1]),
            "agreement": same,
        }
        if self.objective == "accuracy":
            losses = (best != self.at[:, 0]).float()[None]
        else:
            own = z.gather(1, self.at)[:, 0]
            losses = torch.stack([(z * b).logsumexp(1) - b * own for b in SHARPER])
        return Outcome.of(losses[..., None], {name: c[:, None] for name, c in confidence.items()})


class PixelTable(_Table):
    """A class at every pixel: the probability of each pixel's label is all that a mean of probabilities needs."""

    by_pixel = True
    measures = ("margin",)

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__(outcomes)
        self.labels = self.pool.targets[:, 0].long()  # (N, P)
        self.unlabelled = self.labels == IGNORE

    def encode(self, group: PassGroup, combine: str) -> Tensor:
        if group not in self._encoded:
            at = self.labels.masked_fill(self.unlabelled, 0)[:, None]
            total = torch.zeros(self.labels.shape)
            for passes in self.pool.passes(group):
                for start in range(0, len(passes), 16):  # some images at a time
                    part = two_class(passes[start : start + 16, :, 0]).softmax(1)
                    total[start : start + 16] += part.gather(1, at[start : start + 16])[:, 0]
            self._encoded[group] = total
        return self._encoded[group]

    def judge(self, mean: Tensor, combine: str, groups: Groups) -> Outcome:
        losses = -mean.clamp(min=1e-9).log()
        confidence = {}
        if len(groups) == 1 and groups[0].plain and self.pool.maps is not None:
            confidence["margin"] = self.pool.maps.confidence(groups[0].network)
        return Outcome.of(losses.masked_fill(self.unlabelled, 0.0)[None], confidence)


class TaskTable(_Table):
    """Every other task: the scoring's own loss of each image."""

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__(outcomes)
        own = self.task.gates
        self.measures = () if self.task.maps or not self.task.classes else tuple(m for m in own if m != "agreement")

    def encode(self, group: PassGroup, combine: str) -> Tensor:
        key = (group, combine)
        if key not in self._encoded:
            self._encoded[key] = torch.stack([self.task.encode(v, combine) for v in self.pool.passes(group)]).sum(0)
        return self._encoded[key]

    def judge(self, mean: Tensor, combine: str, groups: Groups) -> Outcome:
        output = self.task.decode(mean, combine)
        losses = torch.from_numpy(self.scoring.loss(self.scoring.stats(output, self.pool.targets))).float()
        confidence = {by: self.task.confidence(output, by)[:, None] for by in self.measures}
        return Outcome.of(losses[None, :, None], confidence)


def _table_for(outcomes: Outcomes) -> _Table:
    if outcomes.pool.task == "classification":
        return ClassTable(outcomes)
    return PixelTable(outcomes) if outcomes.pool.task == "segmentation" else TaskTable(outcomes)


# ---------------------------------------------------------------- behind gates
def gated_losses(
    candidate: Candidate,
    steps: Sequence[Array],
    before: Sequence[Array | None],
    valid: NDArray[np.bool_] | None,
    fit: NDArray[np.bool_],
) -> tuple[Array, int]:
    """Losses (B, n) behind thresholds from the images `fit`, and which of B temperatures suits those best.

    Args:
        steps: losses (B, n, Q) after each step without gates.
        before: confidence (n, Q) before each further step; None where everything goes on that came so far.
        valid: (n, Q), which pixels count; None: all.
    """
    loss = steps[0]
    passing = np.ones(loss.shape[1:], dtype=bool) if valid is None else valid
    units = int(passing[fit].sum())
    for step, after, confidence in zip(candidate.steps[1:], steps[1:], before, strict=True):
        if confidence is not None:
            below = _kth(confidence[fit][passing[fit]], round(step.share * units))
            passing = passing & (confidence < below)
        loss = np.where(passing, after, loss)
    each = loss[..., 0] if valid is None else loss.sum(2) / np.maximum(1, valid.sum(1))
    return each, int(each[:, fit].mean(1).argmin())


def _kth(values: Array, count: int) -> float:
    """The value that `count` of these are below."""
    if count <= 0 or not len(values):
        return -np.inf
    if count >= len(values):
        return np.inf
    return float(np.partition(values, count)[count])
