"""One image as plain data: the answer, every pass, the gates between stages, and the cost.

explained(pipeline, image)["stages"][0]["passes"][0]["answer"]    # "coat 54%"
"""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unstride.errors import InputError
from unstride.execution.prediction import ForwardPass, Prediction
from unstride.models.weights import place
from unstride.pipeline import Pipeline
from unstride.recipe.stage import Stage
from unstride.recipe.view import View
from unstride.show.answers import changed, class_map, entries, headline
from unstride.show.html import as_png
from unstride.show.maps import principal
from unstride.show.segmentation import differences, overlay
from unstride.show.style import as_image
from unstride.studio.choices import Truth, spec_name
from unstride.views.source import PILImages, for_network

SIDE = 320  # pixels: the longer side of images for a model without a size of its own
THUMBNAIL = 160  # pixels
TOP = 6  # classes that are compared
STOPPED = {
    "all passes": "All passes of the recipe ran.",
    "budget": "The search reached its budget.",
    "no states left": "The search visited every state.",
}


def explained(pipeline: Pipeline, image: Image.Image, truth: Truth | None = None) -> dict[str, Any]:
    """What the page shows of one image, run by the pipeline's recipe."""
    prepared = pipeline.better.preprocess or pipeline.base.preprocess
    if prepared.size is None:
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
    device, dtype = place(pipeline.better.model)
    source = PILImages([image], prepared, torch.empty(0, device=device, dtype=dtype))
    p = pipeline.better.explain(source)[0]
    if p.problem is not None:
        raise InputError(p.problem)
    story = _Story(pipeline, p, source, truth)
    return {
        "task": p.task,
        "recipe": str(pipeline.better.recipe),
        "base_network": spec_name(pipeline.base.spec),
        "headline": headline(p, pipeline.classes),
        "base": story.answer(p.base),
        "answer": story.answer(p.output),
        "truth": truth.label if truth is not None and truth.label else None,
        "scores": _scores(p, pipeline.classes),
        "cost": p.cost,
        "agreement": p.agreement,
        "stopped": STOPPED.get(p.stopped, f"Stopped early: {p.stopped.replace('>=', '≥')}."),
        "images": [{"caption": words, "data": data} for words, data in story.images()],
        "stages": story.stages(),
    }


