"""A report in one file: no script, no font, no image from anywhere else; narrow windows, dark mode and print included.

page = render_report("Results", [Section("Accuracy", (Text("On 2,500 images."), *charts("accuracy", measured)))])
"""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from unstride.geometry.grids import by
from unstride.geometry.report import Report
from unstride.show.charts import Chart, Point, Series

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Note:
    """A paragraph that stands out: what could not be done, what to keep in mind."""

    text: str


@dataclass(frozen=True)
class Facts:
    """A few large figures: `Facts((("93.1 %", "plain"), ("93.6 %", "10 states")))`."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Columns of numbers are set to the right. `strong` are the indices of rows to stress."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    strong: frozenset[int] = frozenset()

    @property
    def right(self) -> tuple[bool, ...]:
        """Which columns hold numbers."""
        return tuple(numeric(self.rows, k) for k in range(len(self.columns)))


@dataclass(frozen=True)
class Figure:
    """A whole image: the bytes of a PNG, JPEG, WebP or SVG file."""

    data: bytes
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Thumbnail:
    """`mark` is "corrected", "corrupted" or nothing."""

    image: Image.Image
    caption: str
    mark: str = ""


@dataclass(frozen=True)
class Thumbnails:
    """Small images with their captions; `wide`: each is a strip of several."""

    items: tuple[Thumbnail, ...]
    caption: str = ""
    wide: bool = False


Block = Text | Note | Facts | Table | Chart | Figure | Thumbnails


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Measured:
    """One budget's result: the value, its interval (plain value + interval of the gain) and its cost, plain = 1."""

    budget: int
    value: float
    low: float
    high: float
    cost: float


def charts(metric: str, measured: Mapping[str, Sequence[Measured]], note: str = "") -> tuple[Chart, Chart]:
    """The two images of a comparison: `metric` over the budget and over the cost, a line per key of `measured`."""

    def lines(over_cost: bool) -> tuple[Series, ...]:
        return tuple(
            Series(
                name,
                tuple(
                    Point(m.cost if over_cost else m.budget, m.value, m.low, m.high, f"{m.budget} states")
                    for m in results
                ),
            )
            for name, results in measured.items()
        )

    plain = next((m.value for results in measured.values() for m in results if m.budget == 1), None)
    return (
        Chart(f"{metric} over the budget", "budget (states per image)", metric, lines(False), plain, note=note),
        Chart(f"{metric} over the cost", "cost (MACs, plain forward = 1)", metric, lines(True), plain, note=note),
    )


def layer_table(report: Report) -> Table:
    """What `unstride.inspect` found, a row per layer."""
    return Table(
        ("layer", "rate", "map", "one more state costs", "stride", "ops"),
        tuple(
            (
                str(layer.index),
                by(layer.rate),
                by(layer.map),
                f"{layer.cost:.0%} of a forward",
                by(layer.stride),
                ", ".join(f"{path} ({kind})" for path, kind in layer.ops),
            )
            for layer in report.layers
        ),
        f"{len(report.layers)} layers, {report.states:,} states; a plain forward uses one. "
        f"{report.macs / 1e9:.2f} GMACs at {by(report.image)}.",
    )


def render_report(title: str, sections: Sequence[Section], subtitle: str = "") -> str:
    """The page as text: write it to a file that ends in .html."""
    return _template().render(title=title, sections=sections, subtitle=subtitle)


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("unstride.show", "pages")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(kind=lambda block: type(block).__name__, uri=_uri, png=as_png)
    return pages.get_template("report.html")


_VALUE = r"[-+±]?[\d.,]+\s?(%|x|s|ms|points?)?( of a forward)?"
_NUMBER = re.compile(rf"{_VALUE}( ?\[.*\]| / {_VALUE})?|\[.*\]|nan|-|")


def numeric(rows: Sequence[Sequence[str]], k: int) -> bool:
    """Whether column k holds numbers."""
    return all(_NUMBER.fullmatch(row[k]) for row in rows) and any(row[k] for row in rows)


def as_png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"RIFF", "webp"), (b"<svg", "svg+xml"), (b"<?xml", "svg+xml"))


def _uri(data: bytes) -> str:
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), None)
    if kind is None:
        raise ValueError(f"an image that starts with {data[:8]!r}; wanted PNG, JPEG, WebP or SVG")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
