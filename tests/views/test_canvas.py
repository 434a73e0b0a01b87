"""The plain view is exactly the user's preprocessing; other views read real pixels where there are any."""

import numpy as np
import pytest
import torch
from PIL import Image

from unstride.errors import InputError, OptionError
from unstride.views.canvas import Canvas, PILImages, as_source, place
from unstride.views.images import Preprocess
from unstride.views.policies import IDENTITY, parse_view


@pytest.fixture(scope="module")
def image() -> Image.Image:
    small = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    "preprocess", [Preprocess(), Preprocess(resize=None, crop=None), Preprocess(resize=(64, 48), crop=None)]
)
def test_the_plain_view_is_the_preprocessing(image, preprocess):
    images = PILImages([image], preprocess)
    assert torch.equal(images.see(IDENTITY)[0], preprocess(image))
    assert images.size == tuple(preprocess(image).shape[1:])
    assert torch.equal(images.see(parse_view("mirror"))[0], preprocess(image).flip(-1))


def test_a_shift_reads_the_pixels_beside_the_crop(image):
    wide = Preprocess(crop=(256, 256))(image)[None]
    canvas, images = Canvas(wide, crop=224), PILImages([image], Preprocess())
    view = parse_view("ShiftY=-16 + ShiftX=16")
    assert torch.equal(canvas.see(view), wide[:, :, :224, 32:])
    torch.testing.assert_close(images.see(view), canvas.see(view), atol=0.02, rtol=0)


def test_beyond_the_image_it_is_reflected():
    x = torch.arange(6.0).view(1, 1, 1, 6).expand(1, 1, 6, 6)
    seen = Canvas(x).see(parse_view("ShiftX=2"))
    assert seen[0, 0, 0].tolist() == [2, 3, 4, 5, 4, 3]


def test_sizes_stay_even():
    assert place(parse_view("1.3x"), (224, 224)).size == (288, 288)
    assert place(parse_view("1.125x"), (32, 32)).size == (36, 36)
    assert Canvas(torch.zeros(1, 3, 224, 224)).see(parse_view("1.3x")).shape == (1, 3, 288, 288)


def test_a_wider_field_is_the_whole_canvas():
    x = torch.randn(2, 3, 256, 256)
    seen = Canvas(x, crop=224).see(parse_view("Size=1.142857 + Field=1.142857"))
    assert torch.equal(seen, x)


def test_what_is_no_image_is_refused():
    with pytest.raises(InputError, match="unsqueeze"):
        as_source(torch.zeros(8, 8))
    with pytest.raises(InputError, match="preprocess"):
        as_source([Image.new("RGB", (8, 8))])
    with pytest.raises(InputError, match="PIL"):
        as_source("photo.jpg")
    with pytest.raises(OptionError, match="inside the image"):
        Canvas(torch.zeros(1, 3, 8, 8), crop=9)
    with pytest.raises(InputError, match="colours"):
        Canvas(torch.zeros(1, 3, 8, 8)).see(parse_view("Contrast=1.2"))
