"""Tasks: what a network's output means, how passes are combined, how confident an output is, whether passes agree.

    TASKS["embedding"].compare([p.output for p in passes], prediction.output)    # (agreement, spread)

A new task is a few lines in this file, and its metrics in `unstride.evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unstride.errors import CaptureError, OptionError

MEASURES = ("margin", "probability", "entropy", "agreement")
PIECE = 1 << 20  # elements of a map that are measured together
NEAR = "take Near states, which need no classes: Stage(states=Near(4)), or Search(criterion='displacement')"
Compared = tuple[float, Tensor]


def two_class(logits: Tensor, dim: int = 1) -> Tensor:
    """One logit per item means sigmoid: the same as two classes with logits (0, z)."""
    return logits if logits.shape[dim] > 1 else torch.cat([torch.zeros_like(logits), logits], dim)


def entropy(logits: Tensor, dim: int = 1) -> Tensor:
    """Entropy of the predicted distribution divided by log K: 0 is certain, 1 knows nothing."""
    logits = two_class(logits, dim).float()
    logp = logits.log_softmax(dim)
    finite = logp.clamp(min=torch.finfo(logp.dtype).min)  # 0 log 0 is 0 where a class is ruled out; NaN stays
    return -(logp.exp() * finite).sum(dim) / math.log(logits.shape[dim])


def in_pieces(measure: Callable[[Tensor], Tensor], maps: Tensor) -> Tensor:
    """`measure(maps)` (R, H, W) of maps (R, K, H, W), some lines at a time, so that temporaries stay small."""
    if maps.ndim < 3:
        return measure(maps)
    lines = max(1, PIECE * maps.shape[2] // max(1, maps.numel()))
    return torch.cat([measure(part) for part in maps.split(lines, 2)], 1)


def top_class(logits: Tensor, dim: int = 1) -> Tensor:
    """The most probable class; -1 where the logits are not numbers."""
    best, index = two_class(logits, dim).max(dim)
    return index.masked_fill_(best.isnan(), -1)


def agreement(answers: Tensor, final: Tensor) -> Tensor:
    """Whether classes (S, ...) equal the final ones (...), as numbers to be averaged: NaN where one is unknown."""
    return (answers == final).float().masked_fill_((answers < 0) | (final < 0), math.nan)


def confidence(logits: Tensor, by: str, answers: Sequence[Tensor] = ()) -> Tensor:
    """Confidence of combined logits (B, K) -> (B,), or of maps (B, K, H, W) -> (B, H, W).

    Args:
        by: "margin" between the two most probable classes, "probability" of the first, "entropy" as 1 - H / log K, or
            "agreement": the share of passes that give the combined class.
        answers: the class (B,) of each pass so far, for agreement.
    """
    logits = two_class(logits).float()
    if by == "entropy":
        return 1.0 - entropy(logits)
    if by == "agreement":
        final = top_class(logits)
        return torch.stack([agreement(top, final) for top in answers]).mean(0)
    first, second = logits.softmax(1).topk(2, 1).values.unbind(1)
    return first - second if by == "margin" else first


@dataclass(frozen=True)
class Task:
    """One of several classes, by softmax: of an image, or at every pixel where the output `maps` it.

    The tuples say what a recipe may ask for, the usual first. `stitches`: states can be placed on a finer grid. `pads`:
    an image of a size that the model does not take is padded, and the output cropped.
    """

    name: str
    shape: str  # of the output, in words
    combines: tuple[str, ...] = ("logits", "probabilities", "max")
    criteria: tuple[str, ...] = (
        "entropy",
        "entropy-unaligned",
        "learned",
        "displacement",
        "random",
        "random-per-image",
    )
    aggregates: tuple[str, ...] = ("mean", "entropy", "entropy-unaligned", "learned", "max")
    gates: tuple[str, ...] = MEASURES
    maps: bool = False
    stitches: bool = False
    pads: bool = False
    searches: bool = True  # whether the paper's search runs on it; otherwise only lists of states
    classes: ClassVar[bool] = True
    one_label: ClassVar[bool] = True

    def reads(self, shape: Sequence[int]) -> str:
        """What an output of this shape is taken for."""
        count = shape[1] if len(shape) > 1 else 1
        what = f"the scores of {count} classes" if count > 1 else "one score: the second of two classes, by sigmoid"
        return what + (" at every pixel" if self.maps else "")

    def answer(self, output: Tensor) -> Tensor:
        """What of a pass is compared to see whether passes agree."""
        return top_class(output)

    def confidence(self, combined: Tensor, by: str, answers: Sequence[Tensor] = ()) -> Tensor:
        """From 0 to 1: (B,), or each pixel (B, H, W). `answers`: of each pass so far, for agreement."""
        return confidence(combined, by, answers)

    def uncertainty(self, values: Tensor) -> Tensor:
        """What the search minimises, (B,): 0 is certain, 1 knows nothing."""
        return in_pieces(entropy, values).flatten(1).mean(1) if values.ndim > 2 else entropy(values)

    def encode(self, output: Tensor, combine: str) -> Tensor:
        """An output as what is averaged over passes; `decode` is the inverse."""
        if combine != "probabilities":
            return output
        return output.sigmoid() if self._by_sigmoid(output) else output.softmax(1)

    def decode(self, mean: Tensor, combine: str) -> Tensor:
        if combine != "probabilities":
            return mean
        return mean.logit(1e-7) if self._by_sigmoid(mean) else mean.clamp(min=1e-12).log_()  # NaN stays NaN in both

    def _by_sigmoid(self, output: Tensor) -> bool:
        return output.shape[1] == 1

    def compare(self, outputs: Sequence[Tensor], final: Tensor) -> Compared:
        """Agreement of passes with the final output (K, ...), from 0 to 1, and their spread.

        Classes: the share of passes (and pixels) that give the final class, and the mutual information between pass and
        class in nats.
        """
        best = top_class(final, 0)
        total: Tensor | float = 0.0
        within: Tensor | float = 0.0
        same: list[Tensor] = []
        for logits in outputs:
            p = two_class(logits[None].float())[0].softmax(0)
            total = total + p
            within = within - (p * p.clamp(min=1e-12).log()).sum(0)
            same.append(agreement(top_class(p, 0), best).double().mean())
        mean = total / len(outputs)
        assert isinstance(mean, Tensor) and isinstance(within, Tensor)
        whole = -(mean * mean.clamp(min=1e-12).log()).sum(0)
        return float(torch.stack(same).mean()), (whole - within / len(outputs)).clamp(min=0)


@dataclass(frozen=True)
class Labels(Task):
    """Any number of labels, each yes or no by its own sigmoid.

    The least confident label decides how confident an image is.
    """

    one_label: ClassVar[bool] = False

    def reads(self, shape: Sequence[int]) -> str:
        return f"{shape[1]} labels, each a yes or no{' at every pixel' if self.maps else ''}"

    def answer(self, output: Tensor) -> Tensor:
        return (output > 0).long().masked_fill_(output.isnan(), -1)

    def confidence(self, combined: Tensor, by: str, answers: Sequence[Tensor] = ()) -> Tensor:
        if by == "agreement":
            final = self.answer(combined)
            return torch.stack([agreement(one, final) for one in answers]).mean(0).flatten(1).mean(1)
        if by == "entropy":
            return 1.0 - self.uncertainty(combined)
        p = combined.float().sigmoid().flatten(1)
        return ((2 * p - 1).abs() if by == "margin" else torch.maximum(p, 1 - p)).amin(1)

    def uncertainty(self, values: Tensor) -> Tensor:
        return _binary_entropy(values.float().sigmoid()).flatten(1).mean(1) / math.log(2)

    def _by_sigmoid(self, output: Tensor) -> bool:
        return True

    def compare(self, outputs: Sequence[Tensor], final: Tensor) -> Compared:
        """The share of passes and labels that give the final yes or no; the mutual information of each label."""
        p = torch.stack([logits.float().sigmoid() for logits in outputs])
        same = torch.stack([agreement(self.answer(logits), self.answer(final)).double().mean() for logits in outputs])
        return float(same.mean()), (_binary_entropy(p.mean(0)) - _binary_entropy(p).mean(0)).clamp(min=0)


@dataclass(frozen=True)
class Values(Task):
    """Numbers: a vector, or a map such as depth. Nothing in them says how confident they are; several passes do."""

    combines: tuple[str, ...] = ("values", "median")
    criteria: tuple[str, ...] = ("displacement", "random", "random-per-image")
    aggregates: tuple[str, ...] = ("mean",)
    gates: tuple[str, ...] = ()
    classes: ClassVar[bool] = False
    one_label: ClassVar[bool] = False

    def reads(self, shape: Sequence[int]) -> str:
        count = math.prod(shape[1:2])
        return (
            "one number at every pixel"
            if self.maps and len(shape) < 4
            else (f"{count} number{'s' * (count > 1)}{' at every pixel' if self.maps else ''}")
        )

    def answer(self, output: Tensor) -> Tensor:
        return output

    def confidence(self, combined: Tensor, by: str, answers: Sequence[Tensor] = ()) -> Tensor:
        raise OptionError(f"task={self.name!r} has no {by}: nothing in its output says how confident it is; {NEAR}")

    def uncertainty(self, values: Tensor) -> Tensor:
        return torch.zeros(len(values), device=values.device)

    def encode(self, output: Tensor, combine: str) -> Tensor:
        return output

    def decode(self, mean: Tensor, combine: str) -> Tensor:
        return mean

    def compare(self, outputs: Sequence[Tensor], final: Tensor) -> Compared:
        """Agreement: 1 - sum |pass - final| / sum (|pass| + |final|); spread: the standard deviation of each number."""
        values, f = torch.stack([v.double() for v in outputs]), final.double()
        size = float((values.abs() + f.abs()).sum())
        return 1 - float((values - f).abs().sum()) / size if size else 1.0, values.std(0, correction=0).float()


@dataclass(frozen=True)
class Directions(Values):
    """Vectors that are compared by their angle: of an image, or at every cell of a map.

    Their mean is the mean of unit vectors, scaled to the mean length of the passes: unit vectors stay unit vectors.
    """

    def reads(self, shape: Sequence[int]) -> str:
        return "features that lie on the image" if self.maps else f"a vector of {math.prod(shape[1:])} numbers"

    def answer(self, output: Tensor) -> Tensor:
        return normalize(output.flatten(1).float())

    def confidence(self, combined: Tensor, by: str, answers: Sequence[Tensor] = ()) -> Tensor:
        if by not in self.gates:
            return super().confidence(combined, by, answers)
        final = self.answer(combined)
        return torch.stack([(one * final).sum(1) for one in answers]).mean(0).clamp(min=0)

    def encode(self, output: Tensor, combine: str) -> Tensor:
        if combine != "directions":
            return output
        flat = output if self.maps else output.flatten(1)
        return torch.cat([normalize(flat), flat.norm(dim=1, keepdim=True)], 1)

    def decode(self, mean: Tensor, combine: str) -> Tensor:
        return normalize(mean[:, :-1]) * mean[:, -1:] if combine == "directions" else mean

    def compare(self, outputs: Sequence[Tensor], final: Tensor) -> Compared:
        """Agreement: the mean cosine with the final vector; spread: 1 - the length of the unit vectors' mean."""
        units = torch.stack([self._unit(vectors) for vectors in outputs])
        cosine = (units * self._unit(final)).sum(1)
        return float(cosine.double().mean()), (1 - units.mean(0).norm(dim=0)).clamp(min=0)

    def _unit(self, vectors: Tensor) -> Tensor:
        return normalize(vectors.float() if self.maps else vectors.float().flatten(), dim=0)


