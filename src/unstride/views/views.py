"""Views at work: the ops of a policy on tensors and PIL images, and their way back on a segmentation output.

An op is torchvision's (`transforms.v2.functional`) or Pillow's own; nothing is random. Pixels from outside the image
are black, geometry is nearest-neighbour as in both libraries' defaults, resizing is bilinear with antialiasing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
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
AnyImage = Any  # Tensor (..., C, H, W), float in [0, 1] or uint8, or a PIL image


def _stays(output: Tensor, op: Op, size: Size) -> Tensor:
    return output


@dataclass(frozen=True)
class Act:
    """What an op does: `run` to an image, `back` to a segmentation output of it."""

    run: Callable[..., AnyImage]  # (image, op); a framed one also takes the size that the model sees, and the divisor
    touches: str = "values"  # of pixels: "order" (right on any tensor), "place" (black may come in) or "values"
    back: Callable[[Tensor, Op, Size], Tensor] | None = _stays  # None: there is no way back
    hides: bool = False  # a part of the image is not seen, so that what comes back is not valid everywhere
    framed: bool = False


def needs_pixels(view: View) -> bool:
    """True where the view must see values in [0, 1]; flips and crops are as right on a normalised tensor."""
    return any(ACTS[op.name].touches != "order" and not _does_nothing(op) for op in view.ops)


def changes_values(view: View) -> bool:
    """True where an op reads values as colours, so that a tensor out of [0, 1] would give nonsense."""
    return any(ACTS[op.name].touches == "values" for op in view.ops)


def apply(view: View, image: AnyImage, size: Size | None = None) -> AnyImage:
    """`apply(View((Op("Rotate", 10.0),)), image, (224, 224))`: the view, cut (or padded) to `size` around its centre.

    `size` is what the model sees, by default the size of the image itself.
    """
    size = size or _size(image)
    image = transform(view, image, size)
    return image if _size(image) == size else F.center_crop(image, list(size))


def transform(view: View, image: AnyImage, size: Size, divisor: int = 1) -> AnyImage:
    """The ops alone; the result may have another size. Scaled sides are rounded to multiples of `divisor`."""
    for op in view.ops:
        act = ACTS[op.name]
        image = act.run(image, op, size, divisor) if act.framed else act.run(image, op)
    return image


def undo(view: View, output: Tensor, size: Size, out_size: Size, divisor: int = 1) -> tuple[Tensor, Tensor | None]:
    """A segmentation output (B, K, h, w) of a view of a `size` image, brought back over the image itself.

    Also returns the valid region (1, 1, h, w), bool: where the view saw the image; None is everywhere. `out_size` is
    the size of an unchanged image's output. Flips and whole-pixel shifts are exact, a scale is resized back.
    """
    check_undo(view)
    valid: Tensor | None = None
    acts = [(ACTS[op.name], op) for op in view.ops if not _does_nothing(op)]
    if any(act.hides for act, _ in acts):
        moves = View(tuple(op for op in view.ops if ACTS[op.name].touches != "values"))
        valid = interpolate(transform(moves, _ones(output, size), size, divisor), output.shape[-2:], mode="area")
    for act, op in reversed(acts):
        assert act.back is not None  # checked
        output, valid = act.back(output, op, size), None if valid is None else act.back(valid, op, size)
    if tuple(output.shape[-2:]) != out_size:
        output = interpolate(output, out_size, mode="bilinear", align_corners=False, antialias=True)
        valid = valid if valid is None else interpolate(valid, out_size, mode="area")
    return output, None if valid is None else valid > 1 - 1e-4


def check_undo(view: View) -> None:
    """Raise for a view that cannot be brought back on a segmentation output."""
    for op in view.ops:
        if ACTS[op.name].back is None:
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


def _flip_lr(image: AnyImage, op: Op) -> AnyImage:
    return image if op.value is False else F.horizontal_flip(image)


def _posterize(image: AnyImage, op: Op) -> AnyImage:
    return F.posterize(image, bits=8 - int(op.number))  # the table's p is the number of bits taken away


def _solarize(image: AnyImage, op: Op) -> AnyImage:
    floating = isinstance(image, Tensor) and image.is_floating_point()
    return F.solarize(image, threshold=op.number if floating else op.number * 255)


def _filter(kernel: Any) -> Callable[[AnyImage, Op], AnyImage]:
    """One of Pillow's fixed filters; on tensors a convolution that leaves the border alone, as Pillow does."""
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
    """A `size` window at the centre or a corner; an image that is smaller lies in that corner of a black window."""
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


