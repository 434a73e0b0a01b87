"""The paper's procedure with the embedded segmentation network, on scenes that tuning did not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import unstride
from unstride import sample
from unstride import show as plots
from unstride.demo.common import READING, Say, drawn, percent, result, results_table, time_ratios
from unstride.enhanced import Enhanced
from unstride.evaluation import metrics
from unstride.show.html import Block, Measured, Text, Thumbnail, Thumbnails, charts

BUDGETS = (1, 4, 10)
SCENES: int | None = None  # of the embedded sample: all
TOGETHER = 24
EXAMPLES = 3
METHOD = "learning-free"
CLASSES = len(sample.SCENE_CLASSES)


def segmentation(out: Path, say: Say) -> tuple[Any, list[Block]]:
    """Figures and what is shown of them; `out` gets an image."""
    model = sample.load_segmenter()
    _, (x, truth) = halves()
    scenes = sample.segmentation_sample(SCENES)[0][-len(x) :]
    say("preparing the embedded segmentation network")
    better = unstride.enhance(model, x[:1], recipe="paper", budget=max(BUDGETS), task="segmentation")
    maps, costs = _segmented(better, x, say)
    results, measured = _measured(maps, costs, truth)
    say("timing")
    time_ratios(results, better, model, x[:8])
    blocks: list[Block] = [
        Text(
            f"The {len(x)} scenes of the proof above, with the paper's search. mIoU comes from one confusion matrix of "
            f"all scenes; corrected and corrupted count pixels. {READING}"
        ),
        results_table(results, (("mIoU", "miou", percent), ("pixel accuracy", "aacc", percent))),
        *charts("mIoU", {METHOD: measured}, "Bars: 95 % interval of the gain over the plain network. Dotted: plain."),
        _most_changed(out, better, scenes, x, maps),
    ]
    top = max(BUDGETS)
    if strips := _changed(scenes, truth, maps[1], maps[top]):
        caption = (
            f"From left to right: scene, labels, plain, {top} states, what changed (white: now right, red: now wrong)."
        )
        blocks.append(Thumbnails(strips, caption, wide=True))
    return {"scenes": len(x), "rows": results}, blocks


def halves() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Scenes and masks to tune on, and others to prove it on."""
    scenes, masks = sample.segmentation_sample(SCENES)
    x, truth = sample.preprocess_segmentation(scenes), torch.from_numpy(masks).long()
    half = len(x) // 2
    return (x[:half], truth[:half]), (x[half:], truth[half:])


def areas_of(maps: Tensor, truth: Tensor) -> Any:
    return np.stack([metrics.areas(metrics.confusion(m, t, CLASSES)) for m, t in zip(maps, truth, strict=True)])


def _segmented(better: Enhanced, x: Tensor, say: Say) -> tuple[dict[int, Tensor], dict[int, list[float]]]:
    """By budget: the class of every pixel (B, H, W), and what each scene cost."""
    parts: dict[int, list[Tensor]] = {b: [] for b in BUDGETS}
    costs: dict[int, list[float]] = {b: [] for b in BUDGETS}
    for start in range(0, len(x), TOGETHER):
        say(f"{start} of {len(x)} scenes")
        for b, (logits, cost) in better.costs(x[start : start + TOGETHER], BUDGETS).items():
            parts[b].append(logits.argmax(1))
            costs[b] += cost
    return {b: torch.cat(p) for b, p in parts.items()}, costs


def _measured(
    maps: dict[int, Tensor], costs: dict[int, list[float]], truth: Tensor
) -> tuple[list[dict[str, Any]], list[Measured]]:
    """Each budget's figures, and its point in the charts."""
    areas = {b: areas_of(seen, truth) for b, seen in maps.items()}
    base = metrics.summarise_areas(areas[1].sum(0)).miou
    results, measured = [], []
    for b in BUDGETS:
        total = metrics.summarise_areas(areas[b].sum(0))
        gain = metrics.compare_segmentation(areas[1], areas[b], metrics.changed(maps[1], maps[b], truth))
        mean_cost = float(np.mean(costs[b]))
        results.append(result(METHOD, b, mean_cost, gain, miou=total.miou, aacc=total.aacc))
        measured.append(Measured(b, total.miou, base + gain.low, base + gain.high, mean_cost))
    return results, measured


def _most_changed(out: Path, better: Enhanced, scenes: Any, x: Tensor, maps: dict[int, Tensor]) -> Block:
    changes = (maps[1] != maps[max(BUDGETS)]).flatten(1).float().mean(1)
    most = int(changes.argmax())
    return drawn(
        out / "segmentation.png",
        lambda: plots.plot_segmentation(
            Image.fromarray(scenes[most]),
            better.explain(x[most : most + 1])[0],
            sample.SCENE_CLASSES,
            f"Scene {most}: {float(changes[most]):.1%} of the pixels change",
        ),
        "The scene that changed most.",
    )


def _changed(scenes: Any, truth: Tensor, plain: Tensor, better: Tensor) -> tuple[Thumbnail, ...]:
    """The scenes that gained most, and those that lost most."""
    right = ((better == truth).flatten(1).sum(1) - (plain == truth).flatten(1).sum(1)).tolist()
    order = sorted(range(len(right)), key=lambda k: -right[k])
    chosen = [(k, "corrected") for k in order[:EXAMPLES] if right[k] > 0]
    chosen += [(k, "corrupted") for k in order[::-1][:EXAMPLES] if right[k] < 0]
    out = []
    for k, mark in chosen:
        maps = [np.asarray(m[k]) for m in (truth, plain, better)]
        image = plots.strip(Image.fromarray(scenes[k]), maps, sample.SCENE_CLASSES, CLASSES)
        out.append(Thumbnail(image, f"scene {k}: {right[k]:+d} pixels right", mark))
    return tuple(out)
