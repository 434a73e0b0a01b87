"""Maps: of each image a sample of labelled pixels is kept, and how confident each network is in each tile.

Neighbouring pixels say much the same, and whole maps of every pass would fill a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unstride.evaluation.metrics import IGNORE
from unstride.execution.calibrate import threshold
from unstride.execution.padding import MULTIPLE
from unstride.execution.prediction import at_size
from unstride.execution.tiles import Tiling, tile_means, tile_of
from unstride.recipe.stage import Gate, tile_gate
from unstride.recipe.view import View
from unstride.tasks.tasks import TASKS

MOST, FEWEST = 4096, 256  # pixels of an image
NUMBERS = 49152  # of an image in one pass: pixels times classes


def pixel_count(classes: int) -> int:
    """How many pixels of each image are kept."""
    return min(MOST, max(FEWEST, NUMBERS // max(1, classes)))


def sampled(target: Tensor, key: str, count: int, task: str) -> Tensor:
    """Places (P,) of labelled pixels of a mask or map: all of them, or `count`, the same every time."""
    flat = target.flatten(-2)
    labelled = flat.isfinite() if task == "dense" else flat != IGNORE
    places = (labelled if labelled.ndim == 1 else labelled.any(0)).nonzero()[:, 0]
    if len(places) <= count:
        return places
    generator = torch.Generator().manual_seed(int(key[:12], 16))
    return places[torch.randperm(len(places), generator=generator)[:count]].sort().values


def at_places(output: Tensor, shape: Sequence[int], places: Tensor, count: int) -> Tensor:
    """Of a map (K, h, w) or (h, w) over an image of `shape`, the values (K, count) there; zeros fill up."""
    maps = output if output.ndim == 3 else output[None]
    values = at_size(maps[None].float(), tuple(shape))[0].flatten(1)[:, places.to(output.device)]
    return torch.nn.functional.pad(values, (0, count - values.shape[1])).half().cpu()


def labels_at(target: Tensor, places: Tensor, count: int, task: str) -> Tensor:
    """The labels there (P,) or (K, P); "no label" fills up."""
    fill = torch.nan if task == "dense" else IGNORE
    values = target.flatten(-2)[..., places]
    values = values.float() if task == "dense" else values.long()
    return torch.nn.functional.pad(values, (0, count - values.shape[-1]), value=fill)


def tile_confidence(output: Tensor, size: Sequence[int], task: str) -> Tensor:
    """How confident a map (1, K, h, w) is in each tile (rows, columns), by margin."""
    tile = tile_gate(tuple(size)).tile
    assert tile is not None
    return tile_means(TASKS[task].confidence(output, "margin"), size, tile)[0].float().cpu()


def tile_places(size: Sequence[int], shape: Sequence[int], places: Tensor, count: int) -> Tensor:
    """In which tile each pixel lies (count,), row by row."""
    tile = tile_gate(tuple(size)).tile
    assert tile is not None
    y, x = (tile_of(int(size[a]), int(shape[a]), tile) for a in (0, 1))
    columns = -(-int(size[1]) // tile)
    found = y[places // shape[1]] * columns + x[places % shape[1]]
    return torch.nn.functional.pad(found, (0, count - len(found)))


@dataclass(frozen=True, eq=False)
class MapPixels:
    """What is known of the images of a pool of maps, beside the outputs.

    Args:
        at: (N, P), the tile of each pixel.
        valid: (N, P), False where there are fewer labelled pixels.
        tiles: of each network, the confidence in each tile (rows, columns) of each image.
        sizes: of each image as the first network takes it, and whether it is padded.
    """

    at: Tensor
    valid: Tensor
    tiles: dict[str, list[Tensor]]
    sizes: list[tuple[int, int]]
    padded: list[bool]
    _known: dict[Any, Any] = field(default_factory=dict)  # thresholds and areas that were asked for

    def rows(self, chosen: Sequence[int]) -> MapPixels:
        at = list(chosen)
        areas = {key: value[at] for key, value in self._known.items() if isinstance(value, Tensor)}
        return replace(
            self,
            at=self.at[at],
            valid=self.valid[at],
            tiles={name: [own[i] for i in at] for name, own in self.tiles.items()},
            sizes=[self.sizes[i] for i in at],
            padded=[self.padded[i] for i in at],
            _known=areas,
        )

    @cached_property
    def gate(self) -> Gate:
        return tile_gate(self.sizes[0])

    def confidence(self, network: str) -> Tensor:
        """Of the tile of each pixel (N, P)."""
        return torch.stack([c.flatten()[at] for c, at in zip(self.tiles[network], self.at, strict=True)])

    def threshold(self, network: str, share: float) -> float:
        """Below which this share of the tiles lies."""
        if (network, share) not in self._known:
            every = torch.cat([c.flatten() for c in self.tiles[network]])
            self._known[network, share] = threshold(every, share)
        return float(self._known[network, share])

    def open_pixels(self, network: str, below: float) -> Tensor:
        """Which pixels (N, P) lie in a tile that passes."""
        return ~(self.confidence(network) >= below)

    def areas(self, network: str, view: View, below: float) -> Tensor:
        """Of each image (N,) the share of the view's area that is computed for the tiles that pass."""
        key = (network, view, below)
        if key not in self._known:
            every = range(len(self.sizes))
            self._known[key] = torch.tensor([self._area(i, *key) for i in every], dtype=torch.float64)
        found: Tensor = self._known[key]
        return found

    def _area(self, image: int, network: str, view: View, below: float) -> float:
        fill = MULTIPLE if self.padded[image] else 1
        tiling = Tiling.of(view, self.gate, self.sizes[image], (MULTIPLE, MULTIPLE), fill)
        return tiling.share(~(self.tiles[network][image] >= below))
