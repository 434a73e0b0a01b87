"""A Prediction in words and plain data: what the command line prints, and what its JSON holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unstride.procedure.aggregate import two_class
from unstride.procedure.prediction import Prediction


def class_name(classes: tuple[str, ...], index: int) -> str:
    return classes[index] if index < len(classes) else f"class {index}"


def probabilities(logits: Tensor) -> Tensor:
    """(K,) -> (K,); one logit is a yes or no, so that gives two."""
    return two_class(logits[None].float()).softmax(1)[0]


def class_map(logits: Tensor) -> NDArray[np.int64]:
    """(K, H, W) -> (H, W); one logit is a yes or no."""
    return np.asarray(two_class(logits[None])[0].argmax(0).cpu())


def answer_of(p: Prediction, classes: tuple[str, ...] = (), top: int = 5) -> dict[str, Any]:
    """`answer_of(better.explain(x)[0], classes)["enhanced"][0]["name"]`.

    Classification: the `top` classes by probability, and each state's first. Segmentation: the `top` classes by their
    share of the pixels, and the share that changed.
    """
    common = {
        "expansions": [{"state": [list(s) for s in e.state.selections], "layer": e.layer} for e in p.expansions],
        "macs": p.macs,
        "plain_macs": p.plain_macs,
        "cost": p.cost,
        "agreement": p.agreement,
        "spread": float(p.spread.mean()),
        "stopped": p.stopped,
    }
    states = [
        {
            "view": v.view.spec(),
            "state": [list(s) for s in v.state.selections],
            "criterion": v.criterion,
            "weight": v.weight,
        }
        for v in p.states
    ]
    if p.logits.ndim == 1:
        own = [{**entry, **_best(v.logits, classes, 1)[0]} for entry, v in zip(states, p.states, strict=True)]
        return {
            "plain": _best(p.plain, classes, top),
            "enhanced": _best(p.logits, classes, top),
            "states": own,
            **common,
        }
    plain, final = class_map(p.plain), class_map(p.logits)
    return {
        "plain": _shares(plain, classes, top),
        "enhanced": _shares(final, classes, top),
        "changed": float((plain != final).mean()),
        "states": states,
        **common,
    }


def headline(answer: dict[str, Any]) -> str:
    """One line: `tiger cat 39% becomes Egyptian cat 40%`."""
    if "changed" in answer:
        return f"{answer['changed']:.1%} of the pixels change"
    plain, final = answer["plain"][0], answer["enhanced"][0]
    if plain["class"] == final["class"]:
        return f"{plain['name']}, {plain['probability']:.0%} plain, {final['probability']:.0%} enhanced"
    return f"{plain['name']} {plain['probability']:.0%} becomes {final['name']} {final['probability']:.0%}"


def _best(logits: Tensor, classes: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    found = probabilities(logits)
    values, indices = found.topk(min(top, len(found)))
    return [
        {"class": k, "name": class_name(classes, k), "probability": value}
        for value, k in zip(values.tolist(), indices.tolist(), strict=True)
    ]


def _shares(seen: NDArray[np.int64], classes: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    found, counts = np.unique(seen, return_counts=True)
    return [
        {"class": int(found[i]), "name": class_name(classes, int(found[i])), "share": float(counts[i] / seen.size)}
        for i in np.argsort(-counts, kind="stable")[:top]
    ]
