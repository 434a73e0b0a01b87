"""What the page asks for, answered: one computation at a time, and nothing computed twice."""

from __future__ import annotations

import base64
import gzip
import hashlib
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from torch import Tensor

from unstride import models
from unstride.enhanced import Enhanced
from unstride.errors import DataError, InputError, OptionError, TaskAssumed, UnstrideError
from unstride.evaluation.loop import prepared
from unstride.models import LoadedModel
from unstride.models.tasks import task_of
from unstride.models.weights import place
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.recipe.saving import opened, task_said
from unstride.show.html import as_png
from unstride.storage import strict_json
from unstride.studio.choices import (
    GIVEN,
    RECIPES,
    TUNED,
    Choice,
    Sample,
    gallery_for,
    laid_out,
    named,
    offered,
    samples_for,
    started_with,
)
from unstride.studio.drawing import DRAWN, drawn
from unstride.studio.looking import BUDGET, layers, look
from unstride.studio.tuner import Tuner
from unstride.studio.worker import Worker
from unstride.views.images import open_image

UPLOAD_BYTES = 20 << 20
UPLOAD_PIXELS = 40_000_000
LONGEST = 20  # times as long as wide: a strip of one pixel would be blown up beyond all memory
KEPT = 24  # answers that are remembered
UPLOADS = 2 * UPLOAD_BYTES  # of uploaded files that are remembered, so that a link opens them again
SIZES = 8  # image sizes that a model stays prepared for
PATIENCE = 120.0  # seconds that a question waits for the one before it


class Busy(UnstrideError):
    """Another computation took too long."""


@dataclass(eq=False)
class Ready:
    """A model that is loaded, and prepared for the recipes that were picked so far."""

    loaded: LoadedModel
    better: Enhanced
    picked: dict[str, Enhanced] = field(default_factory=dict)

    def sizes(self) -> int:
        return max(len(better.plans) for better in (self.better, *self.picked.values()))


