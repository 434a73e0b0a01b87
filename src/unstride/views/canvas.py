"""Where views look: the image before the crop where the caller has it, otherwise the tensor that is left of it.

Canvas(images, box=(16, 16, 224, 224)).see(parse_view("ShiftX=8"))    # (B, C, 224, 224), real pixels at its edge
PILImages([image], preprocess).see(parse_view("1.3x"))                 # (1, C, 288, 288), from the image itself
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from unstride.errors import InputError, OptionError
from unstride.views.images import Preprocess
from unstride.views.policies import IDENTITY, View

PLACING = {"Size", "Field", "ShiftX", "ShiftY", "FiveCrop"}
FLIPS = {"FlipLR": -1, "FlipUD": -2, "FlipFB": -3}  # the axis that each turns round; only volumes have the third
_MARGIN = 8 / 7  # of a canvas around its crop: 256 for 224


class Source(Protocol):
    """Some images, of which every view can be had."""

    def __len__(self) -> int: ...
    @property
    def size(self) -> tuple[int, ...]:
        """(H, W) of the plain view."""
        ...

    def rows(self, chosen: Sequence[int]) -> Source: ...
    def see(self, view: View) -> Tensor:
        """(B, C, h, w), prepared as the network wants it."""
        ...


@dataclass(frozen=True)
class Place:
    """What a view looks at, in pixels of the plain view from its top left corner, and the size it is shown in."""

    top: float
    left: float
    height: float
    width: float
    size: tuple[int, int]


def place(view: View, size: tuple[int, int], margin: tuple[float, float] = (0.0, 0.0)) -> Place:
    """Where a view of a (H, W) crop looks. `margin`: how far the canvas goes on beyond each side of the crop."""
    field, scale, y, x = 1.0, 1.0, 0.0, 0.0
    for op in view.ops:
        match op.name:
            case "Size":
                scale *= op.number
            case "Field":
                field *= op.number
            case "ShiftX":
                x += op.number
            case "ShiftY":
                y += op.number
            case "FiveCrop" if op.value != "Center":
                y += margin[0] * (-1 if str(op.value).endswith("Top") else 1)
                x += margin[1] * (-1 if str(op.value).startswith("Left") else 1)
    h, w = size[0] * field, size[1] * field
    shown = (_sized(size[0], scale), _sized(size[1], scale))
    return Place((size[0] - h) / 2 + y, (size[1] - w) / 2 + x, h, w, shown)


def _sized(side: int, scale: float) -> int:
    """A scaled side, as even as the plain one: 224 at 1.3 is 288, whose half is whole as often.

    An odd side keeps its form, too: upsampling that lays corner cells on corner pixels wants sizes of 8 n + 1.
    """
    if scale == 1:
        return side
    step, odd = 1, side % 2
    even = side - odd
    while even % (2 * step) == 0 and even // (2 * step) >= 7:
        step *= 2
    return max(step, round((side * scale - odd) / step) * step) + odd


def flips(view: View) -> list[int]:
    """The axes that a view turns round, counted from the last: [-1] is mirrored left to right."""
    names = [op.name for op in view.ops if op.value is not False]
    return [axis for name, axis in FLIPS.items() if names.count(name) % 2 == 1]


def others(view: View) -> View | None:
    """The ops that change what is shown, not where it is looked at; None without any."""
    rest = tuple(op for op in view.ops if op.name not in {*PLACING, "FlipLR", "FlipUD", "Identity"})
    return View(rest) if rest else None


@dataclass(frozen=True, eq=False)
class Canvas:
    """Prepared images (B, C, H, W) and the box (top, left, height, width) in them that the network usually sees.

    Example: `better(unstride.Canvas(images_256, crop=224))`. Beyond the canvas pixels are reflected; a tensor without a
    box has nothing beyond its crop.
    """

    pixels: Tensor
    box: tuple[int, int, int, int] | None = None
    crop: int | tuple[int, int] | None = None
    preprocess: Preprocess | None = None  # how the images were normalised, for views that change colours

    def __post_init__(self) -> None:
        if not isinstance(self.pixels, Tensor) or self.pixels.ndim != 4:
            came = tuple(self.pixels.shape) if isinstance(self.pixels, Tensor) else type(self.pixels).__name__
            raise InputError(
                f"images: got {came}, wanted a float tensor (B, C, H, W); for one image pass image.unsqueeze(0)"
            )
        height, width = self.pixels.shape[2:]
        box = self.box
        if box is None:
            crop = (height, width) if self.crop is None else self.crop
            h, w = (crop, crop) if isinstance(crop, int) else crop
            box = (round((height - h) / 2), round((width - w) / 2), h, w)
        top, left, h, w = box
        if not (h > 0 and w > 0 and top >= 0 and left >= 0 and top + h <= height and left + w <= width):
            raise OptionError(f"canvas: the crop {box} does not lie inside the image of {height}x{width}")
        object.__setattr__(self, "box", (int(top), int(left), int(h), int(w)))

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, int]:
        assert self.box is not None
        return self.box[2], self.box[3]

    def rows(self, chosen: Sequence[int]) -> Canvas:
        return replace(self, pixels=self.pixels[list(chosen)], crop=None)

    def see(self, view: View) -> Tensor:
        assert self.box is not None
        top, left, h, w = self.box
        if view == IDENTITY:
            return self.pixels[:, :, top : top + h, left : left + w]
        beyond = (self.pixels.shape[2] - h) / 2, (self.pixels.shape[3] - w) / 2
        if beyond == (0.0, 0.0):  # corners of an image that is all crop: as of one with the usual margin
            beyond = (h * (_MARGIN - 1) / 2, w * (_MARGIN - 1) / 2)
        at = place(view, (h, w), beyond)
        seen = self.pixels
        for dim, start, extent in ((2, top + at.top, at.height), (3, left + at.left, at.width)):
            seen = _cut(seen, dim, round(start), round(start + extent) - round(start))
        if tuple(seen.shape[2:]) != at.size:
            seen = interpolate(seen.float(), at.size, mode="bicubic", antialias=True).to(seen.dtype)
        return changed(seen, view, self.preprocess)


@dataclass(frozen=True, eq=False)
class Block:
    """Volumes and clips (B, C, D, H, W), or signals (B, C, L): seen as they are, or mirrored."""

    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.pixels.shape[2:])

    def rows(self, chosen: Sequence[int]) -> Block:
        return Block(self.pixels[list(chosen)])

    def see(self, view: View) -> Tensor:
        axes = len(self.size)
        known = {"Identity", *(name for name, axis in FLIPS.items() if -axis <= axes)}
        strange = [op.name for op in view.ops if op.name not in known]
        if strange:
            raise OptionError(
                f"view {view}: {strange[0]} is not for what has {axes} axes; there are {', '.join(sorted(known))}"
            )
        return self.pixels.flip(dims) if (dims := flips(view)) else self.pixels


def _cut(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Rows or columns start .. start + length - 1; beyond the ends the image is reflected."""
    extent = x.shape[dim]
    if start >= 0 and start + length <= extent:
        return x.narrow(dim, start, length)
    period = max(1, 2 * (extent - 1))
    i = torch.arange(start, start + length, device=x.device).remainder(period)
    return x.index_select(dim, torch.where(i >= extent, period - i, i))


