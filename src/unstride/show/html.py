"""A report in one file, without scripts or anything from elsewhere, for narrow windows, dark mode and print.

page = render_report("Results", [Section("Accuracy", (Text("On 2,500 images."), Chart(...)))])
"""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from unstride.geometry.grids import by
from unstride.geometry.report import Report
from unstride.show.charts import Chart

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Note:
    """A paragraph that stands out, such as a limitation."""

    text: str


@dataclass(frozen=True)
class Facts:
    """A few large figures: `Facts((("93.1 %", "base model"), ("93.6 %", "recipe")))`."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Columns of numbers are aligned to the right. `strong`: indices of rows in bold."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    strong: frozenset[int] = frozenset()

    @property
    def right(self) -> tuple[bool, ...]:
        """True for each column of numbers."""
        return tuple(numeric(self.rows, k) for k in range(len(self.columns)))


@dataclass(frozen=True)
class Figure:
    """A whole image: the bytes of a PNG, JPEG, WebP or SVG file."""

    data: bytes
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Thumbnail:
    """`mark` is "corrected", "broken" or nothing."""

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


def layer_table(report: Report) -> Table:
    """A row for each layer that `unstride.inspect` finds."""
    return Table(
        ("layer", "rate", "map", "cost of one more state", "stride", "ops"),
        tuple(
            (
                str(layer.index),
                by(layer.rate),
                by(layer.map),
                f"{layer.cost:.2f}x",
                by(layer.stride),
                ", ".join(f"{path} ({kind})" for path, kind in layer.ops),
            )
            for layer in report.layers
        ),
        f"{len(report.layers)} layers, {report.states:,} states; one forward pass uses one of them. "
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


_VALUE = r"[-+±]?[\d.,]+\s?(%|x|s|ms|points?)?"
_NUMBER = re.compile(rf"{_VALUE}( ?\[.*\]| / {_VALUE})?|\[.*\]|nan|-|")


def numeric(rows: Sequence[Sequence[str]], k: int) -> bool:
    """True if column k holds numbers only."""
    return all(_NUMBER.fullmatch(row[k]) for row in rows) and any(row[k] for row in rows)


def as_png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"RIFF", "webp"), (b"<svg", "svg+xml"), (b"<?xml", "svg+xml"))


def _uri(data: bytes) -> str:
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), None)
    if kind is None:
        raise ValueError(f"image: got data that starts with {data[:8]!r}, expected PNG, JPEG, WebP or SVG")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
