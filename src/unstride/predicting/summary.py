"""The parts of a run: which of them are done, what their rows add up to, and the summary that a run ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from unstride.errors import DataError
from unstride.predicting.containers import Entry
from unstride.predicting.inputs import ImageInputs
from unstride.predicting.parts import PART, PartResult
from unstride.predicting.rows import Row
from unstride.storage.cache import Cache
from unstride.storage.distributed import World
from unstride.storage.fingerprint import text_digest


@dataclass(frozen=True)
class PredictSummary:
    """What a run did.

    Attributes:
        changed: the share of predictions (or pixels) that differ from the base model's.
        cost: mean, in forward passes of the base model, each `base_macs` multiply-accumulates.
        seconds: of this run, without those of earlier ones.
        waiting: the share of the time in which the network waited for images.
        passed: the share of the images that passed each gate.
        already: the table of an earlier run is complete, and these are its figures.
        before: images that an earlier run had done.
    """

    out: str
    images: int
    errors: int
    changed: float
    cost: float
    seconds: float = 0.0
    waiting: float = 0.0
    masks: str | None = None
    passed: tuple[float, ...] = ()
    base_macs: int = 0
    already: bool = False
    before: int = 0

    def __str__(self) -> str:
        speed = f" ({(self.images - self.before) / max(self.seconds, 1e-9):.1f} images/s)" if not self.already else ""
        plural = "" if self.images == 1 else "s"
        failed = f"; {self.errors:,} of them could not be read or run: see the column `error`" if self.errors else ""
        shares = ", ".join(f"{share:.0%}" for share in self.passed)
        gates = f"; {shares} passed the gate{'s' * (len(self.passed) > 1)}" if self.passed else ""
        lines = [
            *(["already done: nothing left to do"] if self.already else []),
            f"{self.images:,} image{plural}{speed}{failed}",
            f"{self.changed:.2%} of the predictions changed; mean cost {self.cost:.2f} forward passes{gates}",
            *([] if self.already else [f"{self.waiting:.0%} of the time was waiting for images"]),
            f"table: {self.out}",
            *([f"masks: {self.masks}"] if self.masks else []),
        ]
        return "\n".join(lines)


class PartList:
    """The parts that this process has to do, as (number, [(index, entry)]).

    Attributes, complete after an iteration:
        keys: of every part, a digest of the names, sizes and times of its images.
        count: of all images.
        reused: the parts that an earlier run had finished, with their numbers of images.
    """

    def __init__(self, inputs: ImageInputs, finished: set[str], us: World) -> None:
        self.inputs, self.finished, self.us = inputs, finished, us
        self.keys: list[str] = []
        self.count = 0
        self.reused: dict[int, int] = {}

    def __iter__(self) -> Iterator[tuple[int, list[tuple[int, Entry]]]]:
        entries, turn = iter(self.inputs), -1
        while chunk := list(islice(entries, PART)):
            part = len(self.keys)
            self.keys.append(text_digest([part, *([e.name.encode(errors="replace").hex(), e.stamp] for e in chunk)]))
            numbered = list(enumerate(chunk, self.count))
            self.count += len(chunk)
            if self.keys[part] in self.finished:
                self.reused[part] = len(chunk)
                continue
            turn += 1
            if turn % self.us.size == self.us.rank:
                yield part, numbered


@dataclass
class TableTotals:
    """Sums over the rows that pass by."""

    cache: Cache
    parts: PartList
    masks: Path | None = None
    errors: int = 0
    good: int = 0
    changed: float = 0.0
    cost: float = 0.0
    images: int = 0
    base_macs: int = 0
    passed: list[int] = field(default_factory=list)
    read: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """All rows in order; a missing part is an error."""
        for number, key in enumerate(self.parts.keys):
            values = self.cache.get(key)
            part = None if values is None else PartResult(**values)
            if part is None or len(part.rows) != min(PART, self.parts.count - number * PART):
                raise DataError(
                    f"{self.cache.folder}: part {number} is not complete; remove the folder and start again. Under "
                    "torchrun and on Ray, do all processes see the same folder?"
                )
            self._add(part)
            if self.masks is not None:
                _remove_others(self.masks / f"{number:06d}", part.rows)
            yield from part.rows

    def _add(self, part: PartResult) -> None:
        self.read.append(part.read)
        self.images += part.images
        self.base_macs = max(self.base_macs, part.base_macs)
        sums = self.passed or [0] * len(part.passed)
        self.passed = [a + b for a, b in zip(sums, part.passed, strict=True)]
        for row in part.rows:
            if row["error"] is not None:
                self.errors += 1
            else:
                self.good += 1
                self.changed += row["changed"]
                self.cost += row["cost"]


def _remove_others(folder: Path, rows: Sequence[Row]) -> None:
    """Maps of images that an earlier run had in this part, and that were changed since."""
    names = {Path(row.get("mask") or row.get("map") or "").name for row in rows}
    for path in folder.glob("*"):
        if path.name not in names:
            path.unlink()
