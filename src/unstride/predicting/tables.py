"""Rows as a table: JSON lines, CSV or Parquet, written whole or not at all."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from unstride.errors import OptionError
from unstride.predicting.rows import Columns, Row
from unstride.storage import files, strict_json
from unstride.storage.artefacts import cannot_write

FORMATS = (".jsonl", ".csv", ".parquet")
_GROUP = 1 << 14  # rows of a parquet row group


def check_table(out: Path) -> None:
    """An OptionError if the table cannot be written: before the work."""
    if out.suffix.lower() not in FORMATS:
        raise OptionError(
            f"--out {out}: expected the name of a table that ends in {' '.join(FORMATS)}; masks and other maps go to a "
            f"folder beside it, as {out.stem}.csv.masks/ of {out.stem}.csv"
        )
    files.check_file(out, "--out")
    if out.suffix.lower() == ".parquet":
        _pyarrow()


def write_table(out: Path, columns: Columns, rows: Iterator[Row]) -> None:
    """Rows as they come into a file; an ArtefactError that names it where the disk does not take them."""
    try:
        with files.open_atomic(out) as file:
            if out.suffix.lower() == ".jsonl":
                for row in rows:
                    file.write((strict_json.dumps(row) + "\n").encode())
            elif out.suffix.lower() == ".csv":
                _write_csv(file, columns, rows)
            else:
                _write_parquet(file, columns, rows)
    except OSError as error:
        raise cannot_write(out, error) from error


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
