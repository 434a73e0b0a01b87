"""A Result as Markdown, CSV, LaTeX or an image. Columns of the paper's own numbers say so."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unstride.errors import NotWritten
from unstride.paper.exhibits import Value
from unstride.paper.reproducing import Result
from unstride.show.style import save
from unstride.storage.files import write_atomic

Grid = tuple[list[str], list[list[str]]]


def markdown(result: Result) -> str:
    head, rows = _grid(result)
    lines = [f"## {result.exhibit.title} ({result.exhibit.where})", ""]
    lines += ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    lines += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(lines).rstrip() + "\n"


def latex(result: Result) -> str:
    head, rows = _grid(result)
    labels = len(result.exhibit.labels)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(result.exhibit.title)}}}"]
    lines += [rf"\begin{{tabular}}{{{'l' * labels}{'r' * (len(head) - labels)}}}", r"\hline"]
    lines += [" & ".join(map(_tex, head)) + r" \\", r"\hline"]
    lines += [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    lines += [r"\hline", r"\end{tabular}", r"\end{table}", *(f"% {note}" for note in result.notes)]
    return "\n".join(lines) + "\n"


def csv_text(result: Result) -> str:
    """One line per number: labels, column, ours, paper, the interval of the gain, images."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    labels = list(result.exhibit.labels)
    extra = max((len(v.row) for v in result.values), default=0) - len(labels)
    writer.writerow([*labels, *["state"] * extra, "column", "unstride", "paper", "gain_low", "gain_high", "images"])
    for v in result.values:
        writer.writerow(
            [*v.row, v.column, *("" if x is None else x for x in (v.ours, v.paper, v.low, v.high, v.images))]
        )
    return stream.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "md": (".md", markdown),
    "csv": (".csv", csv_text),
    "latex": (".tex", latex),
}


def write(result: Result, folder: Path) -> list[Path]:
    """All formats, and an image where there is something to draw, as NAME.md, NAME.csv, NAME.tex, NAME.png."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, make in FORMATS.values():
            path = folder / f"{result.exhibit.name}{suffix}"
            write_atomic(path, make(result).encode())
            paths.append(path)
    except OSError as error:
        warnings.warn(NotWritten(f"{folder}: cannot be written to ({error.strerror or error})"), stacklevel=2)
        return paths
    if any(isinstance(value.ours, float) for value in result.values):
        drawn = save(image(result), folder / f"{result.exhibit.name}.png")
        paths += [drawn] if drawn is not None else []
    return paths


def image(result: Result) -> Any:
    """A matplotlib Figure: lines, a scatter, or for a table ours and the paper's side by side."""
    draw = {"lines": _lines, "scatter": _scatter, "table": _dots}[result.exhibit.shape]
    figure = draw(result)
    figure.supxlabel("\n".join(result.notes), size=6, color="gray")  # what was substituted goes with the image
    return figure


def _grid(result: Result) -> Grid:
    """Header and rows; a column of the paper only where it has numbers."""
    columns = list(dict.fromkeys(v.column for v in result.values))
    if result.exhibit.shape == "lines":
        columns.sort(key=float)
    from_paper = {v.column for v in result.values if v.paper is not None}
    rows: dict[tuple[str, ...], dict[str, Value]] = {}
    for v in result.values:
        rows.setdefault(v.row, {})[v.column] = v
    width = max((len(row) for row in rows), default=0)
    head = [*result.exhibit.labels, *["state"] * (width - len(result.exhibit.labels))]
    for column in columns:
        head += [column, f"{column} (paper)"] if column in from_paper else [column]
    numbers = {c: [x for v in result.values if v.column == c for x in (v.ours, v.paper)] for c in columns}
    whole = {c: all(x == int(x) for x in found if isinstance(x, float)) for c, found in numbers.items()}
    whole |= {c: False for c in columns if "%" in c or "B =" in c}
    body = []
    for row, found in rows.items():
        cells = [*row]
        for column in columns:
            value = found.get(column)
            cells.append(_text(value.ours if value else None, whole[column]))
            if column in from_paper:
                cells.append(_text(value.paper if value else None, whole[column]))
        body.append(cells)
    return head, body


def _text(value: float | str | None, whole: bool) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if whole else f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"


def _tex(text: str) -> str:
    for character in "%_&#":
        text = text.replace(character, f"\\{character}")
    return text


def _figure(count: int, height: float) -> tuple[Any, list[Any]]:
    from unstride.show.style import library

    figure = library().Figure(figsize=(5.2 * count, height), dpi=130, layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _lines(result: Result) -> Any:
    """One panel per last label but the first (a measure), one line per first label."""
    panels = list(dict.fromkeys(v.row[1:] for v in result.values))
    figure, axes = _figure(len(panels), 4.2)
    figure.suptitle(result.exhibit.title)
    for ax, panel in zip(axes, panels, strict=True):
        for name in dict.fromkeys(v.row[0] for v in result.values):
            points = sorted(
                (float(v.column), v.ours) for v in result.values
                if v.row == (name, *panel) and isinstance(v.ours, float)
            )  # fmt: skip
            if points:
                ax.plot(*zip(*points, strict=True), "o-", markersize=3, label=name)
        ax.set_xlabel(result.exhibit.x)
        ax.set_ylabel(panel[0] if panel else "top-1 %")
        ax.grid(alpha=0.3)
    axes[-1].legend(fontsize=6)
    return figure


def _scatter(result: Result) -> Any:
    kinds = list(dict.fromkeys(v.row[0] for v in result.values))
    figure, axes = _figure(len(kinds), 4.2)
    figure.suptitle(result.exhibit.title)
    for ax, kind in zip(axes, kinds, strict=True):
        states = list(dict.fromkeys(v.row for v in result.values if v.row[0] == kind))
        found = {(v.row, v.column): v.ours for v in result.values}
        points = [(found[s, "criterion"], found[s, "top-1 %"]) for s in states]
        ax.scatter([x for x, _ in points], [y for _, y in points], s=12, label="states")
        ax.scatter(*[[value] for value in points[0]], s=50, marker="*", label="the plain network")
        ax.set_xlabel(f"{kind}: {result.exhibit.x}")
        ax.set_ylabel("top-1 %")
        ax.legend(fontsize=7)
        ax.grid(alpha=0.3)
    return figure


def _dots(result: Result) -> Any:
    """A panel per column: a filled dot is ours, a ring the paper's."""
    columns = [c for c in dict.fromkeys(v.column for v in result.values) if _numeric(result, c)]
    rows = list(dict.fromkeys(v.row for v in result.values))
    figure, axes = _figure(len(columns), 1.2 + 0.22 * len(rows))
    figure.suptitle(f"{result.exhibit.title}: ● unstride, ○ paper")
    for k, (ax, column) in enumerate(zip(axes, columns, strict=True)):
        for v in result.values:
            if v.column == column:
                y = -rows.index(v.row)
                if isinstance(v.ours, float):
                    ax.plot([v.ours], [y], "o", color="C0")
                if isinstance(v.paper, float):
                    ax.plot([v.paper], [y], "o", color="C1", fillstyle="none")
        ax.set_yticks([-i for i in range(len(rows))], [" ".join(row) for row in rows] if k == 0 else [""] * len(rows))
        ax.tick_params(axis="y", labelsize=6)
        ax.set_title(column, size=9)
        ax.grid(alpha=0.3)
    return figure


def _numeric(result: Result, column: str) -> bool:
    return any(v.column == column and isinstance(v.ours, float) for v in result.values)
