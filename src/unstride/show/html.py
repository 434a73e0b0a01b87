"""A report in one file: no script, no font, no image from anywhere else; narrow windows, dark mode and print included.

page = render_report("Results", [Section("Accuracy", (Text("On 2,500 images."), *charts("accuracy", measured)))])
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from PIL import Image

from unstride.geometry.report import Report
from unstride.show.charts import Chart, Point, Series


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


@dataclass(frozen=True)
class Picture:
    """A whole picture: the bytes of a PNG, JPEG, WebP or SVG file."""

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
    """Small pictures with their captions; `wide`: each is a strip of several."""

    items: tuple[Thumbnail, ...]
    caption: str = ""
    wide: bool = False


Block = Text | Note | Facts | Table | Chart | Picture | Thumbnails


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
    """The two pictures of a comparison: `metric` over the budget and over the cost, a line per key of `measured`."""

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
                f"{layer.rate[0]}x{layer.rate[1]}",
                f"{layer.map[0]}x{layer.map[1]}",
                f"{layer.cost:.0%} of a forward",
                f"{layer.stride[0]}x{layer.stride[1]}",
                ", ".join(f"{path} ({kind})" for path, kind in layer.ops),
            )
            for layer in report.layers
        ),
        f"{len(report.layers)} layers, {report.states:,} states; a plain forward uses one. "
        f"{report.macs / 1e9:.2f} GMACs at {report.image[0]}x{report.image[1]}.",
    )


def render_report(title: str, sections: Sequence[Section], subtitle: str = "") -> str:
    """The page as text: write it to a file that ends in .html."""
    body = [f"<h1>{escape(title)}</h1>"]
    if subtitle:
        body.append(f'<p class="soft">{escape(subtitle)}</p>')
    for section in sections:
        body.append(f"<section><h2>{escape(section.title)}</h2>")
        blocks = list(section.blocks)
        while blocks:
            if isinstance(blocks[0], Chart):  # neighbours stand side by side where there is room
                row = [_figure(b) for b in _leading_charts(blocks)]
                body.append('<div class="charts">' + "".join(row) + "</div>")
                blocks = blocks[len(row) :]
            else:
                body.append(_block(blocks.pop(0)))
        body.append("</section>")
    return _PAGE.format(title=escape(title), style=_STYLE, body="\n".join(body))


def _leading_charts(blocks: Sequence[Block]) -> list[Chart]:
    out: list[Chart] = []
    for block in blocks:
        if not isinstance(block, Chart):
            break
        out.append(block)
    return out


def _figure(chart: Chart) -> str:
    note = f'<p class="soft">{escape(chart.note)}</p>' if chart.note else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{chart.svg()}{note}</figure>"


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Note(text):
            return f'<p class="note">{escape(text)}</p>'
        case Facts(items):
            tiles = (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in items)
            return f'<div class="facts">{"".join(tiles)}</div>'
        case Table():
            return _table(block)
        case Picture(data, alt, caption):
            words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
            return f'<figure class="picture"><img src="{_uri(data)}" alt="{escape(alt)}">{words}</figure>'
        case Thumbnails(items, caption, wide):
            words = f'<p class="soft">{escape(caption)}</p>' if caption else ""
            kind = "thumbs strips" if wide else "thumbs"
            return f'{words}<div class="{kind}">{"".join(map(_thumbnail, items))}</div>'
        case Chart():
            return _figure(block)


_VALUE = r"[-+±]?[\d.,]+\s?(%|x|s|ms|points?)?( of a forward)?"
_NUMBER = re.compile(rf"{_VALUE}( ?\[.*\]| / {_VALUE})?|\[.*\]|nan|-|")


def numeric(rows: Sequence[Sequence[str]], k: int) -> bool:
    """Whether column k holds numbers."""
    return all(_NUMBER.fullmatch(row[k]) for row in rows) and any(row[k] for row in rows)


def _table(table: Table) -> str:
    right = [numeric(table.rows, k) for k in range(len(table.columns))]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="n">{escape(c)}</{tag}>' if r else f"<{tag}>{escape(c)}</{tag}>"
            for c, r in zip(row, right, strict=True)
        )

    rows = [
        f'<tr class="strong">{cells("td", row)}</tr>' if k in table.strong else f"<tr>{cells('td', row)}</tr>"
        for k, row in enumerate(table.rows)
    ]
    words = f"<figcaption>{escape(table.caption)}</figcaption>" if table.caption else ""
    head = cells("th", table.columns)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    # The words stay outside of what scrolls: they are read in a narrow window, too.
    return f'<figure class="table"><div class="wide"><table>{inner}</table></div>{words}</figure>'


_MARKS = {"corrected": "✓ corrected", "corrupted": "✗ corrupted"}


def _thumbnail(thumb: Thumbnail) -> str:
    small = ' class="pixels"' if thumb.image.height <= 100 else ""
    mark = f'<b class="{escape(thumb.mark)}">{escape(_MARKS.get(thumb.mark, thumb.mark))}</b>' if thumb.mark else ""
    uri = _uri(as_png(thumb.image))
    words = escape(thumb.caption)
    return f'<figure><img{small} src="{uri}" alt="{words}"><figcaption>{mark}{words}</figcaption></figure>'


def as_png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"RIFF", "webp"), (b"<svg", "svg+xml"), (b"<?xml", "svg+xml"))


def _uri(data: bytes) -> str:
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), None)
    if kind is None:
        raise ValueError(f"a picture that starts with {data[:8]!r}; wanted PNG, JPEG, WebP or SVG")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


# The policy makes the browser refuse anything from outside, so "self-contained" is not only a promise.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f27; --soft: #5d6675; --line: #d9dee6; --tint: #f4f6f9;
  --s0: #1f6feb; --s1: #c2570c; --s2: #0b7a55; --s3: #a0246e; --good: #0b7a55; --bad: #b42318; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --paper: #12151b; --ink: #e8ebf0; --soft: #9aa4b2; --line: #333b47;
  --tint: #1b2029; --s0: #6ea8ff; --s1: #ff9d5c; --s2: #4cc38a; --s3: #f07ab8; --good: #4cc38a; --bad: #ff8577;
  --warn: #e5b454; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2.2rem); line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.3rem; margin: 2.8rem 0 0.6rem; padding-top: 0.9rem; border-top: 1px solid var(--line); }
p { max-width: 46rem; margin: 0.6rem 0; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.note { border-left: 4px solid var(--warn); padding: 0.5rem 0.8rem; background: var(--tint); }
.table { margin: 1rem 0; }
.wide { overflow-x: auto; margin-bottom: 0.5rem; background:
  linear-gradient(90deg, transparent, var(--paper) 60%) right / 3rem 100% no-repeat local,
  linear-gradient(90deg, transparent, var(--line)) right / 1rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; min-width: 60%; }
th, td { text-align: left; padding: 0.35rem 0.9rem 0.35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
.n { text-align: right; white-space: nowrap; }
.strong td { font-weight: 650; }
td:first-child, th:first-child { white-space: nowrap; }
@media (max-width: 34rem) { table { font-size: 0.84rem; } th, td { padding-right: 0.6rem; } }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.8rem; margin: 1rem 0; }
.facts div { border: 1px solid var(--line); border-radius: 10px; padding: 0.7rem 0.9rem; }
.facts b { display: block; font-size: 1.45rem; font-weight: 650; line-height: 1.2; }
.facts span { color: var(--soft); font-size: 0.85rem; }
figure { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.4rem;
  margin: 1.2rem 0; }
.charts figcaption { color: var(--ink); font-weight: 600; margin-bottom: 0.3rem; }
.chart { width: 100%; height: auto; display: block; }
.chart text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.chart path { fill: none; }
.chart .grid { stroke: var(--line); }
.chart .axis { stroke: var(--soft); }
.chart .base { stroke: var(--soft); stroke-dasharray: 1 4; stroke-linecap: round; stroke-width: 1.6; }
.chart .line { stroke: currentColor; stroke-width: 2.2; stroke-linejoin: round; }
.chart .whisker { stroke: currentColor; stroke-width: 1.2; }
.chart .mark { fill: currentColor; stroke: var(--paper); stroke-width: 1.2; }
.chart .band { fill: currentColor; opacity: 0.12; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.picture { margin: 1.2rem 0; overflow-x: auto; }
.picture img { width: 100%; min-width: 40rem; height: auto; border-radius: 8px; border: 1px solid var(--line);
  background: #fff; }
.thumbs { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: 0.9rem; margin: 0.8rem 0; }
.thumbs.strips { grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.thumbs img { width: 100%; height: auto; border-radius: 6px; display: block; }
.thumbs figcaption { font-size: 0.8rem; line-height: 1.35; margin-top: 0.3rem; }
.thumbs figcaption b { display: block; }
.pixels { image-rendering: pixelated; }
.corrected { color: var(--good); } .corrupted { color: var(--bad); }
@media print { :root { --paper: #fff; --ink: #000; --soft: #333; --line: #bbb; --tint: #fff; --s0: #000; --s1: #555;
  --s2: #000; --s3: #555; --good: #000; --bad: #000; --warn: #000; }
  main { max-width: none; padding: 0; } figure, tr, .facts { break-inside: avoid; } h2, .soft { break-after: avoid; }
  .wide, .picture { overflow: visible; } .picture img { min-width: 0; } }
"""