def _binary_entropy(p: Tensor) -> Tensor:
    """Entropy of a yes or no, in nats."""
    q = 1 - p
    return -(p * p.clamp(min=1e-12).log() + q * q.clamp(min=1e-12).log())


_LABELS: dict[str, Any] = {
    "criteria": ("entropy", "entropy-unaligned", "displacement", "random", "random-per-image"),
    "aggregates": ("mean", "max"),
}
_PIXELS: dict[str, Any] = {"maps": True, "stitches": True, "pads": True}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("classification", "(B, K)"),
        Labels("multilabel", "(B, K)", **_LABELS),
        Task(
            "segmentation",
            "(B, K, H, W)",
            aggregates=("mean", "entropy", "entropy-unaligned", "max"),
            gates=MEASURES[:3],
            **_PIXELS,
        ),
        Labels("multilabel-segmentation", "(B, K, H, W)", gates=(), **_LABELS, **_PIXELS),
        Values("regression", "(B, K)"),
        Values("dense", "(B, H, W) or (B, C, H, W)", **_PIXELS),
        Directions("embedding", "(B, C)", combines=("directions", "values", "median"), gates=("agreement",)),
        Directions("features", "a map or tokens", ("values", "directions", "median"), maps=True, searches=False),
    )
}
ALIASES = {"depth": "dense"}
COMBINES = tuple(dict.fromkeys(combine for task in TASKS.values() for combine in task.combines))


