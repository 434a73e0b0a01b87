"""Preprocessing as ONNX ops: uint8 pixels (n, H, W, 3) of any size -> what a network takes, as Pillow resizes.

Pillow resizes the width first, then the height, and rounds to 8 bits after each: so does this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unstride.errors import OptionError
from unstride.exporting.builder import OnnxBuilder
from unstride.exporting.views import check_view
from unstride.recipe.view import PLAIN, View
from unstride.views.images import Preprocess
from unstride.views.source import PLACING, flip_axes, place

_MODES = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
_GRAY = (19595, 38470, 7471)  # of red, green and blue, over 65536: Pillow's convert("L")


def check_pixels(preprocess: Preprocess | None, network: str) -> Preprocess:
    """The preprocessing, or an OptionError where the file cannot do it."""
    if preprocess is None:
        raise OptionError(
            f"export: from_pixels needs the preprocessing of network {network!r}. Pass enhance(..., preprocess=...)."
        )
    if preprocess.size is None:
        raise OptionError(
            f"export: from_pixels needs a preprocessing with a fixed size, and that of network {network!r} is: "
            f"{preprocess}. Give a crop or both sides of the resize, or export without from_pixels."
        )
    if preprocess.interpolation not in _MODES:
        raise OptionError(
            f"export: from_pixels: got interpolation {preprocess.interpolation!r} of network {network!r}, expected "
            f"one of {', '.join(_MODES)}."
        )
    return preprocess


def prepared(b: OnnxBuilder, rows: str, view: View, p: Preprocess) -> str:
    """Rows (n, H, W, 3) of uint8 in a view, prepared for a network: (n, C, h, w)."""
    check_view(view)
    x = b.op("Transpose", b.op("Cast", rows, to=1), perm=[0, 3, 1, 2])
    if p.channels == "L":
        x = _gray(b, x)
    elif p.channels == "BGR":
        x = b.op("Gather", x, b.constant([2, 1, 0]), axis=1)
    size = _Sizes(b, x, p)
    placing = View(tuple(op for op in view.ops if op.name in PLACING) or PLAIN.ops)
    x = _cropped(b, _resized(b, x, size), size) if placing == PLAIN else _placed(b, x, placing, size)
    mean, std = (np.array(v, np.float32).reshape(1, -1, 1, 1) for v in (p.mean, p.std))
    x = b.op("Div", b.op("Sub", b.op("Div", x, b.constant(255.0)), b.constant(mean)), b.constant(std))
    for axis in flip_axes(view):
        x = b.reversed(x, axis)
    return x


def _gray(b: OnnxBuilder, x: str) -> str:
    """As Pillow does it, in whole numbers."""
    weights = np.array(_GRAY, np.int64).reshape(1, 3, 1, 1)
    total = b.op("ReduceSum", b.op("Mul", b.op("Cast", x, to=7), b.constant(weights)), b.constant([1]), keepdims=1)
    return b.op("Cast", b.op("Div", b.op("Add", total, b.constant(0x8000)), b.constant(0x10000)), to=1)


@dataclass(eq=False)
class _Sizes:
    """(H, W) of the image, and after the resize, as values of the graph (each a number)."""

    b: OnnxBuilder
    x: str
    preprocess: Preprocess

    def __post_init__(self) -> None:
        b, p = self.b, self.preprocess
        shape = b.op("Shape", self.x)
        self.image = [b.op("Gather", shape, b.constant(axis), axis=0) for axis in (2, 3)]
        self.full = [b.op("Identity", n) for n in self.image]
        if isinstance(p.resize, tuple):
            self.full = [b.constant(n) for n in p.resize]
        elif p.resize is not None:
            short = b.op("Min", *self.image)
            self.full = [b.op("Div", b.op("Mul", n, b.constant(p.resize)), short) for n in self.image]


def _resized(b: OnnxBuilder, x: str, size: _Sizes) -> str:
    p = size.preprocess
    if p.resize is None:
        return x
    mode = _MODES[p.interpolation]
    kind = {"mode": mode, "coordinate_transformation_mode": "half_pixel"}
    more: dict[str, Any] = {"nearest_mode": "round_prefer_ceil"} if mode == "nearest" else {"antialias": 1}
    more |= {"cubic_coeff_a": -0.5} if mode == "cubic" else {}
    shape = b.op("Shape", x)
    first = b.op("Slice", shape, b.constant([0]), b.constant([3]))
    wide = b.op("Concat", first, _vector(b, size.full[1]), axis=0)
    x = _eight_bits(b, b.op("Resize", x, "", "", wide, **kind, **more))
    high = b.op(
        "Concat",
        b.op("Slice", shape, b.constant([0]), b.constant([2])),
        *(_vector(b, n) for n in size.full),
        axis=0,
    )
    return _eight_bits(b, b.op("Resize", x, "", "", high, **kind, **more))


def _cropped(b: OnnxBuilder, x: str, size: _Sizes) -> str:
    """The centre, black where the image is smaller; as torchvision rounds."""
    p = size.preprocess
    if not isinstance(p.crop, tuple):
        return x
    starts, before, after = [], [], []
    for full, crop in zip(size.full, p.crop, strict=True):
        missing = b.op("Max", b.op("Sub", b.constant(crop), full), b.constant(0))
        before.append(b.op("Div", missing, b.constant(2)))
        after.append(b.op("Sub", missing, before[-1]))
        over = b.op("Cast", b.op("Sub", b.op("Add", full, missing), b.constant(crop)), to=1)
        starts.append(b.op("Cast", b.op("Round", b.op("Div", over, b.constant(2.0))), to=7))
    none = b.constant([0, 0])
    pads = b.op("Concat", none, *(_vector(b, v) for v in before), none, *(_vector(b, v) for v in after), axis=0)
    x = b.op("Pad", x, pads, b.constant(0.0), mode="constant")
    start = b.op("Concat", *(_vector(b, s) for s in starts), axis=0)
    return b.op("Slice", x, start, b.op("Add", start, b.constant(list(p.crop))), b.constant([2, 3]))


def _placed(b: OnnxBuilder, x: str, view: View, size: _Sizes) -> str:
    """The rectangle that a view shows, resampled from the image itself, reflected around it."""
    p = size.preprocess
    crop = p.crop or p.resize
    assert isinstance(crop, tuple)
    margins, boxes = [], []
    for image, full, n in zip(size.image, size.full, crop, strict=True):
        over = b.op("Div", b.op("Cast", b.op("Sub", full, b.constant(n)), to=1), b.constant(2.0))
        margins.append(b.op("Max", over, b.constant(0.0)))
        ratio = b.op("Div", b.op("Cast", image, to=1), b.op("Cast", full, to=1))
        boxes.append((b.op("Round", over), ratio))
    none, whole = place(view, crop), place(view, crop, (1.0, 1.0))
    starts, lengths = (none.top, none.left), (none.height, none.width)
    by_margin = (whole.top - none.top, whole.left - none.left)  # corner crops move by the margin
    for axis in (1, 0):  # the width first
        offset, ratio = boxes[axis]
        moved = b.op("Mul", margins[axis], b.constant(float(by_margin[axis])))
        start = b.op("Add", b.op("Add", offset, moved), b.constant(float(starts[axis])))
        box = b.op("Mul", start, ratio), b.op("Mul", b.constant(float(lengths[axis])), ratio)
        matrix = _resampling(b, size.image[axis], box, none.size[axis], p.interpolation)
        x = b.op("MatMul", x, b.op("Transpose", matrix, perm=[1, 0])) if axis else b.op("MatMul", matrix, x)
        x = _eight_bits(b, x)
    return x


def _resampling(b: OnnxBuilder, extent: str, box: tuple[str, str], out: int, interpolation: str) -> str:
    """(out, extent): how Pillow resamples a box (start, length) of an axis, reflected at its ends."""
    start, length = box
    scale = b.op("Div", length, b.constant(float(out)))
    middle = b.op("Add", start, b.op("Mul", b.constant(np.arange(out) + 0.5), scale))  # (out,)
    limit = b.op("Cast", extent, to=1)
    first, last = b.op("Neg", limit), b.op("Mul", limit, b.constant(2.0))  # one image before and after
    cells = b.op("Cast", b.op("Range", first, last, b.constant(1.0)), to=1)
    if interpolation == "nearest":
        near = b.op("Unsqueeze", b.op("Floor", middle), b.constant([1]))
        weights = b.op("Cast", b.op("Equal", near, b.op("Unsqueeze", cells, b.constant([0]))), to=1)
    else:
        width = b.op("Max", scale, b.constant(1.0))
        centre = b.op("Unsqueeze", b.op("Sub", middle, b.constant(0.5)), b.constant([1]))
        distance = b.op("Abs", b.op("Div", b.op("Sub", b.op("Unsqueeze", cells, b.constant([0])), centre), width))
        weights = (_triangle if interpolation == "bilinear" else _cubic)(b, distance)
        weights = _inside(b, weights, cells, limit, box)
        weights = b.op("Div", weights, b.op("ReduceSum", weights, b.constant([1]), keepdims=1))
    return _folded(b, weights, extent)


def _inside(b: OnnxBuilder, weights: str, cells: str, extent: str, box: tuple[str, str]) -> str:
    """Only pixels of the image, and of its reflection as far as the box reaches: Pillow reads no others."""
    start, length = box
    zero, one = b.constant(0.0), b.constant(1.0)
    before = b.op("Add", b.op("Floor", b.op("Neg", start)), one)
    low = b.op("Where", b.op("Less", start, zero), b.op("Neg", before), zero)
    over = b.op("Sub", b.op("Add", start, length), extent)
    after = b.op("Where", b.op("Greater", over, b.constant(1e-3)), b.op("Add", b.op("Floor", over), one), zero)
    inside = b.op("And", b.op("GreaterOrEqual", cells, low), b.op("Less", cells, b.op("Add", extent, after)))
    return b.op("Where", b.op("Unsqueeze", inside, b.constant([0])), weights, zero)


def _triangle(b: OnnxBuilder, d: str) -> str:
    return b.op("Relu", b.op("Sub", b.constant(1.0), d))


def _cubic(b: OnnxBuilder, d: str) -> str:
    """Keys' kernel with a = -0.5."""
    near = b.op(
        "Add",
        b.op("Mul", b.op("Mul", d, d), b.op("Sub", b.op("Mul", d, b.constant(1.5)), b.constant(2.5))),
        b.constant(1.0),
    )
    inner = b.op("Mul", b.op("Sub", b.op("Mul", b.op("Sub", d, b.constant(5.0)), d), b.constant(-8.0)), d)
    far = b.op("Mul", b.op("Sub", inner, b.constant(4.0)), b.constant(-0.5))
    beyond = b.op("Where", b.op("Less", d, b.constant(2.0)), far, b.constant(0.0))
    return b.op("Where", b.op("Less", d, b.constant(1.0)), near, beyond)


def _folded(b: OnnxBuilder, weights: str, extent: str) -> str:
    """(out, 3 E) -> (out, E): weights of pixels before and after the image are added to the pixels they reflect."""

    def part(first: str, end: str, step: int) -> str:
        bounds = [_vector(b, first), _vector(b, end)]
        return b.op("Slice", weights, *bounds, b.constant([1]), b.constant([step]))

    def times(count: int, more: int) -> str:
        return b.op("Add", b.op("Mul", extent, b.constant(count)), b.constant(more))

    image = part(extent, times(2, 0), 1)
    before = b.op("Pad", part(times(1, -1), b.constant(0), -1), b.constant([0, 1, 0, 0]), b.constant(0.0))
    after = b.op("Pad", part(times(3, -2), times(2, -1), -1), b.constant([0, 0, 0, 1]), b.constant(0.0))
    return b.op("Add", b.op("Add", image, before), after)


def _eight_bits(b: OnnxBuilder, x: str) -> str:
    return b.op("Clip", b.op("Floor", b.op("Add", x, b.constant(0.5))), b.constant(0.0), b.constant(255.0))


def _vector(b: OnnxBuilder, value: str) -> str:
    return b.op("Unsqueeze", value, b.constant([0]))
