"""What a row of the table holds: the answer, the base model's, whether they differ, what was spent."""

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

from unstride.execution.prediction import Prediction, at_size
from unstride.show.answers import changed, class_map, entries
from unstride.show.segmentation import palette
from unstride.tasks.tasks import TASKS, Task, two_class

DIGITS = 6
Row = dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """The columns of a task. `top`: how many classes, or numbers, a row has."""

    task: str
    top: int

    @property
    def meaning(self) -> Task:
        return TASKS[self.task]

    @property
    def value(self) -> str:
        return "share" if self.meaning.maps else "probability"

    @property
    def file(self) -> str | None:
        """The column that names the file of an image's map."""
        return None if not self.meaning.maps else "mask" if self.task == "segmentation" else "map"

    @property
    def many(self) -> dict[str, type]:
        """Columns with as many values as there are classes shown."""
        if not self.meaning.classes:
            return {} if self.meaning.maps else {"values": float, "base_values": float}
        return {"classes": int, "names": str, "shares" if self.value == "share" else "probabilities": float}

    @property
    def single(self) -> dict[str, type]:
        base: dict[str, type] = {"base_class": int, "base_name": str, f"base_{self.value}": float}
        if not self.meaning.classes:
            base = dict.fromkeys(("mean", "least", "most"), float) if self.meaning.maps else {}
        sure: dict[str, type] = {"confidence": float} if self.confident else {}
        spent: dict[str, type] = {"passes": int, "cost": float, "agreement": float, "spread": float, "stopped": str}
        file: dict[str, type] = {self.file: str} if self.file else {}
        changed = bool if self.task == "classification" else float
        return {**base, "changed": changed, **sure, **spent, **file, "error": str}

    @property
    def confident(self) -> bool:
        """Whether the output says how confident it is."""
        return "probability" in self.meaning.gates

    def row(self, name: str, p: Prediction, passes: int, classes: Sequence[str], file: str | None = None) -> Row:
        different = changed(p)
        values: Row = {
            **self._answer(p, classes),
            "changed": different > 0 if self.task == "classification" else round(different, DIGITS),
            "confidence": round(confidence(p), DIGITS) if self.confident else None,
            "passes": passes,
            "cost": round(p.cost, DIGITS),
            "agreement": round(p.agreement, DIGITS),
            "spread": round(float(p.spread.mean()), DIGITS),
            "stopped": p.stopped,
            self.file or "": file,
            "error": None,
        }
        return {"image": readable(name)} | {key: values[key] for key in (*self.many, *self.single)}

    def _answer(self, p: Prediction, classes: Sequence[str]) -> Row:
        names = tuple(classes)
        best, base = (entries(p.meaning, output, names, self.top) for output in (p.output, p.base))
        if self.meaning.classes:
            return {
                "classes": [entry["class"] for entry in best],
                "names": [entry["name"] for entry in best],
                list(self.many)[2]: [round(entry[self.value], DIGITS) for entry in best],
                "base_class": base[0]["class"],
                "base_name": base[0]["name"],
                f"base_{self.value}": round(base[0][self.value], DIGITS),
            }
        if self.meaning.maps:
            return {entry["name"]: entry["value"] for entry in best}
        return {"values": [entry["value"] for entry in best], "base_values": [entry["value"] for entry in base]}

    def error(self, name: str, why: str) -> Row:
        """An image without an answer, in the same columns."""
        nothing: Row = {"image": readable(name), **dict.fromkeys(self.many), **dict.fromkeys(self.single)}
        return {**nothing, "error": readable(why)}

    def flat(self, row: Mapping[str, Any]) -> list[Any]:
        """For tables without lists: a column for each of the classes."""
        cells = [row["image"]]
        for k in range(self.top):
            cells += [row[name][k] if row[name] is not None and k < len(row[name]) else None for name in self.many]
        return cells + [row[name] for name in self.single]

    @property
    def flat_names(self) -> list[str]:
        each = ["class", "name", self.value] if self.meaning.classes else ["value", "base_value"]
        each = each[: len(self.many)]
        return ["image", *(f"{name}_{k + 1}" for k in range(self.top) for name in each), *self.single]


def confidence(p: Prediction) -> float:
    """The probability of the predicted class; of several labels the least certain one, of a map the mean."""
    return float(p.meaning.confidence(p.output[None], "probability").double().mean())


def readable(name: str) -> str:
    r"""Text that every table can hold: bytes of a file's name that are no UTF-8 as \xff."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


# --------------------------------------------------------------------------------------------------- maps in files


def over_image(p: Prediction, size: tuple[int, int]) -> Prediction:
    """A map's answers over the image's own pixels; features stay on their grid."""
    if p.task == "features":
        return p

    def over(output: Tensor) -> Tensor:
        bare = output.ndim == len(size)  # one number at each pixel
        maps = (output[None, None] if bare else output[None]).float()
        maps = at_size(two_class(maps) if p.task == "segmentation" else maps, size)[0]
        return maps[0] if bare else maps

    return replace(p, output=over(p.output), base=over(p.base))


def map_file(part: int, index: int, name: str, p: Prediction, classes: Sequence[str]) -> tuple[str, bytes]:
    """The name and content of an image's map: a mask as PNG, anything else as .npy."""
    stem = re.sub(r"[^\w.-]+", "-", Path(name).stem)[-80:]
    if p.task == "segmentation":
        content, suffix = _png(class_map(p.output), max(2, p.output.shape[0]), classes), "png"
    else:
        stream = io.BytesIO()
        values = (p.output > 0) if p.meaning.classes else p.output.float()
        np.save(stream, values.cpu().numpy())
        content, suffix = stream.getvalue(), "npy"
    return f"{part:06d}/{index:09d}-{stem}.{suffix}", content


def _png(labels: NDArray[np.int64], count: int, classes: Sequence[str]) -> bytes:
    """Class indices as a PNG with a palette, of 16 bits without one beyond 256 classes."""
    if count <= 256:
        image = Image.fromarray(labels.astype(np.uint8), "L")
        image.putpalette(palette(tuple(classes), count).round().astype(np.uint8).tobytes())
    else:
        image = Image.fromarray(labels.astype(np.uint16))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
