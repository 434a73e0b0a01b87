"""Looks into one answer, as they come: the mean of what a task averages, or the median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unstride.procedure.meaning import TASKS, Task


@dataclass(eq=False)
class Merged:
    """The running mean of all looks, picture by picture, of what the task and `merge` average; or their median."""

    merge: str
    task: Task = TASKS["classification"]
    total: Tensor | None = None
    weight: Tensor | None = None
    kept: dict[int, list[Tensor]] = field(default_factory=dict)  # every look, only for the median

    def add(
        self,
        count: int,
        rows: list[int],
        logits: Tensor,
        weight: float,
        temperature: float,
        where: Tensor | None = None,
    ) -> None:
        """`where` (rows, 1, H, W): only there."""
        logits = logits.float() / temperature
        if self.merge == "median":
            for i, one in zip(rows, logits, strict=True):
                self.kept.setdefault(i, []).append(one)
        else:
            part = weight if where is None else weight * where
            self.add_mean(count, rows, self.task.encode(logits, self.merge), part)

    def add_mean(self, count: int, rows: list[int], logits: Tensor, weight: float | Tensor) -> None:
        """What is merged already, such as a stage's own mean."""
        if self.total is None or self.weight is None:
            self.total = logits.new_zeros((count, *logits.shape[1:]))
            self.weight = logits.new_zeros((count, 1, *logits.shape[2:]))
        self.total[rows] += weight * logits
        self.weight[rows] += weight

    def logits(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        if self.merge == "median":
            chosen = sorted(self.kept)[rows] if isinstance(rows, slice) else rows
            return torch.stack([_median(self.kept[i]) for i in chosen])
        assert self.total is not None and self.weight is not None
        return self.task.decode(self.total[rows] / self.weight[rows], self.merge)


def _median(looks: Sequence[Tensor]) -> Tensor:
    """Number by number; of an even number of looks, the mean of the two in the middle."""
    ordered = torch.stack(list(looks)).sort(0).values
    return (ordered[(len(looks) - 1) // 2] + ordered[len(looks) // 2]) / 2
