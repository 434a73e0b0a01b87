"""An exhibit as Markdown, CSV, LaTeX, and of a figure a plot: our number first, the paper's in brackets beside it."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstride.errors import ArtefactError, NotWritten
from unstride.paper.exhibits import ACCURACIES, PRINTED, Value
from unstride.paper.reproducing import Reproduction
from unstride.storage.artefacts import write_file

WHOLE = ("values", "R")  # columns of counts
Place = tuple[tuple[str, ...], str, str]  # row, group and column of a value


@dataclass(frozen=True)
class ExhibitTable:
    """A table with grouped columns: (group, column) in order, and for each row its labels and texts."""

    labels: list[str]
    columns: list[tuple[str, str]]
    rows: list[tuple[tuple[str, ...], list[tuple[str, bool]]]]  # a text, and whether it is bold


def markdown(result: Reproduction) -> str:
    grid = grid_of(result)
    titles = [*grid.labels, *_one_line(grid.columns)]
    body = [[*labels, *(f"**{text}**" if bold else text for text, bold in cells)] for labels, cells in grid.rows]
    lines = [f"## {result.exhibit.where}: {result.exhibit.title}", ""]
    lines += ["| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *body)]
    return "\n".join([*lines, "", *(f"- {note}" for note in _notes(result))]).rstrip() + "\n"


def latex(result: Reproduction) -> str:
    """With networks as column groups, as in the paper."""
    grid = grid_of(result)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(result.exhibit.title)}}}"]
    lines += [rf"\begin{{tabular}}{{{'l' * len(grid.labels)}{'r' * len(grid.columns)}}}", r"\hline"]
    groups = _groups(grid.columns)
    if any(name for name, _ in groups):
        heads = [rf"\multicolumn{{{count}}}{{c}}{{{_tex(name)}}}" for name, count in groups]
        lines.append(" & ".join([*[""] * len(grid.labels), *heads]) + r" \\")
    lines += [" & ".join([*map(_tex, grid.labels), *(_tex(c) for _, c in grid.columns)]) + r" \\", r"\hline"]
    for labels, cells in grid.rows:
        texts = [rf"\textbf{{{_tex(text)}}}" if bold else _tex(text) for text, bold in cells]
        lines.append(" & ".join([*map(_tex, labels), *texts]) + r" \\")
    lines += [r"\hline", r"\end{tabular}", r"\end{table}", *(f"% {note}" for note in _notes(result))]
    return "\n".join(lines) + "\n"


def csv_text(result: Reproduction) -> str:
    """A line for each number."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = ("group", "column", "unstride", "paper", "std", "seeds", "gain_low", "gain_high", "images")
    writer.writerow([*_labels(result), *names])
    for v in result.values:
        numbers = (v.ours, v.paper, v.spread, v.seeds, v.low, v.high, v.images)
        writer.writerow([*v.row, v.group, v.column, *("" if x is None else x for x in numbers)])
    return stream.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Reproduction], str]]] = {
    "md": (".md", markdown),
    "csv": (".csv", csv_text),
    "latex": (".tex", latex),
}


def write(result: Reproduction, folder: Path) -> list[Path]:
    """All formats, and of a figure a plot: NAME.md, NAME.csv, NAME.tex, NAME.png."""
    from unstride.show.style import save

    paths = []
    try:
        for suffix, make in FORMATS.values():
            paths.append(write_file(folder / f"{result.exhibit.name}{suffix}", make(result).encode()))
    except ArtefactError as error:
        warnings.warn(NotWritten(str(error)), stacklevel=2)
        return paths
    if result.exhibit.shape != "table":
        drawn = save(plot(result), folder / f"{result.exhibit.name}.png")
        paths += [drawn] if drawn is not None else []
    return paths


# ---------------------------------------------------------------- texts
def grid_of(result: Reproduction) -> ExhibitTable:
    """The values in rows and grouped columns."""
    values = {(v.row, v.group, v.column): v for v in result.values}
    columns = list(dict.fromkeys((group, column) for _, group, column in values))
    if result.exhibit.shape == "lines":
        columns.sort(key=lambda c: float(c[1]))
    bold = best(result)
    rows = []
    for row in dict.fromkeys(v.row for v in result.values):
        places = [(row, group, column) for group, column in columns]
        rows.append((row, [(_cell(values.get(place)), place in bold) for place in places]))
    return ExhibitTable(_labels(result), columns, rows)


def best(result: Reproduction) -> set[Place]:
    """The better ones of our numbers, where the exhibit compares them. Where all are equal, none is."""
    exhibit = result.exhibit
    measures = {(cell.row, cell.group, cell.column): cell.measure for cell in exhibit.cells}
    compared: dict[Any, list[Value]] = {}
    for v in result.values:
        measure = measures.get((v.row, v.group, v.column), PRINTED)
        if exhibit.compare and isinstance(v.ours, float) and measure != PRINTED:
            keys = {"ours": (v.row[:-1], v.group, v.column), "group": (v.row, v.group), "column": (v.group, v.column)}
            compared.setdefault((measure in ACCURACIES, keys[exhibit.compare]), []).append(v)
    found = set()
    for (higher, _), values in compared.items():
        numbers = [float(v.ours) for v in values if v.ours is not None]
        top = max(numbers) if higher else min(numbers)
        if min(numbers) < max(numbers):
            found |= {(v.row, v.group, v.column) for v in values if v.ours == top}
    return found


