"""What the page asks for, answered: one computation at a time, and nothing computed twice."""

from __future__ import annotations

import base64
import gzip
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from PIL import Image

from unstride.errors import DataError, InputError, OptionError, UnstrideError
from unstride.pipeline import Pipeline
from unstride.recipe.recipe import Recipe
from unstride.show.html import as_png
from unstride.storage import strict_json
from unstride.studio.choices import Choice, LabelledImage, choices, recipes
from unstride.studio.passes import explained
from unstride.studio.worker import Worker
from unstride.views.images import open_image

UPLOAD_BYTES = 20 << 20
UPLOAD_PIXELS = 40_000_000
LONGEST = 20  # times as long as wide: a strip of one pixel would be enlarged beyond all memory
ANSWERS = 24  # that are remembered
UPLOADS = 2 * UPLOAD_BYTES  # of uploaded files that are remembered, so that a link opens them again
PATIENCE = 120.0  # seconds that a request waits for the one before it


class Busy(UnstrideError):
    """Another computation takes too long."""


class Studio:
    """`Studio().explain("0", "0", "2")`: the third image of the first networks, by their first recipe, as gzipped JSON.

    Networks, recipes and images are looked up in lists: no name in a request reaches the file system.

    Args:
        pipeline: networks and a recipe to begin with; the embedded networks are offered beside it.
    """

    def __init__(self, pipeline: Pipeline | None = None) -> None:
        if not isinstance(pipeline, Pipeline | None):
            raise OptionError(f"studio: got {type(pipeline).__name__}, expected what open_pipeline returns.")
        self.choices: dict[str, Choice] = {str(k): choice for k, choice in enumerate(choices(pipeline))}
        self._lock, self._worker = threading.Lock(), Worker()
        self._pipelines: dict[str, Pipeline] = {}
        self._recipes: dict[str, dict[str, tuple[str, Recipe]]] = {}
        self._answers: OrderedDict[tuple[str, ...], bytes] = OrderedDict()
        self._uploads: OrderedDict[str, bytes] = OrderedDict()

    def catalogue(self) -> bytes:
        """The networks on offer, and the limits of an upload."""
        return packed(
            {
                "upload": {"bytes": UPLOAD_BYTES, "pixels": UPLOAD_PIXELS},
                "networks": [{"key": key, "title": choice.title} for key, choice in self.choices.items()],
            }
        )

    def offer(self, networks: str) -> bytes:
        """The recipes and images for some networks."""
        choice = self._choice(networks)

        def compute() -> dict[str, Any]:
            self._pipeline(networks)
            return {
                "recipes": [{"key": k, "title": title} for k, (title, _) in self._recipes[networks].items()],
                "images": [
                    {"key": str(k), "title": image.title, "data": _thumbnail(image.image)}
                    for k, image in enumerate(choice.images)
                ],
            }

        return self._once(("offer", networks), compute)

    def explain(self, networks: str, recipe: str, image: str | bytes) -> bytes:
        """Everything that is shown of one image: the key of an image on offer, or the bytes of an uploaded file.

        The answer's "image" names it from then on, also an upload while it is remembered.
        """
        choice = self._choice(networks)
        body = image if isinstance(image, bytes) else self._uploads.get(image)
        on_offer = {str(k): one for k, one in enumerate(choice.images)}
        if isinstance(image, str) and body is None and image not in on_offer:
            raise InputError(f"image: got {image[:20]!r}, which is not here any more. Choose it again.")
        name = f"upload-{hashlib.sha256(image).hexdigest()[:16]}" if isinstance(image, bytes) else image

        def compute() -> dict[str, Any]:
            pipeline = self._pipeline(networks)
            if recipe not in self._recipes[networks]:
                raise InputError(f"recipe: got {recipe[:20]!r}, which these networks do not have. Reload the page.")
            if body is None:
                chosen = on_offer[name]
            else:  # decoded when it is its turn: many at once would fill the memory
                chosen = LabelledImage(name, _uploaded(body))
                self._remember(name, body)
            running = pipeline.with_recipe(self._recipes[networks][recipe][1])
            return {**explained(running, chosen.image, chosen.truth), "image": name}

        return self._once(("explain", networks, recipe, name), compute)

    def _choice(self, networks: str) -> Choice:
        if networks not in self.choices:
            raise InputError(f"networks: got {networks[:20]!r}, which is not in the list. Reload the page.")
        return self.choices[networks]

    def _pipeline(self, networks: str) -> Pipeline:
        if networks not in self._pipelines:
            pipeline = self.choices[networks].open()
            self._recipes[networks] = {str(k): item for k, item in enumerate(recipes(pipeline).items())}
            self._pipelines[networks] = pipeline
        return self._pipelines[networks]

    def _remember(self, name: str, body: bytes) -> None:
        self._uploads[name] = body
        self._uploads.move_to_end(name)
        while sum(map(len, self._uploads.values())) > UPLOADS:
            self._uploads.popitem(last=False)

    def _once(self, key: tuple[str, ...], compute: Callable[[], dict[str, Any]]) -> bytes:
        if not self._lock.acquire(timeout=PATIENCE):
            raise Busy("Another image is still being computed. Try again when it is done.")
        try:
            if key not in self._answers:
                self._answers[key] = self._worker.do(lambda: packed(compute()))
            self._answers.move_to_end(key)
            while len(self._answers) > ANSWERS:
                self._answers.popitem(last=False)
            return self._answers[key]
        finally:
            self._lock.release()


def packed(data: Any) -> bytes:
    """Gzipped JSON."""
    return gzip.compress(strict_json.dumps(data).encode(), 5, mtime=0)


def _uploaded(body: bytes) -> Image.Image:
    if not body:
        raise InputError("The file is empty.")
    try:
        image = open_image(body, max_pixels=UPLOAD_PIXELS)
    except DataError as error:
        if any(words in str(error) for words in ("more than the limit", "exceeds limit")):  # ours, and Pillow's
            most = UPLOAD_PIXELS // 1_000_000
            raise InputError(f"The image has more than {most} million pixels. Choose a smaller one.") from error
        raise InputError("The file cannot be read as an image. It is damaged, or not an image.") from error
    if max(image.size) > LONGEST * min(image.size):
        size = f"{image.width} x {image.height}"
        raise InputError(f"The image has {size} pixels; at most {LONGEST} times as long as wide is allowed.")
    return image


def _thumbnail(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((112, 112))
    return f"data:image/png;base64,{base64.b64encode(as_png(small)).decode()}"
