"""A shard is a run of images and all that was measured on them, in one file that is there whole or not at all.

Scores are kept per image, so that what is computed from the shards of a killed, resumed or distributed run is exactly
what one process would have computed in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unstride.errors import ArtefactError
from unstride.storage.artefacts import read_artefact, write_artefact

KIND = "evaluation-shard"
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

    def save(self, path: Path, run: str) -> None:
        """All or nothing; `run` says which evaluation it belongs to."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in self.values.items()}
        tensors["index"] = torch.from_numpy(self.index)
        meta = {
            "kind": KIND,
            "run": run,
            "errors": {str(i): text for i, text in self.errors.items()},
            "seconds": list(self.seconds),
            "timed_images": self.timed_images,
            "memory": self.memory,
        }
        write_artefact(path, tensors, meta)

    @staticmethod
    def load(path: Path, run: str, expected: range) -> Shard | None:
        """What was saved, or None: there is no such file, it is damaged, or it is not these images of this run."""
        try:
            tensors, meta = read_artefact(path, KIND)
            values = {name: tensor.numpy() for name, tensor in tensors.items()}
            index = values.pop("index")
            errors = {int(i): str(text) for i, text in meta["errors"].items()}
            seconds, timed, memory = list(map(float, meta["seconds"])), int(meta["timed_images"]), int(meta["memory"])
            if meta["run"] != run or sorted([*index.tolist(), *errors]) != list(expected):
                return None
        except (ArtefactError, KeyError, TypeError, ValueError, AttributeError):
            return None
        return Shard(index, values, errors, seconds, timed, memory)

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
