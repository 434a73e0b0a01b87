"""Segmentation as figures: the base model's map, the recipe's, where they differ, where the passes disagree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unstride.execution.prediction import Prediction
from unstride.show.answers import class_map, class_name
from unstride.show.passes import summary
from unstride.show.style import INK, PAPER, SOFT, class_colours, library, shorten

Labels = NDArray[np.int64]
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


def overlay(image: Image.Image, labels: Labels, classes: tuple[str, ...], count: int) -> Image.Image:
    """The classes' colours over the image, resized to the map, with an outline around each.

    The background stays as it is, and so do pixels without a label (`count` and above). The outline is black on light
    and white on dark, so that classes stay apart in gray print.
    """
    base = np.asarray(image.convert("RGB").resize(labels.shape[::-1], Image.Resampling.BICUBIC), np.float64)
    labels = np.minimum(labels, count)
    strength = np.full(count + 1, 0.55)
    strength[count] = 0.0
    if classes and classes[0] == "background":
        strength[0] = 0.0
    at = strength[labels][..., None]
    shown = (1 - at) * base + at * np.vstack([palette(classes, count), GRAY])[labels]
    edge = _outline(labels)[..., None]
    contrast = np.where(shown @ LUMINANCE > 110, 0.0, 255.0)[..., None]
    return Image.fromarray(np.rint(np.where(edge, 0.25 * shown + 0.75 * contrast, shown)).astype(np.uint8))


def _outline(labels: Labels) -> NDArray[np.bool_]:
    """The last pixels before another class, to the right or below; wider in large maps, which are shown smaller."""
    wide = max(1, min(labels.shape) // 240)
    edge = np.zeros(labels.shape, bool)
    edge[:-wide] |= labels[:-wide] != labels[wide:]
    edge[:, :-wide] |= labels[:, :-wide] != labels[:, wide:]
    return edge


def strip(image: Image.Image, maps: Sequence[Labels], classes: tuple[str, ...], count: int) -> Image.Image:
    """Side by side: the image, `maps` (truth, base, recipe), and what changed: white is corrected, red is broken."""
    side = max(image.size)
    if side > TILE:
        size = (max(1, image.width * TILE // side), max(1, image.height * TILE // side))
        image = image.resize(size, Image.Resampling.BICUBIC)
        small = [Image.fromarray(m.astype(np.int32)).resize(size, Image.Resampling.NEAREST) for m in maps]
        maps = [np.asarray(m, np.int64) for m in small]
    truth, base, final = maps
    change = np.repeat((np.asarray(image.convert("L")) // 4)[..., None], 3, 2)
    known = truth < count
    change[known & (base != truth) & (final == truth)] = 255
    change[known & (base == truth) & (final != truth)] = (255, 96, 80)  # mid-gray in print
    tiles = [image.convert("RGB"), *(overlay(image, m, classes, count) for m in maps)]
    tiles.append(Image.fromarray(change))
    step = image.width + 3
    out = Image.new("RGB", (step * len(tiles) - 3, image.height), "white")
    for k, tile in enumerate(tiles):
        out.paste(tile, (k * step, 0))
    return out


def plot_segmentation(image: Image.Image | None, p: Prediction, classes: tuple[str, ...] = (), title: str = "") -> Any:
    """A matplotlib Figure: the image, both maps, where they differ, where the passes disagree, and the classes."""
    base, final = class_map(p.base), class_map(p.output)
    count = max(2, p.output.shape[0])
    image = image or Image.new("RGB", final.shape[::-1], "white")
    ratio = final.shape[0] / final.shape[1]
    panel = min(PANEL, PANEL / ratio * 1.2)
    tall = panel * ratio
    width, height = 2 * MARGIN + 3 * panel + 2 * GAP, 1.3 + 2 * (tall + 0.45)
    fig = library().Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    heading = {"color": INK, "va": "center", "size": 16, "weight": "bold"}
    fig.text(MARGIN / width, 1 - 0.44 / height, title or "Base model and recipe", **heading)
    fig.text(MARGIN / width, 1 - 0.77 / height, summary(p), size=10, color=SOFT, va="center")

    def axes(row: int, column: int, words: str) -> Any:
        x, top = MARGIN + column * (panel + GAP), 1.1 + row * (tall + 0.45)
        ax = fig.add_axes((x / width, 1 - (top + 0.3 + tall) / height, panel / width, tall / height))
        ax.set_title(words, loc="left", size=10.5, color=INK, pad=5)
        ax.set_axis_off()
        return ax

    axes(0, 0, "image").imshow(image.convert("RGB").resize(final.shape[::-1], Image.Resampling.BICUBIC))
    scale = max(1, SHARP // min(final.shape))
    for column, words, labels in ((1, "base model", base), (2, "combined", final)):
        ax = axes(0, column, words)
        fine = labels.repeat(scale, 0).repeat(scale, 1)  # outlines of small maps stay thin
        ax.imshow(overlay(image, fine, classes, count))
        _name_classes(ax, fine, classes)
    words = f"where they differ: {(base != final).mean():.1%}, in the new colour"
    axes(1, 0, words).imshow(differences(image, base, final, classes, count))
    _spread(fig, axes(1, 1, "where the passes disagree (spread, nats)"), p.spread.cpu().numpy())
    _legend(axes(1, 2, ""), base, final, classes, count, tall)
    return fig


def differences(image: Image.Image, base: Labels, final: Labels, classes: tuple[str, ...], count: int) -> Image.Image:
    """The image in pale gray, the changed pixels in the colour of their new class."""
    small = image.convert("L").resize(final.shape[::-1], Image.Resampling.BICUBIC)
    gray = np.asarray(small, np.float64)[..., None] * 0.3 + 175
    shown = np.where((base != final)[..., None], palette(classes, count)[final], gray)
    return Image.fromarray(np.rint(shown).astype(np.uint8))


def _spread(fig: Any, ax: Any, spread: NDArray[np.float32]) -> None:
    shown = ax.imshow(spread, cmap="magma", vmin=0, vmax=max(float(np.quantile(spread, 0.995)), 1e-6))
    bar = ax.inset_axes((1.015, 0, 0.025, 1))
    fig.colorbar(shown, cax=bar)
    bar.tick_params(labelsize=7, colors=SOFT)
    bar.yaxis.tick_right()


def _name_classes(ax: Any, labels: Labels, classes: tuple[str, ...]) -> None:
    """The names of large classes in the middle of their largest part, for gray print."""
    from matplotlib import patheffects

    for k in np.unique(labels):
        inside = labels == k
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


def _legend(ax: Any, base: Labels, final: Labels, classes: tuple[str, ...], count: int, tall: float) -> None:
    """The largest classes and their shares of the image, before and after."""
    colours = palette(classes, count)
    before, after = (np.bincount(m.ravel(), minlength=count) / m.size for m in (base, final))
    order = [k for k in np.argsort(-(before + after)) if before[k] + after[k] > 0]
    lines = max(4, int(tall / 0.28) - 1)
    shown = order[: min(LISTED, lines)]
    ax.set_xlim(0, 1)
    ax.set_ylim(lines + 0.5, -0.5)
    for x, text in ((0.68, "base model"), (0.95, "combined")):
        ax.text(x, 0, text, size=9, color=SOFT, ha="right", va="center")
    for row, k in enumerate(shown, 1):
        ax.barh(row, 0.07, 0.6, left=0.1, color=colours[k] / 255)
        ax.text(0.2, row, shorten(class_name(classes, int(k)), 18), size=9.5, color=INK, va="center")
        for x, share in ((0.68, before[k]), (0.95, after[k])):
            ax.text(x, row, f"{share:.1%}", size=9.5, color=INK, ha="right", va="center")
    if len(order) > len(shown):
        ax.text(0.2, len(shown) + 1, f"and {len(order) - len(shown)} smaller", size=9, color=SOFT, va="center")
