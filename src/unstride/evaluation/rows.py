"""Results as rows: what was measured, on what, with which configuration. One JSON object per line, only ever appended.

rows = read_rows("runs/mine/rows.jsonl")
rows[-1].metrics["top1"], rows[-1].verdict, rows[-1].macs
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from unstride.errors import ArtefactError
from unstride.evaluation.measures import Measure, measure_of
from unstride.storage import locks, strict_json

# What a field may be in a file, by how it is declared.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "Mapping[str, Any]": (dict,),
    "Mapping[str, float]": (dict,),
    "Mapping[str, str]": (dict,),
    "tuple[str, ...]": (list, tuple),
}


@dataclass(frozen=True)
class Row:
    """One setting (states per image, views per image) of one run. Shares are in 0..1.

    metrics      classification: top1, top5, nll, ece, brier; segmentation: miou, dice, aacc, macc, iou by class; both:
                 chance, what guessing one of the model's classes reaches; others: `unstride.evaluation.measures`
    gain         over the plain network, positive where it is better: gain, low, high (95 % paired bootstrap), images
                 (pixels, labels, queries) corrected, corrupted
    macs         MACs of an image as a multiple of `plain_macs`, a plain forward's
    latency      seconds as a multiple of a plain forward's, timed in turn on batches of the same run; None: not timed
    peak_memory  bytes, of the largest process (of its device on CUDA) over the whole run; 0: not known here
    errors       images that could not be read or run; the first of them are in `error_names`
    recommended  the cheapest setting that is not measurably below the best one; the plain row means "leave it off"
    """

    run: str
    spec: str
    weights: str
    model: str
    data: str
    data_fingerprint: str
    images: int
    task: str
    budget: int
    views: int
    options: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    seed: int
    metrics: Mapping[str, Any]
    gain: Mapping[str, float]
    verdict: str
    recommended: bool
    macs: float
    plain_macs: float
    latency: float | None
    plain_ms: float | None
    peak_memory: int
    errors: int
    error_names: tuple[str, ...]
    batch_size: int
    device: str
    versions: Mapping[str, str]
    command: str
    threads: int
    cpu: str
    created: str

    @property
    def plain(self) -> bool:
        """Whether this is the network as it came."""
        return self.budget == 1 and self.views == 1

    @property
    def recipe(self) -> str | None:
        """The recipe whose stages of looks this is; None for budgets of the search."""
        return (self.options.get("recipe") or "of yours") if "stage" in self.options else None

    @property
    def quality(self) -> float:
        """The number that is compared: top-1 accuracy, mIoU, mAP, RMSE, ...; see `measure`."""
        return float(self.metrics[self.measure.key])

    @property
    def measure(self) -> Measure:
        """Which number that is, what it is called, and whether lower is better."""
        return measure_of(self.task, self.metrics)

    def to_json(self) -> dict[str, Any]:
        """Plain types. `Row.from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Row:
        """Its own `to_json`, also after a trip through a file; a KeyError or TypeError says which field is wrong."""
        types = {field.name: _TYPES[str(field.type)] for field in fields(cls)}
        if set(stored) != set(types):
            raise KeyError(", ".join(sorted(set(stored) ^ set(types))))
        for name, wanted in types.items():
            if not isinstance(stored[name], wanted) or (isinstance(stored[name], bool) and bool not in wanted):
                raise TypeError(f"{name} is {type(stored[name]).__name__}")
        return cls(**{**stored, "error_names": tuple(stored["error_names"])})


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a file, in its order; none where there is no file. A last line that was cut off does not count."""
    path = Path(path)
    try:
        if not path.exists():
            return []
        if not path.is_file():
            raise ArtefactError(f"{path} is not a file, so it cannot hold rows; move it away, or choose another folder")
        return _parsed(path.read_bytes(), path)
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from error


def _parsed(text: bytes, path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(Row.from_json(strict_json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ArtefactError(
                f"{path}, line {number}: not a row of this version ({type(error).__name__}: {error}); move it away"
            ) from error
    return rows


def append_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> list[Row]:
    """Append those that are not there yet (by run, budget and views); returns all of them as the file has them.

    Writing twice, again after a crash, or from several processes at once changes nothing.
    """
    path, rows = Path(path), list(rows)
    try:
        lines = {_key(row): json.dumps(row.to_json(), allow_nan=False).encode() + b"\n" for row in rows}
    except ValueError as error:
        raise ArtefactError(f"{path}: a row holds a number that is not finite; it is not written") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file, locks.locked(file):  # read and written under one lock, or two would see no row
            file.seek(0)
            text = file.read()
            there = {_key(row): row for row in _parsed(text, path)}
            new = b"".join(line for key, line in lines.items() if key not in there)
            if new:
                file.truncate(text.rfind(b"\n") + 1)  # without the rest of a line whose writer was killed
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise ArtefactError(f"cannot write {path}: {error.strerror or error}") from error
    return [there.get(_key(row), row) for row in rows]


def _key(row: Row) -> tuple[str, int, int]:
    return row.run, row.budget, row.views
