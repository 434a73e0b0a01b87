"""Labelled images in parts: what is looked at together, stored in one file, and how its answers are kept.

for part in parts(loader, like, "regression"): part.kept(model(part.source.render(PLAIN)))    # (n, K)
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstride.data import Dataset
from unstride.data.batches import NUMBERS, unpacked
from unstride.data.items import check_labels
from unstride.enhanced import Enhanced
from unstride.errors import DataError, InputError, LeftOut
from unstride.evaluation.measures import check_shape
from unstride.execution.prediction import at_size
from unstride.storage.fingerprint import digest
from unstride.views.source import Canvas, PILImages, Source, as_source

SHARD = 64  # images
PIXELS = 300_000  # of all maps together, about


@dataclass(frozen=True, eq=False)
class Part:
    """Some labelled images, and what identifies them.

    `labels`: classes (n,), or labels, numbers or matches (n, K). Of maps a part is one image: `labels` (1, P) are the
    values at `at`, places of some of the known pixels of a map of `size`, and `stands` is how many are known.
    """

    key: str
    source: Source
    labels: Tensor
    at: Tensor | None = None
    size: tuple[int, ...] = ()
    stands: int = 1
    names: tuple[str, ...] = ()

    def check(self, better: Enhanced) -> None:
        """Its labels against what the model gives: classes, or as many labels or numbers."""
        if better.task == "classification":
            check_labels(self.names, self.labels.tolist(), better.plan.classes)
        elif better.task in ("multilabel", "regression"):
            plan = better.plan
            gives = plan.found.trace.shapes[plan.targets[0].leaf][1:]
            check_shape(self.labels[0], (math.prod(gives),), "labels" if better.task == "multilabel" else "numbers")

    def kept(self, outputs: Tensor) -> Tensor:
        """(n, E) of the network's outputs (n, ...): all of a vector, of a map the values at these places."""
        found = outputs.detach().float().cpu()
        if self.at is None:
            return found.reshape(len(found), -1)
        maps = found[:, None] if found.ndim == 1 + len(self.size) else found
        if maps.shape[1] != 1:
            raise InputError(f"maps of {maps.shape[1]} numbers at each pixel have no one depth to be compared with")
        return at_size(maps, self.size)[:, 0].flatten(1)[:, self.at]


def parts(data: Dataset | Iterable[Any], like: Tensor, task: str = "classification") -> Iterator[Part]:
    """A data set, or batches of (images, labels) -> parts of at most 64 images, of maps one image each.

    Images that cannot be read are left out, with a warning that names them.
    """
    if task == "dense":
        yield from _maps(data, like)
        return
    if isinstance(data, Dataset):
        whole = prepared(data)
        for start in range(0, len(data), SHARD):
            found = list(read(data, range(start, min(start + SHARD, len(data)))))
            if found:
                names, opened, targets = zip(*found, strict=True)
                source = PILImages(list(opened), data.preprocess, like)
                yield Part(_key(whole, list(names)), source, _stacked(list(targets)), names=names)
        return
    seen = 0
    for batch in data:
        images, known = unpacked(batch, "data", task)
        canvas = as_source(images)
        if not isinstance(canvas, Canvas) or known.ndim != (2 if task in NUMBERS else 1):
            raise InputError(
                f"data: got images {tuple(getattr(canvas, 'pixels', torch.empty(0)).shape)} with labels "
                f"{tuple(known.shape)}, wanted tensors (B, C, H, W) or Canvas batches, with "
                + (NUMBERS[task][1] if task in NUMBERS else "the number of its class for each image, (B,)")
            )
        known = known.long() if task not in NUMBERS and not known.is_floating_point() else known
        pixels = canvas.pixels.to(like)
        for start in range(0, len(pixels), SHARD):
            own = pixels[start : start + SHARD]
            part = Canvas(own, canvas.box, preprocess=canvas.preprocess)
            names = tuple(f"image {seen + k}" for k in range(len(own)))
            key = _key(digest({"x": own}), [repr(part.box), repr(part.preprocess)])
            yield Part(key, part, known[start : start + SHARD], names=names)
            seen += len(own)


def check_finite(answers: Tensor, names: Sequence[str]) -> None:
    """Refuse images whose answers (n, ...) are no numbers: one would spoil every figure of the others."""
    bad = (~answers.isfinite().flatten(1).all(1)).nonzero()[:, 0].tolist()
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DataError(
            f"{', '.join(names[i] for i in bad[:3])}{more}: the network's answer is not finite, to the image or to a "
            "view of it, so nothing can be chosen by it. Look for NaN or infinite values in the image, and repair it "
            "or leave it out"
        )


def read(data: Dataset, chosen: Iterable[int]) -> Iterator[tuple[str, Any, Any]]:
    """(id, image, target) of those that can be read; the others are named in a warning."""
    for item in (data[i] for i in chosen):
        try:
            image, target = item.read()
        except (DataError, OSError) as error:
            warnings.warn(f"left out: {item.id}: {error}", LeftOut, stacklevel=2)
            continue
        yield item.id, image, target


def prepared(data: Dataset) -> str:
    """What identifies images together with how they are prepared."""
    return f"{data.fingerprint()} {data.preprocess!r}"


def _key(fingerprint: str, names: list[str]) -> str:
    return hashlib.sha256(repr((fingerprint, names)).encode()).hexdigest()[:24]


def _stacked(targets: list[Any]) -> Tensor:
    return torch.stack(targets) if isinstance(targets[0], Tensor) else torch.tensor(targets)


def _maps(data: Dataset | Iterable[Any], like: Tensor) -> Iterator[Part]:
    given: list[tuple[str, str, Source, Tensor]] = []
    if isinstance(data, Dataset):
        whole = prepared(data)
        for name, image, known in read(data, range(len(data))):
            given.append((_key(whole, [name]), name, PILImages([image], data.preprocess, like), known))
    else:
        for batch in data:
            images, values = unpacked(batch, "data", "dense")
            for x, known in zip(images.to(like), values, strict=True):
                key = digest({"x": x[None], "y": known})[:24]
                given.append((key, f"image {len(given)}", Canvas(x[None]), known))
    for key, name, source, known in given:
        there = known.isfinite().flatten()
        if not bool(there.any()):
            raise DataError("nothing is measured in one of the maps; leave that image out")
        at = drawn(there, key, each(len(given)))
        labels, size = known.flatten()[at][None], tuple(known.shape)
        yield Part(f"{key}-{len(at)}", source, labels, at, size, int(there.sum()), (name,))


def each(images: int) -> int:
    """How many pixels of each map are kept: neighbouring ones say much the same."""
    return min(4096, max(256, PIXELS // max(1, images)))


def drawn(there: Tensor, key: str, count: int | None) -> Tensor:
    """Places where `there` (M,) holds: all of them, or so many, the same every time."""
    known = there.nonzero()[:, 0]
    if count is None or len(known) <= count:
        return known
    seed = int(key[:8], 16)
    return known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))[:count]].sort().values