def back(view: View, output: Tensor, size: tuple[int, ...], out_size: tuple[int, ...]) -> Tensor:
    """A map (B, K, h, w) of a view of `size` images, brought back over the plain view's own map of `out_size`."""
    names = {op.name for op in view.ops}
    if names - {"Identity", "Size", *FLIPS}:
        from unstride.views import views

        return views.undo(view, output, (size[0], size[1]), (out_size[0], out_size[1]))[0]
    output = output.flip(dims) if (dims := flips(view)) else output
    if tuple(output.shape[2:]) == out_size:
        return output
    return interpolate(output, out_size, mode="bilinear", align_corners=False, antialias=True)


def changed(seen: Tensor, view: View, preprocess: Preprocess | None) -> Tensor:
    """The ops of a view that are not about where it looks, on prepared pixels (B, C, H, W)."""
    rest = others(view)
    if rest is not None:
        from unstride.views import views  # torchvision's ops: only where one is asked for

        if preprocess is None and views.changes_values(rest):
            raise InputError(
                f"view {rest} changes colours, so it must know how the images were normalised: give Canvas(..., "
                "preprocess=...) or PIL images"
            )
        pixels = seen if preprocess is None else preprocess.denormalise(seen).clamp(0, 1)
        pixels = views.apply(rest, pixels)
        seen = pixels if preprocess is None else preprocess.normalise(pixels)
    return seen.flip(dims) if (dims := flips(view)) else seen


