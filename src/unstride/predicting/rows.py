"""What a row of the table holds: the answer, the plain network's, whether they differ, what it took."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unstride.jobs.outputs import write_whole
from unstride.predicting.reading import Ready
from unstride.procedure.aggregate import two_class
from unstride.procedure.prediction import Prediction, at_size
from unstride.show.answers import answer_of, class_map
from unstride.show.segmentation import palette
from unstride.views.volumes import volume_bytes, volume_stem

DIGITS = 6
Row = dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """`classes` are the `top` ones, the likeliest first; in segmentation those with the largest share of the pixels."""

    task: str
    top: int

    @property
    def value(self) -> str:
        return "share" if self.task == "segmentation" else "probability"

    @property
    def many(self) -> dict[str, type]:
        """Columns with as many values as there are classes shown."""
        return {"classes": int, "names": str, "shares" if self.value == "share" else "probabilities": float}

    @property
    def single(self) -> dict[str, type]:
        segments = self.task == "segmentation"
        plain: dict[str, type] = {"plain_class": int, "plain_name": str, f"plain_{self.value}": float}
        used: dict[str, type] = {"looks": int, "cost": float, "agreement": float, "spread": float, "stopped": str}
        mask: dict[str, type] = {"mask": str} if segments else {}
        return {**plain, "changed": float if segments else bool, **used, **mask, "error": str}

    def row(self, name: str, p: Prediction, classes: tuple[str, ...], mask: str | None = None) -> Row:
        told = answer_of(p, classes, self.top)
        best, plain = told["enhanced"], told["plain"][0]
        values: Row = {
            "classes": [one["class"] for one in best],
            "names": [one["name"] for one in best],
            list(self.many)[2]: [round(one[self.value], DIGITS) for one in best],
            "plain_class": plain["class"],
            "plain_name": plain["name"],
            f"plain_{self.value}": round(plain[self.value], DIGITS),
            "changed": round(told["changed"], DIGITS) if mask else plain["class"] != best[0]["class"],
            "looks": len(p.states),
            **{key: round(told[key], DIGITS) for key in ("cost", "agreement", "spread")},
            "stopped": p.stopped,
            "mask": mask,
            "error": None,
        }
        return {"picture": name} | {key: values[key] for key in (*self.many, *self.single)}

    def error(self, name: str, why: str) -> Row:
        """A picture without an answer, in the same columns."""
        nothing: Row = {"picture": name, **dict.fromkeys(self.many), **dict.fromkeys(self.single)}
        return {**nothing, "error": why}

    def flat(self, row: Mapping[str, Any]) -> list[Any]:
        """For tables that know no lists: a column for each of the classes."""
        found = [row["picture"]]
        for k in range(self.top):
            found += [row[name][k] if row[name] is not None and k < len(row[name]) else None for name in self.many]
        return found + [row[name] for name in self.single]

    @property
    def flat_names(self) -> list[str]:
        of_one = ["class", "name", self.value]
        return ["picture", *(f"{name}_{k + 1}" for k in range(self.top) for name in of_one), *self.single]


def over_picture(p: Prediction, size: tuple[int, ...]) -> Prediction:
    """A segmentation's answers over the picture's own pixels."""

    def over(logits: Tensor) -> Tensor:
        return at_size(two_class(logits[None]).float(), size)[0]

    return replace(p, logits=over(p.logits), plain=over(p.plain))


def write_mask(folder: Path, ready: Ready, p: Prediction, classes: Sequence[str]) -> str:
    """Class indices as a PNG with a palette (16 bits without one beyond 256 classes), or as a .nii.gz that lies where
    the volume does; its name below `folder`.
    """
    seen, count = class_map(p.logits), max(2, p.logits.shape[0])
    stem = Path(ready.name).stem if ready.frame is None else volume_stem(Path(ready.name))
    stem = re.sub(r"[^\w.-]+", "-", stem)[-80:]
    name = f"{ready.part:06d}/{ready.index:09d}-{stem}{'.png' if ready.frame is None else '.nii.gz'}"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    write_whole(folder / name, _png(seen, count, classes) if ready.frame is None else volume_bytes(seen, ready.frame))
    return name


def _png(seen: NDArray[np.int64], count: int, classes: Sequence[str]) -> bytes:
    if count <= 256:
        image = Image.fromarray(seen.astype(np.uint8), "L")
        image.putpalette(palette(tuple(classes), count).round().astype(np.uint8).tobytes())
    else:
        image = Image.fromarray(seen.astype(np.uint16))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
