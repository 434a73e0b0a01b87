"""A network with real ImageNet weights: what it throws away, and what it says of photographs that packages ship."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import unstride
from unstride import models
from unstride import show as plots
from unstride.demo.common import BUDGET, Say, drawn
from unstride.errors import UnstrideError
from unstride.show.answers import answer_of, headline
from unstride.show.html import Block, Table, Text, Thumbnail, Thumbnails, layer_table
from unstride.views.images import open_image

NETWORK = "efficientnet-lite0"
# package, file in it, whose picture it is
PHOTOS = (
    ("skimage", "data/chelsea.png", "Stefan van der Walt, CC0"),
    ("skimage", "data/astronaut.png", "NASA, public domain"),
    ("skimage", "data/coffee.png", "Rachel Michetti, public domain"),
    ("skimage", "data/rocket.jpg", "SpaceX, CC0"),
    ("sklearn", "datasets/images/china.jpg", "danielbuechele, CC BY 2.0"),
    ("sklearn", "datasets/images/flower.jpg", "vultilion, CC BY 2.0"),
)


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
    found = {path: credit for package, name, credit in PHOTOS if (path := inside(package, name)) is not None}
    if not found:
        raise UnstrideError("no photographs here: pip install scikit-image scikit-learn, which ship some")
    loaded = models.load(NETWORK)
    images = [open_image(path) for path in found]
    x = torch.stack([loaded.preprocess(image) for image in images])
    say(f"preparing {NETWORK}")
    better = unstride.enhance(loaded.model, x[:1], BUDGET)
    predictions = []
    for k, path in enumerate(found):
        say(f"classifying {path.name}")
        predictions += better.explain(x[k : k + 1])
    answers = [{"image": path.name, **answer_of(p, loaded.classes)} for path, p in zip(found, predictions, strict=True)]
    moved = [float((p.logits.softmax(0) - p.plain.softmax(0)).abs().sum()) for p in predictions]
    most = int(np.argmax(moved))
    rates = better.prepare(x[:1]).found.space.rates
    name = answers[most]["image"]
    picture = drawn(
        out / f"search-{Path(name).stem}.png",
        lambda: plots.plot_classification(
            images[most], predictions[most], rates, loaded.classes, f"{name}: {headline(answers[most])}"
        ),
        "The search in the photograph that changed most: the states, what each of them sees, how much it counts.",
    )
    return answers, [_table(answers), picture, _thumbnails(images, answers, found.values())]


def _table(answers: Iterable[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            a["image"],
            f"{a['plain'][0]['name']} {a['plain'][0]['probability']:.0%}",
            f"{a['enhanced'][0]['name']} {a['enhanced'][0]['probability']:.0%}",
            str(len(a["states"])),
            f"{a['cost']:.1f}x",
            f"{a['agreement']:.0%}",
            f"{a['spread']:.3f}",
        )
        for a in answers
    )
    return Table(
        ("photograph", "plain", "enhanced", "states", "cost", "agreement", "spread"),
        rows,
        "Cost: MACs, a plain forward is 1x. Agreement: states that give the enhanced answer. Spread: how far the "
        "states differ, in nats. There are no labels here: this shows what happens, not how good it is.",
    )


def _thumbnails(images: Iterable[Image.Image], answers: Iterable[dict[str, Any]], credits: Iterable[str]) -> Thumbnails:
    thumbs = []
    for image, answer, credit in zip(images, answers, credits, strict=True):
        small = image.copy()
        small.thumbnail((240, 240))
        thumbs.append(Thumbnail(small, f"{headline(answer)} ({credit})"))
    return Thumbnails(tuple(thumbs))


def inside(package: str, name: str) -> Path | None:
    """A file of an installed package, found without importing it and without any network."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((path for place in places if (path := Path(place) / name).is_file()), None)
