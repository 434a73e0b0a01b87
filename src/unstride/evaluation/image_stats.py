"""What is kept of each image: a few numbers from which every metric of its task follows.

A function for each task: the outputs of a batch and its targets -> tensors whose first axis is the images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

from unstride.errors import DataError, InputError
from unstride.evaluation import metrics
from unstride.evaluation.metrics import Array
from unstride.execution.prediction import at_size
from unstride.tasks.tasks import two_class

NEAREST = 5  # neighbours that count

Stats = dict[str, Tensor]


def of_classes(output: Tensor, targets: Sequence[int] | Tensor) -> Stats:
    """Logits (B, K) -> whether each image is right, its NLL, Brier score and confidence."""
    labels = torch.as_tensor(targets)
    scores = metrics.class_scores(two_class(output), labels)
    numbers = {name: torch.from_numpy(np.asarray(value)) for name, value in vars(scores).items()}
    return {**numbers, "label": labels.cpu().long()}


def of_labels(output: Tensor, targets: Sequence[Tensor] | Tensor) -> Stats:
    """Logits (B, K) of labels that are yes or no."""
    target = _beside(output, targets, "labels")
    return {"scores": output.detach().float().cpu(), "target": target.float().cpu()}


def of_numbers(output: Tensor, targets: Sequence[Tensor] | Tensor) -> Stats:
    """Numbers (B, K) -> mean squared and absolute error of each image."""
    output = output if output.ndim > 1 else output[:, None]
    apart = output.detach().double() - _beside(output, targets, "numbers").double()
    return {"squares": apart.square().mean(1).cpu(), "errors": apart.abs().mean(1).cpu()}


def of_maps(output: Tensor, targets: Sequence[Tensor] | Tensor, ignore: int | None) -> Stats:
    """Logit maps (B, K, h, w) -> areas of each class (3, K), and the mean NLL of the labelled pixels."""
    metrics.check_logits(output)
    rows = []
    for logits, mask in zip(output, targets, strict=True):
        scores = two_class(at_size(logits[None].float(), mask.shape))
        target = mask.to(scores.device).long()
        areas = metrics.areas(scores.argmax(1)[0], target, scores.shape[1], ignore)
        unlabelled = -100 if ignore is None else ignore
        nll = cross_entropy(scores, target[None], ignore_index=unlabelled, reduction="sum")
        rows.append((torch.from_numpy(areas), nll.double().cpu() / max(1, int(areas[2].sum()))))
    return {"areas": torch.stack([a for a, _ in rows]), "nll": torch.stack([n for _, n in rows])}


def of_label_maps(output: Tensor, targets: Sequence[Tensor] | Tensor, ignore: int | None) -> Stats:
    """The same for maps of labels that are yes or no by themselves.

    A target is (K, H, W) of 0 and 1, or a mask (H, W) of class numbers; of one label, 1 says yes.
    """
    metrics.check_logits(output)
    rows = []
    for logits, mask in zip(output, targets, strict=True):
        labels, seen = _yes_or_no(mask.to(logits.device), len(logits), ignore)
        scores = at_size(logits[None].float(), labels.shape[1:])[0]
        yes = (scores > 0) & seen
        areas = torch.stack([(yes & labels).flatten(1).sum(1), yes.flatten(1).sum(1), labels.flatten(1).sum(1)])
        nll = binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")
        rows.append((areas.cpu(), (nll * seen).sum().double().cpu() / max(1, int(seen.sum()))))
    return {"areas": torch.stack([a for a, _ in rows]), "nll": torch.stack([n for _, n in rows])}


def _yes_or_no(mask: Tensor, labels: int, ignore: int | None) -> tuple[Tensor, Tensor]:
    """Booleans (K, H, W): which labels each pixel has, and which are known."""
    if mask.ndim == 2:
        metrics.check_mask(mask, max(2, labels), ignore)
        wanted = torch.arange(labels, device=mask.device) if labels > 1 else torch.ones(1, device=mask.device)
        yes = mask[None] == wanted[:, None, None]
        known = torch.ones_like(mask, dtype=torch.bool) if ignore is None else mask != ignore
        return yes & known, known.expand_as(yes)
    if mask.ndim != 3 or len(mask) != labels:
        raise DataError(f"mask: got {tuple(mask.shape)}, expected ({labels}, H, W) of 0 and 1, or (H, W) of classes.")
    metrics.check_mask(mask, 2, ignore)
    known = torch.ones_like(mask, dtype=torch.bool) if ignore is None else mask != ignore
    return (mask == 1) & known, known


def of_depth(output: Tensor, targets: Sequence[Tensor] | Tensor) -> Stats:
    """Maps (B, h, w) or (B, 1, h, w) of one number -> errors over the pixels that were measured."""
    maps = output if output.ndim == 4 else output[:, None]
    metrics.check_logits(maps)
    if maps.shape[1] != 1:
        raise InputError(f"output: got maps of {maps.shape[1]} numbers at each pixel, expected one.")
    rows = []
    for values, target in zip(maps, targets, strict=True):
        known = torch.isfinite(target)
        if not bool(known.any()):
            raise DataError("map: nothing in it is measured.")
        truth = target[known].double().to(values.device)
        guess = at_size(values[None].float(), target.shape)[0, 0][known.to(values.device)].double()
        apart, size = guess - truth, truth.abs().clamp(min=1.17e-06)
        near = (torch.maximum(guess / truth, truth / guess) < 1.25) & (guess > 0) & (truth > 0)
        rows.append((float(len(truth)), apart.square().mean(), (apart.abs() / size).mean(), near.double().mean()))
    table = torch.tensor(rows, dtype=torch.float64)
    return dict(zip(("pixels", "squares", "relative", "within"), table.T.contiguous(), strict=True))


def of_vectors(output: Tensor, targets: Sequence[Any] | Tensor) -> Stats:
    """Vectors (B, C) as unit vectors, and the class of each image, or its pairs."""
    metrics.check_logits(output)
    vectors = normalize(output.detach().float().flatten(1), dim=1).cpu()
    target = targets if isinstance(targets, Tensor) else torch.stack([torch.as_tensor(t) for t in targets])
    return {"vectors": vectors, ("label" if target.ndim == 1 else "pairs"): target.long().cpu()}


def _beside(output: Tensor, targets: Sequence[Tensor] | Tensor, what: str) -> Tensor:
    """Targets (B, K) beside an output of that shape."""
    metrics.check_logits(output)
    values = targets if isinstance(targets, Tensor) else torch.stack(list(targets))
    values = values[:, None] if values.ndim == 1 else values
    if values.shape != output.shape:
        raise DataError(
            f"{what}: got {values.shape[1]} for each image, expected {output.shape[1]}, as many as the model gives."
        )
    return values.to(output.device)


# ---------------------------------------------------------------- of each image, from what was kept
def loss(stats: Mapping[str, Any]) -> Array:
    """One number for each image, lower is better."""
    if "nll" in stats:
        return np.asarray(stats["nll"], dtype=np.float64)
    if "scores" in stats:
        scores, target = (torch.as_tensor(np.asarray(stats[name])).double() for name in ("scores", "target"))
        return binary_cross_entropy_with_logits(scores, target, reduction="none").mean(1).numpy()
    if "squares" in stats:
        return np.asarray(stats["squares"], dtype=np.float64)
    return -quality(stats)


def quality(stats: Mapping[str, Any]) -> Array:
    """One number for each image, higher is better: what it means that an image is corrected or broken."""
    if "correct" in stats:
        return np.asarray(stats["correct"], dtype=np.float64)
    if "scores" in stats:
        return ((np.asarray(stats["scores"]) > 0) == (np.asarray(stats["target"]) > 0.5)).sum(1).astype(np.float64)
    if "areas" in stats:  # pixels that are right, minus those of a label that should not be there
        right, predicted, _ = np.moveaxis(np.asarray(stats["areas"], dtype=np.float64).sum(2), 1, 0)
        return 2 * right - predicted
    if "squares" in stats:
        return -np.asarray(stats["squares"], dtype=np.float64)
    if "pairs" in stats:
        hits, rows = pair_hits(stats)
        values = np.zeros(len(np.asarray(stats["vectors"])))
        values[rows] = hits[:, 0]
        return values
    return neighbour_hits(stats, NEAREST)[0][:, 0].astype(np.float64)


def neighbour_hits(stats: Mapping[str, Any], near: int) -> Any:
    """As `metrics.neighbour_hits`: labels of the nearest others, and the vote."""
    vectors, labels = (torch.as_tensor(np.asarray(stats[name])) for name in ("vectors", "label"))
    if len(labels) < 3 or len(labels.unique()) < 2:
        raise DataError(f"got {len(labels)} images of {len(labels.unique())} class, expected several of each.")
    return metrics.neighbour_hits(vectors, labels, near)


def pair_hits(stats: Mapping[str, Any], near: int = NEAREST) -> Any:
    """As `metrics.pair_hits`: whether the nearest are a query's matches, and the rows of the queries."""
    vectors, pairs = (torch.as_tensor(np.asarray(stats[name])) for name in ("vectors", "pairs"))
    return metrics.pair_hits(vectors, pairs, near)
