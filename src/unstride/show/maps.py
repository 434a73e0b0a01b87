"""Maps of numbers and of features as figures: the base model's, the recipe's, and where the passes differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unstride.errors import InputError
from unstride.execution.prediction import Prediction
from unstride.show.style import INK, SOFT, library, shorten

SIDE = 2.6  # inches of one panel
DPI = 200  # large enough for a slide


def principal(*maps: Tensor) -> list[NDArray[np.uint8]]:
    """Feature maps (C, h, w) of one network as RGB (h, w, 3): their first three common principal components.

    The same colour is the same feature in all of them.
    """
    flat = [m.detach().float().flatten(1).T for m in maps]
    if any(f.shape[1] != flat[0].shape[1] for f in flat):
        raise InputError(f"maps of {', '.join(str(len(m)) for m in maps)} channels have no common components")
    joined = torch.cat(flat)
    middle = joined.mean(0)
    _, _, axes = torch.linalg.svd(joined - middle, full_matrices=False)
    axes = axes[:3] * axes[:3].sum(1, keepdim=True).sign()  # the sign is arbitrary: the same each time
    projected = [(f - middle) @ axes.T for f in flat]
    together = torch.cat(projected)
    low, high = together.quantile(0.02, 0), together.quantile(0.98, 0)
    out = []
    for values, m in zip(projected, maps, strict=True):
        rgb = torch.zeros(len(values), 3)
        rgb[:, : values.shape[1]] = ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
        out.append((rgb * 255).round().byte().view(*m.shape[1:], 3).numpy())
    return out


def plot_map(image: Image.Image | None, p: Prediction, title: str = "") -> Any:
    """A matplotlib Figure: the image, the base model's map, the recipe's, and where the passes differ.

    Maps of one number (depth) share one scale; of features the principal components are shown.
    """
    base, final, spread = (t.detach().float().cpu() for t in (p.base, p.output, p.spread))
    panels = 3 + (image is not None)
    ratio = min(2.0, final.shape[-2] / final.shape[-1])
    size = (SIDE * panels, SIDE * ratio + (0.6 if title else 0.35))
    figure = library().Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    if title:
        figure.suptitle(shorten(title, 90), color=INK, fontsize=10)
    if image is not None:
        _panel(axes[0], np.asarray(image.convert("RGB")), "image")
    before, after, last = axes[-3:]
    if final.ndim == 3 and final.shape[0] > 1:
        for ax, colours, words in zip((before, after), principal(base, final), ("base model", "combined"), strict=True):
            _panel(ax, colours, words)
        spread = spread if spread.ndim == 2 else spread.mean(0)
    else:
        base, final, spread = (t.reshape(t.shape[-2:]) for t in (base, final, spread))
        scale = {"vmin": float(min(base.min(), final.min())), "vmax": float(max(base.max(), final.max()))}
        _panel(before, base.numpy(), "base model", cmap="magma", **scale)
        drawn = _panel(after, final.numpy(), "combined", cmap="magma", **scale)
        figure.colorbar(drawn, ax=[before, after], shrink=0.6, pad=0.02)
    count = len(p.passes)
    drawn = _panel(last, spread.numpy(), f"spread of {count} pass{'es' * (count != 1)}", cmap="viridis")
    figure.colorbar(drawn, ax=last, shrink=0.6, pad=0.02)
    return figure


def _panel(ax: Any, values: NDArray[Any], words: str, **style: Any) -> Any:
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(words, fontsize=8, color=SOFT)
    return ax.imshow(values, interpolation="nearest", **style)
