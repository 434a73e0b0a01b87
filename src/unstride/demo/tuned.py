"""The main job on the embedded classifier: tune on one half of its test sample, prove it on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstride import sample
from unstride.demo.common import READING, Say, percent, result
from unstride.proof import metrics
from unstride.recipe import get
from unstride.show.html import Block, Table, Text
from unstride.tuning.page import frontier_chart
from unstride.tuning.tune import tune
from unstride.tuning.tuned import HEAD, Tuned

COST = 1.5
IMAGES: int | None = None  # of the embedded sample: all; the first half is tuned on
TOGETHER = 250


def halves() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images and labels to tune on, and others to prove it on."""
    images, labels = sample.classification_sample(IMAGES)
    x, truth = sample.preprocess_classification(images), torch.from_numpy(labels)
    half = len(x) // 2
    return (x[:half], truth[:half]), (x[half:], truth[half:])


def main_job(out: Path, say: Say) -> tuple[Any, list[Block]]:
    """Figures and what is shown of them; `out` gets the recipe."""
    model = sample.load_classifier()
    (x, truth), (unseen, known) = halves()
    say(f"tuning on {len(x):,} images")
    tuned = tune(model, list(zip(x.split(TOGETHER), truth.split(TOGETHER), strict=True)), COST, pool="small")
    file = tuned.save(out / "tuned.toml")
    say(f"proving it on {len(unseen):,} other images")
    rows = _proved(tuned, unseen, known)
    blocks: list[Block] = [
        Text(
            f"`unstride.tune(model, data, cost={COST:g})` on {len(x):,} labelled test images of Fashion-MNIST: what "
            f"the network can do at up to {COST:g} plain forwards per image, and what a user would do instead. "
            f"Each image is judged by a recipe that was chosen without it."
        ),
        Table(HEAD, tuple(line.cells() for line in tuned.lines), tuned.verdict, frozenset({len(tuned.lines) - 1})),
        frontier_chart(list(tuned.lines)),
        Text(f"The recommended recipe, also in {file.name}: {tuned.recipe}"),
        Table(
            ("", "accuracy", "gain, points", "corrected / corrupted", "cost", "NLL"),
            tuple(_cells(r) for r in rows),
            f"The proof: {len(unseen):,} images that played no part in tuning. {READING}",
            frozenset({len(rows) - 1}),
        ),
    ]
    figures = {
        "images": len(x),
        "verdict": tuned.verdict,
        "cost": tuned.cost,
        "recipe": str(file),
        "frontier": [
            {"name": line.name, "accuracy": line.accuracy, "nll": line.nll, "cost": line.cost, "time": line.time}
            for line in tuned.lines
        ],
        "unseen": len(unseen),
        "rows": rows,
    }
    return figures, blocks


def _proved(tuned: Tuned, x: Tensor, truth: Tensor) -> list[dict[str, Any]]:
    """Plain, flip, the default and the tuned recipe on images that none of them was chosen by."""
    rows: list[dict[str, Any]] = []
    plain: metrics.Scores | None = None
    for name, recipe in (("plain", "plain"), ("flip", "flip"), ("default", "default"), ("tuned", tuned.recipe)):
        better = tuned.better.with_options(recipe=get(recipe) if isinstance(recipe, str) else recipe)
        logits, costs = [], list[float]()
        for part in x.split(TOGETHER):
            found, spent = better.looks(part)
            logits.append(found)
            costs += spent
        scores = metrics.score(torch.cat(logits), truth)
        plain = scores if plain is None else plain
        total, gain = metrics.summarise(scores), metrics.compare(plain, scores)
        cost = float(np.mean(costs))
        rows.append(result(name, 1 if name == "plain" else 2, cost, gain, accuracy=total.top1, nll=total.nll))
    return rows


def _cells(r: dict[str, Any]) -> tuple[str, ...]:
    gain = "" if r["method"] == "plain" else f"{100 * r['gain']:+.2f} [{100 * r['low']:+.2f}, {100 * r['high']:+.2f}]"
    changed = "" if r["method"] == "plain" else f"{r['corrected']:,} / {r['corrupted']:,}"
    return (r["method"], percent(r["accuracy"]), gain, changed, f"{r['cost']:.2f}x", f"{r['nll']:.3f}")
