"""What a frozen network says about many states of an image, computed once: aligned maps, criteria, the label."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from unstride.data.batches import unpacked
from unstride.engine.engine import Request
from unstride.errors import DataError, InputError
from unstride.geometry.states import State
from unstride.graph.capture import check_images
from unstride.procedure.aggregate import entropy, two_class
from unstride.procedure.align import Offset, align, align_covered
from unstride.procedure.options import Options
from unstride.procedure.search import Search
from unstride.procedure.tasks import Plan
from unstride.storage.cache import Cache, Values

COARSE = 4  # cells a side: light and colour, not shape
SHARP = 0.05  # a state of criterion c is expanded with probability ~ 1 / (c + SHARP)
Draw = Callable[[str], "Search | Sequence[State]"]  # image key -> how its states are found


@dataclass(eq=False)
class SampledSearch(Search):
    """The search of training: the state to expand is drawn, the more often the lower its criterion."""

    seed: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.random = random.Random(self.seed)

    def _pop(self, scores: Sequence[float]) -> tuple[int, int]:
        waiting = sorted(self._open)
        if not all(math.isfinite(scores[i]) for i in waiting):
            raise InputError(
                "the model's answer for some image is not finite, so nothing can be learned from it; half precision "
                "may have overflowed: use float32, or leave such images out"
            )
        i = self.random.choices(waiting, [1.0 / (max(scores[i], 0.0) + SHARP) for i in waiting])[0]
        return i, self._open[i][0]


@dataclass(frozen=True, eq=False)
class Pool:
    """One image: aligned maps (S, C, H, W) of its states in visited order, their criteria (S,), and its class."""

    maps: Tensor
    criteria: Tensor
    label: int

    @property
    def bytes(self) -> int:
        return self.maps.nbytes + self.criteria.nbytes

    def values(self) -> Values:
        """What a cache keeps of it."""
        return {"maps": self.maps, "criteria": self.criteria, "label": self.label}

    @staticmethod
    def cached(cache: Cache, key: str) -> Pool:
        """The pool that was kept."""
        values = cache.get(key)
        if values is None:
            raise DataError(f"{cache.folder}: the maps of an image cannot be read back; start again")
        return Pool(**values)


def image_key(image: Tensor, label: int) -> str:
    sha = hashlib.sha256(f"{label} {tuple(image.shape)} {image.dtype}".encode())
    sha.update(image.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


def unfamiliar(images: Tensor, seeds: Sequence[str]) -> Tensor:
    """Images (B, C, H, W) that the network does not know by heart: fine detail kept, the coarse light of 4 x 4 cells
    redrawn with the image's own mean and spread, the same for a seed whatever the batch.
    """
    coarse = adaptive_avg_pool2d(images.float(), COARSE)
    drawn = torch.stack(
        [torch.randn(coarse.shape[1:], generator=torch.Generator().manual_seed(_number(seed))) for seed in seeds]
    ).to(coarse)
    new = coarse.mean((2, 3), keepdim=True) + coarse.flatten(2).std(2)[..., None, None] * drawn
    light = interpolate(new - coarse, size=images.shape[2:], mode="bilinear", align_corners=False)
    return (images.float() + light).to(images.dtype)


def _number(seed: str) -> int:
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big")


def draw_pools(plan: Plan, images: Tensor, labels: Sequence[int], draw: Draw, options: Options) -> list[Pool]:
    """Run the states that `draw` asks for. The criterion is the entropy of a state's own prediction."""
    target = plan.targets[0]
    run = plan.engine.start(images)
    asked = [draw(image_key(x, y)) for x, y in zip(images, labels, strict=True)]
    maps: list[list[Tensor]] = [[] for _ in labels]
    scores: list[list[float]] = [[] for _ in labels]

    def take(requests: list[Request], values: Tensor) -> None:
        own = entropy(target.finish(values)).tolist()
        for (i, _), m, h in zip(requests, aligned(plan, requests, values, options), own, strict=True):
            maps[i].append(m)
            scores[i].append(h)

    take([(i, plan.found.space.zero) for i in range(len(labels))], run.plain[target.tap])
    searched = any(isinstance(a, Search) for a in asked)
    levels = [layer - 1 for layer in options.layers] if searched else range(plan.engine.depth)
    given = [[] if isinstance(a, Search) else [s for s in a if s != plan.found.space.zero] for a in asked]
    while True:
        requests = []
        for i, a in enumerate(asked):
            new = a.next(scores[i]) if isinstance(a, Search) else given[i]
            requests += [(i, s) for s in new]
            given[i] = []
        if not requests:
            break
        take(requests, run.add(requests, keep=levels if searched else ())[0])
    return [
        Pool(compact(torch.stack(m)), torch.tensor(h), int(y)) for m, h, y in zip(maps, scores, labels, strict=True)
    ]


def aligned(plan: Plan, requests: Sequence[Request], values: Tensor, options: Options) -> list[Tensor]:
    """Rows of the tap -> maps on the plain network's grid, as the attention sees them; equal offsets move together."""
    target = plan.targets[0]
    maps = plan.maps(values, target).float()
    if target.grid is None or not options.align:
        return list(maps)
    move = align_covered if options.border == "renormalise" else align
    rows: dict[Offset, list[int]] = {}
    for row, (_, state) in enumerate(requests):
        rows.setdefault(plan.offset(state, target), []).append(row)  # type: ignore[arg-type]
    out: list[Tensor] = [maps[0]] * len(requests)
    for offset, where in rows.items():
        for row, m in zip(where, move(maps[where], offset), strict=True):
            out[row] = m
    return out


def finish(plan: Plan, maps: Tensor) -> Tensor:
    """Aggregated maps -> logits (N, K) through the network's own head, with gradients."""
    target = plan.targets[0]
    like = torch.empty((len(maps), *plan.found.trace.shapes[target.tap][1:]), dtype=plan.graph.dtype, device="meta")
    values = plan.unmap(maps, like, target)
    logits = values if target.head is None else target.head(len(maps), (), [values])[0]
    return two_class(logits.float())


def compact(maps: Tensor) -> Tensor:
    """Half precision where the values fit: half the memory, and a thousand times finer than what training changes."""
    half = maps.half()
    return half if bool(torch.isfinite(half).all()) else maps


def batches(loader: Iterable[Any], what: str) -> Iterator[tuple[Tensor, list[int]]]:
    """(images, labels) of a loader, checked."""
    some = False
    for batch in loader:
        images, labels = unpacked(batch, what)
        check_images(images, f"{what} images")
        if labels.ndim != 1:
            raise InputError(f"{what}: labels {tuple(labels.shape)}, wanted an integer for each image")
        some = True
        yield images, [int(y) for y in labels]
    if not some:
        raise DataError(f"{what}: the loader gave no batch")
