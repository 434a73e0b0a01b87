"""A Prediction in words and plain data: what the command line prints, and what its JSON holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unstride.execution.prediction import Prediction
from unstride.tasks.tasks import TASKS, Task, two_class


def class_name(classes: tuple[str, ...], index: int) -> str:
    return classes[index] if index < len(classes) else f"class {index}"


def probabilities(logits: Tensor) -> Tensor:
    """Softmax of (K,); one logit is that of the second of two classes, and gives two."""
    return two_class(logits[None].float()).softmax(1)[0]


def class_map(logits: Tensor) -> NDArray[np.int64]:
    """The class at each pixel (H, W) of logits (K, H, W)."""
    return np.asarray(two_class(logits[None])[0].argmax(0).cpu())


def described(p: Prediction, classes: tuple[str, ...] = (), top: int = 5) -> dict[str, Any]:
    """A prediction as plain data: `described(better.explain(x)[0], names)["answer"][0]["name"]`.

    "base" and "answer" are lists: the `top` classes with their probabilities; of a map of classes, those with the
    largest share of the pixels; of numbers, the first `top`; of a map of numbers, the mean, the least and the most.
    """
    maps = p.meaning.maps
    passes = [
        {
            "stage": v.stage,
            "network": v.network,
            "view": str(v.view),
            "state": [list(s) for s in v.state.selections],
            "criterion": v.criterion,
            "weight": v.weight,
            "cost": v.cost,
            **({} if maps else entries(p.meaning, v.output, classes, 1)[0]),
        }
        for v in p.passes
    ]
    return {
        "base": entries(p.meaning, p.base, classes, top),
        "answer": entries(p.meaning, p.output, classes, top),
        **({"changed": changed(p)} if maps else {}),
        "passes": passes,
        "task": p.task,
        "assumed": p.assumed,
        "expansions": [{"state": [list(s) for s in e.state.selections], "layer": e.layer} for e in p.expansions],
        "cost": p.cost,
        "agreement": p.agreement,
        "spread": float(p.spread.mean()),
        "stopped": p.stopped,
    }


def changed(p: Prediction) -> float:
    """The share of the answer that differs from the base model's: of pixels and labels, else 1 - agreement."""
    if p.meaning.classes and p.meaning.one_label:
        before, after = (two_class(output[None])[0].argmax(0) for output in (p.base, p.output))
        return float((before != after).float().mean())
    return 1 - TASKS[p.task].compare([p.base], p.output)[0]


def headline(p: Prediction, classes: tuple[str, ...] = ()) -> str:
    """One line: "tiger cat 39 % becomes Egyptian cat 40 %"."""
    before, after = (entries(p.meaning, output, classes, 1)[0] for output in (p.base, p.output))
    if "value" in after:
        return f"{after['name']} {before['value']:.4g} becomes {after['value']:.4g}"
    if p.meaning.maps:
        return f"{changed(p):.1%} of the pixels change"
    if before["class"] == after["class"]:
        return f"{before['name']}: {before['probability']:.0%} alone, {after['probability']:.0%} combined"
    return f"{before['name']} {before['probability']:.0%} becomes {after['name']} {after['probability']:.0%}"


def entries(task: Task, output: Tensor, classes: tuple[str, ...] = (), top: int = 5) -> list[dict[str, Any]]:
    """What one output of a task says: classes with a probability or a share, or numbers, the largest first."""
    if not task.classes:
        return _numbers(output, task.maps, top)
    if task.maps and task.one_label:
        return _shares(class_map(output), classes, top)
    if task.maps:
        values, name = (output > 0).flatten(1).float().mean(1), "share"
    else:
        values, name = probabilities(output) if task.one_label else output.float().sigmoid(), "probability"
    found = values.topk(min(top, len(values)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [{"class": k, "name": class_name(classes, k), name: v} for k, v in pairs]


def _numbers(output: Tensor, maps: bool, top: int) -> list[dict[str, Any]]:
    flat = output.float().flatten()
    if maps:
        named = [("mean", flat.mean()), ("least", flat.min()), ("most", flat.max())]
    else:
        named = [(f"value {k}", v) for k, v in enumerate(flat[:top])]
    return [{"name": name, "value": float(value)} for name, value in named]


def _shares(labels: NDArray[np.int64], classes: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    found, counts = np.unique(labels, return_counts=True)
    return [
        {"class": int(found[i]), "name": class_name(classes, int(found[i])), "share": float(counts[i] / labels.size)}
        for i in np.argsort(-counts, kind="stable")[:top]
    ]
