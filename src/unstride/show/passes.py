"""One image with a vector for an answer: the base model's, the recipe's, and what each pass adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from unstride.execution.prediction import ForwardPass, Prediction
from unstride.show.answers import class_name, entries, probabilities
from unstride.show.style import COLOURS, FAINT, INK, LINE, PAPER, PLAIN, SOFT, library, shorten
from unstride.show.tree import Node, rows

MARGIN, LEFT, ROW, INDENT = 0.4, 3.5, 0.4, 0.4  # inches
NAMES, ANSWERS, BARS, COSTS = 3.2, 2.2, 1.7, 0.6  # inches: the columns of the table of passes
TOP = 5  # classes in the comparison


def summary(p: Prediction) -> str:
    count = len(p.passes)
    return (
        f"{count} pass{'es' * (count != 1)} · cost {p.cost:.2f}x · {p.agreement:.0%} agreement · "
        f"spread {float(p.spread.mean()):.3f} · stopped: {p.stopped}"
    )


def plot_passes(image: Image.Image | None, p: Prediction, classes: tuple[str, ...] = (), title: str = "") -> Any:
    """A matplotlib Figure: the image, base model against recipe, and a row for each pass."""
    nodes = rows(p)
    photo = 0.0 if image is None else min(LEFT * image.height / image.width, 2.7)
    compared = 0.4 + 0.54 * min(TOP, max(2, len(p.output)))
    tall = max(photo + 0.2 + compared, ROW * (len(nodes) + 2.4))
    indent = INDENT * max(n.depth for n in nodes)
    x0, table = MARGIN + LEFT + 0.6, NAMES + indent + ANSWERS + BARS + COSTS
    width, height = x0 + table + MARGIN, 1.1 + tall + MARGIN
    fig = library().Figure(figsize=(width, height), dpi=160, facecolor=PAPER)

    def axes(x: float, top: float, w: float, h: float) -> Any:
        """Axes at inches from the top left."""
        ax = fig.add_axes((x / width, 1 - (top + h) / height, w / width, h / height))
        ax.set_axis_off()
        return ax

    words = [entries(p.meaning, output, classes, 1)[0]["name"] for output in (p.base, p.output)]
    title = title or (" → ".join(dict.fromkeys(words)) if p.meaning.classes else p.task)
    fig.text(MARGIN / width, 1 - 0.44 / height, shorten(title, 90), size=16, weight="bold", color=INK, va="center")
    fig.text(MARGIN / width, 1 - 0.77 / height, summary(p), size=10, color=SOFT, va="center")
    if image is not None:
        ax = axes(MARGIN, 1.1, LEFT, photo)
        ax.imshow(np.asarray(image.convert("RGB")), interpolation="antialiased")
        ax.set_anchor("NW")
    colours = _colours(p)
    _compare(axes(MARGIN, 1.1 + photo + 0.2, LEFT, compared), p, classes, colours)
    ax = axes(x0, 1.1, table, ROW * (len(nodes) + 2.4))
    ax.set_xlim(0, table)
    ax.set_ylim(len(nodes) + 1.4, -1)
    _Table(ax, p, classes, colours, NAMES + indent).draw(nodes)
    return fig


def _scores(p: Prediction, output: Tensor) -> Tensor:
    """What is compared: probabilities, or the numbers themselves."""
    if not p.meaning.classes:
        return output.float()
    return probabilities(output) if p.meaning.one_label else output.float().sigmoid()


def _colours(p: Prediction) -> dict[int, str]:
    """The classes that matter here get a colour: the answer first, then the base model's, then those of the passes."""
    outputs = [p.output, p.base, *(v.output for v in p.passes)]
    order = dict.fromkeys(int(_scores(p, output).argmax()) for output in outputs)
    return dict(zip(order, COLOURS, strict=False))


