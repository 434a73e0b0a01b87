"""What a task does with outputs, as ONNX ops: encode, decode, confidence. The counterpart of `tasks`, checked with it.

Outputs of passes are (n, S, K, ...): images, states, classes. Combined values are (n, K, ...).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unstride.exporting.builder import OnnxBuilder
from unstride.tasks.tasks import Directions, Labels, Task

_TINY = 1e-12


@dataclass(frozen=True)
class Arithmetic:
    """Args:
    classes: entries along the class axis of an output.
    rank: dimensions of a combined value.
    """

    task: Task
    combine: str
    classes: int
    rank: int

    @property
    def sigmoid(self) -> bool:
        return self.classes == 1 or isinstance(self.task, Labels)

    # -- what is averaged
    def encode(self, b: OnnxBuilder, x: str) -> str:
        if self.combine == "probabilities":
            return b.op("Sigmoid", x) if self.sigmoid else b.op("Softmax", x, axis=2)
        if self.combine != "directions":
            return x
        flat = b.op("Reshape", x, b.constant([0, 0, -1]))
        norm = _norm(b, flat, 2)
        return b.op("Concat", b.op("Div", flat, _at_least(b, norm)), norm, axis=2)

    def decode(self, b: OnnxBuilder, mean: str) -> str:
        if self.combine == "probabilities" and self.sigmoid:
            p = b.op("Clip", mean, b.constant(1e-7), b.constant(1 - 1e-7))
            return b.op("Log", b.op("Div", p, b.op("Sub", b.constant(1.0), p)))
        if self.combine == "probabilities":
            return b.op("Log", _at_least(b, mean))
        if self.combine != "directions":
            return mean
        ends = [b.constant([v]) for v in (0, -1, 1)]
        vectors = b.op("Slice", mean, *ends)
        length = b.op("Slice", mean, ends[1], b.constant([2**62]), ends[2])
        return b.op("Mul", b.op("Div", vectors, _at_least(b, _norm(b, vectors, 1))), length)

    # -- confidence
    def votes(self, b: OnnxBuilder, x: str) -> str:
        """What agreement counts, summed over states: (n, K)."""
        if isinstance(self.task, Directions):
            flat = b.op("Reshape", x, b.constant([0, 0, -1]))
            each = b.op("Div", flat, _at_least(b, _norm(b, flat, 2)))
        elif isinstance(self.task, Labels):
            each = b.op("Cast", b.op("Greater", x, b.constant(0.0)), to=1)
        else:
            logits = self._two_class(b, x, 2)
            each = self._one_hot(b, b.op("ArgMax", logits, axis=2, keepdims=0))
        return b.op("ReduceSum", each, b.constant([1]), keepdims=0)

    def confidence(self, b: OnnxBuilder, value: str, by: str, votes: str = "", passes: str = "") -> str:
        """(n,), of combined values; of maps the mean over pixels. `passes`: how many outputs voted."""
        if by == "agreement":
            return self._agreement(b, value, votes, passes)
        if isinstance(self.task, Labels):
            return self._label_confidence(b, b.op("Sigmoid", value), by)
        logits = self._two_class(b, value, 1)
        if by == "entropy":
            logp = b.op("LogSoftmax", logits, axis=1)
            finite = b.op("Max", logp, b.constant(-3.4028235e38))
            total = b.op("ReduceSum", b.op("Mul", b.op("Exp", logp), finite), b.constant([1]), keepdims=0)
            each = b.op("Add", b.constant(1.0), b.op("Div", total, b.constant(math.log(max(2, self.classes)))))
        else:
            p = b.op("Softmax", logits, axis=1)
            two = b.ops("TopK", p, b.constant([2]), count=2, axis=1)[0]
            first = b.op("Gather", two, b.constant(0), axis=1)
            each = first if by == "probability" else b.op("Sub", first, b.op("Gather", two, b.constant(1), axis=1))
        return self._mean(b, each, self.rank - 1)

    def _label_confidence(self, b: OnnxBuilder, p: str, by: str) -> str:
        q = b.op("Sub", b.constant(1.0), p)
        if by == "entropy":
            parts = [b.op("Mul", v, b.op("Log", _at_least(b, v))) for v in (p, q)]
            bits = b.op("Div", b.op("Add", *parts), b.constant(math.log(2)))
            return b.op("Add", b.constant(1.0), self._mean(b, bits, self.rank))
        each = b.op("Abs", b.op("Sub", p, q)) if by == "margin" else b.op("Max", p, q)
        return b.op("ReduceMin", each, b.constant(list(range(1, self.rank))), keepdims=0)

    def _agreement(self, b: OnnxBuilder, value: str, votes: str, passes: str) -> str:
        """The share of passes that give the final answer."""
        count = b.op("Cast", passes, to=1)
        if isinstance(self.task, Directions):
            flat = b.op("Reshape", value, b.constant([0, -1]))
            unit = b.op("Div", flat, _at_least(b, _norm(b, flat, 1)))
            total = b.op("ReduceSum", b.op("Mul", votes, unit), b.constant([1]), keepdims=0)
            return b.op("Max", b.op("Div", total, count), b.constant(0.0))
        if isinstance(self.task, Labels):
            yes = b.op("Greater", value, b.constant(0.0))
            share = b.op("Div", votes, b.op("Unsqueeze", count, b.constant([1])))
            same = b.op("Where", yes, share, b.op("Sub", b.constant(1.0), share))
            return self._mean(b, same, self.rank)
        final = self._one_hot(b, b.op("ArgMax", self._two_class(b, value, 1), axis=1, keepdims=0))
        total = b.op("ReduceSum", b.op("Mul", votes, final), b.constant([1]), keepdims=0)
        return b.op("Div", total, count)

    def _one_hot(self, b: OnnxBuilder, index: str) -> str:
        return b.op("OneHot", index, b.constant(max(2, self.classes)), b.constant([0.0, 1.0]), axis=-1)

    def _two_class(self, b: OnnxBuilder, logits: str, axis: int) -> str:
        """One logit means sigmoid: two classes with logits (0, z)."""
        if self.classes > 1:
            return logits
        return b.op("Concat", b.op("Mul", logits, b.constant(0.0)), logits, axis=axis)

    def _mean(self, b: OnnxBuilder, each: str, rank: int) -> str:
        """Over all axes but the first."""
        return each if rank == 1 else b.op("ReduceMean", each, b.constant(list(range(1, rank))), keepdims=0)


def _norm(b: OnnxBuilder, x: str, axis: int) -> str:
    return b.op("ReduceL2", x, b.constant([axis]), keepdims=1)


def _at_least(b: OnnxBuilder, x: str) -> str:
    return b.op("Max", x, b.constant(_TINY))
