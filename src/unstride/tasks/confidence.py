"""How confident a prediction is, from 0 (knows nothing) to 1 (certain). Pure functions over logits."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MEASURES = ("margin", "probability", "entropy", "agreement")
PIECE = 1 << 20  # elements of a map that are measured together


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
    p = logits.softmax(1).topk(2, 1).values
    return p[:, 0] - p[:, 1] if by == "margin" else p[:, 0]