def _scores(p: Prediction, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The most probable classes (of a map, the largest), or the first numbers, of the base model and of the recipe."""
    many = 2 * p.output.numel() if not p.meaning.maps else p.output.shape[0]
    base, final = (entries(p.meaning, output, classes, many) for output in (p.base, p.output))
    kind = next(k for k in ("probability", "share", "value") if k in final[0])
    before = {e["name"]: e[kind] for e in base}
    first = [e["name"] for e in final[:TOP]]
    shown = [*first, *(e["name"] for e in base[:TOP] if e["name"] not in first)][: TOP + 1]
    after = {e["name"]: e[kind] for e in final}
    return [{"name": n, "base": before.get(n, 0.0), "answer": after.get(n, 0.0), "kind": kind} for n in shown]


class _Story:
    """One prediction, stage by stage."""

    def __init__(self, pipeline: Pipeline, p: Prediction, source: PILImages, truth: Truth | None) -> None:
        self.pipeline, self.p, self.source, self.truth = pipeline, p, source, truth
        self.classes, self.task = pipeline.classes, p.meaning
        self.labels = {name: spec_name(loaded.spec) for name, loaded in pipeline.networks.items()}
        self.base_map = class_map(p.base) if p.task == "segmentation" else None
        self.views: dict[tuple[str, View], tuple[str, str]] = {}

    def stages(self) -> list[dict[str, Any]]:
        described, passes = [], self.p.passes
        reached, spent = True, 0.0
        for index, stage in enumerate(self.pipeline.better.recipe.stages):
            before = [v for v in passes if v.stage < index]
            own = [v for v in passes if v.stage == index]
            gate = self._gate(stage, before, bool(own)) if stage.gate is not None and reached else None
            reached = reached and (gate is None or bool(gate["passed"]))
            spent += sum(v.cost for v in own)
            described.append(
                {
                    "title": str(replace(stage, gate=None, network="base")),
                    "network": self.labels.get(stage.network, stage.network),
                    "condition": None if stage.gate is None else str(stage.gate),
                    "gate": gate,
                    "reached": reached,
                    "passes": [self._pass(v) for v in own],
                    "spent": spent,
                }
            )
        return described

    def answer(self, output: Tensor) -> dict[str, Any]:
        """An output in words, and whether it is right, if that is known."""
        known = self.truth
        if self.base_map is not None:
            labels, right = class_map(output), None
            text = f"{(labels != self.base_map).mean():.1%} of the pixels differ from the base model's"
            if known is not None and known.mask is not None:
                text = f"{(labels == _resized(known.mask, labels.shape)).mean():.1%} of the pixels right"
            return {"text": text, "right": right}
        first = entries(self.task, output, self.classes, 1)[0]
        kind = "probability" if "probability" in first else "share" if "share" in first else "value"
        text = f"{first['name']} {first[kind]:.4g}" if kind == "value" else f"{first['name']} {first[kind]:.0%}"
        labelled = kind == "probability" and known is not None and bool(set(known.classes) & set(self.classes))
        return {"text": text, "right": first["name"] in known.classes if known is not None and labelled else None}

    def _pass(self, v: ForwardPass) -> dict[str, Any]:
        seen, size = self._view(v.network, v.view)
        return {
            "view": str(v.view),
            "state": "" if v.state.plain else str(v.state),
            "network": self.labels.get(v.network, v.network),
            "seen": seen,
            "size": size,
            **self.answer(v.output),
            "running": self.answer(v.running),
            "weight": v.weight,
            "cost": v.cost,
            "map": None if self.base_map is None else _uri(self._overlay(v.output)),
        }

    def _gate(self, stage: Stage, before: list[ForwardPass], ran: bool) -> dict[str, Any]:
        """The gate as this image came to it."""
        gate = stage.gate
        assert gate is not None
        stages = self.pipeline.better.recipe.stages
        fresh = max((v.stage for v in before if stages[v.stage].join == "replace"), default=0)
        answers = [self.task.answer(v.output[None]) for v in before if v.stage >= fresh]
        value = self.task.confidence(before[-1].running[None], gate.by, answers).float().mean()
        passed = ran or (gate.tile is None and bool(gate.passes(value[None]).any()))
        words = "below" if passed else "not below"
        text = f"{gate.by} {float(value):.2f} is {words} {gate.below:.2f}: " + ("go on" if passed else "stop")
        if gate.tile is not None:
            text = f"{gate}: mean {gate.by} {float(value):.2f}, " + ("go on with these tiles" if passed else "stop")
        return {"text": text, "value": float(value), "below": gate.below, "passed": passed}

    # -- images
    def images(self) -> list[tuple[str, str]]:
        """Of a map: the input, the base model's map, the combined one, and what changed."""
        p = self.p
        if not p.meaning.maps:
            return []
        image = self._pixels("base", p.passes[0].view)
        if self.base_map is None:
            base, final = _drawn_maps(p.base, p.output)
            spread = _drawn_maps(p.spread)[0]
            shown = [("image", image), ("base model", base), ("combined", final), ("where the passes differ", spread)]
        else:
            labels, count = class_map(p.output), max(2, p.output.shape[0])
            shown = [("image", image), ("base model", self._overlay(p.base)), ("combined", self._overlay(p.output))]
            where = f"where they differ ({changed(p):.1%}), in the new colour"
            shown += [(where, differences(image, self.base_map, labels, self.classes, count))]
            if self.truth is not None and self.truth.mask is not None:
                truth = _resized(self.truth.mask, labels.shape)
                shown += [("label", overlay(image, truth, self.classes, count))]
        return [(words, _uri(drawn)) for words, drawn in shown]

    def _overlay(self, output: Tensor) -> Image.Image:
        image = self._pixels("base", self.p.passes[0].view)
        return overlay(image, class_map(output), self.classes, max(2, output.shape[0]))

    def _pixels(self, network: str, view: View) -> Image.Image:
        """What a network gets of a view, as an image."""
        source = for_network(self.source, self.pipeline.better.networks[network].preprocess)
        assert isinstance(source, PILImages)
        pixels = source.preprocess.denormalise(source.render(view)[0].float().cpu()).clamp(0, 1)
        return as_image(source.preprocess, pixels)

    def _view(self, network: str, view: View) -> tuple[str, str]:
        """A small image of what a network gets of a view, and its size in words."""
        if (network, view) not in self.views:
            image = self._pixels(network, view)
            size = f"{image.height} x {image.width}"
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            self.views[network, view] = (_uri(image), size)
        return self.views[network, view]


def _drawn_maps(*maps: Tensor) -> list[Image.Image]:
    """Maps of numbers in gray, on one scale; of features their principal components."""
    if all(m.ndim == 3 and m.shape[0] > 1 for m in maps):
        return [Image.fromarray(colours) for colours in principal(*maps)]
    flat = [(m if m.ndim == 2 else m.float().mean(0)).detach().float().cpu() for m in maps]
    low, high = (float(f(torch.stack([f(m) for m in flat]))) for f in (torch.min, torch.max))
    scaled = [((m - low) / max(high - low, 1e-12) * 255).round().byte().numpy() for m in flat]
    return [Image.fromarray(values) for values in scaled]


def _resized(mask: Any, size: tuple[int, ...]) -> Any:
    found = Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST)
    return np.asarray(found, np.int64)


def _uri(image: Image.Image) -> str:
    """PNG for small images, JPEG for large ones."""
    if max(image.size) <= 128:
        data, kind = as_png(image), "png"
    else:
        stream = io.BytesIO()
        image.convert("RGB").save(stream, "JPEG", quality=90)
        data, kind = stream.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
