"""The main job on the embedded networks: tune on one half of the test sample, prove it on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstride import sample
from unstride.demo import garments, scenes
from unstride.demo.common import GAIN, Say, percent, result
from unstride.enhanced import Enhanced
from unstride.evaluation import metrics
from unstride.recipe.presets import get
from unstride.show.html import Block, Table, Text
from unstride.tuning.page import frontier_chart
from unstride.tuning.tune import tune
from unstride.tuning.tuned import HEAD, Tuned

COSTS = {"scenes": 2.0, "garments": 1.5}


def scenes_job(out: Path, say: Say) -> tuple[Any, list[Block]]:
    """The segmenter: figures and what is shown of them; `out` gets the recipe."""
    (x, truth), (unseen, known) = scenes.halves()
    say(f"tuning on {len(x)} scenes")
    batches = list(zip(x.split(scenes.TOGETHER), truth.split(scenes.TOGETHER), strict=True))
    tuned = tune(sample.load_segmenter(), batches, COSTS["scenes"], task="segmentation", pool="small", paper=False)
    say(f"proving it on {len(unseen)} other scenes")
    found = _answers(tuned, "segmentation", unseen, scenes.TOGETHER, lambda logits: logits.argmax(1))
    plain = found[0][1]
    rows = []
    for name, maps, cost in found:
        was, now = (scenes.areas_of(m, known) for m in (plain, maps))
        gain = metrics.compare_segmentation(was, now, metrics.changed(plain, maps, known))
        total = metrics.summarise_areas(now.sum(0))
        rows.append(result(name, 1 if name == "plain" else 2, cost, gain, miou=total.miou))
    words = (
        f"unstride.tune(model, data, cost={COSTS['scenes']:g}) on {len(x)} scenes, composed from Fashion-MNIST test "
        "images on cluttered backgrounds and labelled pixel by pixel: a composed task, not photographs."
    )
    return _shown(tuned, out / "scenes.toml", words, f"{len(unseen)} scenes", rows, "miou", "mIoU")


def garments_job(out: Path, say: Say) -> tuple[Any, list[Block]]:
    """The classifier, the same way."""
    (x, truth), (unseen, known) = garments.halves()
    say(f"tuning on {len(x):,} garments")
    batches = list(zip(x.split(garments.TOGETHER), truth.split(garments.TOGETHER), strict=True))
    tuned = tune(sample.load_classifier(), batches, COSTS["garments"], pool="small", paper=False)
    say(f"proving it on {len(unseen):,} other garments")
    found = _answers(tuned, "classification", unseen, garments.TOGETHER, lambda logits: logits)
    plain = metrics.score(found[0][1], known)
    rows = []
    for name, logits, cost in found:
        scores = metrics.score(logits, known)
        total, gain = metrics.summarise(scores), metrics.compare(plain, scores)
        rows.append(result(name, 1 if name == "plain" else 2, cost, gain, accuracy=total.top1, nll=total.nll))
    words = (
        f"The same on {len(x):,} test images of Fashion-MNIST, for a mean cost of {COSTS['garments']:g}: small centred "
        "images that a second look tells little about. Where nothing is gained, tune says so."
    )
    return _shown(tuned, out / "garments.toml", words, f"{len(unseen):,} images", rows, "accuracy", "accuracy")


def _answers(
    tuned: Tuned, task: str, x: Tensor, together: int, kept: Callable[[Tensor], Tensor]
) -> list[tuple[str, Tensor, float]]:
    """Name, answers and mean cost of plain, flip and the tuned recipe, on images that none of them was chosen by."""
    out = []
    for name, recipe in (("plain", get("plain", task)), ("flip", get("flip", task)), ("tuned", tuned.recipe)):
        better: Enhanced = tuned.better.with_options(recipe=recipe)
        answers, costs = [], list[float]()
        for part in x.split(together):
            logits, spent = better.looks(part)
            answers.append(kept(logits))
            costs += spent
        out.append((name, torch.cat(answers), float(np.mean(costs))))
    return out


def _shown(
    tuned: Tuned, file: Path, words: str, unseen: str, rows: Sequence[dict[str, Any]], key: str, metric: str
) -> tuple[Any, list[Block]]:
    tuned.save(file)
    head = (HEAD[0], f"{metric} %", *HEAD[2:])
    used = [k for k in range(len(head)) if any(line.cells()[k] for line in tuned.lines)]
    table = tuple(tuple(line.cells()[k] for k in used) for line in tuned.lines)
    proof = Table(
        ("", metric, "gain, points", "corrected / corrupted", "cost"),
        tuple(_cells(r, key) for r in rows),
        f"The proof: {unseen} that played no part in tuning. {GAIN} Cost in plain forwards, by MACs.",
        frozenset({len(rows) - 1}),
    )
    blocks: list[Block] = [
        Text(f"{words} {tuned.reading.capitalize()}."),
        Table(tuple(head[k] for k in used), table, tuned.verdict, frozenset({tuned.at})),
        frontier_chart(list(tuned.lines)),
        Text(f"The recipe, also in {file.name}: {'; '.join(line.strip() for line in str(tuned.recipe).splitlines())}"),
        proof,
    ]
    frontier = [{"name": x.name, metric: x.value, "nll": x.beside, "cost": x.cost} for x in tuned.lines]
    figures = {"verdict": tuned.verdict, "recipe": str(file), "frontier": frontier, "unseen": unseen, "rows": rows}
    return figures, blocks


def _cells(r: dict[str, Any], key: str) -> tuple[str, ...]:
    plain = r["method"] == "plain"
    gain = "" if plain else f"{100 * r['gain']:+.2f} [{100 * r['low']:+.2f}, {100 * r['high']:+.2f}]"
    changed = "" if plain else f"{r['corrected']:,} / {r['corrupted']:,}"
    return (r["method"], percent(r[key]), gain, changed, f"{r['cost']:.2f}x")
