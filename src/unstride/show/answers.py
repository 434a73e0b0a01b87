"""A Prediction in words and plain data: what the command line prints, and what its JSON holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unstride.tasks.confidence import two_class
from unstride.execution.prediction import Prediction


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

    Classes: the `top` ones by probability, and each state's first; of a map those with the largest share of the pixels,
    and the share that changed. Numbers: the first `top` of them; of a map the mean, the least and the most.
    """
    common = {
        "task": p.task,
        "assumed": p.assumed,
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
            "view": str(v.view),
            "state": [list(s) for s in v.state.selections],
            "criterion": v.criterion,
            "weight": v.weight,
        }
        for v in p.states
    ]
    told: dict[str, Any] = {side: _said(p, output, classes, top) for side, output in _sides(p)}
    if not p.meaning.maps:
        firsts = [(entry, _said(p, v.logits, classes, 1)[0]) for entry, v in zip(states, p.states, strict=True)]
        return {**told, "states": [{**entry, **first} for entry, first in firsts], **common}
    return {**told, "changed": changed(p), "states": states, **common}


def _sides(p: Prediction) -> list[tuple[str, Tensor]]:
    return [("plain", p.plain), ("enhanced", p.logits)]


def changed(p: Prediction) -> float:
    """How much of the answer is not the plain network's: classes and labels, or 1 - the agreement of numbers."""
    if p.task in ("classification", "segmentation"):
        plain, final = two_class(p.plain[None])[0].argmax(0), two_class(p.logits[None])[0].argmax(0)
        return float((plain != final).float().mean())
    return 1 - p.meaning.compare([p.plain], p.logits)[0]


def headline(answer: dict[str, Any]) -> str:
    """One line: `tiger cat 39% becomes Egyptian cat 40%`."""
    plain, final = answer["plain"][0], answer["enhanced"][0]
    if "value" in final:
        changed = f" ({answer['changed']:.1%} of it changes)" if "changed" in answer else ""
        return f"{final['name']} {plain['value']:.4g} becomes {final['value']:.4g}{changed}"
    if "changed" in answer:
        return f"{answer['changed']:.1%} of the pixels change"
    if plain["class"] == final["class"]:
        return f"{plain['name']}, {plain['probability']:.0%} plain, {final['probability']:.0%} enhanced"
    return f"{plain['name']} {plain['probability']:.0%} becomes {final['name']} {final['probability']:.0%}"


def _said(p: Prediction, output: Tensor, classes: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    """What an output says, in the task's words."""
    if not p.meaning.classes:
        return _numbers(output, p.meaning.maps, top)
    if p.meaning.maps and not p.meaning.one_label:
        shares = (output > 0).flatten(1).float().mean(1)
        return [{"class": k, "name": class_name(classes, k), "share": v} for v, k in _largest(shares, top)]
    if p.meaning.maps:
        return _shares(class_map(output), classes, top)
    found = probabilities(output) if p.meaning.one_label else output.float().sigmoid()
    return [{"class": k, "name": class_name(classes, k), "probability": v} for v, k in _largest(found, top)]


def _numbers(output: Tensor, maps: bool, top: int) -> list[dict[str, Any]]:
    flat = output.float().flatten()
    if maps:
        named = [("mean", flat.mean()), ("least", flat.min()), ("most", flat.max())]
    else:
        named = [(f"value {k}", v) for k, v in enumerate(flat[:top])]
    return [{"name": name, "value": float(value)} for name, value in named]


def _largest(values: Tensor, top: int) -> list[tuple[float, int]]:
    found, indices = values.topk(min(top, len(values)))
    return list(zip(found.tolist(), indices.tolist(), strict=True))


def _shares(seen: NDArray[np.int64], classes: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    found, counts = np.unique(seen, return_counts=True)
    return [
        {"class": int(found[i]), "name": class_name(classes, int(found[i])), "share": float(counts[i] / seen.size)}
        for i in np.argsort(-counts, kind="stable")[:top]
    ]