def _of_volumes(image: AnyImage, op: Op) -> AnyImage:
    raise OptionError(f"{op} turns volumes (B, C, D, H, W) front to back; an image has no such axis.")


def _elsewhere(image: AnyImage, op: Op) -> AnyImage:
    raise OptionError(f"{op} says where a look is taken, so it belongs in the stages of a recipe, not in a TTA policy.")


ACTS: dict[str, Act] = {
    "Identity": Act(lambda image, op: image, "order"),
    "FlipLR": Act(_flip_lr, "order", lambda output, op, size: output.flip(-1)),
    "FlipUD": Act(lambda image, op: F.vertical_flip(image), "order", lambda output, op, size: output.flip(-2)),
    "FlipFB": Act(_of_volumes, "order", None),
    "Invert": Act(lambda image, op: F.invert(image)),
    "PIL_Blur": Act(_filter(ImageFilter.BLUR)),
    "PIL_Smooth": Act(_filter(ImageFilter.SMOOTH)),
    "AutoContrast": Act(lambda image, op: F.autocontrast(image)),
    "Equalize": Act(lambda image, op: F.equalize(image)),
    "Posterize": Act(_posterize),
    "Rotate": Act(lambda image, op: F.rotate(image, op.number), "place", None),
    "CropBilinear": Act(_crop_bilinear, "place", None),
    "Solarize": Act(_solarize),
    "Contrast": Act(lambda image, op: F.adjust_contrast(image, op.number)),
    "Saturation": Act(lambda image, op: F.adjust_saturation(image, op.number)),
    "Brightness": Act(lambda image, op: F.adjust_brightness(image, op.number)),
    "Sharpness": Act(lambda image, op: F.adjust_sharpness(image, op.number)),
    "ShearX": Act(lambda image, op: _affine(image, shear_x=op.number), "place", None),
    "ShearY": Act(lambda image, op: _affine(image, shear_y=op.number), "place", None),
    "TranslateX": Act(lambda image, op: _affine(image, x=int(op.number)), "place", _shift_back, hides=True),
    "TranslateY": Act(lambda image, op: _affine(image, y=int(op.number)), "place", _shift_back, hides=True),
    "Cutout": Act(_cutout, "place", hides=True),
    "Scale": Act(_scale, "place", framed=True),
    "FiveCrop": Act(_five_crop, "order", None, framed=True),
    **{name: Act(_elsewhere, "order", None) for name in ("Size", "Field", "ShiftX", "ShiftY")},
}


def on_floats(run: Callable[[Tensor, Op], Tensor]) -> Callable[[AnyImage, Op], AnyImage]:
    """An op that knows float tensors (..., C, H, W) in [0, 1] only, for all that a view takes; it keeps the size."""

    def act(image: AnyImage, op: Op) -> AnyImage:
        if isinstance(image, Image.Image):
            return F.to_pil_image(act(F.pil_to_tensor(image), op))
        if not image.is_floating_point():
            seen = act(F.to_dtype(image, torch.float32, scale=True), op)
            return F.to_dtype(seen.clamp(0, 1), image.dtype, scale=True)
        seen = run(image, op)
        if not isinstance(seen, Tensor) or seen.shape != image.shape:
            got = tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
            raise InputError(f"{op} made {got} of an image of {tuple(image.shape)}; wanted a tensor of the same shape.")
        return seen

    return act


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
