"""What the page asks for, answered: one computation at a time, and nothing computed twice."""

from __future__ import annotations

import base64
import gzip
import hashlib
import threading
from collections import OrderedDict
from typing import Any

from PIL import Image
from torch import Tensor

from unstride import models
from unstride.enhanced import Enhanced
from unstride.errors import DataError, InputError, OptionError, UnstrideError
from unstride.jobs import strict
from unstride.models import Loaded
from unstride.models.weights import place
from unstride.proof.loop import prepared
from unstride.show.html import as_png
from unstride.studio.choices import Choice, Sample, offered, samples_for
from unstride.studio.looking import BUDGET, layers, look
from unstride.studio.worker import Worker
from unstride.views.images import open_image

UPLOAD_BYTES = 20 << 20
UPLOAD_PIXELS = 40_000_000
LONGEST = 20  # times as long as wide: a strip of one pixel would be blown up beyond all memory
KEPT = 24  # answers that are remembered
SIZES = 8  # image sizes that a model stays prepared for
PATIENCE = 120.0  # seconds that a question waits for the one before it


class Busy(UnstrideError):
    """Another computation took too long."""


class Studio:
    """`Studio("timm:resnet18").look("0", "2")`: the third sample picture through the first model, as gzipped JSON.

    Models and pictures are named by their place in lists that are fixed at the start: no name reaches the file system.
    """

    def __init__(self, spec: str | None = None, weights: str = "default", **options: Any) -> None:
        """`options`: what `enhance` takes (recipe, ...), for the model that is given."""
        if spec is None and options:
            raise OptionError(f"{', '.join(options)}: a recipe belongs to a model; give it, too")
        given = None if spec is None else models.load(spec, weights=weights)
        self._options: dict[str, dict[str, Any]] = {"0": options} if given is not None else {}
        self.choices: dict[str, Choice] = {str(k): choice for k, choice in enumerate(offered(given))}
        if not self.choices:
            raise UnstrideError("no model to offer: give one, such as `unstride studio torchvision:resnet18`")
        self.samples: dict[str, dict[str, Sample]] = {
            key: {str(k): s for k, s in enumerate(samples_for(choice.spec))} for key, choice in self.choices.items()
        }
        self._lock, self._worker = threading.Lock(), Worker()
        self._ready: dict[str, tuple[Loaded, Enhanced]] = {}
        self._answers: OrderedDict[tuple[str, ...], bytes] = OrderedDict()
        self._catalogue = packed(
            {
                "budget": BUDGET,
                "upload": {"bytes": UPLOAD_BYTES, "pixels": UPLOAD_PIXELS},
                "models": [
                    {
                        "key": key,
                        "spec": choice.spec,
                        "about": choice.about,
                        "samples": [
                            {"key": k, "title": s.title, "data": _thumbnail(s.image)}
                            for k, s in self.samples[key].items()
                        ],
                    }
                    for key, choice in self.choices.items()
                ],
            }
        )

    def catalogue(self) -> bytes:
        """Models, their sample pictures and the limits."""
        return self._catalogue

    def layers(self, model: str) -> bytes:
        """What a model subsamples, at its own image size."""
        self._known(model)

        def compute() -> dict[str, Any]:
            loaded, better = self._model(model)
            plan = better.prepare(_example(loaded))
            return {"task": better.task, **layers(plan, () if better.recipe.stages else better.options(plan).layers)}

        return self._once(("layers", model), compute)

    def look(self, model: str, picture: str | bytes) -> bytes:
        """All that is shown of one picture: the key of a sample, or the bytes of an uploaded file."""
        self._known(model)
        if isinstance(picture, str) and picture not in self.samples[model]:
            raise InputError(f"there is no sample picture {picture[:20]!r} for this model; reload the page")
        name = hashlib.sha256(picture).hexdigest() if isinstance(picture, bytes) else picture

        def compute() -> dict[str, Any]:
            # Decoded here, when it is its turn: many at once would fill the memory.
            image = _uploaded(picture) if isinstance(picture, bytes) else self.samples[model][picture].image
            loaded, better = self._model(model)
            return look(loaded, better, image)

        return self._once(("look", model, name), compute)

    def _known(self, model: str) -> None:
        if model not in self.choices:
            raise InputError(f"there is no model {model[:20]!r} in the list; reload the page")

    def _model(self, key: str) -> tuple[Loaded, Enhanced]:
        if key not in self._ready or len(self._ready[key][1].plans) > SIZES:
            loaded = self.choices[key].load()
            task = loaded.task or "classification"
            if task not in ("classification", "segmentation"):
                raise InputError(f"the studio shows classes; {loaded.spec} is for {task}: unstride predict --plot")
            options = {"preprocess": loaded.preprocess, **self._options.get(key, {})}
            better = prepared(loaded.model, _example(loaded), task, options)
            self._ready[key] = loaded, better if better.recipe.stages else better.with_options(budget=BUDGET)
        return self._ready[key]

    def _once(self, key: tuple[str, ...], compute: Any) -> bytes:
        if not self._lock.acquire(timeout=PATIENCE):
            raise Busy("another picture is still being computed; try again when it is done")
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
    return gzip.compress(strict.dumps(data).encode(), 5, mtime=0)


def _example(loaded: Loaded) -> Tensor:
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
