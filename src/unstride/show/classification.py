"""The slide: the photograph, the search state by state, what each state saw and how much it counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from unstride.execution.prediction import Prediction
from unstride.show.answers import class_name, probabilities
from unstride.show.style import COLOURS, FAINT, INK, LINE, PAPER, PLAIN, SOFT, library, shorten
from unstride.show.tree import Node, rows

MARGIN, LEFT = 0.4, 3.5  # inches
TOP = 5  # classes in the comparison
LARGEST_GLYPH = 4  # a selection among more cells than 4x4 is written in numbers


def plot_classification(
    image: Image.Image,
    prediction: Prediction,
    rates: Sequence[tuple[int, ...]],
    classes: tuple[str, ...] = (),
    title: str = "",
) -> Any:
    """A matplotlib Figure: `plot_classification(photo, better.explain(x)[0], rates).savefig("a.png")`.

    `rates` are the layers' (R_y, R_x): `better.prepare(x).found.space.rates`.
    """
    figure = library()
    nodes = rows(prediction)
    own = [probabilities(v.logits) for v in prediction.states]
    final, plain = probabilities(prediction.logits), probabilities(prediction.plain)
    colour = _colours(own, final, plain)
    photo_height = min(LEFT * image.height / image.width, 2.7)
    compare_height = 0.4 + 0.54 * min(TOP, len(final))
    lines = len(nodes) + 3.2  # a heading above, the answer below
    room = max(photo_height + 0.2 + compare_height, 0.33 * lines)
    row = min(room / lines, 0.46)
    width_of = _Widths(tree=0.62 * max(n.depth for n in nodes) + 2.6, glyphs=_glyphs_width(rates), bars=1.75)
    x0 = MARGIN + LEFT + 0.6
    width, height = x0 + width_of.total + MARGIN, room + 1.1 + MARGIN
    fig = figure.Figure(figsize=(width, height), dpi=160, facecolor=PAPER)

    def box(x: float, top: float, w: float, h: float) -> tuple[float, float, float, float]:
        """Inches from the top left -> what matplotlib counts in."""
        return x / width, 1 - (top + h) / height, w / width, h / height

    title = title or f"{class_name(classes, int(plain.argmax()))} → {class_name(classes, int(final.argmax()))}"
    fig.text(MARGIN / width, 1 - 0.44 / height, title, size=16, weight="bold", color=INK, va="center")
    fig.text(MARGIN / width, 1 - 0.77 / height, summary(prediction), size=10, color=SOFT, va="center")
    photo = fig.add_axes(box(MARGIN, 1.1, LEFT, photo_height))
    photo.imshow(np.asarray(image), interpolation="antialiased")
    photo.set_anchor("NW")
    photo.set_axis_off()
    _compare(fig.add_axes(box(MARGIN, 1.1 + photo_height + 0.2, LEFT, compare_height)), plain, final, classes, colour)
    tree = fig.add_axes(box(x0, 1.1, width_of.total, row * lines))
    tree.set_xlim(0, width_of.total)
    tree.set_ylim(lines - 1.3, -1.3)
    tree.set_axis_off()
    _draw_tree(tree, nodes, prediction, own, final, classes, colour, rates, width_of, row)
    return fig


@dataclass(frozen=True)
class _Widths:
    """Of the tree's columns, in inches."""

    tree: float
    glyphs: float
    bars: float

    @property
    def total(self) -> float:
        return self.tree + self.glyphs + self.bars + 0.5


def _glyphs_width(rates: Sequence[tuple[int, ...]]) -> float:
    return max(1.6, (0.26 if max(map(max, rates)) <= LARGEST_GLYPH else 0.45) * len(rates) + 0.3)


def summary(p: Prediction) -> str:
    return (
        f"{len(p.states)} looks · {p.cost:.1f}x the work of a plain forward · {p.agreement:.0%} of them agree "
        f"with the answer · spread {float(p.spread.mean()):.3f} nats · stopped: {p.stopped}"
    )


def _colours(own: list[Tensor], final: Tensor, plain: Tensor) -> dict[int, str]:
    """The classes that matter in this image get a colour: the answers first, then the states' own favourites."""
    order = [int(final.argmax()), int(plain.argmax()), *(int(p.argmax()) for p in own)]
    return dict(zip(dict.fromkeys(order), COLOURS, strict=False))


def _compare(ax: Any, plain: Tensor, final: Tensor, classes: tuple[str, ...], colour: dict[int, str]) -> None:
    """Plain above enhanced, class by class."""
    count = min(TOP, len(final))
    shown = final.topk(count).indices.tolist()
    first = int(plain.argmax())
    if first not in shown:
        shown[-1] = first
    top = max(float(final[shown].max()), float(plain[shown].max()), 1e-9)
    for row, k in enumerate(shown):
        tint = colour.get(k, SOFT)
        ax.text(0, row - 0.33, shorten(class_name(classes, k), 40), size=10, color=INK, va="center")
        both = ((row - 0.02, float(plain[k]), PAPER, PLAIN), (row + 0.25, float(final[k]), tint, tint))
        for y, p, fill, edge in both:
            ax.barh(y, 0.8 * p / top, 0.19, color=fill, edgecolor=edge, linewidth=1)
            ax.text(0.8 * p / top + 0.02, y, f"{p:.1%}", size=8, color=SOFT, va="center")
    ax.set_xlim(0, 1)
    ax.set_ylim(count - 0.55, -1.2)
    ax.barh(-0.85, 0.05, 0.17, color=PAPER, edgecolor=PLAIN, linewidth=1)
    ax.text(0.07, -0.85, "plain", size=9, color=SOFT, va="center")
    ax.barh(-0.85, 0.05, 0.17, left=0.22, color=colour[int(final.argmax())])
    ax.text(0.29, -0.85, "enhanced", size=9, color=SOFT, va="center")
    ax.set_axis_off()


