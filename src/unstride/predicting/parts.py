"""Finished runs of rows, each a file that is there whole or not at all, and how they become one table."""

from __future__ import annotations

import csv
import importlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from unstride.errors import DataError, OptionError
from unstride.predicting.rows import Columns, Row
from unstride.storage import outputs, strict

FORMATS = (".jsonl", ".csv", ".parquet")
PART = 256  # images; batches do not reach across, so that rows do not depend on who made the part, or when
_GROUP = 1 << 14  # rows of a parquet row group


@dataclass(frozen=True)
class Parts:
    """`OUT.parts/`: what a killed run goes on from."""

    folder: Path

    @staticmethod
    def beside(out: Path) -> Parts:
        return Parts(out.with_name(out.name + ".parts"))

    def file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.jsonl"

    def done(self) -> set[int]:
        return {int(path.stem) for path in self.folder.glob("*.jsonl") if path.stem.isdecimal()}

    def save(self, number: int, rows: Sequence[Row]) -> None:
        outputs.write_whole(self.file(number), "".join(strict.dumps(row) + "\n" for row in rows).encode())

    def claim(self, run: str) -> None:
        """These are the parts of `run`; those of another are not touched."""
        mark = self.folder / "run"
        if not mark.exists():
            outputs.write_whole(mark, run.encode())
        elif mark.read_text() != run:
            raise OptionError(
                f"{self.folder}: holds finished parts of another run (other images, model, recipe or version). Start "
                "that one again, give another --out, or remove the folder"
            )

    def rows(self, count: int) -> Iterator[Row]:
        """All rows in order; a part that was lost is said."""
        for number in range(-(-count // PART)):
            lines = self.file(number).read_bytes().splitlines() if self.file(number).is_file() else []
            if len(lines) != min(PART, count - number * PART):
                raise DataError(
                    f"{self.file(number)}: it holds {len(lines)} rows; remove it and start again. Under torchrun, do "
                    "all processes see the same folder?"
                )
            for line in lines:
                yield json.loads(line)

    def remove(self) -> None:
        """All at once, so that a crash here leaves nothing that looks like a run."""
        gone = self.folder.with_name(f".{self.folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def check_out(out: Path) -> None:
    """Whether the table can be written, before the work."""
    if out.suffix.lower() not in FORMATS:
        raise OptionError(
            f"--out {out}: wanted the name of a table that ends in {' '.join(FORMATS)}; masks and other maps go to a "
            f"folder beside it, as {out.stem}.masks/ of {out.stem}.csv"
        )
    outputs.check_file(out, "--out")
    if out.suffix.lower() == ".parquet":
        _pyarrow()


def write_table(out: Path, columns: Columns, rows: Iterator[Row]) -> None:
    """Rows as they come -> OUT, whole or not at all."""
    with outputs.whole_file(out) as file:
        if out.suffix.lower() == ".jsonl":
            for row in rows:
                file.write((strict.dumps(row) + "\n").encode())
        elif out.suffix.lower() == ".csv":
            _write_csv(file, columns, rows)
        else:
            _write_parquet(file, columns, rows)


def _write_csv(file: IO[bytes], columns: Columns, rows: Iterator[Row]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns.flat_names)
    table.writerows(columns.flat(row) for row in rows)
    text.detach()


def _write_parquet(file: IO[bytes], columns: Columns, rows: Iterator[Row]) -> None:
    arrow, parquet = _pyarrow(), importlib.import_module("pyarrow.parquet")
    kinds = {int: arrow.int64(), float: arrow.float64(), str: arrow.string(), bool: arrow.bool_()}
    many = [(name, arrow.list_(kinds[kind])) for name, kind in columns.many.items()]
    single = [(name, kinds[kind]) for name, kind in columns.single.items()]
    schema = arrow.schema([("image", arrow.string()), *many, *single])
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(rows, _GROUP)):
            writer.write_table(arrow.Table.from_pylist(group, schema))


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise OptionError(".parquet needs pyarrow: pip install 'unstride[parquet]', or write .jsonl or .csv") from error