class Studio:
    """`Studio("timm:resnet18").look("0", "2", "flip")`: the third sample image, flipped too, as gzipped JSON.

    Models, recipes and images are looked up in lists: no name reaches the file system.
    """

    def __init__(
        self, spec: str | None = None, weights: str = "default", task: str | None = None, **options: Any
    ) -> None:
        """`task` and `options`: what `enhance` takes (recipe, ...), for the model that is given."""
        if spec is None and (options or task):
            told = ", ".join([*(["task"] if task else []), *options])
            raise OptionError(f"{told}: a recipe and a task belong to a model; give it, too")
        given = None if spec is None else models.load(spec, weights=weights)
        self._options: dict[str, dict[str, Any]] = {"0": options} if given is not None else {}
        meant = None if given is None else _task(given, task or task_said(options.get("recipe")))
        if given is not None and options:
            _check(given, meant, options)
        self.choices: dict[str, Choice] = {str(k): choice for k, choice in enumerate(offered(given, meant))}
        if not self.choices:
            raise UnstrideError("no model to offer: give one, such as `unstride studio torchvision:resnet18`")
        self.samples: dict[str, dict[str, Sample]] = {
            key: {str(k): s for k, s in enumerate(samples_for(choice.spec))} for key, choice in self.choices.items()
        }
        self._lock, self._worker = threading.Lock(), Worker()
        self._ready: dict[str, Ready] = {}
        self._answers: OrderedDict[tuple[str, ...], bytes] = OrderedDict()
        self._uploads: OrderedDict[str, bytes] = OrderedDict()
        self.tuner = Tuner()
        self._images = {
            key: [{"key": k, "title": s.title, "data": _thumbnail(s.image)} for k, s in of.items()]
            for key, of in self.samples.items()
        }

    def catalogue(self) -> bytes:
        """Models, their recipes and sample images, and the limits."""
        return packed(
            {
                "budget": BUDGET,
                "upload": {"bytes": UPLOAD_BYTES, "pixels": UPLOAD_PIXELS},
                "models": [
                    {
                        "key": key,
                        "spec": choice.spec,
                        "about": choice.about,
                        "recipes": [{"key": k, "title": title} for k, title in self.recipes(key).items()],
                        "tunes": choice.spec == "sample",
                        "samples": self._images[key],
                    }
                    for key, choice in self.choices.items()
                ],
            }
        )

    def recipes(self, model: str) -> dict[str, str]:
        """What can be picked for a model, the first to begin with, and what each is."""
        given, drawn = self._options.get(model), self.choices[model].task in DRAWN
        tuned = self.choices[model].spec == "sample" and self.tuner.recipe is not None
        return {
            **({GIVEN: named(given)} if given else {}),
            **{name: title for name, title in RECIPES.items() if not (drawn and name == "paper")},
            **({TUNED: "tuned: what tuning on the sample found"} if tuned else {}),
        }

    def tune(self, model: str, start: bool = False) -> bytes:
        """How far tuning on the sample is, and what it found; `start` begins it, once."""
        self._known(model)
        if self.choices[model].spec != "sample":
            raise InputError("only the embedded sample can be tuned here: `unstride tune` does it for other models")
        if start:
            self.tuner.start(self.choices[model].load())
        return packed(self.tuner.told())

    def layers(self, model: str) -> bytes:
        """What a model subsamples, at its own image size."""
        self._known(model)

        def compute() -> dict[str, Any]:
            better = self._picked(model, next(iter(self.recipes(model))))
            plan = better.prepare(_example(self._model(model).loaded))
            return {"task": better.task, **layers(plan, () if better.recipe.stages else better.options(plan).layers)}

        return self._once(("layers", model), compute)

    def look(self, model: str, image: str | bytes, recipe: str | None = None) -> bytes:
        """All that is shown of one image: the key of a sample, or the bytes of an uploaded file.

        The answer's `image` names it from then on, also an upload for as long as it is remembered.
        """
        self._known(model)
        recipes = self.recipes(model)
        asked = next(iter(recipes)) if recipe is None else recipe
        if asked not in recipes:
            raise InputError(f"there is no recipe {asked[:20]!r} for this model; reload the page")
        body = image if isinstance(image, bytes) else self._uploads.get(image)
        if isinstance(image, str) and body is None and image not in self.samples[model]:
            told = image[:20]
            raise InputError(f"the image {told!r} is not here (any more); choose it again, or reload the page")
        name = f"upload-{hashlib.sha256(image).hexdigest()[:16]}" if isinstance(image, bytes) else image

        def compute() -> dict[str, Any]:
            if body is None:
                sample = self.samples[model][name]
            else:
                # Decoded here, when it is its turn: many at once would fill the memory.
                sample = Sample(name, _uploaded(body))
                self._remember(name, body)
            better, loaded = self._picked(model, asked), self._model(model).loaded
            if better.task in DRAWN:
                others = self._others(model, name) if better.task == "embedding" else []
                return {**drawn(loaded, better, sample, others), "image": name}
            return {**look(loaded, better, sample.image, sample.truth), "image": name}

        # Uploads are neighbours of each other: with another one, the answer is another.
        beside = sorted(set(self._uploads) - {name}) if self.choices[model].task == "embedding" else []
        return self._once(("look", model, asked, name, *beside), compute)

    def _others(self, model: str, name: str) -> list[Sample]:
        """The images that may be neighbours: the gallery, and what was uploaded."""
        own = [Sample(key, _uploaded(body)) for key, body in self._uploads.items() if key != name]
        shown = self.samples[model].get(name)
        return [s for s in gallery_for(self.choices[model].spec) if shown is None or s.title != shown.title] + own

    def _remember(self, name: str, body: bytes) -> None:
        self._uploads[name] = body
        self._uploads.move_to_end(name)
        while sum(map(len, self._uploads.values())) > UPLOADS:
            self._uploads.popitem(last=False)

    def _known(self, model: str) -> None:
        if model not in self.choices:
            raise InputError(f"there is no model {model[:20]!r} in the list; reload the page")

    def _model(self, key: str) -> Ready:
        if key not in self._ready or self._ready[key].sizes() > SIZES:
            loaded = self.choices[key].load()
            task = self.choices[key].task or loaded.task or "classification"
            if task not in ("classification", "segmentation", *DRAWN):
                raise InputError(
                    f"the studio shows classes, maps, features and neighbours, not {task}: unstride predict"
                )
            loaded = loaded.for_task(task)
            options = {"preprocess": loaded.preprocess, **self._options.get(key, {})}
            self._ready[key] = Ready(loaded, prepared(loaded.model, _example(loaded), task, options))
        return self._ready[key]

    def _picked(self, key: str, recipe: str) -> Enhanced:
        ready = self._model(key)
        if recipe not in ready.picked:
            known: dict[str, Recipe | None] = {GIVEN: ready.better.recipe, TUNED: self.tuner.recipe}
            asked = known.get(recipe) or get(recipe, ready.better.task)
            ready.picked[recipe] = ready.better.with_options(recipe=laid_out(asked))
        return ready.picked[recipe]

    def _once(self, key: tuple[str, ...], compute: Any) -> bytes:
        if not self._lock.acquire(timeout=PATIENCE):
            raise Busy("another image is still being computed; try again when it is done")
        try:
            if key not in self._answers:
                self._answers[key] = self._worker.do(lambda: packed(compute()))
            self._answers.move_to_end(key)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
            return self._answers[key]
        finally:
            self._lock.release()


def packed(data: Any) -> bytes:
    """Gzipped JSON: maps of thirty budgets are long and repeat themselves."""
    return gzip.compress(strict_json.dumps(data).encode(), 5, mtime=0)


def _task(given: LoadedModel, asked: str | None) -> str | None:
    """What is asked for (also by a recipe), what the model is for, or what its output suggests, which is then told."""
    found = task_of(asked or given.task, given.model, _example(given))
    if found.assumed:
        warnings.warn(TaskAssumed(str(found)), stacklevel=3)
    return found.task


def _check(given: LoadedModel, task: str | None, options: dict[str, Any]) -> None:
    """A recipe that is not there, or was made for another model, is said now, and not when a page asks for it."""
    changes = {name: value for name, value in options.items() if name != "recipe"}
    opened(started_with(options), given.model, given.preprocess, task).recipe.changed(**changes)


def _example(loaded: LoadedModel) -> Tensor:
    return loaded.example().to(*place(loaded.model))


def _uploaded(body: bytes) -> Image.Image:
    if not body:
        raise InputError("the file is empty")
    try:
        image = open_image(body, max_pixels=UPLOAD_PIXELS)
    except DataError as error:
        if "more than the limit" in str(error):
            raise InputError(
                f"the image has more than the {UPLOAD_PIXELS // 1_000_000} million pixels that are allowed here"
            ) from error
        raise InputError("the file cannot be read as an image: it is damaged, or not an image") from error
    if max(image.size) > LONGEST * min(image.size):
        raise InputError(f"the image has {image.width}x{image.height} pixels; at most {LONGEST} to 1 is allowed here")
    return image


def _thumbnail(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((112, 112))
    return f"data:image/png;base64,{base64.b64encode(as_png(small)).decode()}"
