"""The TTA ops on tensors and PIL images, and how an output of a transformed image is mapped back.

An op is torchvision's (`transforms.v2.functional`) or Pillow's; nothing is random. Pixels from outside the image are
black, geometry is nearest-neighbour as in both libraries' defaults, resizing is bilinear with antialiasing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn.functional import conv2d, interpolate

from unstride.compat import import_torchvision
from unstride.errors import InputError, OptionError
from unstride.recipe.view import Op, View

import_torchvision()
from torchvision.transforms import InterpolationMode  # noqa: E402
from torchvision.transforms.v2 import functional as F  # noqa: E402

Size = tuple[int, int]
AnyImage = Any  # Tensor (..., C, H, W), float in [0, 1] or uint8, or a PIL image


def _unmoved(output: Tensor, op: Op, size: Size) -> Tensor:
    return output


@dataclass(frozen=True)
class Transform:
    """What an op does to an image (`run`), and to a segmentation output of that image (`back`)."""

    run: Callable[..., AnyImage]  # (image, op); a framed one also takes the model's input size, and the divisor
    touches: str = "values"  # of pixels: "order" (right on any tensor), "place" (black may come in) or "values"
    back: Callable[[Tensor, Op, Size], Tensor] | None = _unmoved  # None: there is no way back
    hides: bool = False  # a part of the image is lost, so the output that is mapped back is not valid everywhere
    framed: bool = False


def needs_pixels(view: View) -> bool:
    """True where the view needs values in [0, 1]; flips and crops are as right on a normalised tensor."""
    return any(TRANSFORMS[op.name].touches != "order" and not _does_nothing(op) for op in view.ops)


def changes_values(view: View) -> bool:
    """True where an op reads values as colours, so that a tensor out of [0, 1] would give nonsense."""
    return any(TRANSFORMS[op.name].touches == "values" for op in view.ops)


def apply(view: View, image: AnyImage, size: Size | None = None) -> AnyImage:
    """`apply(View((Op("Rotate", 10.0),)), image, (224, 224))`: the view, cut (or padded) to `size` around its centre.

    `size` is the model's input size, by default that of the image itself.
    """
    size = size or _size(image)
    image = transform(view, image, size)
    return image if _size(image) == size else F.center_crop(image, list(size))


def transform(view: View, image: AnyImage, size: Size, divisor: int = 1) -> AnyImage:
    """The ops alone; the result may have another size. Scaled sides are rounded to multiples of `divisor`."""
    for op in view.ops:
        made = TRANSFORMS[op.name]
        image = made.run(image, op, size, divisor) if made.framed else made.run(image, op)
    return image


def undo(view: View, output: Tensor, size: Size, out_size: Size, divisor: int = 1) -> tuple[Tensor, Tensor | None]:
    """A segmentation output (B, K, h, w) of a view of a `size` image, brought back over the image itself.

    Also returns the valid region (1, 1, h, w), bool: where the view shows the image; None is everywhere. `out_size` is
    the size of an unchanged image's output. Flips and whole-pixel shifts are exact, a scale is resized back.
    """
    check_undo(view)
    valid: Tensor | None = None
    undone = [(TRANSFORMS[op.name], op) for op in view.ops if not _does_nothing(op)]
    if any(made.hides for made, _ in undone):
        moves = View(tuple(op for op in view.ops if TRANSFORMS[op.name].touches != "values"))
        valid = interpolate(transform(moves, _ones(output, size), size, divisor), output.shape[-2:], mode="area")
    for made, op in reversed(undone):
        assert made.back is not None  # checked
        output, valid = made.back(output, op, size), None if valid is None else made.back(valid, op, size)
    if tuple(output.shape[-2:]) != out_size:
        output = interpolate(output, out_size, mode="bilinear", align_corners=False, antialias=True)
        valid = valid if valid is None else interpolate(valid, out_size, mode="area")
    return output, None if valid is None else valid > 1 - 1e-4


def check_undo(view: View) -> None:
    """Raise for a view whose segmentation output cannot be mapped back."""
    for op in view.ops:
        if TRANSFORMS[op.name].back is None:
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
    scaled = size
    for op in view.ops:
        if op.name == "Scale":
            scaled = _scaled(scaled, op.number, divisor)
    h, w = output.shape[-2:]
    return max(1, round(h * size[0] / scaled[0])), max(1, round(w * size[1] / scaled[1]))


def _flip_lr(image: AnyImage, op: Op) -> AnyImage:
    return image if op.value is False else F.horizontal_flip(image)


def _posterize(image: AnyImage, op: Op) -> AnyImage:
    return F.posterize(image, bits=8 - int(op.number))  # the table's p is the number of bits taken away


def _solarize(image: AnyImage, op: Op) -> AnyImage:
    floating = isinstance(image, Tensor) and image.is_floating_point()
    return F.solarize(image, threshold=op.number if floating else op.number * 255)


def _filter(kernel: Any) -> Callable[[AnyImage, Op], AnyImage]:
    """One of Pillow's fixed filters; on tensors a convolution that keeps the border as it is, as Pillow does."""
    (width, height), scale, offset, weights = kernel.filterargs
    assert offset == 0

    def run(image: AnyImage, op: Op) -> AnyImage:
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


