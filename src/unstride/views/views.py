"""Views at work: the ops of a policy on tensors and PIL images, and their way back on a segmentation output.

An op is torchvision's (`transforms.v2.functional`) or Pillow's own; nothing is random. Pixels from outside the image
are black, geometry is nearest-neighbour as in both libraries' defaults, resizing is bilinear with antialiasing.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn.functional import conv2d, interpolate
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from unstride.errors import InputError, OptionError
from unstride.views.policies import Op, View

Size = tuple[int, int]
Picture = Any  # Tensor (..., C, H, W), float in [0, 1] or uint8, or a PIL image

_REARRANGE = {"Identity", "FlipLR", "FlipUD"}  # move pixels, never change their values: right on any tensor
_GEOMETRY = {"Rotate", "CropBilinear", "ShearX", "ShearY", "TranslateX", "TranslateY", "Scale", "FiveCrop", "Cutout"}
_NO_WAY_BACK = {"Rotate", "CropBilinear", "ShearX", "ShearY", "FiveCrop", "Field", "ShiftX", "ShiftY"}


def needs_pixels(view: View) -> bool:
    """True where the view must see values in [0, 1]; flips and crops are as right on a normalised tensor."""
    return any(op.name not in _REARRANGE | {"FiveCrop"} and not _does_nothing(op) for op in view.ops)


def changes_values(view: View) -> bool:
    """True where an op reads values as colours, so that a tensor out of [0, 1] would give nonsense."""
    return any(op.name not in _REARRANGE | _GEOMETRY for op in view.ops)


def apply(view: View, image: Picture, size: Size | None = None) -> Picture:
    """`apply(View((Op("Rotate", 10.0),)), image, (224, 224))`: the view, cut (or padded) to `size` around its centre.

    `size` is what the model sees, by default the size of the image itself.
    """
    size = size or _size(image)
    image = transform(view, image, size)
    return image if _size(image) == size else F.center_crop(image, list(size))


def transform(view: View, image: Picture, size: Size, divisor: int = 1) -> Picture:
    """The ops alone; the result may have another size. Scaled sides are rounded to multiples of `divisor`."""
    for op in view.ops:
        if op.name == "Scale":
            image = _scale(image, op.number, divisor)
        elif op.name == "FiveCrop":
            image = _five_crop(image, str(op.value), size)
        else:
            image = _OPS[op.name](image, op)
    return image


def undo(view: View, output: Tensor, size: Size, out_size: Size, divisor: int = 1) -> tuple[Tensor, Tensor | None]:
    """A segmentation output (B, K, h, w) of a view of a `size` image, brought back over the image itself.

    Also returns the valid region (1, 1, h, w), bool: where the view saw the image; None is everywhere. `out_size` is
    the size of an unchanged image's output. Flips and whole-pixel shifts are exact, a scale is resized back.
    """
    check_undo(view)
    valid: Tensor | None = None
    if any(op.name in ("TranslateX", "TranslateY", "Cutout") and not _does_nothing(op) for op in view.ops):
        seen = transform(
            View(tuple(op for op in view.ops if op.name in _GEOMETRY | _REARRANGE)), _ones(output, size), size, divisor
        )
        valid = interpolate(seen, output.shape[-2:], mode="area")
    for op in reversed(view.ops):
        if op.name == "FlipLR" and op.value is not False:
            output, valid = output.flip(-1), valid if valid is None else valid.flip(-1)
        elif op.name == "FlipUD":
            output, valid = output.flip(-2), valid if valid is None else valid.flip(-2)
        elif op.name in ("TranslateX", "TranslateY"):
            output, valid = _shift_back(op, output, size), None if valid is None else _shift_back(op, valid, size)
    if tuple(output.shape[-2:]) != out_size:
        output = interpolate(output, out_size, mode="bilinear", align_corners=False, antialias=True)
        valid = valid if valid is None else interpolate(valid, out_size, mode="area")
    return output, None if valid is None else valid > 1 - 1e-4


def check_undo(view: View) -> None:
    """Raise for a view that cannot be brought back on a segmentation output."""
    for op in view.ops:
        if op.name in _NO_WAY_BACK:
            raise OptionError(
                f"view {view} cannot be used for segmentation: {op.name} has no exact way back on the output. "
                "Use flips, Scale, Translate, Cutout or colour ops, such as policy='segmentation'."
            )
    names = [op.name for op in view.ops]
    if "Scale" in names and {"TranslateX", "TranslateY"} & set(names):
        raise OptionError(
            f"view {view} cannot be used for segmentation: a shift of a scaled image is not a whole pixel."
        )


def out_size(view: View, output: Tensor, size: Size, divisor: int = 1) -> Size:
    """The output size that an unchanged image has, from the output of a view: the same cells per pixel."""
    seen = size
    for op in view.ops:
        if op.name == "Scale":
            seen = _scaled(seen, op.number, divisor)
    h, w = output.shape[-2:]
    return max(1, round(h * size[0] / seen[0])), max(1, round(w * size[1] / seen[1]))


def _flip_lr(image: Picture, op: Op) -> Picture:
    return image if op.value is False else F.horizontal_flip(image)


def _posterize(image: Picture, op: Op) -> Picture:
    return F.posterize(image, bits=8 - int(op.number))  # the table's p is the number of bits taken away


def _solarize(image: Picture, op: Op) -> Picture:
    floating = isinstance(image, Tensor) and image.is_floating_point()
    return F.solarize(image, threshold=op.number if floating else op.number * 255)


def _filter(kernel: Any) -> Callable[[Picture, Op], Picture]:
    """One of Pillow's fixed filters; on tensors a convolution that leaves the border alone, as Pillow does."""
    (width, height), scale, offset, weights = kernel.filterargs
    assert offset == 0

    def run(image: Picture, op: Op) -> Picture:
        if not isinstance(image, Tensor):
            return image.filter(kernel)
        channels, (h, w) = image.shape[-3], image.shape[-2:]
        if h < height or w < width:
            return image.clone()
        weight = torch.tensor(weights, dtype=torch.float32, device=image.device).reshape(1, 1, height, width) / scale
        pixels = image.reshape(-1, channels, h, w)
        inside = conv2d(pixels.float(), weight.expand(channels, 1, height, width), groups=channels)
        inside = inside.clamp(0, 1) if image.is_floating_point() else (inside + 0.5).floor().clamp(0, 255)
        out = pixels.clone()
        out[..., height // 2 : h - height // 2, width // 2 : w - width // 2] = inside.to(image.dtype)
        return out.reshape(image.shape)

    return run


def _crop_bilinear(image: Picture, op: Op) -> Picture:
    h, w = _size(image)
    side = int(op.number)
    if side >= min(h, w):
        raise InputError(f"{op} takes {side} px off an image of {h} x {w} px: nothing is left. Use a larger image.")
    return F.resize(F.center_crop(image, [h - side, w - side]), [h, w], InterpolationMode.BILINEAR, antialias=True)


def _affine(image: Picture, *, x: float = 0, y: float = 0, shear_x: float = 0, shear_y: float = 0) -> Picture:
    shear = [math.degrees(math.atan(shear_x)), math.degrees(math.atan(shear_y))]
    return F.affine(image, angle=0.0, translate=[x, y], scale=1.0, shear=shear, center=[0.0, 0.0])


def _cutout(image: Picture, op: Op) -> Picture:
    h, w = _size(image)
    side = int(op.number)
    if side > min(h, w):
        raise InputError(f"{op} does not fit into an image of {h} x {w} px. Use a larger image or a smaller Cutout.")
    y, x = op.place or (0.5, 0.5)
    return F.erase(image, round(y * (h - side)), round(x * (w - side)), side, side, torch.zeros(()))


def _scale(image: Picture, ratio: float, divisor: int) -> Picture:
    size = _size(image)
    target = _scaled(size, ratio, divisor)
    return image if target == size else F.resize(image, list(target), InterpolationMode.BILINEAR, antialias=True)


def _scaled(size: Size, ratio: float, divisor: int) -> Size:
    if ratio == 1:
        return size
    h, w = (max(divisor, round(side * ratio / divisor) * divisor) for side in size)
    return h, w


def _five_crop(image: Picture, where: str, size: Size) -> Picture:
    """A `size` window at the centre or a corner; an image that is smaller lies in that corner of a black window."""
    h, w = _size(image)
    if where == "Center":
        return image if (h, w) == size else F.center_crop(image, list(size))
    top = 0 if where.endswith("Top") else h - size[0]
    left = 0 if where.startswith("Left") else w - size[1]
    return F.crop(image, top, left, *size)


_OPS: dict[str, Callable[[Picture, Op], Picture]] = {
    "Identity": lambda image, op: image,
    "FlipLR": _flip_lr,
    "FlipUD": lambda image, op: F.vertical_flip(image),
    "Invert": lambda image, op: F.invert(image),
    "PIL_Blur": _filter(ImageFilter.BLUR),
    "PIL_Smooth": _filter(ImageFilter.SMOOTH),
    "AutoContrast": lambda image, op: F.autocontrast(image),
    "Equalize": lambda image, op: F.equalize(image),
    "Posterize": _posterize,
    "Rotate": lambda image, op: F.rotate(image, op.number),
    "CropBilinear": _crop_bilinear,
    "Solarize": _solarize,
    "Contrast": lambda image, op: F.adjust_contrast(image, op.number),
    "Saturation": lambda image, op: F.adjust_saturation(image, op.number),
    "Brightness": lambda image, op: F.adjust_brightness(image, op.number),
    "Sharpness": lambda image, op: F.adjust_sharpness(image, op.number),
    "ShearX": lambda image, op: _affine(image, shear_x=op.number),
    "ShearY": lambda image, op: _affine(image, shear_y=op.number),
    "TranslateX": lambda image, op: _affine(image, x=int(op.number)),
    "TranslateY": lambda image, op: _affine(image, y=int(op.number)),
    "Cutout": _cutout,
}


def _shift_back(op: Op, output: Tensor, size: Size) -> Tensor:
    """Undo a shift of whole pixels; what left the image comes back as 0 (and not valid)."""
    if tuple(output.shape[-2:]) != size:
        raise InputError(
            f"{op} cannot be undone on an output of {tuple(output.shape[-2:])} for an image of {size}: "
            "the shift is not a whole number of cells. Leave Translate out of the policy."
        )
    h, w = size
    step = int(op.number)
    if op.name == "TranslateX":
        return F.crop(output, 0, step, h, w)
    return F.crop(output, step, 0, h, w)


def _does_nothing(op: Op) -> bool:
    return (op.name == "FlipLR" and op.value is False) or (op.name == "Scale" and op.value == 1)


def _ones(like: Tensor, size: Size) -> Tensor:
    return torch.ones(1, 1, *size, dtype=torch.float32, device=like.device)


def _size(image: Picture) -> Size:
    if isinstance(image, Tensor):
        return int(image.shape[-2]), int(image.shape[-1])
    if isinstance(image, Image.Image):
        return image.height, image.width
    raise InputError(f"a view takes a tensor (..., C, H, W) or a PIL image, not {type(image).__name__}.")
