"""How each task is measured: the number that is compared and its name, and the scores behind it.

    MEASURES["dense"].key, MEASURES["embedding"].name    # "rmse", "k-NN accuracy"

What is kept of each image (answers, sums, vectors) can be stored and joined in any split; metrics come from all of them
at once, torchmetrics' own where it has them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unstride.errors import DataError, InputError, OptionError
from unstride.evaluation.metrics import LEVEL, RESAMPLES, Floats, Gain, bootstrap
from unstride.execution.prediction import at_size

NEIGHBOURS = 5
DRAWS = 200  # resamples of a metric that is computed anew for each
Values = list[dict[str, Any]]
Measured = tuple[list[dict[str, Any]], Callable[[int, int], Gain]]


@dataclass(frozen=True)
class Measure:
    """What of a task is compared. `counted`: what a change corrects or corrupts; "" where that means nothing."""

    key: str
    name: str
    counted: str
    columns: tuple[tuple[str, str], ...]
    percent: bool = True
    lower: bool = False  # is better
    enough: int | None = None  # images from which a result at chance says something; None: there is no chance
    batch: int = 32
    shard: int = 64

    def shown(self, value: float) -> str:
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"

    def change(self, gain: float) -> str:
        """A gain in words; it is positive where the result became better."""
        return f"{100 * gain:+.2f} points of {self.name}" if self.percent else f"{gain:+.4g} of {self.name}, saved"


_TOP = (("top-1", "top1"), ("top-5", "top5"), ("NLL", "nll"), ("ECE", "ece"), ("Brier", "brier"))
_MAPS: dict[str, Any] = {"batch": 4, "shard": 16}
PERCENT = ("top1", "top5", "miou", "dice", "aacc", "macc", "map", "exact", "knn", "recall1", "recall5", "delta1")
MEASURES = {
    "classification": Measure("top1", "top-1", "images", _TOP, enough=20),
    "segmentation": Measure(
        "miou",
        "mIoU",
        "pixels",
        (("mIoU", "miou"), ("Dice", "dice"), ("aAcc", "aacc"), ("mAcc", "macc")),
        enough=1,
        **_MAPS,
    ),
    "multilabel": Measure("map", "mAP", "labels", (("mAP", "map"), ("all labels right", "exact"))),
    "regression": Measure("rmse", "RMSE", "", (("RMSE", "rmse"), ("MAE", "mae")), percent=False, lower=True),
    "dense": Measure(
        "rmse", "RMSE", "", (("RMSE", "rmse"), ("AbsRel", "absrel"), ("delta 1.25", "delta1")), False, True, **_MAPS
    ),
    "embedding": Measure(
        "knn",
        "k-NN accuracy",
        "queries",
        (("k-NN", "knn"), ("recall@1", "recall1"), ("recall@5", "recall5")),
        enough=20,
    ),
}


# Pairs have no classes that neighbours could vote for.
RECALL = Measure("recall1", "recall@1", "queries", (("recall@1", "recall1"), ("recall@5", "recall5")), enough=20)


def measure_of(task: str, metrics: Mapping[str, Any] | None = None) -> Measure:
    """What a task is compared by; `metrics`: those that were found, where it depends on how the data is labelled."""
    if task == "embedding" and metrics is not None and "knn" not in metrics:
        return RECALL
    if task not in MEASURES:
        raise OptionError(f"task={task!r} has no labels to be measured with; there are {', '.join(MEASURES)}")
    return MEASURES[task]


# ------------------------------------------------------------------------------------------------- of single images


def score(task: str, outputs: Sequence[Tensor], targets: Sequence[Any]) -> Values:
    """What is kept of each image: `outputs` of every setting, (B, ...) each; `targets` of the images."""
    if any(not bool(torch.isfinite(one).all()) for one in outputs):
        raise InputError("outputs are not finite; half precision may have overflowed, try float32")
    return [_SCORES[task]([one[k].float().cpu() for one in outputs], target) for k, target in enumerate(targets)]


def _labels(outputs: Sequence[Tensor], target: Tensor) -> dict[str, Any]:
    return {"scores": _beside(outputs, target, "labels"), "target": target.numpy().astype(np.int64)}


def _numbers(outputs: Sequence[Tensor], target: Tensor) -> dict[str, Any]:
    flat = [one.flatten() for one in outputs]
    return {"answers": _beside(flat, target, "numbers").astype(np.float64), "target": target.numpy().astype(np.float64)}


def _beside(outputs: Sequence[Tensor], target: Tensor, what: str) -> Any:
    check_shape(target, tuple(outputs[0].shape), what)
    return np.stack([one.numpy() for one in outputs])


def check_shape(target: Tensor, gives: Sequence[int], what: str) -> None:
    """Labels or numbers (K,) of an image, against what the model gives for one."""
    if tuple(target.shape) != tuple(gives):
        raise DataError(f"{len(target)} {what} for a model that gives {tuple(gives)}; they must be as many")


def _map(outputs: Sequence[Tensor], target: Tensor) -> dict[str, Any]:
    """Pixels measured; of each setting: mean squared error, absolute relative error, share within 1.25."""
    functional = torchmetrics()
    known = torch.isfinite(target)
    truth = target[known]
    if not len(truth):
        raise DataError("nothing is measured in the map that it should be compared with")
    rows = []
    for one in outputs:
        found = one[None, None] if one.ndim == 2 else one[None]
        if found.shape[1] != 1:
            raise InputError(f"maps of {found.shape[1]} numbers at each pixel have no one depth to be compared with")
        guess = at_size(found, target.shape)[0, 0][known]
        square = float(functional.mean_squared_error(guess, truth))
        relative = float(functional.mean_absolute_percentage_error(guess, truth))
        within = torch.maximum(guess / truth, truth / guess) < 1.25
        rows.append([square, relative, float((within & (guess > 0) & (truth > 0)).float().mean())])
    return {"pixels": np.array(len(truth), np.int64), "errors": np.array(rows)}


def _vector(outputs: Sequence[Tensor], target: int | Tensor) -> dict[str, Any]:
    vectors = normalize(torch.stack([one.flatten() for one in outputs]), dim=1)
    if isinstance(target, Tensor):
        return {"vectors": vectors.numpy(), "pairs": target.numpy().astype(np.int64)}
    return {"vectors": vectors.numpy(), "label": np.array(int(target), np.int64)}


_SCORES: dict[str, Callable[[Sequence[Tensor], Any], dict[str, Any]]] = {
    "multilabel": _labels,
    "regression": _numbers,
    "dense": _map,
    "embedding": _vector,
}


def torchmetrics() -> Any:
    try:
        return importlib.import_module("torchmetrics.functional")
    except ImportError as error:
        raise OptionError(
            f"torchmetrics measures this task, and is not here ({error}): pip install 'unstride[metrics]'"
        ) from error


# --------------------------------------------------------------------------------------------------- of all of them


def summarise(task: str, values: Mapping[str, Any], seed: int) -> Measured:
    """The metrics of each setting, and `compare(a, b)`: the gain of setting b over a."""
    return _SUMMARIES[task](values, seed)


def _multilabel(values: Mapping[str, Any], seed: int) -> Measured:
    scores, target = torch.from_numpy(values["scores"]), torch.from_numpy(values["target"])
    right = (scores > 0).long() == target[:, None]  # (N, settings, K)

    def mean_precision(k: int, rows: Any) -> float:
        """torchmetrics' mAP over the labels that some of these images have."""
        truth = target[rows]
        there = truth.any(0)
        found = scores[rows, k][:, there].sigmoid()
        each = torchmetrics().classification.binary_average_precision  # its multilabel one refuses a single label
        found_each = [each(f, t) for f, t in zip(found.T, truth[:, there].T, strict=True)]
        return float(torch.stack(found_each).mean()) if found_each else 0.0

    everything = torch.arange(len(target))
    if not bool(target.any()):
        raise DataError("no image has any label, so there is no average precision")
    measured = [
        {"map": mean_precision(k, everything), "exact": float(right[:, k].all(1).double().mean())}
        for k in range(scores.shape[1])
    ]
    drawn: dict[int, Floats] = {}

    def resampled(k: int) -> Floats:
        if k not in drawn:
            rng = np.random.default_rng(seed)
            rows = [torch.from_numpy(rng.integers(0, len(target), len(target))) for _ in range(DRAWS)]
            drawn[k] = np.array([mean_precision(k, at) for at in rows])
        return drawn[k]

    def compare(a: int, b: int) -> Gain:
        low, high = (0.0, 0.0) if a == b else np.quantile(resampled(b) - resampled(a), _ENDS).tolist()
        was, now = right[:, a], right[:, b]
        flips = int((~was & now).sum()), int((was & ~now).sum())
        return Gain(measured[b]["map"] - measured[a]["map"], low, high, *flips, n=len(target))

    return measured, compare


