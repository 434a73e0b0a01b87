"""Temperature: one number that calibrates logits, fitted by NLL or matched to other logits. Pure functions."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.tasks.tasks import two_class

FOLDS, ERRORS = 5, 2.0  # of cross-validation; standard errors
_GOLDEN = (math.sqrt(5) - 1) / 2
_LOW, _HIGH = math.log(0.2), math.log(5.0)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature that minimises the NLL of the labels (N,) under logits (N, K)."""
    logits = two_class(logits.float())
    return _least(lambda t: float(F.cross_entropy(logits / t, labels)))


def safe_temperature(logits: Tensor, labels: Tensor) -> float:
    """`fit_temperature` if it lowers the cross-validated NLL significantly, else 1."""
    gaps = []
    for k in range(FOLDS):
        held = torch.arange(len(labels)) % FOLDS == k
        if bool(held.any()) and not bool(held.all()):
            warm = fit_temperature(logits[~held], labels[~held])
            gaps.append(nll(logits[held], labels[held]) - nll(logits[held], labels[held], warm))
    gap = torch.cat(gaps) if gaps else torch.zeros(1, dtype=torch.float64)
    significant = len(gap) > 1 and float(gap.mean()) > ERRORS * float(gap.std()) / math.sqrt(len(gap))
    return fit_temperature(logits, labels) if significant else 1.0


def match_temperature(logits: Tensor, like: Tensor) -> float:
    """The temperature that brings logits (N, K) closest to `like` (N, K); no labels are needed.

    Example: larger views are usually overconfident; this matches them to the original view.
    """
    logits, wanted = two_class(logits.float()), two_class(like.float()).softmax(1)
    return _least(lambda t: float(F.cross_entropy(logits / t, wanted)))


def _least(loss: Callable[[float], float]) -> float:
    """Golden-section search over the logarithm: these losses have one minimum."""
    low, high = _LOW, _HIGH
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    fa, fb = loss(math.exp(a)), loss(math.exp(b))
    for _ in range(18):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - _GOLDEN * (high - low)
            fa = loss(math.exp(a))
        else:
            low, a, fa = a, b, fb
            b = low + _GOLDEN * (high - low)
            fb = loss(math.exp(b))
    return math.exp((low + high) / 2)


def nll(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Of each image, (N,)."""
    return F.cross_entropy(two_class(logits.double()) / temperature, labels, reduction="none")
