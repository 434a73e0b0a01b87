"""Images decoded and prepared a little ahead, by a few threads, while the network works on those before."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from torch import Tensor

from unstride.errors import DataError
from unstride.predicting.inputs import Entry
from unstride.recipe.recipe import Recipe
from unstride.storage.contents import file_digest
from unstride.views.source import PLACING, PILImages
from unstride.views.images import Preprocess, open_image
from unstride.views.source import PLACING, PILImages

MOST = 128  # images ahead
BYTES = 256 << 20  # of decoded images ahead


@dataclass(frozen=True, eq=False)
class Ready:
    """An image as the network wants it, or why there is none."""

    index: int
    part: int
    name: str
    size: tuple[int, ...] = (0, 0)  # (height, width) of the image itself
    made: dict[View, Tensor] = field(default_factory=dict)  # (C, h, w)
    image: Image.Image | None = None  # where later looks read it
    error: str = ""
    content: str = ""  # the sha256 of what was read

    @property
    def bytes(self) -> int:
        kept = 0 if self.image is None else 3 * self.image.width * self.image.height
        return kept + sum(x.numel() * x.element_size() for x in self.made.values())


@dataclass(frozen=True)
class Preparing:
    """What a thread does to an image: all the looks that every image gets; what gates ask for is made when asked."""

    preprocess: Preprocess
    recipe: Recipe

    @property
    def keeps(self) -> bool:
        """Whether views are made from the image itself, and not from what is left of it."""
        return any(op.name in PLACING for s in self.recipe.stages for v in s.views for op in v.ops)

    @property
    def views(self) -> list[View]:
        if not self.keeps:
            return [PLAIN]  # the others are flipped from it at no cost
        sure: list[View] = []
        for stage in self.recipe.stages:
            if stage.gate is not None:
                break
            sure += stage.views
        return list(dict.fromkeys(sure))

    def __call__(self, part: int, index: int, name: str, source: Path | bytes) -> Ready:
        content = file_digest(source) if isinstance(source, Path) else hashlib.sha256(source).hexdigest()
        try:
            image = open_either(source)
            if isinstance(image, Volume):
                made = {PLAIN: self.preprocess(image)}
                return Ready(index, part, name, image.size, made, frame=image.frame, content=content)
            alone = PILImages([image], self.preprocess)
            made = {view: alone.render(view)[0] for view in self.views}
        except (DataError, OSError) as error:
            return Ready(index, part, name, error=str(error), content=content)
        kept = image if self.keeps else None
        return Ready(index, part, name, (image.height, image.width), made, kept, content=content)


@dataclass(eq=False)
class Reader:
    """`for ready in Reader(prepare)(wanted)`: in order; `waited` is how long the one who asks had to wait."""

    prepare: Callable[[int, int, str, Path | bytes], Ready]
    threads: int = min(8, 2 + (os.cpu_count() or 1))
    waited: float = 0.0

    def __call__(self, wanted: Iterator[tuple[int, int, Entry]]) -> Iterator[Ready]:
        ahead = 2 * self.threads
        with ThreadPoolExecutor(self.threads) as pool:
            waiting: deque[Future[Ready]] = deque()
            more = True
            while more or waiting:
                start = time.perf_counter()
                while more and len(waiting) < ahead:
                    more = self._submit(pool, wanted, waiting)
                ready = waiting.popleft().result() if waiting else None
                self.waited += time.perf_counter() - start
                if ready is not None:
                    ahead = max(self.threads, min(MOST, BYTES // max(1, ready.bytes)))
                    yield ready

    def _submit(
        self, pool: ThreadPoolExecutor, wanted: Iterator[tuple[int, int, Entry]], waiting: deque[Future[Ready]]
    ) -> bool:
        found = next(wanted, None)
        if found is None:
            return False
        part, index, entry = found
        try:
            waiting.append(pool.submit(self.prepare, part, index, entry.name, entry.fetch()))
        except (DataError, OSError) as error:
            broken: Future[Ready] = Future()
            broken.set_result(Ready(index, part, entry.name, error=str(error)))
            waiting.append(broken)
        return True
