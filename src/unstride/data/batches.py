"""(images, labels) of a data set, batch after batch, as often as somebody asks: what a fit reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unstride.data import Dataset
from unstride.errors import DataError
from unstride.views.images import Preprocess


@dataclass(frozen=True, eq=False)
class Batches:
    """`Batches(data, 32)`: always in the same order. Images that cannot be read are left out, and named in `errors`.

    chosen      which of the data set's images; all by default
    preprocess  another than the data set's own
    """

    data: Dataset
    size: int
    chosen: Sequence[int] | None = None
    preprocess: Preprocess | None = None
    errors: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return -(-len(self._indices()) // self.size)

    def _indices(self) -> Sequence[int]:
        return range(len(self.data)) if self.chosen is None else self.chosen

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        prepare = self.preprocess or self.data.preprocess
        images: list[Tensor] = []
        labels: list[int] = []
        found = False
        for index in self._indices():
            item = self.data[index]
            try:
                picture, target = item.read()
                image = prepare(picture)
            except (DataError, OSError) as error:
                self.errors[item.id] = str(error)
                continue
            most = self.size if isinstance(target, int) else 1  # images with masks are large
            if images and (len(images) >= most or image.shape != images[0].shape):
                yield torch.stack(images), torch.tensor(labels)
                images, labels = [], []
            found = True
            images.append(image)
            labels.append(target if isinstance(target, int) else 0)  # of a mask nobody asks
        if images:
            yield torch.stack(images), torch.tensor(labels)
        if not found:
            first = next(iter(self.errors.values()), "it is empty")
            raise DataError(f"{self.data.name}: none of {len(self._indices())} images can be read; the first: {first}")
