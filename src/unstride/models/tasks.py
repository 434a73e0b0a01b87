"""What a model's output means: what its library says, otherwise what its shape suggests.

library_task(timm.create_model("vit_tiny_patch16_224", num_classes=0))    # "embedding"
guess(model, images[:1])                                               # Guess("classification", "output (B, ...")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unstride.errors import CaptureError, ModelRaised
from unstride.graph.capture import calling
from unstride.graph.evaluation import evaluation_copy
from unstride.tasks.tasks import TASKS, task_named

_SEGMENTS = 16  # a map this many times smaller than the image is features rather than classes of pixels
ASSUMED = "assumed: nothing says so"
_HEADS = ("fc", "classifier", "head", "heads")


@dataclass(frozen=True)
class Guess:
    """A task, and why: `assumed` says what was taken for what, and is empty where the model's library said it."""

    task: str | None
    assumed: str = ""

    def __str__(self) -> str:
        return f"the task is assumed to be {self.task}: {self.assumed}"


def task_of(asked: Any, model: nn.Module, example: Tensor, recipe_says: bool = False) -> Guess:
    """What the user says, then what a recipe of its own was made for (None), then what can be found out."""
    if getattr(model, "is_enhanced", False) and asked in (None, "auto"):
        return Guess(str(model.task))
    check_kind(model)
    if asked not in (None, "auto"):
        return Guess(task_named(asked).name)
    return Guess(None) if recipe_says else guess(model, example)


def known_task(asked: Any, model: nn.Module, recipe_says: bool = False) -> Guess:
    """The same without an example: what the user, the recipe or the model's library says, else classification."""
    if asked not in (None, "auto") or recipe_says:
        return Guess(None if asked in (None, "auto") else task_named(asked).name)
    check_kind(model)
    known = library_task(model)
    return Guess(known) if known is not None else Guess("classification", "an output of scores, one for each class")


def guess(model: nn.Module, example: Tensor) -> Guess:
    """The task of a model, from its library or, with one forward of the example, from the shape of what it returns."""
    known = library_task(model)
    if known not in (None, "embedding"):
        return Guess(known)
    try:
        with torch.inference_mode(False), torch.no_grad(), calling(example):
            output = evaluation_copy(model)(example[:1].clone())
    except ModelRaised:  # a capture will say what it raises, and pad the image where that may help
        return Guess(known or "classification")
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        kinds = ", ".join(sorted(set(map(_kind, tree_leaves(output))))) or "nothing"
        raise CaptureError(f"the model returns {kinds}; unstride needs a tensor of floats, with a row for each image")
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if known is not None:  # a tower without a pooled vector gives features
        pooled = any(len(s) == 2 or (len(s) > 2 and set(s[2:]) == {1}) for s in shapes)
        return Guess("embedding" if pooled else "features")
    task, leaf = _by_shape(shapes, example)
    shown = ", ".join(map(str, ("B", *leaf[1:])))
    return Guess(task, f"output ({shown}) read as {TASKS[task].reads(leaf)}")


def _kind(leaf: Any) -> str:
    return f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _by_shape(shapes: Sequence[tuple[int, ...]], example: Tensor) -> tuple[str, tuple[int, ...]]:
    """The likeliest task for outputs of these shapes, and the output that says so."""
    axes = example.ndim - 2
    maps = [s for s in shapes if len(s) == axes + 2]
    if len({s[2:] for s in maps}) > 1 and not any(len(s) == 2 for s in shapes):
        coarse = min(maps, key=lambda s: s[-1])
        if len(maps) > 2 or min(s[-1] * _SEGMENTS for s in maps) < example.shape[-1]:
            return "features", coarse  # a pyramid
    for shape in sorted(shapes, key=lambda s: len(s) < 2):  # single numbers often stand beside the scores
        if len(shape) == 2:
            return "classification", shape
        if len(shape) > 2 and set(shape[2:]) == {1}:
            return "embedding", shape
        if len(shape) == axes + 2:
            fine = shape[-1] * _SEGMENTS >= example.shape[-1] and shape[1] <= 256
            return ("segmentation" if fine else "features"), shape
        if len(shape) == axes + 1 and axes > 1:
            pixels = all(n * _SEGMENTS >= m for n, m in zip(shape[1:], example.shape[2:], strict=True))
            square = shape[1] * example.shape[3] == shape[2] * example.shape[2]
            return ("dense" if pixels and square else "features"), shape
        if len(shape) == 1:
            return "regression", shape
    return "classification", shapes[0]


# ------------------------------------------------------------------------------------------ what libraries say


def library_task(model: nn.Module) -> str | None:
    """The task that the model's library or its own configuration names; None where nobody says."""
    library = type(model).__module__.partition(".")[0]
    found = {"transformers": _transformers, "timm": _timm, "segmentation_models_pytorch": _smp, "torchvision": _tv}
    return found[library](model) if library in found else None


def _transformers(model: Any) -> str | None:
    name = type(model).__name__
    if "ForImageClassification" in name:
        kinds = {"multi_label_classification": "multilabel", "regression": "regression"}
        return kinds.get(getattr(model.config, "problem_type", None) or "", "classification")
    if "ForSemanticSegmentation" in name:
        return "segmentation"
    if "ForDepthEstimation" in name:
        return "dense"
    if name.endswith("Backbone"):
        return "features"
    return "embedding" if name.endswith(("Model", "ModelWithProjection")) else None


def _timm(model: Any) -> str | None:
    if type(model).__name__.startswith("Feature"):
        return "features"
    count = getattr(model, "num_classes", None)
    return None if count is None else "classification" if count else "embedding"


def _smp(model: Any) -> str | None:
    return "segmentation" if hasattr(model, "segmentation_head") else None


def _tv(model: Any) -> str | None:
    if ".segmentation" in type(model).__module__:
        return "segmentation"
    last = [getattr(model, name) for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)]
    return "embedding" if any(isinstance(m, nn.Identity) for m in last) else "classification" if last else None


# ------------------------------------------------------------------------------------------ what cannot be enhanced


def check_kind(model: nn.Module) -> None:
    """A CaptureError for models whose outputs cannot be combined over passes; it says what to do instead."""
    where, name = type(model).__module__, type(model).__name__
    boxes = where.startswith("torchvision.models.detection") and "backbone" not in where
    masks = "ForUniversalSegmentation" in name or name.startswith("MaskFormerFor")
    if boxes or "ForObjectDetection" in name or ("ForInstanceSegment" in name and not masks):
        attribute = "model.backbone" if boxes else "its backbone"
        raise CaptureError(
            f"{name} is a detector: the boxes of several passes cannot be averaged. Enhance its backbone instead, "
            f"{attribute} = unstride.enhance({attribute}, example, task='features')"
        )
    if where.startswith("torchvision.models.optical_flow"):
        raise CaptureError(f"{name} takes two images, and passes of unstride see one, so optical flow cannot be used")
    if masks:
        raise CaptureError(
            f"{name} returns masks for queries, whose order may change between passes; wrap it to return per-pixel "
            "scores of classes, torch.einsum('bqc,bqhw->bchw', out.class_queries_logits.softmax(-1)[..., :-1], "
            "out.masks_queries_logits.sigmoid()).log(), and pass task='segmentation'"
        )
    if name.startswith("NaFlex"):
        raise CaptureError(
            f"{name} takes patches of images of any shape, not a tensor (B, C, H, W); use a ViT of one size instead"
        )