def _compare(ax: Any, p: Prediction, classes: tuple[str, ...], colours: dict[int, str]) -> None:
    """The base model's score above the recipe's, class by class."""
    base, final = _scores(p, p.base).cpu(), _scores(p, p.output).cpu()
    shown = final.topk(min(TOP, len(final))).indices.tolist()
    if (first := int(base.argmax())) not in shown:
        shown[-1] = first
    top = max(float(final[shown].abs().max()), float(base[shown].abs().max()), 1e-9)
    for row, k in enumerate(shown):
        tint = colours.get(k, SOFT)
        name = class_name(classes, k) if p.meaning.classes else f"value {k}"
        ax.text(0, row - 0.33, shorten(name, 40), size=10, color=INK, va="center")
        for y, value, fill, edge in (
            (row - 0.02, float(base[k]), PAPER, PLAIN),
            (row + 0.25, float(final[k]), tint, tint),
        ):
            length = 0.8 * abs(value) / top
            ax.barh(y, length, 0.19, color=fill, edgecolor=edge, linewidth=1)
            text = f"{value:.1%}" if p.meaning.classes else f"{value:.4g}"
            ax.text(length + 0.02, y, text, size=8, color=SOFT, va="center")
    ax.set_xlim(0, 1)
    ax.set_ylim(len(shown) - 0.55, -1.2)
    tint = colours.get(int(final.argmax()), SOFT)
    for left, words, fill, edge in ((0.0, "base model", PAPER, PLAIN), (0.4, "combined", tint, tint)):
        ax.barh(-0.85, 0.05, 0.17, left=left, color=fill, edgecolor=edge, linewidth=1)
        ax.text(left + 0.07, -0.85, words, size=9, color=SOFT, va="center")


@dataclass(frozen=True)
class _Table:
    """A row for each pass; x in inches, y in rows."""

    ax: Any
    p: Prediction
    classes: tuple[str, ...]
    colours: dict[int, str]
    names: float  # width of the first column

    def draw(self, nodes: tuple[Node, ...]) -> None:
        ax, total = self.ax, self.names + ANSWERS + BARS + COSTS
        heads = ("pass", "its own answer", "weight", "cost")
        for head, x in zip(heads, (0, self.names, self.names + ANSWERS, self.names + ANSWERS + BARS), strict=True):
            ax.text(x, -0.7, head, size=9, color=SOFT, va="center")
        ax.plot([0, total], [-0.4, -0.4], color=FAINT, lw=1)
        place = {n.index: y for y, n in enumerate(nodes)}
        heaviest = max(v.weight for v in self.p.passes) or 1.0
        for y, node in enumerate(nodes):
            self._edge(node, place)
            self._row(y, node, self.p.passes[node.index], heaviest)
        last = len(nodes)
        ax.plot([0, total], [last - 0.4, last - 0.4], color=FAINT, lw=1)
        ax.text(0, last, "combined", size=9.5, color=INK, va="center", weight="bold")
        self._answer(last, self.p.output, "bold")
        ax.text(total, last, f"{self.p.cost:.2f}x", size=9.5, color=INK, va="center", ha="right", weight="bold")

    def _row(self, y: int, node: Node, v: ForwardPass, heaviest: float) -> None:
        x = INDENT * node.depth
        tint = self.colours.get(int(_scores(self.p, v.output).argmax()), SOFT)
        layer = f"layer {node.layer}: " if node.layer else ""
        most = int((self.names - x) / 0.085)
        self.ax.scatter([x + 0.08], [y], s=45, color=tint, edgecolor=PAPER, linewidth=1.2, zorder=3)
        self.ax.text(x + 0.2, y, shorten(f"{layer}{v}", most), size=9, color=INK, va="center")
        self._answer(y, v.output, "normal")
        start, length = self.names + ANSWERS, (BARS - 0.6) * v.weight / heaviest
        self.ax.barh(y, length, 0.4, left=start, color=tint)
        self.ax.text(start + length + 0.07, y, f"{v.weight:.1%}", size=8.5, color=SOFT, va="center")
        self.ax.text(start + BARS + COSTS, y, f"{v.cost:.2f}x", size=8.5, color=SOFT, va="center", ha="right")

    def _answer(self, y: int, output: Tensor, weight: str) -> None:
        first = entries(self.p.meaning, output, self.classes, 1)[0]
        value = f"{first['probability']:.0%}" if "probability" in first else f"{first['value']:.4g}"
        text = f"{shorten(first['name'], 20)} {value}"
        self.ax.text(self.names, y, text, size=9.5, color=INK, va="center", weight=weight)

    def _edge(self, node: Node, place: dict[int, int]) -> None:
        if node.parent is not None:
            x = INDENT * (node.depth - 1) + 0.08
            y = place[node.index]
            self.ax.plot([x, x, x + INDENT], [place[node.parent], y, y], color=LINE, lw=1.3, zorder=1)
