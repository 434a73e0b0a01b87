"""What a network's output means, task by task: how sure it is, whether looks agree, how they are merged.

    TASKS["embedding"].compare([v.logits for v in p.states], p.logits)    # (agreement, spread)

Everything else asks here, so a new task is a few lines in this file, and its score in `unstride.evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unstride.errors import OptionError
from unstride.procedure.aggregate import agreement, entropy, in_pieces, top_class, two_class
from unstride.procedure.align import overlap
from unstride.procedure.gates import MEASURES, sureness

NEAR = "take near states, which need no classes: stages with states='near:4', or criterion='displacement'"
Compared = tuple[float, Tensor]


@dataclass(frozen=True)
class Task:
    """One of several classes, by softmax: of an image, or at every pixel where the output `maps` it.

    The tuples say what a recipe may ask for, the usual first. `stitches`: states can be laid on a finer grid. `pads`: a
    image of a size that the model does not take is padded, and the answer cut again.
    """

    name: str
    shape: str  # of the output, in words
    merges: tuple[str, ...] = ("logits", "probabilities")
    criteria: tuple[str, ...] = ("entropy", "learned", "displacement", "random")
    aggregates: tuple[str, ...] = ("mean", "entropy", "attention", "max")
    gates: tuple[str, ...] = MEASURES
    maps: bool = False
    stitches: bool = False
    pads: bool = False
    searches: bool = True  # whether the paper's search runs on it; otherwise only stages of looks
    classes: ClassVar[bool] = True
    one_label: ClassVar[bool] = True

    def reads(self, shape: Sequence[int]) -> str:
        """What an output of this shape is taken for."""
        count = shape[1] if len(shape) > 1 else 1
        what = f"the scores of {count} classes" if count > 1 else "one score: the second of two classes, by sigmoid"
        return what + (" at every pixel" if self.maps else "")

    def own(self, output: Tensor) -> Tensor:
        """What of a look is kept to see whether looks agree."""
        return top_class(output)

    def sure(self, merged: Tensor, by: str, own: Sequence[Tensor] = ()) -> Tensor:
        """How sure an output is, from 0 to 1: (B,), or each pixel (B, H, W); `own`, of each look: for agreement."""
        return sureness(merged, by, own)

    def unsure(self, values: Tensor) -> Tensor:
        """What the search minimises, (B,): 0 is certain, 1 knows nothing."""
        return in_pieces(entropy, values).flatten(1).mean(1) if values.ndim > 2 else entropy(values)

    def encode(self, output: Tensor, merge: str) -> Tensor:
        """An output as what is averaged over looks; `decode` is its way back."""
        if merge != "probabilities":
            return output
        return output.sigmoid() if self._by_sigmoid(output) else output.softmax(1)

    def decode(self, mean: Tensor, merge: str) -> Tensor:
        if merge != "probabilities":
            return mean
        return mean.logit(1e-7) if self._by_sigmoid(mean) else mean.clamp(min=1e-12).log()  # NaN stays NaN in both

    def _by_sigmoid(self, output: Tensor) -> bool:
        return output.shape[1] == 1

    def compare(self, own: Sequence[Tensor], final: Tensor, shifts: Sequence[Sequence[int]] = ()) -> Compared:
        """Agreement of looks with the final output (K, ...), from 0 to 1, and their spread.

        Classes: the share of looks (and pixels) that give the final class, and the mutual information between look and
        class in nats. `shifts`: how far each look's own map lies beyond the final one; a pixel that a look does not
        cover is decided by the others.
        """
        best = top_class(final, 0)
        first = two_class(own[0][None].float())[0]
        total, within, count = torch.zeros_like(first), torch.zeros_like(first[0]), torch.zeros_like(first[0])
        same, pixels = 0.0, 0
        for logits, shift in _moved(own, shifts):
            p = two_class(logits[None].float())[0].softmax(0)
            here: Any = ...
            if p.ndim > 1:
                here, source = overlap(p.shape[1:], shift)
                p = p[source]
            total[here] += p
            within[here] += -(p * p.clamp(min=1e-12).log()).sum(0)
            count[here] += 1
            equal = agreement(top_class(p, 0), best[here])
            same, pixels = same + float(equal.sum(dtype=torch.float64)), pixels + equal.numel()
        mean = total / count
        whole = -(mean * mean.clamp(min=1e-12).log()).sum(0)
        return same / pixels, (whole - within / count).clamp(min=0)


@dataclass(frozen=True)
class Labels(Task):
    """Any number of labels, each yes or no by its own sigmoid. The least sure label is what an image is unsure of."""

    one_label: ClassVar[bool] = False

    def reads(self, shape: Sequence[int]) -> str:
        return f"{shape[1]} labels, each a yes or no{' at every pixel' if self.maps else ''}"

    def own(self, output: Tensor) -> Tensor:
        return (output > 0).long().masked_fill_(output.isnan(), -1)

    def sure(self, merged: Tensor, by: str, own: Sequence[Tensor] = ()) -> Tensor:
        if by == "agreement":
            final = self.own(merged)
            return torch.stack([agreement(one, final) for one in own]).mean(0).flatten(1).mean(1)
        if by == "entropy":
            return 1.0 - self.unsure(merged)
        p = merged.float().sigmoid().flatten(1)
        return ((2 * p - 1).abs() if by == "margin" else torch.maximum(p, 1 - p)).amin(1)

    def unsure(self, values: Tensor) -> Tensor:
        return _doubt(values.float().sigmoid()).flatten(1).mean(1) / math.log(2)

    def _by_sigmoid(self, output: Tensor) -> bool:
        return True

    def compare(self, own: Sequence[Tensor], final: Tensor, shifts: Sequence[Sequence[int]] = ()) -> Compared:
        """The share of looks and labels that give the final yes or no; the mutual information of each label."""
        best = self.own(final)
        total, within, count = (torch.zeros_like(final, dtype=torch.float32) for _ in range(3))
        same, number = 0.0, 0
        for logits, shift in _moved(own, shifts):
            here, source = overlap(logits.shape[1:], shift) if shift else (..., ...)
            p = logits[source].float().sigmoid()
            total[here] += p
            within[here] += _doubt(p)
            count[here] += 1
            equal = agreement(self.own(logits[source]), best[here])
            same, number = same + float(equal.sum(dtype=torch.float64)), number + equal.numel()
        return same / number, (_doubt(total / count) - within / count).clamp(min=0)


@dataclass(frozen=True)
class Values(Task):
    """Numbers: a vector, or a map such as depth. Nothing in them says how sure they are; several looks do."""

    merges: tuple[str, ...] = ("values", "median")
    criteria: tuple[str, ...] = ("displacement", "random")
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

    def own(self, output: Tensor) -> Tensor:
        return output

    def sure(self, merged: Tensor, by: str, own: Sequence[Tensor] = ()) -> Tensor:
        raise OptionError(f"task={self.name!r} has no {by}: nothing in its output says how sure it is; {NEAR}")

    def unsure(self, values: Tensor) -> Tensor:
        return torch.zeros(len(values), device=values.device)

    def encode(self, output: Tensor, merge: str) -> Tensor:
        return output

    def decode(self, mean: Tensor, merge: str) -> Tensor:
        return mean

    def compare(self, own: Sequence[Tensor], final: Tensor, shifts: Sequence[Sequence[int]] = ()) -> Compared:
        """Agreement: 1 - sum |look - final| / sum (|look| + |final|); spread: the standard deviation of each number."""
        total, square, count = (torch.zeros_like(final, dtype=torch.float64) for _ in range(3))
        apart = size = 0.0
        for values, shift in _moved(own, shifts):
            here, source = overlap(values.shape[-len(shift) :], shift) if shift else (..., ...)
            v, f = values[source].double(), final[here].double()
            total[here] += v
            square[here] += v * v
            count[here] += 1
            apart, size = apart + float((v - f).abs().sum()), size + float((v.abs() + f.abs()).sum())
        spread = (square / count - (total / count).square()).clamp(min=0).sqrt().float()
        return 1.0 if size == 0 else 1 - apart / size, spread


@dataclass(frozen=True)
class Directions(Values):
    """Vectors that are compared by their angle: of an image, or at every cell of a map.

    Their mean is that of unit vectors, as long as the looks are in the mean: unit vectors stay unit vectors.
    """

    def reads(self, shape: Sequence[int]) -> str:
        return "features that lie on the image" if self.maps else f"a vector of {math.prod(shape[1:])} numbers"

    def own(self, output: Tensor) -> Tensor:
        return normalize(output.flatten(1).float())

    def sure(self, merged: Tensor, by: str, own: Sequence[Tensor] = ()) -> Tensor:
        if by not in self.gates:
            return super().sure(merged, by, own)
        final = self.own(merged)
        return torch.stack([(one * final).sum(1) for one in own]).mean(0).clamp(min=0)

    def encode(self, output: Tensor, merge: str) -> Tensor:
        if merge != "directions":
            return output
        flat = output if self.maps else output.flatten(1)
        return torch.cat([normalize(flat), flat.norm(dim=1, keepdim=True)], 1)

    def decode(self, mean: Tensor, merge: str) -> Tensor:
        return normalize(mean[:, :-1]) * mean[:, -1:] if merge == "directions" else mean

    def compare(self, own: Sequence[Tensor], final: Tensor, shifts: Sequence[Sequence[int]] = ()) -> Compared:
        """Agreement: the mean cosine with the final vector; spread: 1 - the length of the unit vectors' mean."""
        best = self._unit(final)
        total, count = torch.zeros_like(best), torch.zeros_like(best[0])
        near, cells = 0.0, 0
        for vectors, shift in _moved(own, shifts):
            unit = self._unit(vectors)
            here, source = overlap(unit.shape[1:], shift) if shift else (..., ...)
            total[here] += unit[source]
            count[here] += 1
            cosine = (unit[source] * best[here]).sum(0)
            near, cells = near + float(cosine.sum(dtype=torch.float64)), cells + cosine.numel()
        return near / cells, (1 - (total / count).norm(dim=0)).clamp(min=0)

    def _unit(self, vectors: Tensor) -> Tensor:
        return normalize(vectors.float() if self.maps else vectors.float().flatten(), dim=0)


