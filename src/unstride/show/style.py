"""What all figures share: the plot library, colours, text that fits."""

from __future__ import annotations

import colorsys
import io
import warnings
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from unstride.errors import NotWritten, OptionError
from unstride.storage.files import check_file, write_atomic
from unstride.views.images import Preprocess

INK, SOFT, LINE, FAINT, PAPER = "#1b1f27", "#5d6675", "#aeb7c4", "#d9dee6", "#ffffff"
PLAIN = "#8b94a3"  # of the base model
# Distinct in hue and in lightness, for colour-blind readers and for gray print.
COLOURS = ("#1f6feb", "#e8710a", "#0e9f6e", "#b83280", "#8250df", "#b08800", "#0891b2", "#cf222e")
SUFFIXES = (".png", ".pdf", ".svg", ".jpg", ".webp")


def library() -> Any:
    """`matplotlib.figure`, without a screen; an OptionError that says how to install it."""
    try:
        import matplotlib
        from matplotlib import figure
    except ImportError as error:
        raise OptionError(
            f"plots need matplotlib, which cannot be imported ({error}). Run: pip install 'unstride[plot]'"
        ) from error
    matplotlib.rcParams["svg.hashsalt"] = "unstride"  # the same figure is the same file
    return figure


def check_target(path: Path) -> None:
    """An OptionError, before hours of work, where no figure can be written to `path`."""
    library()
    check_file(path, "--plot", SUFFIXES)


def save(figure: Any, path: Path) -> Path | None:
    """Write a figure. Where that fails: None and a warning, so that the results it shows are not lost."""
    stream = io.BytesIO()
    try:
        figure.savefig(stream, format=path.suffix[1:].lower())
        write_atomic(path, stream.getvalue())
    except (OSError, ValueError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        warnings.warn(NotWritten(f"--plot {path}: cannot be written ({reason})"), stacklevel=2)
        return None
    return path


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """RGB for each of `count` classes; neighbours are far apart, and the first classes look alike in every figure."""
    out = [(int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16)) for c in COLOURS[:count]]
    for k in range(len(out), count):
        hue = (0.11 + k * 0.618034) % 1.0
        light, full = (0.38, 0.62, 0.5)[k % 3], (0.75, 0.55)[k % 2]
        r, g, b = colorsys.hls_to_rgb(hue, light, full)
        out.append((round(r * 255), round(g * 255), round(b * 255)))
    return out


def as_image(preprocess: Preprocess, pixels: Tensor) -> Image.Image:
    """Pixels (C, H, W) from 0 to 1, with the channels in the network's order, as an RGB image."""
    pixels = pixels.flip(0) if preprocess.channels == "BGR" else pixels
    values = (pixels * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(values[..., 0] if values.shape[2] == 1 else values).convert("RGB")
