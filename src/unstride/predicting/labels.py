"""Files of images to be labelled: a CSV with image, probability, two answers in random order, and the label."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from unstride.data import Classes
from unstride.errors import DataError, OptionError
from unstride.models.libraries import close_to
from unstride.storage.artefacts import write_file

NEITHER = "neither"  # the label of an image of which both answers are wrong


@dataclass(frozen=True)
class LabelRow:
    """An image with two answers. `probability`: that a disagreement is in the file. `label`: "" while it has none."""

    image: str
    probability: float
    answer_1: str
    answer_2: str
    label: str = ""


TITLES = [f.name for f in fields(LabelRow)]


def write(path: Path, rows: Sequence[LabelRow]) -> None:
    """All rows, whole or not at all."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(TITLES)
    table.writerows(astuple(row) for row in rows)
    write_file(path, text.getvalue().encode())


def update(path: Path, rows: Sequence[LabelRow]) -> list[LabelRow]:
    """Write the rows with the labels that the file has already; refused where a label would be lost."""
    known = {row.image: row.label for row in read(path).values() if row.label} if path.exists() else {}
    lost = sorted(set(known) - {row.image for row in rows})
    if lost:
        raise OptionError(
            f"{path}: has labels of {len(lost):,} images that would not be in it any more ({lost[0]}). Give another "
            "--out, or move the file away."
        )
    labelled = [replace(row, label=known.get(row.image, "")) for row in rows]
    write(path, labelled)
    return labelled


def read(path: Path) -> dict[int, LabelRow]:
    """The rows by line; a DataError that names the line of what is wrong."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = list(csv.reader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a CSV file in UTF-8 ({error})") from error
    titles = [title.strip().lower() for title in lines[0]] if lines else []
    missing = [title for title in TITLES if title not in titles]
    if missing:
        raise DataError(f"{path}: there is no column {missing[0]!r}. Expected the columns {', '.join(TITLES)}.")
    rows: dict[int, LabelRow] = {}
    images: dict[str, int] = {}
    for line, cells in enumerate(lines[1:], 2):
        if not any(cells):
            continue
        row = _row(path, line, titles, cells)
        if (first := images.setdefault(row.image, line)) != line:
            raise DataError(f"{path}, line {line}: {row.image} is in line {first}, too. Expected each image once.")
        rows[line] = row
    return rows


def _row(path: Path, line: int, titles: list[str], cells: list[str]) -> LabelRow:
    if len(cells) != len(titles):
        raise DataError(f"{path}, line {line}: {len(cells)} cells, expected {len(titles)} as in the first line.")
    values = dict(zip(titles, (cell.strip() for cell in cells), strict=True))
    image = cells[titles.index("image")]  # names may begin with a blank
    try:
        probability = float(values["probability"])
    except ValueError:
        probability = 0.0
    if not 0 < probability <= 1:
        raise DataError(
            f"{path}, line {line}: probability: got {values['probability'][:20]!r}, expected above 0, at most 1."
        )
    return LabelRow(image, probability, values["answer_1"], values["answer_2"], values["label"])


def class_of(label: str, classes: Classes) -> int:
    """The class of a label: its name, or its number where names are not known. -1: neither."""
    if label.lower() == NEITHER:
        return -1
    number = classes.find(label) if classes.names else None
    text = label.removeprefix("class ").strip()
    if number is None and text.isascii() and text.isdigit() and len(text) < 10 and not classes.names:
        number = int(text)
    if number is None or (classes.count is not None and number >= classes.count):
        close = close_to(label, classes.names) if classes.names else ""
        raise DataError(f"label {label[:60]!r} is not a class of the model{close}, nor {NEITHER!r}")
    return number