def _moved(own: Sequence[Tensor], shifts: Sequence[Sequence[int]]) -> list[tuple[Tensor, Sequence[int]]]:
    return list(zip(own, shifts or [()] * len(own), strict=True))


def _doubt(p: Tensor) -> Tensor:
    """Entropy of a yes or no, in nats."""
    q = 1 - p
    return -(p * p.clamp(min=1e-12).log() + q * q.clamp(min=1e-12).log())


_LABELS: dict[str, Any] = {"criteria": ("entropy", "displacement", "random"), "aggregates": ("mean", "max")}
_PIXELS: dict[str, Any] = {"maps": True, "stitches": True, "pads": True}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("classification", "(B, K)"),
        Labels("multilabel", "(B, K)", **_LABELS),
        Task("segmentation", "(B, K, H, W)", aggregates=("mean", "entropy", "max"), gates=MEASURES[:3], **_PIXELS),
        Labels("multilabel-segmentation", "(B, K, H, W)", gates=(), **_LABELS, **_PIXELS),
        Values("regression", "(B, K)"),
        Values("dense", "(B, H, W) or (B, C, H, W)", **_PIXELS),
        Directions("embedding", "(B, C)", merges=("directions", "values", "median"), gates=("agreement",)),
        Directions("features", "a map or tokens", ("values", "directions", "median"), maps=True, searches=False),
    )
}
ALIASES = {"depth": "dense"}
MERGES = tuple(dict.fromkeys(merge for task in TASKS.values() for merge in task.merges))


def task_named(name: Any) -> Task:
    """`task_named("depth")`; an OptionError where there is none of that name."""
    found = TASKS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        raise OptionError(f"task: got {name!r}, wanted one of {', '.join(map(repr, ['auto', *TASKS, *ALIASES]))}")
    return found
