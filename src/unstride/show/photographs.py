"""Photographs whose truth is known: what the network said alone, and what it says now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from unstride.show.style import INK, LINE, PAPER, SOFT, library, shorten

RIGHT, WRONG = "#2a7f3f", "#b3392f"
COLUMNS = 5


@dataclass(frozen=True, eq=False)
class Shown:
    """A photograph, its truth in words, and the answers: name, probability, whether it is right."""

    image: Image.Image
    truth: str
    plain: tuple[str, float, bool]
    enhanced: tuple[str, float, bool]
    cost: float

    @property
    def mark(self) -> str:
        if self.plain[2] == self.enhanced[2]:
            return "right" if self.enhanced[2] else "wrong"
        return "corrected" if self.enhanced[2] else "corrupted"


def plot_photographs(shown: Sequence[Shown]) -> Any:
    """A matplotlib Figure: each photograph with its truth and both answers, green where they are right."""
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    fig = library().Figure(figsize=(2.5 * columns, 3.5 * rows), dpi=100, facecolor=PAPER, layout="constrained")
    panels = np.atleast_1d(fig.subplots(rows, columns)).ravel()
    for ax in panels:
        ax.set_axis_off()
    for ax, one in zip(panels, shown, strict=False):
        side = min(one.image.size)
        left, top = (one.image.width - side) // 2, (one.image.height - side) // 2
        ax.imshow(np.asarray(one.image.crop((left, top, left + side, top + side)).resize((320, 320))))
        ax.text(0, 348, f"truth: {shorten(one.truth, 28)}", size=10, color=INK, va="top", weight="bold")
        for k, (word, (name, p, right)) in enumerate((("plain", one.plain), ("now", one.enhanced))):
            y = 386 + 30 * k
            ax.text(0, y, f"{word}:", size=9, color=SOFT, va="top")
            ax.text(62, y, f"{shorten(name, 19)} {p:.0%}", size=9, color=RIGHT if right else WRONG, va="top")
        ax.text(0, 448, f"{one.mark}, at {one.cost:.1f}x the cost", size=8, color=SOFT, va="top")
        ax.set_xlim(0, 320)
        ax.set_ylim(470, 0)
        ax.plot([0, 320], [338, 338], color=LINE, linewidth=0.5)
    return fig
