"""The one place where passes are averaged: a running weighted mean of what the task averages, a median or a maximum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unstride.tasks.tasks import Task


class Combine:
    """The combined outputs of `count` images.

    Args:
        how: "logits", "probabilities", "values", "directions" (means), "median", or "max", the largest logit.
    """

    def __init__(self, how: str, task: Task, count: int) -> None:
        self.how, self.task, self.count = how, task, count
        self.total: Tensor | None = None
        self.weight: Tensor | None = None
        self.outputs: dict[int, list[Tensor]] = {}  # of each image, every pass: only for the median

    def add(self, rows: Sequence[int], output: Tensor, weight: float | Tensor, where: Tensor | None = None) -> None:
        """Outputs (R, ...) of these images. `where` (R, 1, H, W): only there."""
        output = output if output.dtype == torch.float64 else output.float()
        if self.how == "median":
            for row, value in zip(rows, output, strict=True):
                self.outputs.setdefault(row, []).append(value)
            return
        encoded = self.task.encode(output, self.how)
        weight = weight if where is None else weight * where
        if self.total is None or self.weight is None:
            empty = -torch.inf if self.how == "max" else 0.0
            self.total = encoded.new_full((self.count, *encoded.shape[1:]), empty)
            self.weight = encoded.new_zeros((self.count, *[1] * (encoded.ndim - 1)))
        if isinstance(weight, Tensor) and weight.shape[1:] != self.weight.shape[1:]:
            self.weight = self.weight.expand(self.count, *weight.shape[1:]).clone()
        at = self._index(rows)
        if self.how == "max":
            known = encoded if where is None else encoded.masked_fill(where == 0, -torch.inf)
            _put(self.total, at, torch.maximum(_taken(self.total, at), known))
        else:
            _put(self.total, at, _taken(self.total, at) + weight * encoded)
        _put(self.weight, at, _taken(self.weight, at) + weight)

    def value(self, rows: Sequence[int] | None = None) -> Tensor:
        """The combined output of these images, all by default."""
        chosen = range(self.count) if rows is None else rows
        if self.how == "median":
            return torch.stack([median(self.outputs[row]) for row in chosen])
        assert self.total is not None and self.weight is not None
        at = self._index(chosen)
        if self.how == "max":
            return _taken(self.total, at).clone()
        return self.task.decode(_taken(self.total, at) / _taken(self.weight, at), self.how)

    def replace(self, rows: Sequence[int], other: Combine) -> None:
        """Take these images' passes from `other`, where it has any, and forget those so far."""
        if self.how == "median":
            self.outputs |= {row: other.outputs[row] for row in rows}
            return
        assert self.total is not None and self.weight is not None
        assert other.total is not None and other.weight is not None
        at = self._index(rows)
        if other.weight.shape != self.weight.shape:
            self.weight = self.weight.expand(torch.broadcast_shapes(self.weight.shape, other.weight.shape)).clone()
        theirs = _taken(other.weight, at)
        new = theirs > 0  # of tiles, the pixels that they decide
        _put(self.total, at, torch.where(new, _taken(other.total, at), _taken(self.total, at)))
        _put(self.weight, at, torch.where(new, theirs, _taken(self.weight, at)))

    def _index(self, rows: Sequence[int]) -> Tensor | None:
        """Where the rows are, on the device of the sums; None for all of them, which is faster."""
        assert self.total is not None
        return None if len(rows) == self.count else torch.tensor(list(rows), device=self.total.device)


def _taken(values: Tensor, at: Tensor | None) -> Tensor:
    return values if at is None else values.index_select(0, at)


def _put(values: Tensor, at: Tensor | None, new: Tensor) -> None:
    values.copy_(new) if at is None else values.index_copy_(0, at, new)


def median(passes: Sequence[Tensor]) -> Tensor:
    """Number by number; of an even number of passes, the mean of the two in the middle."""
    ordered = torch.stack(list(passes)).sort(0).values
    return (ordered[(len(passes) - 1) // 2] + ordered[len(passes) // 2]) / 2
