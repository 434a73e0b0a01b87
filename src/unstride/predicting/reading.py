"""Images decoded and prepared ahead by a few threads, while the network works on those before."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import InputError, UnstrideError
from unstride.predicting.containers import Entry
from unstride.recipe.view import PLAIN, View
from unstride.views.images import Preprocess, open_image
from unstride.views.source import PLACING, PILImages

MOST = 256  # images ahead: as many as a part has
BYTES = 384 << 20  # of decoded images ahead


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image as the base network takes it, or why there is none.

    Attributes:
        size: (height, width) of the image itself.
        views: by view, (C, h, w).
        image: kept where later views are made from its own pixels.
        content: the sha256 of what was read.
    """

    index: int
    name: str
    size: tuple[int, int] = (0, 0)
    views: dict[View, Tensor] = field(default_factory=dict)
    image: Image.Image | None = None
    error: str = ""
    content: str = ""

    @property
    def bytes(self) -> int:
        pixels = 0 if self.image is None else 3 * self.image.width * self.image.height
        return pixels + sum(x.numel() * x.element_size() for x in self.views.values())


@dataclass(frozen=True)
class Preparation:
    """What a thread does to each image: decode it, and render the views that every image gets.

    Attributes:
        keeps: keep the image, because views of other places or other networks need its own pixels.
    """

    preprocess: Preprocess
    views: tuple[View, ...]
    keeps: bool

    @classmethod
    def of(cls, better: Enhanced, preprocess: Preprocess) -> Preparation:
        stages = better.recipe.stages
        placing = any(op.name in PLACING for s in stages for v in s.views for op in v.ops)
        other = any(n.preprocess not in (None, preprocess) for n in better.networks.values())
        views = [PLAIN]
        if placing:
            for stage in stages:
                if stage.gate is not None:
                    break
                views += stage.views
        return cls(preprocess, tuple(dict.fromkeys(views)), placing or other)

    def __call__(self, index: int, entry: Entry) -> PreparedImage:
        content = ""
        try:
            source = entry.fetch()
            data = source.read_bytes() if isinstance(source, Path) and source.is_file() else source
            content = "" if isinstance(data, Path) else hashlib.sha256(data).hexdigest()
            return self.prepared(index, entry.name, _opened(data, source), content)
        except (UnstrideError, OSError) as error:
            return PreparedImage(index, entry.name, error=str(error), content=content)

    def prepared(self, index: int, name: str, image: Image.Image, content: str = "") -> PreparedImage:
        """A decoded image with the views that every image gets."""
        alone = PILImages([image], self.preprocess)
        views = {view: alone.render(view)[0] for view in self.views}
        return PreparedImage(
            index, name, (image.height, image.width), views, image if self.keeps else None, content=content
        )


def _opened(data: Path | bytes, source: Path | bytes) -> Image.Image:
    """The image in these bytes; errors name its file."""
    try:
        return open_image(data)
    except (UnstrideError, InputError) as error:
        if isinstance(data, bytes) and isinstance(source, Path):
            raise type(error)(str(error).replace(f"an image given as {len(data):,} bytes", str(source))) from error
        raise


@dataclass(eq=False)
class ImageReader:
    """`for part, image in ImageReader(prepare)(wanted)`: in order; `waited`: seconds that the caller waited."""

    prepare: Preparation
    threads: int = min(8, 2 + (os.cpu_count() or 1))
    waited: float = 0.0

    def __call__(self, wanted: Iterator[tuple[int, int, Entry]]) -> Iterator[tuple[int, PreparedImage]]:
        """Args: wanted: (part, index, entry) of each image."""
        ahead = 2 * self.threads
        with ThreadPoolExecutor(self.threads) as pool:
            waiting: deque[tuple[int, Future[PreparedImage]]] = deque()
            more = True
            while more or waiting:
                start = time.perf_counter()
                while more and len(waiting) < ahead:
                    following = next(wanted, None)
                    more = following is not None
                    if following is not None:
                        part, index, entry = following
                        waiting.append((part, pool.submit(self.prepare, index, entry)))
                if waiting:
                    part, future = waiting.popleft()
                    image = future.result()
                    self.waited += time.perf_counter() - start
                    ahead = max(self.threads, min(MOST, BYTES // max(1, image.bytes)))
                    yield part, image
