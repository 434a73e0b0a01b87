"""Labelled photographs with two answers each: the base model's and the recipe's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from unstride.show.style import INK, LINE, PAPER, SOFT, library, shorten

RIGHT, WRONG = "#2a7f3f", "#b3392f"
COLUMNS, SIDE = 5, 320


@dataclass(frozen=True, eq=False)
class Photograph:
    """An image, its label in words, and two answers: name, probability, whether it is right."""

    image: Image.Image
    truth: str
    base: tuple[str, float, bool]
    answer: tuple[str, float, bool]
    cost: float

    @property
    def mark(self) -> str:
        if self.base[2] == self.answer[2]:
            return "right" if self.answer[2] else "wrong"
        return "corrected" if self.answer[2] else "broken"


def plot_photographs(photographs: Sequence[Photograph]) -> Any:
    """A matplotlib Figure: each photograph with its label and both answers, green where they are right."""
    columns = min(COLUMNS, len(photographs))
    rows = math.ceil(len(photographs) / columns)
    fig = library().Figure(figsize=(2.5 * columns, 3.5 * rows), dpi=100, facecolor=PAPER, layout="constrained")
    panels = np.atleast_1d(fig.subplots(rows, columns)).ravel()
    for ax in panels:
        ax.set_axis_off()
    for ax, photo in zip(panels, photographs, strict=False):
        _draw(ax, photo)
    return fig


def _draw(ax: Any, photo: Photograph) -> None:
    side = min(photo.image.size)
    left, top = (photo.image.width - side) // 2, (photo.image.height - side) // 2
    square = photo.image.convert("RGB").crop((left, top, left + side, top + side)).resize((SIDE, SIDE))
    ax.imshow(np.asarray(square))
    ax.text(0, SIDE + 28, f"label: {shorten(photo.truth, 28)}", size=10, color=INK, va="top", weight="bold")
    for k, (word, (name, p, right)) in enumerate((("base", photo.base), ("recipe", photo.answer))):
        y = SIDE + 66 + 30 * k
        ax.text(0, y, f"{word}:", size=9, color=SOFT, va="top")
        ax.text(66, y, f"{shorten(name, 19)} {p:.0%}", size=9, color=RIGHT if right else WRONG, va="top")
    ax.text(0, SIDE + 128, f"{photo.mark}, cost {photo.cost:.1f}x", size=8, color=SOFT, va="top")
    ax.set_xlim(0, SIDE)
    ax.set_ylim(SIDE + 150, 0)
    ax.plot([0, SIDE], [SIDE + 18, SIDE + 18], color=LINE, linewidth=0.5)