_ENDS = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]


def _regression(values: Mapping[str, Any], seed: int) -> Measured:
    apart = values["answers"] - values["target"][:, None]
    each = np.square(apart).mean(2)
    far = np.abs(apart).mean((0, 2))
    measured = [{"rmse": math.sqrt(each[:, k].mean()), "mae": float(far[k])} for k in range(each.shape[1])]
    return measured, _by_error(each, np.ones(len(each)), seed)


def _dense(values: Mapping[str, Any], seed: int) -> Measured:
    errors, pixels = values["errors"], values["pixels"].astype(np.float64)
    means = np.einsum("n,nsk->sk", pixels / pixels.sum(), errors)
    measured = [{"rmse": math.sqrt(m[0]), "absrel": float(m[1]), "delta1": float(m[2])} for m in means]
    return measured, _by_error(errors[:, :, 0], pixels, seed)


def _by_error(squares: Floats, weight: Floats, seed: int) -> Callable[[int, int], Gain]:
    """Gains in root mean squared error, from those of single images (N, settings) with their weights."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(squares), np.full(len(squares), 1 / len(squares)), RESAMPLES) * weight
    roots = np.sqrt(drawn @ squares / drawn.sum(1, keepdims=True))
    whole = np.sqrt(weight @ squares / weight.sum())

    def compare(a: int, b: int) -> Gain:
        low, high = np.quantile(roots[:, a] - roots[:, b], _ENDS).tolist()
        return Gain(float(whole[a] - whole[b]), low, high, 0, 0, n=len(squares))

    return compare


def neighbours(vectors: Tensor, count: int, step: int = 1024) -> Tensor:
    """Of each unit vector (N, C) the `count` nearest others by cosine, nearest first: indices (N, count)."""
    found = []
    for start in range(0, len(vectors), step):
        near = vectors[start : start + step] @ vectors.T
        near[torch.arange(len(near)), torch.arange(start, start + len(near))] = -math.inf  # not itself
        found.append(near.topk(count, 1).indices)
    return torch.cat(found)


def voted(near: Tensor) -> Tensor:
    """Labels of neighbours (N, k), nearest first -> the one that most of them have, of equals the nearest: (N,)."""
    votes = (near[:, :, None] == near[:, None, :]).sum(2)
    return near.gather(1, votes.max(1, keepdim=True).indices)[:, 0]


def asked_pairs(pairs: Tensor) -> Tensor:
    """Rows (Q,) of the queries that have a match among these images. `pairs` (N, 2 + M): as the data has it."""
    there = pairs[pairs[:, 1] == 1, 0]
    return torch.isin(pairs[:, 2:], there).any(1).nonzero()[:, 0]


def paired(vectors: Tensor, pairs: Tensor, count: int) -> Tensor:
    """Whether each of the nearest in the gallery, but for itself, is a query's match: (Q, count), nearest first."""
    asked, gallery = asked_pairs(pairs), (pairs[:, 1] == 1).nonzero()[:, 0]
    near = vectors[asked] @ vectors[gallery].T
    near = near.masked_fill(pairs[asked, :1] == pairs[gallery, 0], -math.inf)
    found = pairs[gallery, 0][near.topk(min(count, len(gallery)), 1).indices]
    return (found[:, :, None] == pairs[asked, None, 2:]).any(2)


