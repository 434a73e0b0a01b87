"""How a task's answers are judged: what each image loses, for choosing; and the metric with its interval, for proof.

    judge = judge_of(pool)
    judge.losses(pool.plain).mean()                       # what is to be small
    judge.scores([pool.plain, merged])[1].certificate     # of the second over the first

Metrics and intervals are those of `unstride.evaluation.measures`, so that `evaluate` finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from unstride.errors import DataError
from unstride.evaluation import measures
from unstride.evaluation.measures import NEIGHBOURS
from unstride.tasks.temperature import fit_temperature
from unstride.tuning.certificate import Certificate, Measured, Saved, certify
from unstride.tuning.choose import fold_of
from unstride.tuning.pool import Pool

FOLDS = 5


@dataclass(frozen=True)
class Score:
    """The metric of some answers, a second figure, and what is sure about the gain over the first answers."""

    value: float
    beside: float
    certificate: Certificate


class Judge:
    """Of numbers: squared errors, whose mean is RMSE squared. `by`: what is chosen by; `metric`, `beside`: shown."""

    by = "RMSE"

    def __init__(self, pool: Pool, seed: int = 0) -> None:
        assert pool.labels is not None
        self.pool, self.labels, self.seed = pool, pool.labels, seed

    @property
    def chance(self) -> float | None:
        """What guessing reaches of the metric, where that says anything."""
        return None

    @property
    def metric(self) -> str:
        return "RMSE"

    @property
    def beside(self) -> str:
        return "AbsRel" if self.pool.task == "dense" else "MAE"

    def answers(self, outputs: Tensor) -> Tensor:
        """(N, A): what is kept of each image's output, once all of them are there."""
        return outputs

    def losses(self, outputs: Tensor) -> Tensor:
        """(N,): what is to be small on average."""
        stands = torch.ones(len(outputs)) if self.pool.stands is None else self.pool.stands
        each = (outputs - self.labels).double().square().nanmean(1)
        return each * stands / stands.double().mean()

    def temperature(self, outputs: Tensor) -> float:
        return 1.0

    def scores(self, answers: Sequence[Tensor]) -> list[Score]:
        """Of the answers of several recipes, the plain network's first."""
        measured, compare = self._measured(answers)
        base, key = measured[0]["rmse"], "absrel" if self.pool.task == "dense" else "mae"
        found = []
        for k, one in enumerate(measured):
            g = compare(0, k)
            low, high, mean = (x / base if base else 0.0 for x in (g.low, g.high, g.gain))
            found.append(Score(one["rmse"], one[key], Saved(len(self.pool), 0, 0, low, high, mean, self.metric)))
        return found

    def _measured(self, answers: Sequence[Tensor]) -> measures.Measured:
        """As `evaluate` measures: of maps, an image counts by its known pixels."""
        task, outputs, targets = self.pool.task, list(answers), list(self.labels)
        if task == "dense":  # the kept pixels as a map of one row
            outputs, targets = [one[:, None] for one in outputs], [one[None] for one in targets]
        each = measures.score(task, outputs, targets)
        values = {name: np.stack([one[name] for one in each]) for name in each[0]}
        if task == "dense" and self.pool.stands is not None:
            values["pixels"] = self.pool.stands.numpy()
        return measures.summarise(task, values, self.seed)


class Labels(Judge):
    """Of several labels: the likelihood of each yes or no after one temperature; the metric is mAP."""

    by = "likelihood"

    @property
    def metric(self) -> str:
        return "mAP %"

    @property
    def beside(self) -> str:
        return "NLL"

    def losses(self, outputs: Tensor) -> Tensor:
        return self._nll(outputs, self.temperature(outputs))

    def temperature(self, outputs: Tensor) -> float:
        return self._fitted(outputs, self.labels)

    def scores(self, answers: Sequence[Tensor]) -> list[Score]:
        measured, compare = self._measured(answers)
        found = []
        for k, one in enumerate(measured):
            g = compare(0, k)
            proof = Measured(len(self.pool), g.corrected, g.corrupted, g.low, g.high, g.gain)
            found.append(Score(one["map"], self._warmed(answers[k]), proof))
        return found

    def _fitted(self, outputs: Tensor, labels: Tensor) -> float:
        return fit_temperature(outputs.reshape(-1, 1), labels.long().reshape(-1))  # each label alone: one of two

    def _nll(self, outputs: Tensor, temperature: float, rows: Tensor | slice = slice(None)) -> Tensor:
        z, y = outputs[rows].double() / temperature, self.labels[rows].double()
        return binary_cross_entropy_with_logits(z, y, reduction="none").mean(1)

    def _warmed(self, outputs: Tensor) -> float:
        """After one temperature, fitted on other folds."""
        folds, out = fold_of(len(outputs), FOLDS, self.seed), []
        for k in range(FOLDS):
            train, held = folds != k, folds == k
            out.append(self._nll(outputs, self._fitted(outputs[train], self.labels[train]), held))
        return float(torch.cat(out).mean())


