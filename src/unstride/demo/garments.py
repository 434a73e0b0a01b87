"""The paper's procedure with the embedded classifier, on images that tuning did not see: learning-free and learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import unstride
from unstride import sample
from unstride.demo.common import BUDGET, READING, Say, percent, result, results_table, time_ratios
from unstride.enhanced import load
from unstride.errors import UnstrideError
from unstride.evaluation import metrics
from unstride.show.html import Block, Measured, Note, Text, Thumbnail, Thumbnails, charts

BUDGETS = (1, 4, BUDGET)
IMAGES: int | None = None  # of the embedded sample: all; the first half is tuned on
PAPER = 1000  # of the other half, for the paper's search, which is dear
TOGETHER = 250
EXAMPLES = 7
LEARNED = "*aggregation*.safetensors"
COLUMNS = (("accuracy", "accuracy", percent), ("NLL", "nll", "{:.3f}".format), ("ECE", "ece", "{:.4f}".format))


def halves() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images and labels to tune on, and others to prove it on."""
    images, labels = sample.classification_sample(IMAGES)
    x, truth = sample.preprocess_classification(images), torch.from_numpy(labels)
    half = len(x) // 2
    return (x[:half], truth[:half]), (x[half:], truth[half:])


def classification(say: Say) -> tuple[Any, list[Block]]:
    """Figures and what is shown of them."""
    model = sample.load_classifier()
    x, truth = (part[:PAPER] for part in halves()[1])
    images, labels = (part[-len(halves()[1][0]) :][: len(x)] for part in sample.classification_sample(IMAGES))
    blocks: list[Block] = [
        Text(
            f"The first {len(x):,} images of the proof above, with the paper's search. Corrected and corrupted count "
            f"the images that turned right and wrong. {READING}"
        )
    ]
    say("preparing the embedded classifier")
    methods = {
        "learning-free": unstride.enhance(model, x[:1], recipe="paper", budget=max(BUDGETS), task="classification")
    }
    try:
        methods["learned"] = _learned(model)
    except UnstrideError as error:
        blocks.append(Note(f"Without the learned aggregation: {error}"))
    results: dict[str, list[dict[str, Any]]] = {}
    measured: dict[str, list[Measured]] = {}
    found: dict[str, _Answers] = {}
    for method, better in methods.items():
        found[method] = _Answers(better, x, truth, method, say)
        plain = found["learning-free"].scores[1]  # budget 1 is the plain network, whatever the aggregation
        base = metrics.summarise(plain).top1
        results[method], measured[method] = [], []
        for b in BUDGETS:
            scores = plain if b == 1 else found[method].scores[b]
            cost = 1.0 if b == 1 else found[method].costs[b]
            total, gain = metrics.summarise(scores), metrics.compare(plain, scores)
            results[method].append(result(method, b, cost, gain, accuracy=total.top1, nll=total.nll, ece=total.ece))
            measured[method].append(Measured(b, total.top1, base + gain.low, base + gain.high, cost))
        say(f"timing, {method}")
        time_ratios(results[method], better, model, x[:32])
        blocks.append(results_table(results[method], COLUMNS))
    blocks += charts("accuracy", measured, "Bars: 95 % interval of the gain over the plain network. Dotted: plain.")
    best = found.get("learned", found["learning-free"])
    if thumbs := _changed(images, labels, found["learning-free"].classes[1], best.classes[BUDGET]):
        caption = f"Images that {BUDGET} states ({best.method}) corrected and corrupted, as label: plain → enhanced."
        blocks.append(Thumbnails(thumbs, caption))
    return {"images": len(x), "rows": [r for rows in results.values() for r in rows]}, blocks


def _learned(model: torch.nn.Module) -> unstride.Enhanced:
    file = next(iter(sorted((Path(sample.__file__).parent / "files").glob(LEARNED))), None)
    if file is None:
        raise UnstrideError("its file is not in this installation (unstride/sample/files); reinstall unstride")
    return load(file, model)


class _Answers:
    """Scores, mean cost and classes at each budget, from one search per image."""

    def __init__(self, better: unstride.Enhanced, x: Tensor, truth: Tensor, method: str, say: Say) -> None:
        self.method = method
        scores: dict[int, list[metrics.Scores]] = {b: [] for b in BUDGETS}
        costs: dict[int, list[float]] = {b: [] for b in BUDGETS}
        classes: dict[int, list[Tensor]] = {b: [] for b in BUDGETS}
        for start in range(0, len(x), TOGETHER):
            say(f"{method}: {start:,} of {len(x):,} images")
            stop = start + TOGETHER
            for b, (logits, cost) in better.costs(x[start:stop], BUDGETS).items():
                scores[b].append(metrics.score(logits, truth[start:stop]))
                costs[b] += cost
                classes[b].append(logits.argmax(1))
        self.scores = {b: metrics.Scores.joined(parts) for b, parts in scores.items()}
        self.costs = {b: float(np.mean(c)) for b, c in costs.items()}
        self.classes = {b: torch.cat(c) for b, c in classes.items()}


def _changed(images: Any, labels: Any, plain: Tensor, better: Tensor) -> tuple[Thumbnail, ...]:
    out = []
    for mark, right in (("corrected", better), ("corrupted", plain)):
        for k in np.flatnonzero((plain != better).numpy() & (right.numpy() == labels))[:EXAMPLES]:
            was, now = sample.CLASSES[int(plain[k])], sample.CLASSES[int(better[k])]
            out.append(Thumbnail(Image.fromarray(images[k]), f"{sample.CLASSES[labels[k]]}: {was} → {now}", mark))
    return tuple(out)
