"""One image, looked at: everything the page shows, for every budget at once, as plain data.

look(loaded, better, image)["enhanced"][9]  # probabilities with 10 states
look(loaded, better, image)["story"]        # stage by stage, where the recipe has stages
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import InputError
from unstride.geometry.report import Report
from unstride.models import LoadedModel
from unstride.tasks.confidence import two_class
from unstride.procedure.align import overlap
from unstride.execution.prediction import Prediction, moved
from unstride.procedure.tasks import Plan
from unstride.recipe.view import PLAIN
from unstride.show.answers import class_map, class_name, probabilities
from unstride.show.html import as_png
from unstride.show.segmentation import palette
from unstride.show.style import COLOURS, seen
from unstride.show.tree import rows
from unstride.studio.choices import Truth
from unstride.studio.disagreement import Disagreement, evidence
from unstride.studio.stages import look_by_look, seen_by
from unstride.views.source import PILImages

BUDGET = 30
SIDE = 320  # a model without a size of its own gets images no longer than this: the page answers in seconds
MAPS_BYTES = 1 << 30  # what the logit maps of all states and budgets may take together
TOP = 6


def layers(plan: Plan, searched: Sequence[int]) -> dict[str, Any]:
    """The model's layers at this image size, as `unstride inspect --json` has them, and which of them are searched."""
    found = plan.found
    report = Report(found.layers, found.left_out, found.unknown, None, plan.plain_macs, plan.graph.size)
    return {**report.to_json(), "searched": list(searched)}


def shrunk(loaded: LoadedModel, image: Image.Image) -> Image.Image:
    """As it is, for a model that has a size of its own."""
    if loaded.preprocess.resize is None and loaded.preprocess.crop is None:
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
    return image


def look(loaded: LoadedModel, better: Enhanced, image: Image.Image, truth: Truth = None) -> dict[str, Any]:
    """All budgets at once, or all looks of a recipe with stages, one after the other; beside the truth, if known."""
    segmenting, image = better.task == "segmentation", shrunk(loaded, image)
    x = loaded.seen(image)[None]
    _, plan, _ = better.fitted(x)
    source = PILImages([image], loaded.preprocess, x, {PLAIN: x})
    stages: list[dict[str, Any]] | None = None
    if better.recipe.stages:
        way = look_by_look(better, source)
        p, answers, costs, stages = way.prediction, way.answers, way.costs, way.stages
    else:
        p, answers, costs = _searched(better, x, _affordable(plan) if segmenting else BUDGET)
    if p.problem is not None:
        raise InputError(p.problem)
    view = seen(loaded.preprocess, image)
    told = _segmented(plan, p, answers, loaded, truth) if segmenting else _classified(plan, p, answers, loaded, x)
    if stages is not None:
        _image_views(told["states"], p, source)
    return {
        "task": better.task,
        "recipe": str(better.recipe),
        "budget": better.recipe.budget,
        **_known(truth, loaded.classes),
        "story": stages,
        "image": {"width": view.width, "height": view.height, "data": _image(view)},
        "layers": layers(plan, () if better.recipe.stages else better.options(plan).layers),
        "tree": [{"index": n.index, "parent": n.parent, "layer": n.layer, "depth": n.depth} for n in rows(p)],
        "cost": [round(cost, 3) for cost in costs],
        "stopped": p.stopped,
        **told,
    }


def _known(truth: Truth, classes: tuple[str, ...]) -> dict[str, Any]:
    """What the image shows, and the names of the classes that are right; nothing where this network has none."""
    if isinstance(truth, int):
        truth = (class_name(classes, truth), (class_name(classes, truth),))
    if isinstance(truth, tuple) and set(truth[1]) & set(classes):
        return {"truth": truth[0], "accepted": list(truth[1])}
    return {"truth": None, "accepted": []}


def _image_views(told: list[dict[str, Any]], p: Prediction, source: PILImages) -> None:
    """Beside each look, what its view sees."""
    views = {view: source.render(view) for view in dict.fromkeys(v.view for v in p.states)}
    shown = {view: _image(seen_by(source.preprocess, pixels)) for view, pixels in views.items()}
    for entry, v in zip(told, p.states, strict=True):
        entry |= {"seen": shown[v.view], "size": list(views[v.view].shape[2:])}


def _searched(better: Enhanced, x: Tensor, highest: int) -> tuple[Prediction, list[Tensor], list[float]]:
    """Search once to the highest budget; a search to 30 has visited the search to 4."""
    wide = better.with_options(budget=highest)
    # One search gives all of it: `explain` and `costs` would each search again.
    _, at, predictions, costs = wide.run(x, tuple(range(1, highest + 1)), explain=True)
    budgets = range(1, len(predictions[0].states) + 1)
    return predictions[0], [at[b][0] for b in budgets], [costs[b][0] for b in budgets]


