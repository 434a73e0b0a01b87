"""Results as rows: what was measured, on what, with which configuration. One JSON object per line, only ever appended.

rows = read_rows("runs/mine/rows.jsonl")
rows[-1].metrics["top1"], rows[-1].verdict, rows[-1].macs
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from unstride.errors import ArtefactError

_PACKAGES = (
    "unstride",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "segmentation-models-pytorch",
    "transformers",
)


@dataclass(frozen=True)
class Row:
    """One setting (states per image, views per image) of one run. Shares are in 0..1.

    metrics      classification: top1, top5, nll, ece, brier; segmentation: miou, aacc, macc, and iou by class
    gain         over the plain network: gain, low, high (95 % paired bootstrap), images (pixels) corrected, corrupted
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
    created: str

    @property
    def plain(self) -> bool:
        """Whether this is the network as it came."""
        return self.budget == 1 and self.views == 1

    @property
    def quality(self) -> float:
        """The number that is compared: top-1 accuracy, or mIoU."""
        return float(self.metrics["top1" if self.task == "classification" else "miou"])

    def to_json(self) -> dict[str, Any]:
        """Plain types. `Row.from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Row:
        """Its own `to_json`, also after a trip through a file; a field that is missing or unknown is a KeyError."""
        names = {field.name for field in fields(cls)}
        if set(stored) != names:
            raise KeyError(", ".join(sorted(set(stored) ^ names)))
        return cls(**{**stored, "error_names": tuple(stored["error_names"])})


def versions() -> dict[str, str]:
    """Of Python and the libraries that numbers depend on, where they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a file, in its order; none where there is no file. A last line that was cut off does not count."""
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_bytes()
    rows = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(Row.from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ArtefactError(
                f"{path}, line {number}: not a row of this version ({type(error).__name__}: {error}); move it away"
            ) from error
    return rows


def append_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> list[Row]:
    """Append those that are not there yet (by run, budget and views); returns all of them as the file has them.

    Writing twice, or again after a crash, changes nothing.
    """
    path, rows = Path(path), list(rows)
    there = {(row.run, row.budget, row.views): row for row in read_rows(path)}
    new = [row for row in rows if (row.run, row.budget, row.views) not in there]
    if new:
        data = "".join(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in new).encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                whole = path.read_bytes().rfind(b"\n") + 1
                if whole != file.tell():  # the rest of a line whose writer was killed
                    file.truncate(whole)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ArtefactError(f"cannot write {path}: {error.strerror or error}") from error
    return [there.get((row.run, row.budget, row.views), row) for row in rows]
