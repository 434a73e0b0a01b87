"""The report page: self-contained, escaped, well formed, and its charts hold the numbers they are given."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from torch import nn

import unstride
from unstride.show.charts import Chart, Point, Series
from unstride.show.html import (
    Block,
    Facts,
    Figure,
    Note,
    Section,
    Table,
    Text,
    Thumbnail,
    Thumbnails,
    as_png,
    layer_table,
    numeric,
    render_report,
)

EVIL = '<script>alert(1)</script> & "quotes"'
CHART = Chart(
    "accuracy", "states", "accuracy",
    (
        Series("mean", (Point(1, 0.92), Point(10, 0.93, 0.921, 0.939, "10 states"))),
        Series("learned", (Point(1, 0.92), Point(10, 0.935, 0.925, 0.945))),
    ),
    baseline=0.92,
    note=EVIL,
)  # fmt: skip


def page() -> str:
    dot = Image.new("L", (28, 28), 90)
    blocks = (
        Text(EVIL),
        Note(EVIL),
        Facts(((EVIL, EVIL),)),
        Table((EVIL, "n"), ((EVIL, "1.5 %"),), EVIL, frozenset({0})),
        CHART,
        CHART,
        Figure(as_png(dot), EVIL, EVIL),
        Thumbnails((Thumbnail(dot, EVIL, "corrected"), Thumbnail(dot, "b", "broken")), EVIL),
    )
    return render_report(EVIL, [Section(EVIL, blocks)], EVIL)


class Outline(HTMLParser):
    """Open and closed tags must match; attributes are kept."""

    VOID = frozenset({"meta", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_from_outside() -> None:
    outline = Outline()
    text = page()
    outline.feed(text)
    assert outline.open == []
    tags = [tag for tag, _ in outline.seen]
    assert not {"script", "link", "iframe", "object"} & set(tags)
    for _, attributes in outline.seen:
        assert (attributes.get("src") or "data:").startswith("data:")
        assert "href" not in attributes
    assert "url(" not in text
    assert "@import" not in text
    assert "<script>" not in text
    assert text.count("&lt;script&gt;") >= 12
    assert "default-src 'none'" in text


def test_the_template_knows_every_block() -> None:
    """One that it did not know would be left out of the page without a word."""
    text = resources.files("unstride.show").joinpath("pages", "report.html").read_text("utf-8")
    known = re.findall(r'if kind == "(\w+)"', text)
    assert sorted(known) == sorted(block.__name__ for block in get_args(Block))


def test_dark_mode_print_and_narrow_windows_are_provided_for() -> None:
    text = page()
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert 'name="viewport"' in text
    assert "✓ corrected" in text  # in words, too: colour alone is lost in print
    assert "✗ broken" in text
    drawn = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(drawn) == 2
    for svg in drawn:
        assert "stroke-dasharray" in svg  # the second line differs without colour
        assert "<circle" in svg
        assert '<rect class="mark"' in svg


def test_charts_put_values_where_they_belong() -> None:
    svg = ElementTree.fromstring(CHART.svg())
    titles = [t.text for t in svg.iter("title")]
    assert "mean, 10 states: 93.00 % [92.10 %, 93.90 %]" in titles
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in svg.iter("circle")]
    (x1, y1), (x10, y10) = circles[:2]
    squares = [float(r.get("y", 0)) + 4 for r in svg.iter("rect")]
    assert x10 > x1
    assert squares[1] < y10 < y1  # higher values are higher on the page
    assert (y1 - y10) / (y1 - squares[1]) == pytest.approx(0.01 / 0.015, abs=0.01)
    assert "learned: 1 92.00 %" in svg.get("aria-label", "")


def test_columns_of_numbers_are_recognised() -> None:
    rows = [
        ("1", "+0.44 [-0.10, +0.92]", "1,203 / 45", "7.9x", "0.90x", "2x2"),
        ("12", "-", "0 / 0", "1.0x", "3%", ""),
    ]
    assert [numeric(rows, k) for k in range(6)] == [True, True, True, True, True, False]


def test_the_layer_table_says_what_inspect_found() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    report = unstride.inspect(model, torch.randn(1, 3, 16, 16))
    table = layer_table(report)
    assert [row[0] for row in table.rows] == ["1", "2"]
    assert table.rows[0][1] == "2x2"
    assert "16 states" in table.caption
    signals = nn.Sequential(nn.Conv1d(2, 4, 3, 2, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    table = layer_table(unstride.inspect(signals, torch.randn(1, 2, 16)))
    assert table.rows[0][1:3] == ("2", "8") and table.caption.endswith("at 16.")


def test_an_image_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected PNG"):
        render_report("t", [Section("s", (Figure(b"GIF89a", "a"),))])


@pytest.mark.browser
def test_a_browser_shows_it_wide_narrow_and_dark(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    (tmp_path / "r.html").write_text(page(), "utf-8")

    def shot(name: str, size: str, *options: str) -> Image.Image:
        target = tmp_path / f"{name}.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
        command += [f"--user-data-dir={tmp_path / name}", f"--window-size={size}", f"--screenshot={target}"]
        subprocess.run([*command, (tmp_path / "r.html").as_uri()], check=True, capture_output=True, timeout=120)
        return Image.open(target).convert("RGB")

    wide, narrow = shot("wide", "1200,900"), shot("narrow", "500,900")
    dark = shot("dark", "1200,900", "--blink-settings=preferredColorScheme=0")
    assert wide.getpixel((5, 5)) == narrow.getpixel((5, 5)) == (255, 255, 255)
    assert sum(dark.getpixel((5, 5))) < 120  # type: ignore[arg-type]
    for image in (wide, narrow, dark):
        assert len(image.getcolors(10**6) or ()) > 100  # text, lines, bands: something is drawn
