"""The scores of some images, one row for each, so that numbers do not depend on batches, processes or crashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Shard:
    """Arrays with a row per image, in the order of `index`; errors by index; seconds of timed settings, plain first."""

    index: Array
    values: Mapping[str, Array]
    errors: Mapping[int, str] = field(default_factory=dict)
    seconds: Sequence[float] = ()
    timed_images: int = 0
    memory: int = 0

    @staticmethod
    def of(images: Sequence[tuple[int, Mapping[str, Array]]], **rest: Any) -> Shard:
        """From (index, values of that image), in any order."""
        images = sorted(images, key=lambda image: image[0])
        names = images[0][1] if images else {}
        values = {name: np.stack([v[name] for _, v in images]) for name in names}
        return Shard(np.array([i for i, _ in images], np.int64), values, **rest)

    @staticmethod
    def joined(shards: Sequence[Shard]) -> Shard:
        """All images in order; what was timed and the memory are summed up elsewhere."""
        full = [shard for shard in shards if len(shard.index)]
        names = full[0].values if full else {}
        return Shard(
            np.concatenate([shard.index for shard in full]) if full else np.zeros(0, np.int64),
            {name: np.concatenate([shard.values[name] for shard in full]) for name in names},
            {i: text for shard in shards for i, text in shard.errors.items()},
            memory=max((shard.memory for shard in shards), default=0),
        )