def _draw_tree(
    ax: Any,
    nodes: tuple[Node, ...],
    prediction: Prediction,
    own: list[Tensor],
    final: Tensor,
    classes: tuple[str, ...],
    colour: dict[int, str],
    rates: Sequence[tuple[int, ...]],
    width: _Widths,
    height: float,
) -> None:
    """One row per state; x in inches, y in rows."""
    row = {n.index: y for y, n in enumerate(nodes)}
    x_of = {n.index: 0.14 + 0.62 * n.depth for n in nodes}
    selection, weight = width.tree, width.tree + width.glyphs
    for header, x in (("state and its own answer", 0.0), ("selection per layer", selection), ("weight", weight)):
        ax.text(x, -0.95, header, size=9, color=SOFT, va="center")
    ax.plot([0, width.total], [-0.6, -0.6], color=FAINT, lw=1)
    _edges(ax, nodes, row, x_of)
    heaviest = max(v.weight for v in prediction.states) or 1.0
    for n in nodes:
        y, v, p = row[n.index], prediction.states[n.index], own[n.index]
        k = int(p.argmax())
        tint = colour.get(k, SOFT)
        ax.scatter([x_of[n.index]], [y], s=25 + 140 * float(p[k]), color=tint, edgecolor=PAPER, linewidth=1.2, zorder=3)
        _answer(ax, x_of[n.index] + 0.17, y, k, float(p[k]), classes, width.tree, "(plain)" if n.index == 0 else "")
        _glyphs(ax, selection, y, v.state.selections, rates, tint, height)
        length = (width.bars - 0.1) * v.weight / heaviest
        ax.barh(y, length, min(0.55, 0.17 / height), left=weight, color=tint)
        ax.text(weight + length + 0.07, y, f"{v.weight:.1%}", size=8.5, color=SOFT, va="center")
    last = len(nodes) + 0.55
    k = int(final.argmax())
    ax.plot([0, width.total], [last - 0.85, last - 0.85], color=FAINT, lw=1)
    ax.scatter(
        [x_of[0]], [last], s=25 + 140 * float(final[k]), marker="D", color=colour[k], edgecolor=PAPER, linewidth=1.2
    )
    _answer(ax, x_of[0] + 0.17, last, k, float(final[k]), classes, width.tree, "(together)")
    ax.text(selection, last, "all states, each with its weight", size=8.5, color=SOFT, va="center")


def _edges(ax: Any, nodes: tuple[Node, ...], row: dict[int, int], x_of: dict[int, float]) -> None:
    groups: dict[tuple[int, int], list[Node]] = {}
    for n in nodes:
        if n.parent is not None:
            groups.setdefault((n.parent, n.layer), []).append(n)
    for (parent, layer), members in groups.items():
        x = x_of[parent]
        for n in members:
            y = row[n.index]
            ax.plot([x, x, x_of[n.index]], [row[parent], y, y], color=LINE, lw=1.3, zorder=1, solid_joinstyle="round")
        if layer:
            chip = {"boxstyle": "round,pad=0.2", "fc": PAPER, "ec": FAINT, "lw": 0.8}
            y = row[members[0].index]
            ax.text(x + 0.3, y, f"layer {layer}", size=6.5, color=SOFT, ha="center", va="center", zorder=2, bbox=chip)


def _answer(ax: Any, x: float, y: float, k: int, p: float, classes: tuple[str, ...], end: float, note: str) -> None:
    room = max(8, int((end - x - 0.7) / 0.083) - len(note))
    name = shorten(class_name(classes, k), room)
    ax.text(x, y, f"{name} {note}".strip(), size=9.5, color=INK, va="center", weight="bold" if note else "normal")
    ax.text(
        end - 0.25, y, f"{p:.0%}", size=9.5, color=INK, va="center", ha="right", weight="bold" if note else "normal"
    )


def _glyphs(
    ax: Any,
    x: float,
    y: float,
    selections: Sequence[tuple[int, ...]],
    rates: Sequence[tuple[int, ...]],
    tint: str,
    row: float,
) -> None:
    """A little grid per layer with the chosen cell filled; gray where the plain network's cell is kept."""
    from matplotlib.patches import Rectangle

    if max(map(max, rates)) > LARGEST_GLYPH:
        text = "  ".join("0" if s == (0, 0) else f"{s[0]},{s[1]}" for s in selections)
        ax.text(x, y, text, size=8.5, color=INK, va="center", family="monospace")
        return
    side_x, side_y = 0.18, 0.18 / row
    for layer, ((sy, sx), (ry, rx)) in enumerate(zip(selections, rates, strict=True)):
        left, top = x + 0.26 * layer, y - side_y / 2
        w, h = side_x / rx, side_y / ry
        fill = tint if (sy, sx) != (0, 0) else FAINT
        ax.add_patch(Rectangle((left + sx % rx * w, top + sy % ry * h), w, h, fc=fill, ec="none"))  # by phase
        for k in range(rx + 1):
            ax.plot([left + k * w] * 2, [top, top + side_y], color=LINE, lw=0.7)
        for k in range(ry + 1):
            ax.plot([left, left + side_x], [top + k * h] * 2, color=LINE, lw=0.7)
