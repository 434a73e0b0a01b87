"""Line charts as SVG text, without a plot library: they follow the page's colours, also in dark mode and print.

chart = Chart("Accuracy", "states", "accuracy", (Series("entropy", (Point(1, 0.91), Point(4, 0.92, 0.915, 0.925))),))
chart.svg()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 54, 46
DASHES = ("", "6 4", "2 3", "9 3 2 3", "12 3", "1 4", "4 2")  # colours vanish in print, dashes and marks do not
STYLES = len(DASHES)  # series that can be told apart, by colour (report.css), dash and mark


@dataclass(frozen=True)
class Point:
    """y at x; low and high are its interval, if any."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes. `baseline` is a level to compare with; `percent`: y is a share."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    baseline: float | None = None
    percent: bool = True
    note: str = ""
    unit: str = "%"  # of a share, as it is written

    def svg(self) -> str:
        points = [p for s in self.series for p in s.points]
        if not points:
            return ""
        lows = [p.y if p.low is None else min(p.low, p.y) for p in points]
        highs = [p.y if p.high is None else max(p.high, p.y) for p in points]
        level = [] if self.baseline is None else [self.baseline]
        y_ticks = ticks(min(lows + level), max(highs + level))
        x_ticks = ticks(0, max(p.x for p in points))
        view = _View((0.0, x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
        legend, more = self._legend()
        box = f"0 {-more} {WIDTH} {HEIGHT + more}"
        parts = [
            f'<svg class="chart" viewBox="{box}" role="img" aria-label="{escape(self._words())}">',
            *self._axes(view, x_ticks, y_ticks),
        ]
        if self.baseline is not None:
            y = view.y(self.baseline)
            parts.append(f'<path class="base" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        xs = [round(p.x, 2) for p in points]
        apart = len(self.series) if len(set(xs)) < len(xs) else 1  # whiskers of two series at one x stay apart
        for k, series in enumerate(self.series):
            parts += _drawn(series, k, 3.0 * (k - (apart - 1) / 2) if apart > 1 else 0.0, view, self._number)
        return "".join([*parts, *legend, "</svg>"])

    def _number(self, value: float) -> str:
        return f"{100 * value:.2f} {self.unit}" if self.percent else f"{value:.4g}"

    def _words(self) -> str:
        lines = [
            f"{s.name}: " + ", ".join(f"{p.label or f'{p.x:g}'} {self._number(p.y)}" for p in s.points)
            for s in self.series
        ]
        return f"{self.title}. {self.y} against {self.x}. " + "; ".join(lines)

    def _axes(self, view: _View, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
        out = []
        digits = max(0, -math.floor(math.log10((y_ticks[1] - y_ticks[0]) * (100 if self.percent else 1)) + 1e-9))
        for t in y_ticks:
            text = f"{100 * t:.{digits}f}" if self.percent else f"{t:.{digits}f}"
            out.append(f'<path class="grid" d="M{LEFT} {view.y(t):.1f}H{WIDTH - RIGHT}"/>')
            out.append(f'<text x="{LEFT - 7}" y="{view.y(t) + 4:.1f}" text-anchor="end">{text}</text>')
        for t in x_ticks:
            out.append(f'<text x="{view.x(t):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{t:g}</text>')
        out.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        out.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x)}</text>')
        unit = f", {self.unit}" if self.percent else ""
        out.append(f'<text x="4" y="{TOP - 14}">{escape(self.y + unit)}</text>')
        return out

    def _legend(self) -> tuple[list[str], int]:
        """The names, in as many rows as they need, and how far these reach above the chart."""
        places, x, row = [], LEFT, 0
        for s in self.series:
            wide = 48 + round(7.0 * len(s.name))
            x, row = (LEFT, row + 1) if x + wide > WIDTH and x > LEFT else (x, row)
            places.append((x, row))
            x += wide
        more, out = 16 * row, []
        for k, (s, (x, line)) in enumerate(zip(self.series, places, strict=True)):
            y = 12 - more + 16 * line
            dash = f' stroke-dasharray="{DASHES[k % STYLES]}"' if DASHES[k % STYLES] else ""
            out.append(
                f'<g class="s{k % STYLES}"><path class="line" d="M{x} {y}H{x + 26}"{dash}/>{_mark(k, x + 13, y)}</g>'
            )
            out.append(f'<text x="{x + 32}" y="{y + 4}">{escape(s.name)}</text>')
        return out, more


@dataclass(frozen=True)
class _View:
    """From values to pixels."""

    across: tuple[float, float]
    up: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.across
        return LEFT + 6 + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT - 16)

    def y(self, value: float) -> float:
        low, high = self.up
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _drawn(series: Series, k: int, shift: float, view: _View, number: Callable[[float], str]) -> list[str]:
    points = sorted(series.points, key=lambda p: p.x)
    spots = [(view.x(p.x), view.y(p.y)) for p in points]
    dash = f' stroke-dasharray="{DASHES[k % STYLES]}"' if DASHES[k % STYLES] else ""
    out = [f'<g class="s{k % STYLES}">']
    band = [(view.x(p.x), view.y(p.low), view.y(p.high)) for p in points if p.low is not None and p.high is not None]
    if len(band) > 1:
        edge = [f"{x:.1f} {high:.1f}" for x, _, high in band] + [f"{x:.1f} {low:.1f}" for x, low, _ in reversed(band)]
        out.append(f'<path class="band" d="M{"L".join(edge)}Z"/>')
    for x, low, high in band:
        if low != high:
            x += shift
            ends = f"M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
            out.append(f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}"/>')
    out.append(f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in spots)}"{dash}/>')
    for p, (x, y) in zip(points, spots, strict=True):
        interval = "" if p.low is None or p.high is None else f" [{number(p.low)}, {number(p.high)}]"
        words = f"{series.name}, {p.label or f'{p.x:g}'}: {number(p.y)}{interval}"
        beside = shift if len(points) == 1 else 0.0  # as its whisker
        out.append(f"<g><title>{escape(words)}</title>{_mark(k, x + beside, y)}</g>")
    return [*out, "</g>"]


def _mark(k: int, x: float, y: float) -> str:
    match k % STYLES:
        case 0:
            return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        case 1:
            return f'<rect class="mark" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
        case 2:
            return f'<path class="mark" d="M{x:.1f} {y - 5:.1f}l5 9h-10Z"/>'
        case 3:
            return f'<path class="mark" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5Z"/>'
        case 4:
            return f'<path class="mark" d="M{x:.1f} {y + 5:.1f}l5 -9h-10Z"/>'
        case 5:
            return f'<path class="mark" d="M{x - 2:.1f} {y - 5:.1f}h4v3h3v4h-3v3h-4v-3h-3v-4h3Z"/>'
        case _:
            return f'<rect class="mark" x="{x - 6:.1f}" y="{y - 2.5:.1f}" width="12" height="5"/>'


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that enclose [low, high]: `ticks(0.912, 0.934)` is [0.91, 0.915, ..., 0.935]."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-12):
        low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]
