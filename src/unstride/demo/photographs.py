"""A network with real ImageNet weights: what it throws away, and what it says of photographs whose truth is known."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

import unstride
from unstride import models
from unstride import show as plots
from unstride.demo.common import Say, drawn
from unstride.errors import UnstrideError
from unstride.models import LoadedModel
from unstride.show.answers import answer_of
from unstride.show.html import Block, Table, Text, layer_table
from unstride.show.photographs import Shown
from unstride.views.images import open_image

NETWORK = "efficientnet-lite0"


@dataclass(frozen=True)
class Photo:
    """A photograph that a package ships: where, whose, what it shows, and the network's classes that say so."""

    package: str
    file: str
    credit: str
    truth: str
    classes: tuple[str, ...]


# Only photographs of something that ImageNet has a class for. What they show is what their makers say they show.
PHOTOS = (
    Photo(
        "matplotlib", "mpl-data/sample_data/grace_hopper.jpg", "U.S. Navy, public domain",
        "military uniform", ("military uniform",),
    ),
    Photo("skimage", "data/chelsea.png", "Stefan van der Walt, CC0", "tabby or tiger cat", ("tabby", "tiger cat")),
    Photo("skimage", "data/coffee.png", "Rachel Michetti, public domain", "espresso", ("espresso",)),
    Photo("skimage", "data/camera.png", "Lav Varshney, CC0", "camera on a tripod", ("tripod",)),
    Photo(
        "skimage", "data/clock_motion.png", "Stefan van der Walt, CC0", "clock in motion",
        ("wall clock", "analog clock"),
    ),
)  # fmt: skip


STAGES = 5  # of the network, to its stride of 16: more cells than its last map has


def dense_tower() -> LoadedModel:
    """The network without its last stages, for images of any size: a map of features that is worth looking at."""
    loaded = models.load(NETWORK)
    net: Any = loaded.model
    tower = nn.Sequential(net.conv_stem, net.bn1, *net.blocks[:STAGES]).eval()
    whole = replace(loaded.preprocess, resize=None, crop=None)
    return replace(loaded, model=tower, preprocess=whole, task="features", classes=())


def inspect_network(say: Say) -> tuple[Any, list[Block]]:
    say(f"reading {NETWORK}")
    loaded = models.load(NETWORK)
    report = unstride.inspect(loaded.model, loaded.example())
    words = (
        f"{NETWORK} (weights: {loaded.weights}) keeps one of {report.states:,} ways to subsample its activations and "
        "throws the others away. To look at one more costs less, the later the layer where it differs."
    )
    return {"spec": NETWORK, "weights": loaded.weights, **report.to_json()}, [Text(words), layer_table(report)]


def photographs(out: Path, say: Say) -> tuple[Any, list[Block]]:
    """Answers with their truth, by the default recipe; `out` gets an image."""
    found = {path: photo for photo in PHOTOS if (path := inside(photo.package, photo.file)) is not None}
    if not found:
        raise UnstrideError("no photographs here: pip install scikit-image matplotlib, which ship some")
    loaded = models.load(NETWORK)
    images = [open_image(path) for path in found]
    say(f"preparing {NETWORK}")
    example = loaded.preprocess(images[0])[None]
    better = unstride.enhance(loaded.model, example, preprocess=loaded.preprocess)
    shown, answers = [], []
    for path, photo, image in zip(found, found.values(), images, strict=True):
        say(f"classifying {path.name}")
        answer = answer_of(better.explain([image])[0], loaded.classes)
        plain, now = ((a["name"], a["probability"], a["name"] in photo.classes) for a in _first(answer))
        one = Shown(image, photo.truth, plain, now, answer["cost"])
        shown.append(one)
        answers.append({"image": path.name, "truth": photo.truth, "mark": one.mark, **answer})
    figure = drawn(
        out / "photographs.png",
        lambda: plots.plot_photographs(shown),
        "Photographs whose truth is known: what the network says alone, and with the default recipe.",
    )
    return answers, [_table(found.values(), shown), figure]


def _first(answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return answer["plain"][0], answer["enhanced"][0]


def _table(photos: Iterable[Photo], shown: Iterable[Shown]) -> Table:
    rows = tuple(
        (
            Path(photo.file).name,
            one.truth,
            *(f"{name} {p:.0%}" for name, p, _ in (one.plain, one.enhanced)),
            one.mark,
            f"{one.cost:.1f}x",
            photo.credit,
        )
        for photo, one in zip(photos, shown, strict=True)
    )
    return Table(
        ("photograph", "truth", "plain", "now", "", "cost", "by"),
        rows,
        f"{NETWORK}: the plain look, and the flipped one where the plain one is not sure. A handful of photographs "
        "shows what happens, not how good it is: for that see the tables above.",
    )


def inside(package: str, name: str) -> Path | None:
    """A file of an installed package, found without importing it and without any network."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((path for place in places if (path := Path(place) / name).is_file()), None)
