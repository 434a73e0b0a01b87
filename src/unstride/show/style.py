"""What all images share: the plot library, colours, text that fits."""

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
PLAIN = "#8b94a3"
# Distinct in hue and in lightness, so that they stay apart for colour-blind readers and in gray print.
COLOURS = ("#1f6feb", "#e8710a", "#0e9f6e", "#b83280", "#8250df", "#b08800", "#0891b2", "#cf222e")
SUFFIXES = (".png", ".pdf", ".svg", ".jpg", ".webp")


def library() -> Any:
    """matplotlib without a screen, or an error that says how to get it."""
    try:
        import matplotlib
        from matplotlib import figure
    except ImportError as error:
        raise OptionError(
            f"plots need matplotlib, which cannot be imported ({error}): pip install 'unstride[plot]'"
        ) from error
    matplotlib.rcParams["svg.hashsalt"] = "unstride"  # the same image is the same file
    return figure


def check_target(path: Path) -> None:
    """Whether an image can be written there, asked before hours of work."""
    library()
    check_file(path, "--plot", SUFFIXES)


def save(figure: Any, path: Path) -> Path | None:
    """A figure into a file; None, and a warning, where that fails: what it shows was computed, and is not lost."""
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
    """RGB for each of `count` classes: neighbours far apart, the first classes as in every other image."""
    out = [(int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16)) for c in COLOURS[:count]]
    for k in range(len(out), count):
        hue = (0.11 + k * 0.618034) % 1.0
        light, full = (0.38, 0.62, 0.5)[k % 3], (0.75, 0.55)[k % 2]
        r, g, b = colorsys.hls_to_rgb(hue, light, full)
        out.append((round(r * 255), round(g * 255), round(b * 255)))
    return out


def seen(preprocess: Preprocess, image: Image.Image) -> Image.Image:
    """The part of an image that the network sees, at the size it sees it."""
    return as_image(preprocess, preprocess.pixels(image))


def as_image(preprocess: Preprocess, pixels: Tensor) -> Image.Image:
    """Pixels (C, H, W) in 0..1, in the order of channels that the network takes."""
    pixels = pixels.flip(0) if preprocess.channels == "BGR" else pixels
    values = (pixels * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(values[..., 0] if values.shape[2] == 1 else values).convert("RGB")
