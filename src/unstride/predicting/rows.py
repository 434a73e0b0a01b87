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

from unstride.predicting.reading import Ready
from unstride.tasks.confidence import two_class
from unstride.tasks.tasks import TASKS, Task
from unstride.execution.prediction import Prediction, at_size
from unstride.show.answers import answer_of, changed, class_map
from unstride.show.segmentation import palette
from unstride.storage.artefacts import write_file
from unstride.views.volumes import volume_bytes, volume_stem

DIGITS = 6
Row = dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """`classes` are the `top` ones, the likeliest first; in segmentation those with the largest share of the pixels.

    Where there are none, `values` are the `top` numbers of the answer, or `map` is a file of them.
    """

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
            return {} if self.meaning.maps else {"values": float, "plain_values": float}
        return {"classes": int, "names": str, "shares" if self.value == "share" else "probabilities": float}

    @property
    def single(self) -> dict[str, type]:
        plain: dict[str, type] = {"plain_class": int, "plain_name": str, f"plain_{self.value}": float}
        if not self.meaning.classes:
            plain = dict.fromkeys(("mean", "least", "most"), float) if self.meaning.maps else {}
        used: dict[str, type] = {"looks": int, "cost": float, "agreement": float, "spread": float, "stopped": str}
        file: dict[str, type] = {self.file: str} if self.file else {}
        flips = bool if self.task == "classification" else float
        return {**plain, "changed": flips, **used, **file, "error": str}

    def row(self, name: str, p: Prediction, classes: tuple[str, ...], mask: str | None = None) -> Row:
        told = answer_of(p, classes, self.top)
        different = changed(p)
        values: Row = {
            **self._answer(told),
            "changed": different > 0 if self.task == "classification" else round(different, DIGITS),
            "looks": len(p.states),
            **{key: round(told[key], DIGITS) for key in ("cost", "agreement", "spread")},
            "stopped": p.stopped,
            self.file or "": mask,
            "error": None,
        }
        return {"image": _readable(name)} | {key: values[key] for key in (*self.many, *self.single)}

    def _answer(self, told: Mapping[str, Any]) -> Row:
        best, plain = told["enhanced"], told["plain"]
        if self.meaning.classes:
            return {
                "classes": [one["class"] for one in best],
                "names": [one["name"] for one in best],
                list(self.many)[2]: [round(one[self.value], DIGITS) for one in best],
                "plain_class": plain[0]["class"],
                "plain_name": plain[0]["name"],
                f"plain_{self.value}": round(plain[0][self.value], DIGITS),
            }
        if self.meaning.maps:
            return {one["name"]: one["value"] for one in best}
        return {"values": [one["value"] for one in best], "plain_values": [one["value"] for one in plain]}

    def error(self, name: str, why: str) -> Row:
        """An image without an answer, in the same columns."""
        nothing: Row = {"image": _readable(name), **dict.fromkeys(self.many), **dict.fromkeys(self.single)}
        return {**nothing, "error": _readable(why)}

    def flat(self, row: Mapping[str, Any]) -> list[Any]:
        """For tables that know no lists: a column for each of the classes."""
        found = [row["image"]]
        for k in range(self.top):
            found += [row[name][k] if row[name] is not None and k < len(row[name]) else None for name in self.many]
        return found + [row[name] for name in self.single]

    @property
    def flat_names(self) -> list[str]:
        of_one = ["class", "name", self.value] if self.meaning.classes else ["value", "plain_value"]
        of_one = of_one[: len(self.many)]
        return ["image", *(f"{name}_{k + 1}" for k in range(self.top) for name in of_one), *self.single]


def _readable(name: str) -> str:
    r"""Text that every table can hold: bytes of a file's name that are no UTF-8 as \xff."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def over_image(p: Prediction, size: tuple[int, ...]) -> Prediction:
    """A map's answers over the image's own pixels; features stay on their grid."""
    if p.task == "features":
        return p

    def over(logits: Tensor) -> Tensor:
        bare = logits.ndim == len(size)  # one number at each pixel
        laid = (logits[None, None] if bare else logits[None]).float()
        laid = at_size(two_class(laid) if p.task == "segmentation" else laid, size)[0]
        return laid[0] if bare else laid

    return replace(p, logits=over(p.logits), plain=over(p.plain))


def write_map(folder: Path, ready: Ready, p: Prediction) -> str:
    """Numbers, features or yes and no of each label as .npy; its path from the table's folder."""
    found = (p.logits > 0).cpu() if p.meaning.classes else p.logits.float().cpu()
    stream = io.BytesIO()
    np.save(stream, found.numpy())
    return _written(folder, ready, stream.getvalue(), "npy")


def _written(folder: Path, ready: Ready, content: bytes, suffix: str) -> str:
    stem = re.sub(r"[^\w.-]+", "-", Path(ready.name).stem)[-80:]
    name = f"{ready.part:06d}/{ready.index:09d}-{stem}.{suffix}"
    write_file(folder / name, content)
    return f"{folder.name}/{name}"


def write_mask(folder: Path, ready: Ready, p: Prediction, classes: Sequence[str]) -> str:
    """Class indices as a PNG with a palette (16 bits without one beyond 256 classes).

    Returns its path from the table's folder, in which `folder` lies.
    """
    content = _png(class_map(p.logits), max(2, p.logits.shape[0]), classes)
    return _written(folder, ready, content, "png")


def _png(seen: NDArray[np.int64], count: int, classes: Sequence[str]) -> bytes:
    if count <= 256:
        image = Image.fromarray(seen.astype(np.uint8), "L")
        image.putpalette(palette(tuple(classes), count).round().astype(np.uint8).tobytes())
    else:
        image = Image.fromarray(seen.astype(np.uint16))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