def _labels(result: Reproduction) -> list[str]:
    """Titles of the row labels; the points of a scatter have their state, too."""
    width = max((len(v.row) for v in result.values), default=0)
    return [*result.exhibit.labels, *["state"] * (width - len(result.exhibit.labels))]


def _cell(value: Value | None) -> str:
    """`70.74 ± 0.03 (70.51)`: ours, its standard deviation over the seeds, and the paper's."""
    if value is None or (value.ours is None and value.paper is None):
        return "-"
    spread = "" if value.spread is None else f" ± {_text(value.spread)}"
    digits = 4 if value.column in ("NLL", "mean value") else 0 if value.column in WHOLE else 2
    ours = "-" if value.ours is None else _text(value.ours, digits) + spread
    return ours if value.paper is None else f"{ours} ({_text(value.paper, digits if value.column in WHOLE else 2)})"


def _text(value: float | str, digits: int = 2) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.{4 if 0 < abs(value) < 0.1 else digits}f}"


def _notes(result: Reproduction) -> list[str]:
    brackets = "In brackets: the paper's number." if any(v.paper is not None for v in result.values) else ""
    bold = "Bold: the better of what is compared." if best(result) else ""
    seeds = max((v.seeds or 1 for v in result.values), default=1)
    several = f"±: standard deviation over {seeds} seeds." if seeds > 1 else ""
    legend = " ".join(part for part in (brackets, bold, several) if part)
    return [legend] * bool(legend) + list(result.notes)


def _groups(columns: list[tuple[str, str]]) -> list[tuple[str, int]]:
    """Neighbouring columns of one group, with their number."""
    found: list[tuple[str, int]] = []
    for group, _ in columns:
        if found and found[-1][0] == group:
            found[-1] = (group, found[-1][1] + 1)
        else:
            found.append((group, 1))
    return found


def _one_line(columns: list[tuple[str, str]]) -> list[str]:
    """Titles for a format without grouped columns: the group stands before its first column."""
    titles, last = [], ""
    for group, column in columns:
        titles.append(f"{group}: {column}" if group and group != last else column)
        last = group
    return titles


def _tex(text: str) -> str:
    for character in "%_&#":
        text = text.replace(character, f"\\{character}")
    return text.replace("±", r"$\pm$")


# ---------------------------------------------------------------- plots
def plot(result: Reproduction) -> Any:
    """A matplotlib Figure of a figure of the paper."""
    figure = {"lines": _lines, "scatter": _scatter}[result.exhibit.shape](result)
    figure.supxlabel("\n".join(result.notes), size=6, color="gray")  # what stands for the paper's goes with the plot
    return figure


def _figure(count: int, height: float, title: str) -> tuple[Any, list[Any]]:
    from unstride.show.style import library

    figure = library().Figure(figsize=(5.2 * count, height), dpi=130, layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _lines(result: Reproduction) -> Any:
    """A panel for each metric, a line for each network."""
    panels = list(dict.fromkeys(v.row[1:] for v in result.values))
    figure, axes = _figure(len(panels), 4.2, result.exhibit.title)
    for ax, panel in zip(axes, panels, strict=True):
        for name in dict.fromkeys(v.row[0] for v in result.values):
            own = [v for v in result.values if v.row == (name, *panel) and isinstance(v.ours, float)]
            points = sorted((float(v.column), v.ours, v.spread or 0.0) for v in own)
            if points:
                x, y, spread = zip(*points, strict=True)
                ax.errorbar(x, y, yerr=spread if any(spread) else None, fmt="o-", markersize=3, label=name)
        ax.set_xlabel(result.exhibit.x)
        ax.set_ylabel(panel[0] if panel else "top-1 %")
        ax.grid(alpha=0.3)
    axes[-1].legend(fontsize=6)
    return figure


def _scatter(result: Reproduction) -> Any:
    """A panel for each criterion, a point for each state."""
    kinds = list(dict.fromkeys(v.row[0] for v in result.values))
    figure, axes = _figure(len(kinds), 4.2, result.exhibit.title)
    found = {(v.row, v.column): v.ours for v in result.values}
    for ax, kind in zip(axes, kinds, strict=True):
        states = list(dict.fromkeys(v.row for v in result.values if v.row[0] == kind))
        points = [(found[s, "mean value"], found[s, "top-1 %"]) for s in states]
        ax.scatter([x for x, _ in points], [y for _, y in points], s=12, label="states")
        ax.scatter(*[[value] for value in points[0]], s=50, marker="*", label="state 0, the base model")
        ax.set_xlabel(f"{kind}: {result.exhibit.x}")
        ax.set_ylabel("top-1 %")
        ax.legend(fontsize=7)
        ax.grid(alpha=0.3)
    return figure
