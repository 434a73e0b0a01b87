"""Gain against cost as an SVG image: every row named beside its point, with both intervals.

svg = gain_against_cost(rows, strong={"tuned"})
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from unstride.evaluation.metric_names import unit_of
from unstride.evaluation.rows import Row
from unstride.show.charts import ticks

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 24, 48
LINE = 14  # pixels between two names
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.soft{fill:#777}.grid{stroke:#e3e3e3}.axis{stroke:#999}"
    ".bar{stroke:#7a93b8}.point{fill:#2f5f9e}.strong .point{fill:#c2541b}.strong .bar{stroke:#c2541b}"
    ".strong text{font-weight:700}.lead{stroke:#bbb;stroke-width:.7}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.soft{fill:#999}.grid{stroke:#3a3a3a}}"
)


def gain_against_cost(rows: Sequence[Row], strong: Collection[str] = ()) -> bytes:
    """The image as bytes. `strong`: names of rows that stand out, such as the recommended one."""
    unit, scale = unit_of(rows[0].metric)
    gains = [(0.0, 0.0, 0.0) if r.gain is None else _scaled(r, scale) for r in rows]
    y_ticks = ticks(min(0.0, *(low for _, low, _ in gains)), max(0.0, *(high for _, _, high in gains)))
    x_ticks = ticks(0.0, max(r.cost.high for r in rows))

    def x(value: float) -> float:
        return LEFT + value / x_ticks[-1] * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{_STYLE}</style>',
        *_axes(x, y, x_ticks, y_ticks, unit, rows[0]),
    ]
    places = _apart([y(gain) for gain, _, _ in gains])
    for row, (gain, low, high), at in zip(rows, gains, places, strict=True):
        across, up = x(row.cost.estimate), y(gain)
        kind = ' class="strong"' if row.name in strong else ""
        text = WIDTH - RIGHT + 16
        parts.append(
            f'<g{kind}><path class="bar" d="M{across:.1f} {y(low):.1f}V{y(high):.1f}'
            f'M{x(row.cost.low):.1f} {up:.1f}H{x(row.cost.high):.1f}"/>'
            f'<path class="lead" d="M{across:.1f} {up:.1f}L{text - 4} {at:.1f}"/>'
            f'<circle class="point" cx="{across:.1f}" cy="{up:.1f}" r="4"/>'
            f'<text x="{text}" y="{at + 4:.1f}">{escape(_short(row.name))}</text></g>'
        )
    return "".join([*parts, "</svg>"]).encode()


def _scaled(row: Row, scale: float) -> tuple[float, float, float]:
    assert row.gain is not None
    return scale * row.gain.estimate, scale * row.gain.low, scale * row.gain.high


def _axes(x, y, x_ticks, y_ticks, unit: str, row: Row) -> list[str]:  # type: ignore[no-untyped-def]
    parts = [f'<path class="grid" d="M{LEFT} {y(t):.1f}H{WIDTH - RIGHT}"/>' for t in y_ticks]
    parts += [f'<text x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{_signed(t)}</text>' for t in y_ticks]
    foot = HEIGHT - BOTTOM + 18
    parts += [f'<text x="{x(t):.1f}" y="{foot}" text-anchor="middle">{t:g}</text>' for t in x_ticks]
    parts.append(f'<path class="axis" d="M{LEFT} {y(0):.1f}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="soft" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">cost, {escape(row.cost_unit)}</text>'
    )
    what = row.metric if unit == row.metric else f"{row.metric}, {unit}"
    parts.append(f'<text class="soft" x="4" y="14">gain in {escape(what)} (bars: 95 % CI)</text>')
    return parts


def _signed(value: float) -> str:
    return f"{value:+g}" if value else "0"


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights of the names: those of their points, moved so that no two overlap."""
    order = sorted(range(len(heights)), key=lambda k: heights[k])
    places = list(heights)
    last = float(TOP - LINE)
    for k in order:
        places[k] = last = max(heights[k], last + LINE)
    over = last - (HEIGHT - BOTTOM)
    bound = float("inf")
    for k in reversed(order) if over > 0 else ():
        places[k] = bound = min(places[k], bound - LINE, HEIGHT - BOTTOM)
    return places


def _short(name: str, length: int = 34) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