@dataclass(frozen=True, eq=False)
class PILImages:
    """PIL images and how a network wants them: every view is made from the image itself.

    The plain view is exactly `preprocess(image)`. A larger size has the image's own detail, where it has any.
    """

    images: Sequence[Image.Image]
    preprocess: Preprocess
    like: Tensor | None = None  # for device and type; by default float32 on the CPU
    made: Mapping[View, Tensor] = field(default_factory=dict)  # views that were prepared ahead

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        fixed = self.preprocess.size
        return fixed if fixed is not None else (int((x := self.preprocess(self.images[0])).shape[1]), int(x.shape[2]))

    def rows(self, chosen: Sequence[int]) -> PILImages:
        made = {view: seen[list(chosen)] for view, seen in self.made.items()}
        return replace(self, images=[self.images[i] for i in chosen], made=made)

    def see(self, view: View) -> Tensor:
        seen = self.made.get(view)
        if seen is None:
            seen = torch.stack([self._see(image, view) for image in self.images])
        return seen if self.like is None else seen.to(self.like)

    def _see(self, image: Image.Image, view: View) -> Tensor:
        plain = not any(op.name in PLACING for op in view.ops)
        x = self.preprocess(image) if plain else self._placed(image, view)
        return changed(x[None], view, self.preprocess)[0]

    def _placed(self, image: Image.Image, view: View) -> Tensor:
        p = self.preprocess
        full_h, full_w = p.resized(image.height, image.width)
        h, w = p.crop if isinstance(p.crop, tuple) else (full_h, full_w)
        top, left = round((full_h - h) / 2), round((full_w - w) / 2)
        at = place(view, (h, w), (max(0.0, (full_h - h) / 2), max(0.0, (full_w - w) / 2)))
        y, x = image.height / full_h, image.width / full_w  # the image's own pixels in one of the resized ones
        box = ((left + at.left) * x, (top + at.top) * y, at.width * x, at.height * y)
        whole, (x0, y0, width, height) = _reflected(image.convert("L" if p.channels == "L" else "RGB"), box)
        seen = whole.resize(at.size[::-1], p.resample, (x0, y0, x0 + width, y0 + height))
        return p.normalise(p.tensor(seen))


def _reflected(image: Image.Image, box: tuple[float, ...]) -> tuple[Image.Image, tuple[float, ...]]:
    """An image that holds the whole box (left, top, width, height), reflected around itself where it does not."""
    before = (max(0, int(-box[0]) + 1) if box[0] < 0 else 0, max(0, int(-box[1]) + 1) if box[1] < 0 else 0)
    over = (box[0] + box[2] - image.width, box[1] + box[3] - image.height)
    after = tuple(int(v) + 1 if v > 1e-6 else 0 for v in over)
    if not any((*before, *after)):
        return image, (*box[:2], min(box[2], image.width - box[0]), min(box[3], image.height - box[1]))
    import numpy as np

    sides: list[Any] = [(before[1], after[1]), (before[0], after[0])]
    array = np.asarray(image)
    wide = np.pad(array, sides + [(0, 0)] * (array.ndim - 2), mode="reflect" if min(array.shape[:2]) > 1 else "edge")
    return Image.fromarray(wide), (box[0] + before[0], box[1] + before[1], *box[2:])


def as_source(given: Any, preprocess: Preprocess | None = None) -> Source:
    """A tensor (B, C, H, W), a Canvas, a PIL image or a list of them -> something that can be looked at."""
    if isinstance(given, Tensor):
        return Block(given) if given.ndim in (3, 5) else Canvas(given, preprocess=preprocess)
    if isinstance(given, Canvas | Block | PILImages):
        return given
    images = [given] if isinstance(given, Image.Image) else given
    if isinstance(images, list | tuple) and images and all(isinstance(i, Image.Image) for i in images):
        if preprocess is None:
            raise InputError("PIL images need the model's preprocessing: pass enhance(..., preprocess=...) or a tensor")
        return PILImages(list(images), preprocess)
    raise InputError(f"images: got {type(given).__name__}, wanted a tensor (B, C, H, W), a Canvas or PIL images")


def batches(images: Any) -> Iterator[Any]:
    """What a model takes, or a loader or list of that, with or without labels -> batches."""
    listed = isinstance(images, list) and bool(images) and not isinstance(images[0], Image.Image)
    if listed or (isinstance(images, Iterable) and not isinstance(images, Tensor | list | tuple | Canvas)):
        for batch in images:
            yield batch[0] if isinstance(batch, list | tuple) else batch
    else:
        yield images


def casting(source: Source, precision: str | None) -> AbstractContextManager[Any]:
    """Autocast to a precision, where the images are; nothing without one."""
    if precision is None:
        return nullcontext()
    device = source.pixels.device.type if isinstance(source, Canvas | Block) else "cpu"
    return torch.autocast(device, getattr(torch, precision))
