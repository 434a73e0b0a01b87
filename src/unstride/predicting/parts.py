"""Finished runs of rows, each a file that is there whole or not at all, and how they become one table."""

from __future__ import annotations

import csv
import importlib
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from unstride.errors import DataError, OptionError
from unstride.predicting.rows import Columns, Row
from unstride.storage import files, strict_json
from unstride.storage.artefacts import cannot_write
from unstride.storage.cache import Cache, RunKey

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

    def check(self, key: RunKey) -> None:
        """These are the parts of one run; those of another are not touched."""
        others = [path for path in self.folder.glob("predict-*") if path.name != f"predict-{key.digest}"]
        if any(any(path.glob("*.safetensors")) for path in others):
            raise OptionError(
                f"{self.folder}: holds finished parts of another run (other images, model, recipe or version). Start "
                "that one again, give another --out, or remove the folder"
            )

    def remove(self) -> None:
        """All at once, so that a crash here leaves nothing that looks like a run."""
        gone = self.folder.with_name(f".{self.folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def name_of(number: int) -> str:
    """The item of a part in the cache."""
    return f"{number:06d}"


def finished(cache: Cache) -> set[int]:
    """The numbers of the parts that are done."""
    return {int(item) for item in cache}


def all_rows(cache: Cache, count: int) -> Iterator[Row]:
    """All rows in order; a missing part is an error."""
    for number in range(-(-count // PART)):
        rows = (cache.get(name_of(number)) or {"rows": []})["rows"]
        if len(rows) != min(PART, count - number * PART):
            raise DataError(
                f"{cache.folder}: part {number} holds {len(rows)} rows; remove the folder and start again. Under "
                "torchrun, do all processes see the same folder?"
            )
        yield from rows


class CountedRows:
    """Rows as they pass, counted."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self.rows, self.errors, self.good, self.changed, self.cost = rows, 0, 0, 0.0, 0.0

    def __iter__(self) -> Iterator[Row]:
        for row in self.rows:
            if row["error"] is not None:
                self.errors += 1
            else:
                self.good += 1
                self.changed += row["changed"]
                self.cost += row["cost"]
            yield row


def check_out(out: Path) -> None:
    """Whether the table can be written, before the work."""
    if out.suffix.lower() not in FORMATS:
        raise OptionError(
            f"--out {out}: wanted the name of a table that ends in {' '.join(FORMATS)}; masks and other maps go to a "
            f"folder beside it, as {out.stem}.csv.masks/ of {out.stem}.csv"
        )
    files.check_file(out, "--out")
    if out.suffix.lower() == ".parquet":
        _pyarrow()


def write_table(out: Path, columns: Columns, rows: Iterator[Row]) -> None:
    """Rows as they come -> OUT, whole or not at all."""
    try:
        with files.open_atomic(out) as file:
            _write(file, out.suffix.lower(), columns, rows)
    except OSError as error:
        raise cannot_write(out, error) from error


def _write(file: IO[bytes], suffix: str, columns: Columns, rows: Iterator[Row]) -> None:
    if suffix == ".jsonl":
        for row in rows:
            file.write((strict_json.dumps(row) + "\n").encode())
    elif suffix == ".csv":
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
