"""Numbers, features and neighbours as images: depth with its spread, principal components, who is nearest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unstride.errors import InputError
from unstride.execution.prediction import Prediction
from unstride.show.style import COLOURS, INK, SOFT, library, shorten

SIDE = 2.6  # inches of one image
DPI = 200  # large enough for a slide
SHOWN = 8  # neighbours at most


def principal(*maps: Tensor) -> list[NDArray[np.uint8]]:
    """Feature maps (C, h, w) of one network -> RGB (h, w, 3) by their first three common principal components.

    The same colour is the same feature in all of them.
    """
    flat = [m.detach().float().flatten(1).T for m in maps]
    if any(f.shape[1] != flat[0].shape[1] for f in flat):
        raise InputError(f"maps of {', '.join(str(len(m)) for m in maps)} channels have no common components")
    everything = torch.cat(flat)
    middle = everything.mean(0)
    _, _, axes = torch.linalg.svd(everything - middle, full_matrices=False)
    axes = axes[:3] * axes[:3].sum(1, keepdim=True).sign()  # a sign of its own is no news: the same each time
    seen = [(f - middle) @ axes.T for f in flat]
    together = torch.cat(seen)
    low, high = together.quantile(0.02, 0), together.quantile(0.98, 0)
    out = []
    for one, m in zip(seen, maps, strict=True):
        values = ((one - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
        rgb = torch.zeros(len(values), 3)
        rgb[:, : values.shape[1]] = values  # fewer than three channels
        out.append((rgb * 255).round().byte().view(*m.shape[1:], 3).numpy())
    return out


def plot_map(image: Image.Image, prediction: Prediction, title: str = "") -> Any:
    """`plot_map(photo, better.explain(x)[0])`: the image, plain, enhanced, and where the looks differ.

    Maps of one number (depth) share one scale of colours; of features the principal components are shown.
    """
    plain, final, spread = (t.detach().float().cpu() for t in (prediction.plain, prediction.logits, prediction.spread))
    figure, axes = _row(4, image, title)
    _image(axes[0], image, "image")
    if final.ndim == 3 and final.shape[0] > 1:
        before, after = principal(plain, final)
        for ax, seen, words in ((axes[1], before, "plain"), (axes[2], after, "enhanced")):
            _image(ax, Image.fromarray(seen), words)
        spread = spread if spread.ndim == 2 else spread.mean(0)
    else:
        plain, final, spread = (t.reshape(t.shape[-2:]) for t in (plain, final, spread))
        low, high = float(min(plain.min(), final.min())), float(max(plain.max(), final.max()))
        for ax, one, words in ((axes[1], plain, "plain"), (axes[2], final, "enhanced")):
            drawn = ax.imshow(one.numpy(), cmap="magma", vmin=low, vmax=high)
            _words(ax, words)
        figure.colorbar(drawn, ax=axes[1:3], shrink=0.6, pad=0.02)
    drawn = axes[3].imshow(spread.numpy(), cmap="viridis")
    _words(axes[3], f"spread of {len(prediction.states)} looks")
    figure.colorbar(drawn, ax=axes[3], shrink=0.6, pad=0.02)
    return figure


def plot_features(image: Image.Image, maps: dict[str, Tensor], title: str = "") -> Any:
    """`plot_features(photo, {"plain": f, "twice as fine": fine})`: principal components, one colour for one feature."""
    if not maps:
        raise InputError("maps: got none, wanted at least one, such as {'plain': better.features(x)[0]}")
    figure, axes = _row(1 + len(maps), image, title)
    _image(axes[0], image, "image")
    for ax, name, seen in zip(axes[1:], maps, principal(*maps.values()), strict=True):
        _image(ax, Image.fromarray(seen), f"{name}, {seen.shape[0]} x {seen.shape[1]}")
    return figure


def plot_neighbours(
    query: Image.Image,
    before: Sequence[Image.Image],
    after: Sequence[Image.Image],
    right: Sequence[Sequence[bool]] = (),
) -> Any:
    """`plot_neighbours(photo, plain_nearest, better_nearest)`: an image's neighbours, plain above enhanced.

    `right`: of both rows, whether each neighbour is of the query's class; it is framed by that.
    """
    rows = [list(before)[:SHOWN], list(after)[:SHOWN]]
    if not rows[0] or len(rows[0]) != len(rows[1]):
        raise InputError(f"neighbours: got {len(before)} before and {len(after)} after, wanted as many of both")
    count = len(rows[0])
    size = (SIDE * 0.7 * (count + 1), SIDE * 1.6)
    figure = library().Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(2, count + 1, squeeze=False)
    for k, (row, words) in enumerate(zip(rows, ("plain", "enhanced"), strict=True)):
        _image(axes[k][0], query, words)
        for j, near in enumerate(row):
            _image(axes[k][j + 1], near, "")
            if right:
                colour = COLOURS[2] if right[k][j] else COLOURS[7]
                for side in axes[k][j + 1].spines.values():
                    side.set(visible=True, color=colour, linewidth=3)
    return figure


def _row(count: int, image: Image.Image, title: str) -> tuple[Any, Any]:
    """Panels of the image's own form, with room for the words above them."""
    height = SIDE * min(2.0, image.height / image.width) + (0.6 if title else 0.35)
    figure = library().Figure(figsize=(SIDE * count, height), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    if title:
        figure.suptitle(shorten(title, 90), color=INK, fontsize=10)
    return figure, axes


def _image(ax: Any, image: Image.Image, words: str) -> None:
    ax.imshow(np.asarray(image.convert("RGB")), interpolation="nearest")
    _words(ax, words)


def _words(ax: Any, words: str) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(words, fontsize=8, color=SOFT)