def chance_of(labels: Tensor) -> float:
    """How often a neighbour that is guessed would be right. `labels`: classes (N,), or pairs (N, 2 + M)."""
    if labels.ndim == 1:
        return 1 / len(labels.unique())
    gallery = labels[labels[:, 1] == 1, 0]
    return float(torch.isin(labels[asked_pairs(labels), 2:], gallery).sum(1).double().mean()) / len(gallery)


def _embedding(values: Mapping[str, Any], seed: int) -> Measured:
    """Every image against all the others: is the label of its neighbours its own? Of pairs: is its match among them?"""
    if "pairs" in values:
        return _pairs(values, seed)
    labels = torch.from_numpy(values["label"])
    if len(labels) < 3 or len(labels.unique()) < 2:
        raise DataError(f"{len(labels)} images of {len(labels.unique())} class; neighbours need several of each")
    count = min(NEIGHBOURS, len(labels) - 1)
    measured, right = [], []
    for k in range(values["vectors"].shape[1]):
        near = labels[neighbours(torch.from_numpy(values["vectors"][:, k]), count)]
        right.append((voted(near) == labels).numpy())
        same = near == labels[:, None]
        recalls = {f"recall{n}": float(same[:, :n].any(1).double().mean()) for n in (1, 5)}
        measured.append({"knn": float(right[-1].mean()), **recalls, "chance": chance_of(labels)})
    return measured, _by_query(right, seed)


def _pairs(values: Mapping[str, Any], seed: int) -> Measured:
    pairs = torch.from_numpy(values["pairs"])
    gallery, asked = pairs[pairs[:, 1] == 1, 0], asked_pairs(pairs)
    if not len(asked) or len(gallery) < 2:
        raise DataError(f"{len(asked)} queries with a match, among {len(gallery)} images; there must be several")
    measured, right = [], []
    for k in range(values["vectors"].shape[1]):
        hits = paired(torch.from_numpy(values["vectors"][:, k]), pairs, NEIGHBOURS)
        right.append(hits[:, 0].numpy())
        recalls = {f"recall{n}": float(hits[:, :n].any(1).double().mean()) for n in (1, 5)}
        measured.append({**recalls, "chance": chance_of(pairs)})
    return measured, _by_query(right, seed)


def _by_query(right: Sequence[Any], seed: int) -> Callable[[int, int], Gain]:
    """Gains in the share of queries that are right, (queries,) of each setting."""

    def compare(a: int, b: int) -> Gain:
        change = right[b].astype(np.float64) - right[a]
        low, high = bootstrap(change, seed)
        return Gain(float(change.mean()), low, high, int((change > 0).sum()), int((change < 0).sum()), len(change))

    return compare


_SUMMARIES: dict[str, Callable[[Mapping[str, Any], int], Measured]] = {
    "multilabel": _multilabel,
    "regression": _regression,
    "dense": _dense,
    "embedding": _embedding,
}
