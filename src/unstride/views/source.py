"""A source is a batch of images that renders views: from the uncropped images where it has them, else from tensors.

Canvas(images, box=(16, 16, 224, 224)).render(parse_view("ShiftX=8"))   # (B, C, 224, 224), real pixels at the edge
PILImages([image], preprocess).render(parse_view("1.3x"))               # (1, C, 288, 288), from the image itself
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from unstride.errors import InputError, OptionError
from unstride.graph.capture import SHAPES
from unstride.recipe.view import PLAIN, View
from unstride.views.given import check_preprocess
from unstride.views.images import Preprocess, image_size, reflected, uint8_images

PLACING = {"Size", "Crop", "ShiftX", "ShiftY", "FiveCrop"}
FLIPS = {"FlipLR": -1, "FlipUD": -2, "FlipFB": -3}  # the axis that each reverses; only volumes have the third
_MARGIN = 8 / 7  # of an uncropped image around its crop: 256 for 224


class Source(Protocol):
    """A batch of images that every view can be rendered of."""

    def __len__(self) -> int: ...
    @property
    def size(self) -> tuple[int, ...]:
        """(H, W) of the plain view."""
        ...

    def rows(self, chosen: Sequence[int]) -> Source: ...
    def render(self, view: View) -> Tensor:
        """(B, C, h, w), prepared as the network takes it."""
        ...


@dataclass(frozen=True)
class Place:
    """The rectangle that a view shows, in pixels of the plain view from its top left corner, and its output size."""

    top: float
    left: float
    height: float
    width: float
    size: tuple[int, int]


def place(view: View, size: tuple[int, int], margin: tuple[float, float] = (0.0, 0.0)) -> Place:
    """The place of a view of a (H, W) crop. `margin`: pixels of the image beyond each side of the crop."""
    crop, scale, y, x = 1.0, 1.0, 0.0, 0.0
    for op in view.ops:
        match op.name:
            case "Size":
                scale *= op.number
            case "Crop":
                crop *= op.number
            case "ShiftX":
                x += op.number
            case "ShiftY":
                y += op.number
            case "FiveCrop" if op.value != "Center":
                y += margin[0] * (-1 if str(op.value).endswith("Top") else 1)
                x += margin[1] * (-1 if str(op.value).startswith("Left") else 1)
    h, w = size[0] * crop, size[1] * crop
    shown = (_scaled_side(size[0], scale), _scaled_side(size[1], scale))
    return Place((size[0] - h) / 2 + y, (size[1] - w) / 2 + x, h, w, shown)


def _scaled_side(side: int, scale: float) -> int:
    """A scaled side that can be halved as often as the plain one: 224 at 1.3 is 288.

    An odd side stays odd: upsampling with aligned corners needs sizes of 8 n + 1.
    """
    if scale == 1:
        return side
    step, odd = 1, side % 2
    even = side - odd
    while even % (2 * step) == 0 and even // (2 * step) >= 7:
        step *= 2
    return max(step, round((side * scale - odd) / step) * step) + odd


def flip_axes(view: View) -> list[int]:
    """The axes that a view reverses, counted from the last: [-1] for a horizontal flip."""
    names = [op.name for op in view.ops if op.value is not False]
    return [axis for name, axis in FLIPS.items() if names.count(name) % 2 == 1]


def other_ops(view: View) -> View | None:
    """The ops that neither place nor flip; None without any."""
    rest = tuple(op for op in view.ops if op.name not in {*PLACING, "FlipLR", "FlipUD", "Identity"})
    return View(rest) if rest else None


@dataclass(frozen=True, eq=False)
class Canvas:
    """Uncropped, prepared images (B, C, H, W) and the box (top, left, height, width) that the network usually gets.

    Views that shift or enlarge the crop read real pixels there: `better(unstride.Canvas(images_256, crop=224))`.
    Beyond the tensor, pixels are reflected. Without `box` and `crop`, the whole tensor is the crop.
    """

    pixels: Tensor
    box: tuple[int, int, int, int] | None = None
    crop: int | tuple[int, int] | None = None  # of the centre, instead of `box`
    preprocess: Preprocess | None = None  # how the images were normalised, for views that change colours

    def __post_init__(self) -> None:
        if not isinstance(self.pixels, Tensor) or self.pixels.ndim != 4:
            came = tuple(self.pixels.shape) if isinstance(self.pixels, Tensor) else type(self.pixels).__name__
            raise InputError(f"images: got {came}, expected floats (B, C, H, W); for one image pass image.unsqueeze(0)")
        _check_tensor(self.pixels)
        if not isinstance(self.preprocess, Preprocess | None):
            object.__setattr__(self, "preprocess", check_preprocess(self.preprocess))
        height, width = self.pixels.shape[2:]
        top, left, h, w = _box(self.box) if self.box is not None else _centre(self.crop, height, width)
        if not (h > 0 and w > 0 and top >= 0 and left >= 0 and top + h <= height and left + w <= width):
            raise OptionError(f"canvas: the crop {(top, left, h, w)} is not inside the image of {height}x{width}")
        object.__setattr__(self, "box", (top, left, h, w))

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, int]:
        assert self.box is not None
        return self.box[2], self.box[3]

    def rows(self, chosen: Sequence[int]) -> Canvas:
        return replace(self, pixels=self.pixels[list(chosen)], crop=None)

    def render(self, view: View) -> Tensor:
        assert self.box is not None
        top, left, h, w = self.box
        if view == PLAIN:
            return self.pixels.narrow(2, top, h).narrow(3, left, w)
        margin = (self.pixels.shape[2] - h) / 2, (self.pixels.shape[3] - w) / 2
        if margin == (0.0, 0.0):  # the corner crops of a tensor without a margin: as with the usual one
            margin = (h * (_MARGIN - 1) / 2, w * (_MARGIN - 1) / 2)
        at = place(view, (h, w), margin)
        x = self.pixels
        for dim, start, extent in ((2, top + at.top, at.height), (3, left + at.left, at.width)):
            x = _cut(x, dim, round(start), round(start + extent) - round(start))
        if tuple(x.shape[2:]) != at.size:
            x = interpolate(x.float(), at.size, mode="bicubic", antialias=True).to(x.dtype)
        return apply_other_ops(x, view, self.preprocess)


def _box(box: Any) -> tuple[int, int, int, int]:
    try:
        top, left, h, w = map(operator.index, box)
    except (TypeError, ValueError) as error:
        raise OptionError(f"canvas: box is {box!r}, expected whole numbers (top, left, height, width)") from error
    return top, left, h, w


def _centre(crop: Any, height: int, width: int) -> tuple[int, int, int, int]:
    """The box of a centre crop, or of everything without one."""
    h, w = (height, width) if crop is None else image_size("canvas: crop", crop)
    return round((height - h) / 2), round((width - w) / 2), h, w


@dataclass(frozen=True, eq=False)
class Block:
    """Volumes and clips (B, C, D, H, W), or signals (B, C, L): as they are, or flipped."""

    pixels: Tensor

    def __post_init__(self) -> None:
        _check_tensor(self.pixels)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.pixels.shape[2:])

    def rows(self, chosen: Sequence[int]) -> Block:
        return Block(self.pixels[list(chosen)])

    def render(self, view: View) -> Tensor:
        axes = len(self.size)
        known = {"Identity", *(name for name, axis in FLIPS.items() if -axis <= axes)}
        unknown = [op.name for op in view.ops if op.name not in known]
        if unknown:
            raise OptionError(f"view {view}: {unknown[0]} is not for {axes} axes; there are {', '.join(sorted(known))}")
        return self.pixels.flip(dims) if (dims := flip_axes(view)) else self.pixels


def _check_tensor(pixels: Tensor) -> None:
    """Refuse tensors whose values cannot be read: meta, sparse, and uint8 that nobody normalised."""
    _check_layout(pixels)
    if pixels.dtype == torch.uint8:
        raise InputError(
            f"images: got uint8 {tuple(pixels.shape)}; expected normalised floats. uint8 images (B, C, H, W) or "
            "(B, H, W, C) are prepared where the preprocessing is known: pass enhance(..., preprocess=Preprocess(...))"
        )


def _check_layout(pixels: Tensor) -> None:
    if pixels.device.type == "meta":
        raise InputError("images: got a meta tensor, which has no values; expected a tensor on a real device")
    if pixels.layout != torch.strided:
        raise InputError(f"images: got a tensor of layout {pixels.layout}; expected a dense one, images.to_dense()")


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
        from unstride.views import transforms

        return transforms.undo(view, output, (size[0], size[1]), (out_size[0], out_size[1]))[0]
    output = output.flip(dims) if (dims := flip_axes(view)) else output
    if tuple(output.shape[2:]) == out_size:
        return output
    return interpolate(output, out_size, mode="bilinear", align_corners=False, antialias=True)


def apply_other_ops(x: Tensor, view: View, preprocess: Preprocess | None) -> Tensor:
    """The flips and transforms of a view, on prepared pixels (B, C, H, W) that are placed already."""
    rest = other_ops(view)
    if rest is not None:
        from unstride.views import transforms  # torchvision is imported only where one of its ops is needed

        if preprocess is None and transforms.changes_values(rest):
            raise InputError(
                f"view {rest} changes colours, so it must know how the images were normalised: give Canvas(..., "
                "preprocess=...) or PIL images"
            )
        pixels = x if preprocess is None else preprocess.denormalise(x).clamp(0, 1)
        pixels = transforms.apply(rest, pixels)
        x = pixels if preprocess is None else preprocess.normalise(pixels)
    return x.flip(dims) if (dims := flip_axes(view)) else x


@dataclass(frozen=True, eq=False)
class PILImages:
    """PIL images and the preprocessing of a network: every view is made from the image itself.

    The plain view is exactly `preprocess(image)`. A larger view has the image's own detail, where it has any.
    """

    images: Sequence[Image.Image]
    preprocess: Preprocess
    like: Tensor | None = None  # device and dtype of what is rendered; by default float32 on the CPU
    prepared: Mapping[View, Tensor] = field(default_factory=dict)  # views that were rendered ahead

    def __post_init__(self) -> None:
        wrong = [type(image).__name__ for image in self.images if not isinstance(image, Image.Image)]
        if wrong or not isinstance(self.preprocess, Preprocess):
            came = wrong[0] if wrong else f"preprocess={self.preprocess!r}"
            raise InputError(f"PILImages: got {came}, expected PIL images and a Preprocess")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        fixed = self.preprocess.size
        return fixed or (int((x := self.preprocess(self.images[0])).shape[1]), int(x.shape[2]))

    def rows(self, chosen: Sequence[int]) -> PILImages:
        prepared = {view: x[list(chosen)] for view, x in self.prepared.items()}
        return replace(self, images=[self.images[i] for i in chosen], prepared=prepared)

    def render(self, view: View) -> Tensor:
        x = self.prepared.get(view)
        if x is None:
            x = self._stacked(view)
        return x if self.like is None else to_device(x, self.like)

    def _stacked(self, view: View) -> Tensor:
        plain = self.prepared.get(PLAIN)
        if plain is not None and not any(op.name in PLACING for op in view.ops):
            return apply_other_ops(plain, view, self.preprocess)
        return _stacked([self._render(image, view) for image in self.images], self.preprocess)

    def _render(self, image: Image.Image, view: View) -> Tensor:
        placed = any(op.name in PLACING for op in view.ops)
        x = self._placed(image, view) if placed else self.preprocess(image)
        return apply_other_ops(x[None], view, self.preprocess)[0]

    def _placed(self, image: Image.Image, view: View) -> Tensor:
        p = self.preprocess
        full_h, full_w = p.resized(image.height, image.width)
        h, w = p.crop if isinstance(p.crop, tuple) else (full_h, full_w)
        top, left = round((full_h - h) / 2), round((full_w - w) / 2)
        at = place(view, (h, w), (max(0.0, (full_h - h) / 2), max(0.0, (full_w - w) / 2)))
        y, x = image.height / full_h, image.width / full_w  # the image's own pixels in one of the resized ones
        box = ((left + at.left) * x, (top + at.top) * y, at.width * x, at.height * y)
        whole, (x0, y0, width, height) = reflected(p.converted(image), box)
        resized = whole.resize(at.size[::-1], p.resample, (x0, y0, x0 + width, y0 + height))
        return p.normalise(p.tensor(resized))


def to_device(x: Tensor, like: Tensor) -> Tensor:
    """In the type and on the device of `like`; the copy to an accelerator does not wait."""
    if like.device.type == "cuda" and x.device.type == "cpu":
        x = x.to(like.dtype).pin_memory()
    return x.to(like, non_blocking=True)


def _stacked(rendered: list[Tensor], preprocess: Preprocess) -> Tensor:
    sizes = list(dict.fromkeys(tuple(x.shape[1:]) for x in rendered))
    if len(sizes) > 1:
        raise InputError(
            f"PIL images of different sizes cannot be one batch: they become {sizes[0]} and {sizes[1]} with this "
            f"preprocessing ({preprocess}). Give one image at a time, or a Preprocess with a crop"
        )
    return torch.stack(rendered)


def for_network(source: Source, preprocess: Preprocess | None) -> Source:
    """The same images, prepared as another network wants them; an InputError where its pixels are not there.

    PIL images are prepared anew. Of tensors only the normalisation can be changed.
    """
    own = source.preprocess if isinstance(source, PILImages | Canvas) else None
    if preprocess is None or preprocess == own:
        return source
    if isinstance(source, PILImages):
        return replace(source, preprocess=preprocess, prepared={})
    if isinstance(source, Canvas) and own is not None and own.geometry == preprocess.geometry:
        return replace(source, pixels=preprocess.normalise(own.denormalise(source.pixels)), preprocess=preprocess)
    raise InputError(
        f"images: a network of this recipe wants other preprocessing ({preprocess}) than these tensors have ({own}). "
        "Pass PIL images, so that each network gets its own."
    )


def check_images(images: Any, what: str = "images", axes: int | None = None) -> Tensor:
    """A float tensor (B, C, H, W) with at least one image and one pixel, or an InputError.

    Args:
        axes: spatial axes of the model's input. None also accepts volumes (B, C, D, H, W) and signals (B, C, L).
    """
    shape = SHAPES[axes or 2]
    if not isinstance(images, Tensor) or images.is_nested:
        raise InputError(f"{what}: got {type(images).__name__}, expected a float tensor {shape}, not a nested one")
    if not (3 if axes is None else 2 + axes) <= images.ndim <= 5:
        one = shape.replace("B, ", "")
        raise InputError(
            f"{what}: got shape {tuple(images.shape)}, expected {shape}; for one image {one} pass image.unsqueeze(0)"
        )
    if not images.is_floating_point():
        raise InputError(
            f"{what}: got dtype {images.dtype}, expected floating point. Apply the model's preprocessing first"
        )
    if min(images.shape[0], *images.shape[2:]) < 1:
        raise InputError(f"{what}: got shape {tuple(images.shape)}, expected at least one image and one pixel")
    return images


def as_source(images: Any, preprocess: Preprocess | None = None) -> Source:
    """A source of what a user gives: a tensor, a Canvas, a PIL image or a list of them.

    With a `preprocess`, uint8 tensors (B, C, H, W) or (B, H, W, C) are prepared as PIL images are.
    """
    if isinstance(images, Tensor):
        if images.dtype == torch.uint8 and images.ndim == 4 and preprocess is not None:
            _check_layout(images)
            return PILImages(uint8_images(images), preprocess, torch.empty(0, device=images.device))
        return Block(images) if images.ndim in (3, 5) else Canvas(images, preprocess=preprocess)
    if isinstance(images, Canvas | Block | PILImages):
        return images
    several = [images] if isinstance(images, Image.Image) else images
    if isinstance(several, list | tuple) and several and all(isinstance(i, Image.Image) for i in several):
        if preprocess is None:
            raise InputError("PIL images need the model's preprocessing: pass enhance(..., preprocess=...) or a tensor")
        return PILImages(list(several), preprocess)
    raise InputError(f"images: got {type(images).__name__}, expected a tensor (B, C, H, W), a Canvas or PIL images")


def autocast(source: Source, precision: str | None) -> AbstractContextManager[Any]:
    """torch.autocast to a precision on the device of the images; nothing without one."""
    if precision is None:
        return nullcontext()
    like = source.like if isinstance(source, PILImages) else getattr(source, "pixels", None)
    return torch.autocast("cpu" if like is None else like.device.type, getattr(torch, precision))
