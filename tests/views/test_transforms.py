"""Each op is Pillow's or torchvision's own; each way back is exact; nothing depends on chance or on the batch."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torchvision.transforms.v2 import functional as F

from unstride.errors import InputError, OptionError
from unstride.recipe import policies
from unstride.recipe.view import Op, View, parse_view
from unstride.views import transforms


def photo(h: int = 40, w: int = 48) -> Image.Image:
    """Smooth colours with noise and a saturated corner: edges, gradients, 0 and 255."""
    y, x = np.mgrid[0:h, 0:w]
    base = np.stack([255 * x / w, 255 * y / h, 127 + 120 * np.sin(x / 5 + y / 7)], -1)
    base += np.random.default_rng(0).normal(0, 12, base.shape)
    base[:6, :6], base[-6:, -6:] = 255, 0
    return Image.fromarray(base.clip(0, 255).astype(np.uint8))


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def one(name: str, value=None, place=None) -> View:
    return View((Op(name, value, place),))


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Pillow's own affine map of pixel centres."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def crop_bilinear(image: Image.Image, p: int) -> Image.Image:
    left, top = round(p / 2), round(p / 2)
    box = (left, top, left + image.width - p, top + image.height - p)
    return image.crop(box).resize(image.size, Image.Resampling.BILINEAR)


# name, value, what Pillow gives, levels of 255 that a tensor may differ by, share of pixels that may differ by more
PILLOW = [
    ("FlipLR", None, ImageOps.mirror, 0, 0),
    ("FlipLR", True, ImageOps.mirror, 0, 0),
    ("FlipLR", False, lambda i: i, 0, 0),
    ("FlipUD", None, ImageOps.flip, 0, 0),
    ("Invert", None, ImageOps.invert, 0, 0),
    ("PIL_Blur", None, lambda i: i.filter(ImageFilter.BLUR), 1, 0),
    ("PIL_Smooth", None, lambda i: i.filter(ImageFilter.SMOOTH), 1, 0),
    ("AutoContrast", None, ImageOps.autocontrast, 1, 0),
    ("Equalize", None, ImageOps.equalize, 0, 0),
    *[("Posterize", p, lambda i, p=p: ImageOps.posterize(i, 8 - p), 0, 0) for p in (1, 2, 3, 4)],
    *[("Rotate", p, lambda i, p=p: i.rotate(p), 0, 0.02) for p in (-30.0, 10.0)],
    *[("CropBilinear", p, lambda i, p=p: crop_bilinear(i, p), 1, 0) for p in (2, 5, 10)],
    *[("Solarize", p, lambda i, p=p: ImageOps.solarize(i, p * 255), 0, 0) for p in (0.0, 1 / 3, 1.0)],
    *[("Contrast", p, lambda i, p=p: ImageEnhance.Contrast(i).enhance(p), 2, 0) for p in (0.1, 0.9, 1.9)],
    *[("Saturation", p, lambda i, p=p: ImageEnhance.Color(i).enhance(p), 2, 0) for p in (0.1, 1.9)],
    *[("Brightness", p, lambda i, p=p: ImageEnhance.Brightness(i).enhance(p), 1, 0) for p in (0.1, 1.9)],
    *[("Sharpness", p, lambda i, p=p: ImageEnhance.Sharpness(i).enhance(p), 2, 0) for p in (0.1, 1.9)],
    *[("ShearX", p, lambda i, p=p: affine(i, 1, p, 0, 0, 1, 0), 0, 0.04) for p in (-0.3, 0.1)],
    *[("ShearY", p, lambda i, p=p: affine(i, 1, 0, 0, p, 1, 0), 0, 0.04) for p in (-0.3, 0.1)],
    *[("TranslateX", p, lambda i, p=p: affine(i, 1, 0, -p, 0, 1, 0), 0, 0) for p in (-9, 1)],
    *[("TranslateY", p, lambda i, p=p: affine(i, 1, 0, 0, 0, 1, -p), 0, 0) for p in (-9, 1)],
]


@pytest.mark.parametrize(("name", "value", "pillow", "levels", "share"), PILLOW, ids=lambda v: str(v)[:12])
def test_ops_are_pillows(name, value, pillow, levels, share) -> None:
    image = photo()
    wanted = as_tensor(pillow(image)).int()
    exact = name not in ("ShearX", "ShearY")  # torchvision hands Pillow a rounded matrix
    from_pil = as_tensor(transforms.apply(one(name, value), image)).int()
    assert ((from_pil - wanted).abs().amax(0) > 0).float().mean() <= (0 if exact else share)
    for tensor in (as_tensor(image), as_tensor(image).float() / 255):
        got = transforms.apply(one(name, value), tensor)
        assert got.dtype == tensor.dtype
        got = got.int() if got.dtype == torch.uint8 else (got * 255).round().int()
        slack = levels + (2 if tensor.is_floating_point() and name in ("Posterize", "AutoContrast", "Equalize") else 0)
        slack += 1 if tensor.is_floating_point() and levels else 0
        assert ((got - wanted).abs().amax(0) > slack).float().mean() <= share, (name, tensor.dtype)


TORCHVISION = [
    ("Invert", None, F.invert),
    ("AutoContrast", None, F.autocontrast),
    ("Equalize", None, F.equalize),
    ("Posterize", 3, lambda x: F.posterize(x, 5)),
    ("Solarize", 0.25, lambda x: F.solarize(x, 0.25)),
    ("Rotate", 12.5, lambda x: F.rotate(x, 12.5)),
    ("Contrast", 0.3, lambda x: F.adjust_contrast(x, 0.3)),
    ("Saturation", 0.3, lambda x: F.adjust_saturation(x, 0.3)),
    ("Brightness", 1.3, lambda x: F.adjust_brightness(x, 1.3)),
    ("Sharpness", 0.3, lambda x: F.adjust_sharpness(x, 0.3)),
    ("ShearX", 0.2, lambda x: F.affine(x, 0.0, [0, 0], 1.0, [math.degrees(math.atan(0.2)), 0.0], center=[0, 0])),
    ("ShearY", 0.2, lambda x: F.affine(x, 0.0, [0, 0], 1.0, [0.0, math.degrees(math.atan(0.2))], center=[0, 0])),
    ("TranslateX", 3, lambda x: F.pad(x, [3, 0, 0, 0])[..., :-3]),
    ("TranslateY", -3, lambda x: F.pad(x, [0, 0, 0, 3])[..., 3:, :]),
    ("Scale", 1.5, lambda x: F.center_crop(F.resize(x, [60, 72], antialias=True), [40, 48])),
    ("Scale", 0.5, lambda x: F.pad(F.resize(x, [20, 24], antialias=True), [12, 10, 12, 10])),
]


@pytest.mark.parametrize(("name", "value", "own"), TORCHVISION, ids=lambda v: str(v)[:12])
def test_ops_on_float_batches_are_torchvisions_image_by_image(name, value, own) -> None:
    batch = torch.stack([as_tensor(photo()), as_tensor(photo()).flip(0), as_tensor(photo()) // 3]).float() / 255
    got = transforms.apply(one(name, value), batch)
    for image, view in zip(batch, got, strict=True):
        assert torch.equal(view, own(image)) or torch.allclose(view, own(image), atol=1e-6)


def test_five_crops_are_torchvisions_and_scaled_ones_lie_in_their_corner() -> None:
    image = as_tensor(photo()).float() / 255
    lt, rt, lb, rb, centre = F.five_crop(image, [30, 32])
    own = {"Center": centre, "LeftTop": lt, "LeftBottom": lb, "RightTop": rt, "RightBottom": rb}
    for where, wanted in own.items():
        assert torch.equal(transforms.apply(one("FiveCrop", where), image, (30, 32)), wanted)
    small = View((Op("Scale", 0.5), Op("FiveCrop", "RightBottom")))
    got = transforms.apply(small, image, (30, 32))
    assert torch.equal(got[:, 10:, 8:], F.resize(image, [20, 24], antialias=True))
    assert not got[:, :10].any()
    assert not got[:, :, :8].any()


@pytest.mark.parametrize("kind", ["pil", "uint8", "float"])
def test_cutout_is_black_at_its_place(kind: str) -> None:
    image = Image.new("RGB", (48, 40), (200, 100, 50))
    source = image if kind == "pil" else as_tensor(image) if kind == "uint8" else as_tensor(image) / 255
    got = transforms.apply(one("Cutout", 10, (0.5, 1.0)), source)
    got = as_tensor(got) if kind == "pil" else got
    hole = (got == 0).all(0)
    assert hole.sum() == 100
    assert hole[15:25, 38:48].all()


def test_every_view_of_the_policies_keeps_size_type_and_ignores_chance() -> None:
    tensor = as_tensor(photo(56, 56)).float() / 255
    chosen = [*policies.expanded()[:132], *policies.expanded()[132:8778:700], *policies.standard()[::7]]
    for view in chosen:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        first = transforms.apply(view, tensor, (48, 48))
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        assert first.shape == (3, 48, 48)
        assert first.dtype == torch.float32
        assert -1e-6 < first.min() <= first.max() < 1 + 1e-6
        assert torch.equal(first, transforms.apply(view, tensor, (48, 48)))
        batch = transforms.apply(view, torch.stack([1 - tensor, tensor]), (48, 48))
        assert torch.allclose(batch[1], first, atol=1e-6), view


@pytest.mark.parametrize("text", ["Identity", "FlipLR", "FlipUD", "FlipLR + FlipUD", "Contrast=0.5 + FlipLR"])
def test_flips_are_undone_exactly(text: str) -> None:
    view = parse_view(text)
    output = torch.randn(2, 5, 7, 9)
    geometry = View(tuple(op for op in view.ops if op.name.startswith("Flip")) or (Op("Identity"),))
    back, valid = transforms.undo(view, transforms.apply(geometry, output), (7, 9), (7, 9))
    assert valid is None
    assert torch.equal(back, output)


@pytest.mark.parametrize(
    "text",
    ["TranslateX=3", "TranslateY=-4", "FlipLR + TranslateX=5", "TranslateX=5 + FlipLR", "TranslateX=2 + TranslateY=3"],
)
def test_shifts_are_undone_exactly_where_they_are_valid(text: str) -> None:
    view = parse_view(text)
    output = torch.rand(2, 3, 20, 22) + 0.5
    back, valid = transforms.undo(view, transforms.apply(view, output), (20, 22), (20, 22))
    assert valid is not None
    assert torch.equal(torch.where(valid, back, 0), torch.where(valid, output, 0))
    lost = sum(abs(op.number) * (20 if op.name == "TranslateX" else 22) for op in view.ops if op.name.startswith("Tr"))
    corner = 6 if text == "TranslateX=2 + TranslateY=3" else 0
    assert int((~valid).sum()) == lost - corner


def test_cutout_is_not_valid_in_its_hole_even_on_a_coarse_output() -> None:
    view = View((Op("FlipLR"), Op("Cutout", 8, (0.0, 0.0))))
    _, valid = transforms.undo(view, torch.randn(1, 3, 8, 8), (32, 32), (8, 8))
    assert valid is not None
    wanted = torch.ones(8, 8, dtype=torch.bool)
    wanted[:2, -2:] = False  # the hole is cut after the flip
    assert torch.equal(valid[0, 0], wanted)


@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.25, 1.5])
def test_scale_comes_back_on_the_same_grid(ratio: float) -> None:
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
    ramp = torch.stack([x, y])[None]
    view = one("Scale", ratio)
    scaled = transforms.transform(view, ramp, (48, 64))
    assert transforms.out_size(view, scaled, (48, 64)) == (48, 64)
    back, valid = transforms.undo(view, scaled, (48, 64), (48, 64))
    assert valid is None
    assert torch.allclose(back[..., 4:-4, 4:-4], ramp[..., 4:-4, 4:-4], atol=0.05)  # no shift: a ramp is still the ramp


def test_divisor_rounds_scaled_sides() -> None:
    assert transforms.transform(one("Scale", 0.75), torch.rand(1, 3, 96, 64), (96, 64), divisor=32).shape[-2:] == (
        64,
        64,
    )


@pytest.mark.parametrize(
    "text", ["Rotate=10", "ShearX=0.1", "CropBilinear=2", "FiveCrop=Center", "Scale=0.5 + TranslateX=2"]
)
def test_what_has_no_way_back_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="segmentation"):
        transforms.undo(parse_view(text), torch.rand(1, 2, 8, 8), (8, 8), (8, 8))


def test_bad_images() -> None:
    with pytest.raises(InputError, match="not a whole"):
        transforms.undo(one("TranslateX", 3), torch.rand(1, 2, 8, 8), (32, 32), (8, 8))
    with pytest.raises(InputError, match="does not fit"):
        transforms.apply(one("Cutout", 20, (0.5, 0.5)), torch.rand(3, 16, 16))
    with pytest.raises(InputError, match="nothing is left"):
        transforms.apply(one("CropBilinear", 10), torch.rand(3, 8, 8))
    with pytest.raises(InputError, match="ndarray"):
        transforms.apply(one("Identity"), np.zeros((8, 8, 3)))
