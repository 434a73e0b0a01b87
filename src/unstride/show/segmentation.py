"""Overlays: what the plain and the enhanced network see, where they differ, where the states disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unstride.execution.prediction import Prediction
from unstride.show.answers import class_map, class_name
from unstride.show.classification import summary
from unstride.show.style import INK, PAPER, SOFT, class_colours, library, shorten

Bytes = NDArray[np.uint8]
MARGIN, PANEL, GAP = 0.4, 3.9, 0.3  # inches
GRAY = (70, 74, 82)
LISTED = 9  # classes in the legend
LUMINANCE = np.array([0.299, 0.587, 0.114])
SHARP = 480  # pixels of a map that is drawn large, at least
TILE = 200  # pixels: the longer side of a strip's images, at most


def palette(classes: tuple[str, ...], count: int) -> NDArray[np.float64]:
    """(K, 3) colours in 0..255; a first class called background is gray."""
    if classes and classes[0] == "background":
        return np.asarray([GRAY, *class_colours(count - 1)], np.float64)
    return np.asarray(class_colours(count), np.float64)


def overlay(image: Image.Image, seen: NDArray[np.int64], classes: tuple[str, ...], count: int) -> Image.Image:
    """The classes' colours over the image, which is brought to the map's size, and an outline around each.

    The background stays as it is, and so do pixels without a label (`count` and above). The outline is black on light
    and white on dark, so that the classes stay apart in gray print.
    """
    base = np.asarray(image.convert("RGB").resize(seen.shape[::-1], Image.Resampling.BICUBIC), np.float64)
    seen = np.minimum(seen, count)
    strength = np.full(count + 1, 0.55)
    strength[count] = 0.0
    if classes and classes[0] == "background":
        strength[0] = 0.0
    at = strength[seen][..., None]
    shown = (1 - at) * base + at * np.vstack([palette(classes, count), GRAY])[seen]
    edge = _outline(seen)[..., None]
    contrast = np.where(shown @ LUMINANCE > 110, 0.0, 255.0)[..., None]
    return Image.fromarray(np.rint(np.where(edge, 0.25 * shown + 0.75 * contrast, shown)).astype(np.uint8))


def _outline(seen: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The last pixels before another class, to the right or below; wider in large maps, which are shown smaller."""
    wide = max(1, min(seen.shape) // 240)
    edge = np.zeros(seen.shape, bool)
    edge[:-wide] |= seen[:-wide] != seen[wide:]
    edge[:, :-wide] |= seen[:, :-wide] != seen[:, wide:]
    return edge


def strip(image: Image.Image, maps: Sequence[NDArray[np.int64]], classes: tuple[str, ...], count: int) -> Image.Image:
    """Side by side: the image, `maps` (labels, plain, enhanced), and what changed: white now right, red now wrong."""
    side = max(image.size)
    if side > TILE:
        size = (max(1, image.width * TILE // side), max(1, image.height * TILE // side))
        image = image.resize(size, Image.Resampling.BICUBIC)
        small = [Image.fromarray(m.astype(np.int32)).resize(size, Image.Resampling.NEAREST) for m in maps]
        maps = [np.asarray(m, np.int64) for m in small]
    truth, plain, better = maps
    change = np.repeat((np.asarray(image.convert("L")) // 4)[..., None], 3, 2)
    known = truth < count
    change[known & (plain != truth) & (better == truth)] = 255
    change[known & (plain == truth) & (better != truth)] = (
        255,
        96,
        80,
    )  # mid-gray in print, unlike white and the image
    tiles = [image.convert("RGB"), *(overlay(image, m, classes, count) for m in maps)]
    tiles.append(Image.fromarray(change))
    step = image.width + 3
    out = Image.new("RGB", (step * len(tiles) - 3, image.height), "white")
    for k, tile in enumerate(tiles):
        out.paste(tile, (k * step, 0))
    return out


def plot_segmentation(
    image: Image.Image, prediction: Prediction, classes: tuple[str, ...] = (), title: str = ""
) -> Any:
    """A matplotlib Figure: `plot_segmentation(photo, better.explain(x)[0], classes).savefig("a.png")`."""
    figure = library()
    plain, final = class_map(prediction.plain), class_map(prediction.logits)
    count = max(2, prediction.logits.shape[0])
    base = image.convert("RGB").resize(final.shape[::-1], Image.Resampling.BICUBIC)
    ratio = final.shape[0] / final.shape[1]
    panel = min(PANEL, PANEL / ratio * 1.2)
    tall = panel * ratio
    width = 2 * MARGIN + 3 * panel + 2 * GAP
    height = 1.15 + 2 * (tall + 0.45) + 0.15
    fig = figure.Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    fig.text(
        MARGIN / width, 1 - 0.44 / height, title or "Plain and enhanced", size=16, weight="bold", color=INK, va="center"
    )
    fig.text(MARGIN / width, 1 - 0.77 / height, summary(prediction), size=10, color=SOFT, va="center")

    def axes(row: int, column: int, heading: str) -> Any:
        x, top = MARGIN + column * (panel + GAP), 1.1 + row * (tall + 0.45)
        ax = fig.add_axes((x / width, 1 - (top + 0.3 + tall) / height, panel / width, tall / height))
        ax.set_title(heading, loc="left", size=10.5, color=INK, pad=5)
        ax.set_axis_off()
        return ax

    axes(0, 0, "image").imshow(base)
    scale = max(1, SHARP // min(final.shape))
    for column, heading, found in ((1, "plain", plain), (2, "enhanced", final)):
        ax = axes(0, column, heading)
        fine = found.repeat(scale, 0).repeat(scale, 1)  # thin outlines of small maps, too
        ax.imshow(overlay(image, fine, classes, count))
        _name(ax, fine, classes)
    differ = plain != final
    heading = f"where they differ: {differ.mean():.1%}, in the new colour"
    axes(1, 0, heading).imshow(_differences(base, final, differ, palette(classes, count)))
    spread = prediction.spread.cpu().numpy()
    ax = axes(1, 1, "where the looks disagree (spread, nats)")
    shown = ax.imshow(spread, cmap="magma", vmin=0, vmax=max(float(np.quantile(spread, 0.995)), 1e-6))
    bar = ax.inset_axes((1.015, 0, 0.025, 1))
    fig.colorbar(shown, cax=bar)
    bar.tick_params(labelsize=7, colors=SOFT)
    bar.yaxis.tick_right()
    legend = axes(1, 2, "")
    _legend(legend, plain, final, classes, count, tall)
    return fig


def _name(ax: Any, seen: NDArray[np.int64], classes: tuple[str, ...]) -> None:
    """The names of large classes in the middle of their largest part: colours are lost in gray print."""
    from matplotlib import patheffects

    for k in np.unique(seen):
        inside = seen == k
        if inside.mean() < 0.02 or (classes and classes[0] == "background" and k == 0):
            continue
        y, x = _middle(inside)
        text = ax.text(x, y, shorten(class_name(classes, int(k)), 14), size=8, color=INK, ha="center", va="center")
        text.set_path_effects([patheffects.withStroke(linewidth=2, foreground=PAPER)])
        text.set_clip_on(True)


def _middle(inside: NDArray[np.bool_]) -> tuple[int, int]:
    """The pixel with the most of the area around it, a sixteenth of the image to each side."""
    reach = max(1, max(inside.shape) // 16)
    sums = np.pad(np.pad(inside.astype(np.int64), reach).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    span = 2 * reach + 1
    around = sums[span:, span:] - sums[:-span, span:] - sums[span:, :-span] + sums[:-span, :-span]
    y, x = np.unravel_index(np.where(inside, around, -1).argmax(), inside.shape)
    return int(y), int(x)


def _differences(
    base: Image.Image, final: NDArray[np.int64], differ: NDArray[np.bool_], colours: NDArray[np.float64]
) -> Bytes:
    """The image in pale gray, the changed pixels in the colour of their new class."""
    gray = np.asarray(base.convert("L"), np.float64)[..., None] * 0.3 + 175
    return np.rint(np.where(differ[..., None], colours[final], gray)).astype(np.uint8)


def _legend(
    ax: Any, plain: NDArray[np.int64], final: NDArray[np.int64], classes: tuple[str, ...], count: int, tall: float
) -> None:
    """The largest classes and their share of the image, plain and enhanced."""
    colours = palette(classes, count)
    before, after = (np.bincount(m.ravel(), minlength=count) / m.size for m in (plain, final))
    order = [k for k in np.argsort(-(before + after)) if before[k] + after[k] > 0]
    lines = max(4, int(tall / 0.28) - 1)
    shown = order[: min(LISTED, lines)]
    ax.set_xlim(0, 1)
    ax.set_ylim(lines + 0.5, -0.5)
    for x, text in ((0.66, "plain"), (0.92, "enhanced")):
        ax.text(x, 0, text, size=9, color=SOFT, ha="right", va="center")
    for row, k in enumerate(shown, 1):
        ax.barh(row, 0.07, 0.6, left=0.1, color=colours[k] / 255)
        ax.text(0.2, row, shorten(class_name(classes, int(k)), 18), size=9.5, color=INK, va="center")
        for x, share in ((0.66, before[k]), (0.92, after[k])):
            ax.text(x, row, f"{share:.1%}", size=9.5, color=INK, ha="right", va="center")
    if len(order) > len(shown):
        ax.text(0.2, len(shown) + 1, f"and {len(order) - len(shown)} smaller", size=9, color=SOFT, va="center")