def _crop_bilinear(image: AnyImage, op: Op) -> AnyImage:
    h, w = _size(image)
    side = int(op.number)
    if side >= min(h, w):
        raise InputError(f"{op} takes {side} px off an image of {h} x {w} px: nothing is left. Use a larger image.")
    return F.resize(F.center_crop(image, [h - side, w - side]), [h, w], InterpolationMode.BILINEAR, antialias=True)


def _affine(image: AnyImage, *, x: float = 0, y: float = 0, shear_x: float = 0, shear_y: float = 0) -> AnyImage:
    shear = [math.degrees(math.atan(shear_x)), math.degrees(math.atan(shear_y))]
    return F.affine(image, angle=0.0, translate=[x, y], scale=1.0, shear=shear, center=[0.0, 0.0])


def _cutout(image: AnyImage, op: Op) -> AnyImage:
    h, w = _size(image)
    side = int(op.number)
    if side > min(h, w):
        raise InputError(f"{op} does not fit into an image of {h} x {w} px. Use a larger image or a smaller Cutout.")
    y, x = op.place or (0.5, 0.5)
    return F.erase(image, round(y * (h - side)), round(x * (w - side)), side, side, torch.zeros(()))


def _scale(image: AnyImage, op: Op, frame: Size, divisor: int) -> AnyImage:
    size = _size(image)
    target = _scaled(size, op.number, divisor)
    return image if target == size else F.resize(image, list(target), InterpolationMode.BILINEAR, antialias=True)


def _scaled(size: Size, ratio: float, divisor: int) -> Size:
    if ratio == 1:
        return size
    h, w = (max(divisor, round(side * ratio / divisor) * divisor) for side in size)
    return h, w


def _five_crop(image: AnyImage, op: Op, size: Size, divisor: int) -> AnyImage:
    """A `size` window at the centre or a corner; a smaller image is in that corner of a black window."""
    h, w = _size(image)
    where = str(op.value)
    if where == "Center":
        return image if (h, w) == size else F.center_crop(image, list(size))
    top = 0 if where.endswith("Top") else h - size[0]
    left = 0 if where.startswith("Left") else w - size[1]
    return F.crop(image, top, left, *size)


def _shift_back(output: Tensor, op: Op, size: Size) -> Tensor:
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


def _for_volumes(image: AnyImage, op: Op) -> AnyImage:
    raise OptionError(f"{op} flips volumes (B, C, D, H, W) front to back; an image has no such axis.")