class Neighbours(Judge):
    """Of embeddings: each image against all others, by the labels of its nearest; the answer is what was found.

    Of pairs: each query against the gallery. An image that is no query loses nothing, whatever is done.
    """

    by = "neighbours"

    def __init__(self, pool: Pool, seed: int = 0) -> None:
        super().__init__(pool, seed)
        self.pairs, self.asked = self.labels.ndim == 2, _asked(self.labels)

    @property
    def chance(self) -> float:
        return measures.chance_of(self.labels)

    @property
    def metric(self) -> str:
        return "recall@1 %" if self.pairs else "k-NN accuracy %"

    @property
    def beside(self) -> str:
        return "recall@5" if self.pairs else "recall@1"

    def answers(self, outputs: Tensor) -> Tensor:
        """(N, 1 + 5): whether it is right, then whether each of its neighbours is one that it should have."""
        vectors = normalize(outputs.float())
        found = torch.zeros(len(vectors), 1 + NEIGHBOURS, dtype=torch.bool)
        if self.pairs:
            hits = measures.paired(vectors, self.labels, NEIGHBOURS)
            right = hits[:, 0]
        else:
            near = self.labels[measures.neighbours(vectors, min(NEIGHBOURS, len(vectors) - 1))]
            hits, right = near == self.labels[:, None], measures.voted(near) == self.labels
        found[self.asked, 0], found[self.asked, 1 : 1 + hits.shape[1]] = right, hits
        return found

    def losses(self, outputs: Tensor) -> Tensor:
        """Neighbours of another class, as a share; of pairs, how often the match is not among the 1, 2, ... nearest."""
        hits = self.answers(outputs)[:, 1:]
        hits = hits.cummax(1).values if self.pairs else hits
        lost = torch.zeros(len(outputs), dtype=torch.float64)
        lost[self.asked] = 1 - hits[self.asked].double().mean(1)
        return lost

    def scores(self, answers: Sequence[Tensor]) -> list[Score]:
        asked = [one[self.asked] for one in answers]
        was, found = asked[0][:, 0], []
        for one in asked:
            now = one[:, 0]
            proof = certify(int((now & ~was).sum()), int((was & ~now).sum()), len(now))
            second = one[:, 1:] if self.pairs else one[:, 1:2]
            found.append(Score(float(now.double().mean()), float(second.any(1).double().mean()), proof))
        return found


def check_neighbours(labels: Tensor) -> None:
    """Whether embeddings can be judged by the labels (N, ...) of these images; asked before any look is taken."""
    pairs = labels.ndim == 2
    if not len(_asked(labels)) or (not pairs and len(labels.unique()) < 2):
        what = "pairs" if pairs else "several images of several classes"
        raise DataError(f"{len(labels)} images have no neighbour that they could be told by; give {what}")


def _asked(labels: Tensor) -> Tensor:
    """Rows of the images that are looked for: of pairs the queries, otherwise all."""
    return measures.asked_pairs(labels) if labels.ndim == 2 else torch.arange(len(labels))


JUDGES: dict[str, type[Judge]] = {
    "multilabel": Labels,
    "regression": Judge,
    "dense": Judge,
    "embedding": Neighbours,
}


def judge_of(pool: Pool, seed: int = 0) -> Judge:
    return JUDGES[pool.task](pool, seed)
