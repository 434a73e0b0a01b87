"""The scores of all images -> metrics, gain, verdict, cost and advice of each setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from unstride.evaluation import measures, metrics
from unstride.evaluation.metrics import Gain, Scores
from unstride.evaluation.runner import Setting
from unstride.evaluation.shards import Array, Shard


def summarise(
    whole: Shard,
    shards: Sequence[Shard],
    settings: Sequence[Setting],
    task: str,
    classes: Sequence[str],
    seed: int,
    told_apart: int,
) -> list[dict[str, Any]]:
    """One dict per setting: metrics, gain, verdict, recommended, macs, plain_macs, latency, plain_ms.

    `told_apart` is the number of the model's classes; what guessing among them would reach is in the metrics.
    """
    own = {"classification": _classification, "segmentation": _segmentation}
    if task in own:
        measured, compare = own[task](whole.values, classes, seed)
        measured = [{**one, "chance": 1 / told_apart} for one in measured]
    else:
        measured, compare = measures.summarise(task, whole.values, seed)
    by = measures.measure_of(task, measured[0])
    quality = [-one[by.key] if by.lower else one[by.key] for one in measured]
    plain_macs = whole.values["plain_macs"]
    macs = (whole.values["macs"] * plain_macs[:, None]).sum(0) / plain_macs.sum()
    advised = recommend(quality, macs.tolist(), compare)
    timed = [shard for shard in shards if len(shard.seconds)]
    plain_ms = [1e3 * shard.seconds[0] / shard.timed_images for shard in timed]
    rows = []
    for k in range(len(settings)):
        gain = compare(0, k)
        ratios = [1.0 if k == 0 else shard.seconds[k] / shard.seconds[0] for shard in timed]
        rows.append(
            {
                "metrics": measured[k],
                "gain": {name: value for name, value in asdict(gain).items() if name != "n"},
                "verdict": "plain" if k == 0 else gain.verdict,
                "recommended": k == advised,
                "macs": float(macs[k]),
                "plain_macs": float(plain_macs.mean()),
                "latency": float(np.median(ratios)) if ratios else None,
                "plain_ms": float(np.median(plain_ms)) if plain_ms else None,
            }
        )
    return rows


def recommend(quality: Sequence[float], cost: Sequence[float], compare: Callable[[int, int], Gain]) -> int:
    """The cheapest setting that the best one is not measurably better than: plain, the first, or one that helps.

    `compare(a, b)` is the gain of b over a.
    """
    best = max(range(len(quality)), key=lambda k: (quality[k], -cost[k]))
    enough = [k for k in range(len(quality)) if k == best or compare(k, best).verdict != "helps"]
    helps = [k for k in enough if k in (0, best) or compare(0, k).verdict == "helps"]
    return min(helps, key=lambda k: (cost[k], k))


Measured = tuple[list[dict[str, Any]], Callable[[int, int], Gain]]


def _classification(values: Any, classes: Sequence[str], seed: int) -> Measured:
    names = ("top1", "top5", "nll", "brier", "confidence")
    count = values["top1"].shape[1]
    scores = [Scores(**{name: values[name][:, k] for name in names}) for k in range(count)]
    measured = [{key: v for key, v in asdict(metrics.summarise(s)).items() if key != "n"} for s in scores]
    return measured, lambda a, b: metrics.compare(scores[a], scores[b], seed)


def _segmentation(values: Any, classes: Sequence[str], seed: int) -> Measured:
    areas: Array = values["areas"]  # (N, settings, 3, K)
    flips = values["flips"].sum(0)
    measured = []
    for k in range(areas.shape[1]):
        found = metrics.summarise_areas(areas[:, k].sum(0))
        names = classes if len(classes) == len(found.iou) else [str(c) for c in range(len(found.iou))]
        iou = {name: None if math.isnan(v) else v for name, v in zip(names, found.iou, strict=True)}
        means = {"miou": found.miou, "dice": found.dice, "aacc": found.aacc, "macc": found.macc}
        measured.append({**means, "iou": iou})

    def compare(a: int, b: int) -> Gain:
        changed = tuple(map(int, flips[b])) if a == 0 else (0, 0)  # pixels are counted against the plain network
        return metrics.compare_segmentation(areas[:, a], areas[:, b], (changed[0], changed[1]), seed)

    return measured, compare
