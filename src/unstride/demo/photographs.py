"""A network with real ImageNet weights: what one forward pass throws away, and photographs before and after."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unstride
from unstride import models
from unstride.demo.parts import DemoSize, Say
from unstride.errors import UnstrideError
from unstride.show.answers import described
from unstride.show.html import Block, Figure, Note, Table, Text, layer_table
from unstride.show.photographs import Photograph, plot_photographs
from unstride.storage.artefacts import write_file
from unstride.views.images import open_image

NETWORK = "efficientnet-lite0"


@dataclass(frozen=True)
class PhotoFile:
    """A photograph that a package ships: where, by whom, what it shows, and the network's classes that say so."""

    package: str
    file: str
    credit: str
    truth: str
    classes: tuple[str, ...]


# Only photographs of something that ImageNet has a class for. What they show is what their makers say they show.
PHOTOS = (
    PhotoFile(
        "matplotlib",
        "mpl-data/sample_data/grace_hopper.jpg",
        "U.S. Navy, public domain",
        "military uniform",
        ("military uniform",),
    ),
    PhotoFile("skimage", "data/chelsea.png", "Stefan van der Walt, CC0", "tabby or tiger cat", ("tabby", "tiger cat")),
    PhotoFile("skimage", "data/coffee.png", "Rachel Michetti, public domain", "espresso", ("espresso",)),
    PhotoFile("skimage", "data/camera.png", "Lav Varshney, CC0", "camera on a tripod", ("tripod",)),
    PhotoFile(
        "skimage",
        "data/clock_motion.png",
        "Stefan van der Walt, CC0",
        "clock in motion",
        ("wall clock", "analog clock"),
    ),
)


def network(out: Path, size: DemoSize, say: Say) -> tuple[Any, list[Block]]:
    """What `unstride inspect` says of it, and a few photographs by the default recipe."""
    say(f"reading {NETWORK}")
    loaded = models.load(NETWORK)
    report = unstride.inspect(loaded.model, loaded.example())
    blocks: list[Block] = [
        Text(
            f"{NETWORK} ({loaded.weights}) has {report.states:,} states. One forward pass uses one of them and throws "
            "the others away. The later a layer, the less one more state costs there."
        ),
        layer_table(report),
    ]
    answers, more = _photographs(out, loaded, say)
    return {"spec": NETWORK, "weights": loaded.weights, **report.to_json(), "photographs": answers}, blocks + more


def _photographs(out: Path, loaded: models.LoadedModel, say: Say) -> tuple[list[dict[str, Any]], list[Block]]:
    found = {path: photo for photo in PHOTOS if (path := inside(photo.package, photo.file)) is not None}
    if not found:
        return [], [Note("No photographs here. `pip install scikit-image matplotlib`: these packages ship some.")]
    say(f"classifying {len(found)} photograph{'s' * (len(found) > 1)}")
    better = unstride.enhance(loaded)
    shown, answers = [], []
    for path, photo in found.items():
        image = open_image(path)
        words = described(better.explain([image])[0], loaded.classes)
        base, answer = ((a["name"], a["probability"], a["name"] in photo.classes) for a in _first(words))
        shown.append(Photograph(image, photo.truth, base, answer, words["cost"]))
        answers.append({"image": path.name, "truth": photo.truth, "mark": shown[-1].mark, **words})
    return answers, [_table(found.values(), shown), _drawn(out / "photographs.png", shown)]


def _first(words: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return words["base"][0], words["answer"][0]


def _table(photos: Iterable[PhotoFile], shown: Iterable[Photograph]) -> Table:
    rows = tuple(
        (
            Path(photo.file).name,
            one.truth,
            *(f"{name} {p:.0%}" for name, p, _ in (one.base, one.answer)),
            one.mark,
            f"{one.cost:.1f}x",
            photo.credit,
        )
        for photo, one in zip(photos, shown, strict=True)
    )
    caption = (
        f"{NETWORK} alone, and with the default recipe: one more pass, of the flipped image, where the first is "
        "uncertain. A handful of photographs shows what happens, not how often it helps."
    )
    return Table(("photograph", "label", "before", "after", "", "cost", "by"), rows, caption)


def _drawn(path: Path, shown: Sequence[Photograph]) -> Block:
    """The image, also in a file of its own; a note where there is no plot library."""
    stream = io.BytesIO()
    try:
        plot_photographs(shown).savefig(stream, format="png")
        write_file(path, stream.getvalue())
    except UnstrideError as error:
        return Note(f"The plot of the photographs is missing: {error}")
    caption = "Photographs with a label: the network alone, and with the default recipe."
    return Figure(stream.getvalue(), caption, f"{caption} ({path.name})")


def inside(package: str, name: str) -> Path | None:
    """A file of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((path for place in places if (path := Path(place) / name).is_file()), None)