def _affordable(plan: Plan) -> int:
    """States whose maps, own and aggregated, fit the memory bound."""
    _, classes, height, width = plan.found.trace.shapes[plan.targets[0].leaf]
    return max(1, min(BUDGET, MAPS_BYTES // (2 * 4 * classes * height * width)))


def _classified(plan: Plan, p: Prediction, answers: list[Tensor], loaded: LoadedModel, x: Tensor) -> dict[str, Any]:
    own = torch.stack([probabilities(v.logits) for v in p.states])
    enhanced = torch.stack([probabilities(a) for a in answers])
    first, tops = own.argmax(1), enhanced.argmax(1)
    best = enhanced.topk(min(TOP, own.shape[1])).indices
    shown = list(
        dict.fromkeys([*best[-1].tolist(), *own[0].topk(best.shape[1]).indices.tolist(), *best.flatten().tolist()])
    )
    # The answers first, then the states' own favourites: as in the images of `predict --plot`.
    colours = dict(zip(dict.fromkeys([int(tops[-1]), int(first[0]), *first.tolist()]), COLOURS, strict=False))
    shown += [k for k in colours if k not in shown]
    spread = Disagreement()
    spreads = [float(spread.add(q)) for q in own]
    still = all(v.view == PLAIN for v in p.states)  # cells of other views lie elsewhere
    heat = evidence(plan, x, [v.state for v in p.states]) if still else None
    return {
        "classes": [{"name": class_name(loaded.classes, k), "colour": colours.get(k)} for k in shown],
        "plain": _rounded(own[0, shown]),
        "enhanced": _rounded(enhanced[:, shown]),
        "agreement": [float((first[: b + 1] == top).float().mean()) for b, top in enumerate(tops)],
        "spread": _rounded(torch.tensor(spreads)),
        "states": [
            {
                **_state(v),
                "name": class_name(loaded.classes, int(k)),
                "colour": colours.get(int(k)),
                "probability": round(float(q[k]), 4),
            }
            for v, k, q in zip(p.states, first, own, strict=True)
        ],
        "heat": None if heat is None else _heat(heat),
    }


def _segmented(plan: Plan, p: Prediction, answers: list[Tensor], loaded: LoadedModel, truth: Truth) -> dict[str, Any]:
    maps = [class_map(a) for a in answers]
    height, width = maps[0].shape
    known = _resized(truth, (height, width)) if isinstance(truth, np.ndarray) else None
    count = max(2, p.logits.shape[0])
    spread, own, heat = Disagreement(), [], []
    for v in p.states:
        shift = moved(plan, v.state, (height, width))
        heat.append(spread.add(two_class(v.logits[None].float())[0].softmax(0), shift))
        own.append((class_map(v.logits), shift))
    shares = np.stack([np.bincount(m.ravel(), minlength=count) / m.size for m in maps])
    there = np.asarray(shares.any(0))
    if known is not None:
        there = there | (np.bincount(known.ravel(), minlength=count) > 0)
    shown = [int(k) for k in np.argsort(-(shares[0] + shares[-1]), kind="stable") if there[k]]
    colours = palette(loaded.classes, count).round().astype(int)
    place = np.zeros(count, np.uint8 if len(shown) <= 256 else np.uint16)
    place[shown] = np.arange(len(shown))
    background = bool(loaded.classes) and loaded.classes[0] == "background"
    return {
        "classes": [
            {
                "name": class_name(loaded.classes, k),
                "colour": "#{:02x}{:02x}{:02x}".format(*colours[k]),
                "background": background and k == 0,
            }
            for k in shown
        ],
        "plain": _rounded(torch.from_numpy(shares[0, shown])),
        "enhanced": _rounded(torch.from_numpy(shares[:, shown])),
        "agreement": [float(np.mean([_same(*o, m) for o in own[: b + 1]])) for b, m in enumerate(maps)],
        "changed": [float((m != maps[0]).mean()) for m in maps],
        "spread": [round(float(h.mean()), 4) for h in heat],
        "states": [
            {**_state(v), "changed": round(1 - _same(*o, maps[0]), 4)} for v, o in zip(p.states, own, strict=True)
        ],
        "right": None if known is None else [float((m == known).mean()) for m in maps],
        "heat": _heat(torch.stack(heat)),
        # What is known of it lies behind the answers.
        "maps": {
            "width": width,
            "height": height,
            "bytes": place.itemsize,
            "data": _base64(_little(place[np.stack([*maps, *([] if known is None else [known])])])),
        },
    }


def _resized(mask: NDArray[Any], size: tuple[int, int]) -> NDArray[np.int64]:
    found = Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST)
    return np.asarray(found, np.int64)


def _little(values: NDArray[Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<")).tobytes()


def _state(v: Any) -> dict[str, Any]:
    return {
        "view": None if v.view == PLAIN else str(v.view),
        "selection": [list(s) for s in v.state.selections],
        "criterion": round(v.criterion, 4),
        "confidence": round(1 - v.criterion, 4),
        "weight": v.weight,
    }


def _same(own: NDArray[np.int64], shift: tuple[int, ...], answer: NDArray[np.int64]) -> float:
    """The share of the pixels that both cover where a state, laid on the plain grid, says what the answer says."""
    place, source = overlap(answer.shape, shift)
    return float((own[source] == answer[place]).mean())


def _heat(values: Tensor) -> dict[str, Any]:
    """(B, H, W) in nats -> bytes, with what 255 stands for; a few extreme cells must not darken all others."""
    top = max(float(np.quantile(values[-1].numpy(), 0.995)), float(values.mean()), 1e-6)
    levels = (values.clamp(0, top) * (255 / top)).round().byte().numpy()
    return {
        "width": values.shape[2],
        "height": values.shape[1],
        "top": round(top, 4),
        "data": _base64(levels.tobytes()),
    }


def _rounded(values: Tensor) -> Any:
    return np.round(values.double().numpy(), 4).tolist()


def _image(image: Image.Image) -> str:
    if max(image.size) <= 128:
        return f"data:image/png;base64,{_base64(as_png(image))}"
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{_base64(stream.getvalue())}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