def task_named(name: Any) -> Task:
    """`task_named("depth")`; an OptionError where there is none of that name."""
    found = TASKS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        raise OptionError(f"task: got {name!r}, expected one of {', '.join(map(repr, ['auto', *TASKS, *ALIASES]))}")
    return found


def meant_outputs(task: Task, shapes: Sequence[Sequence[int]], axes: int = 2) -> list[int]:
    """Indices of the outputs that the task combines, the main one first; a CaptureError if there is none.

    Args:
        shapes: of every output tensor, the batch first.
        axes: spatial axes of the input: 1 for signals, 2 for images, 3 for volumes.
    """
    if task.maps:
        ranks = (axes + 2, axes + 1) if task.name == "dense" else (axes + 2,)
        found = [i for i, shape in enumerate(shapes) if len(shape) in ranks]
    else:
        found = [i for i, shape in enumerate(shapes) if len(shape) == 2][:1]
        if not found and task.name == "regression":
            found = [i for i, shape in enumerate(shapes) if len(shape) == 1][:1]
        if not found and task.name == "embedding":
            found = [i for i, shape in enumerate(shapes) if len(shape) > 2 and set(shape[2:]) == {1}][:1]
    if found:
        return found
    maps = not task.maps and any(len(shape) == axes + 2 for shape in shapes)
    hint = " For logit maps pass task='segmentation', for other maps 'dense' or 'features'." if maps else ""
    shown = ", ".join(f"({', '.join(map(str, ('B', *shape[1:])))})" for shape in shapes) or "no tensor"
    raise CaptureError(f"{task.name} needs an output {task.shape}; this model returns {shown}.{hint}")