def _placing(image: AnyImage, op: Op) -> AnyImage:
    raise OptionError(
        f"{op} chooses a part of the uncropped image, so it belongs in the stages of a recipe, not in a TTA policy."
    )


TRANSFORMS: dict[str, Transform] = {
    "Identity": Transform(lambda image, op: image, "order"),
    "FlipLR": Transform(_flip_lr, "order", lambda output, op, size: output.flip(-1)),
    "FlipUD": Transform(lambda image, op: F.vertical_flip(image), "order", lambda output, op, size: output.flip(-2)),
    "FlipFB": Transform(_for_volumes, "order", None),
    "Invert": Transform(lambda image, op: F.invert(image)),
    "PIL_Blur": Transform(_filter(ImageFilter.BLUR)),
    "PIL_Smooth": Transform(_filter(ImageFilter.SMOOTH)),
    "AutoContrast": Transform(lambda image, op: F.autocontrast(image)),
    "Equalize": Transform(lambda image, op: F.equalize(image)),
    "Posterize": Transform(_posterize),
    "Rotate": Transform(lambda image, op: F.rotate(image, op.number), "place", None),
    "CropBilinear": Transform(_crop_bilinear, "place", None),
    "Solarize": Transform(_solarize),
    "Contrast": Transform(lambda image, op: F.adjust_contrast(image, op.number)),
    "Saturation": Transform(lambda image, op: F.adjust_saturation(image, op.number)),
    "Brightness": Transform(lambda image, op: F.adjust_brightness(image, op.number)),
    "Sharpness": Transform(lambda image, op: F.adjust_sharpness(image, op.number)),
    "ShearX": Transform(lambda image, op: _affine(image, shear_x=op.number), "place", None),
    "ShearY": Transform(lambda image, op: _affine(image, shear_y=op.number), "place", None),
    "TranslateX": Transform(lambda image, op: _affine(image, x=int(op.number)), "place", _shift_back, hides=True),
    "TranslateY": Transform(lambda image, op: _affine(image, y=int(op.number)), "place", _shift_back, hides=True),
    "Cutout": Transform(_cutout, "place", hides=True),
    "Scale": Transform(_scale, "place", framed=True),
    "FiveCrop": Transform(_five_crop, "order", None, framed=True),
    **{name: Transform(_placing, "order", None) for name in ("Size", "Crop", "ShiftX", "ShiftY")},
}


def on_floats(run: Callable[[Tensor, Op], Tensor]) -> Callable[[AnyImage, Op], AnyImage]:
    """An op on float tensors (..., C, H, W) in [0, 1] made to take uint8 tensors and PIL images; it keeps the size."""

    def on_any(image: AnyImage, op: Op) -> AnyImage:
        if isinstance(image, Image.Image):
            return F.to_pil_image(on_any(F.pil_to_tensor(image), op))
        if not image.is_floating_point():
            changed = on_any(F.to_dtype(image, torch.float32, scale=True), op)
            return F.to_dtype(changed.clamp(0, 1), image.dtype, scale=True)
        changed = run(image, op)
        if not isinstance(changed, Tensor) or changed.shape != image.shape:
            got = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise InputError(
                f"{op} made {got} of an image of {tuple(image.shape)}; expected a tensor of the same shape."
            )
        return changed

    return on_any


def _does_nothing(op: Op) -> bool:
    return (op.name == "FlipLR" and op.value is False) or (op.name == "Scale" and op.value == 1)


def _ones(like: Tensor, size: Size) -> Tensor:
    return torch.ones(1, 1, *size, dtype=torch.float32, device=like.device)


def _size(image: AnyImage) -> Size:
    if isinstance(image, Tensor):
        return int(image.shape[-2]), int(image.shape[-1])
    if isinstance(image, Image.Image):
        return image.height, image.width
    raise InputError(f"a view takes a tensor (..., C, H, W) or a PIL image, not {type(image).__name__}.")
