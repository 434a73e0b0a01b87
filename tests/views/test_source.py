"""The plain view is exactly the user's preprocessing; other views read real pixels where there are any."""

import numpy as np
import pytest
import torch
from PIL import Image

import unstride
from unstride.errors import InputError, OptionError
from unstride.recipe.view import PLAIN, parse_view
from unstride.views.images import Preprocess, open_image
from unstride.views.source import Canvas, PILImages, as_source, check_images, place


@pytest.fixture(scope="module")
def image() -> Image.Image:
    small = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    "preprocess", [Preprocess(), Preprocess(resize=None, crop=None), Preprocess(resize=(64, 48), crop=None)]
)
def test_the_plain_view_is_the_preprocessing(image, preprocess):
    images = PILImages([image], preprocess)
    assert torch.equal(images.render(PLAIN)[0], preprocess(image))
    assert images.size == tuple(preprocess(image).shape[1:])
    assert torch.equal(images.render(parse_view("flip"))[0], preprocess(image).flip(-1))


def test_a_shift_reads_the_pixels_beside_the_crop(image):
    wide = Preprocess(crop=(256, 256))(image)[None]
    canvas, images = Canvas(wide, crop=224), PILImages([image], Preprocess())
    view = parse_view("ShiftY=-16 + ShiftX=16")
    assert torch.equal(canvas.render(view), wide[:, :, :224, 32:])
    torch.testing.assert_close(images.render(view), canvas.render(view), atol=0.02, rtol=0)


def test_beyond_the_image_it_is_reflected():
    x = torch.arange(6.0).view(1, 1, 1, 6).expand(1, 1, 6, 6)
    shown = Canvas(x).render(parse_view("ShiftX=2"))
    assert shown[0, 0, 0].tolist() == [2, 3, 4, 5, 4, 3]


def test_sizes_stay_even():
    assert place(parse_view("1.3x"), (224, 224)).size == (288, 288)
    assert place(parse_view("1.125x"), (32, 32)).size == (36, 36)
    assert Canvas(torch.zeros(1, 3, 224, 224)).render(parse_view("1.3x")).shape == (1, 3, 288, 288)


def test_a_wider_field_is_the_whole_canvas():
    x = torch.randn(2, 3, 256, 256)
    shown = Canvas(x, crop=224).render(parse_view("Size=1.142857 + Crop=1.142857"))
    assert torch.equal(shown, x)


def test_what_is_no_image_is_refused():
    with pytest.raises(InputError, match="unsqueeze"):
        as_source(torch.zeros(8, 8))
    with pytest.raises(InputError, match="preprocess"):
        as_source([Image.new("RGB", (8, 8))])
    with pytest.raises(InputError, match="PIL"):
        as_source("photo.jpg")
    with pytest.raises(OptionError, match="not inside the image"):
        Canvas(torch.zeros(1, 3, 8, 8), crop=9)
    with pytest.raises(InputError, match="colours"):
        Canvas(torch.zeros(1, 3, 8, 8)).render(parse_view("Contrast=1.2"))


def deep(mode: str) -> Image.Image:
    """The same ramp from black to white in each of Pillow's deep modes."""
    ramp = np.linspace(0, 1, 32 * 32, dtype=np.float32).reshape(32, 32)
    return Image.fromarray(
        {"F": ramp, "I": (ramp * 65535).astype(np.int32), "I;16": (ramp * 65535).astype(np.uint16)}[mode]
    )


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
@pytest.mark.parametrize("view", ["plain", "flip", "0.5x", "Contrast=1.2"])
def test_deep_images_are_scaled_as_open_image_does(tmp_path, mode, view):
    image, preprocess = deep(mode), Preprocess(resize=None, crop=24)
    assert image.mode == mode
    image.save(tmp_path / "deep.tif")
    wanted = PILImages([open_image(tmp_path / "deep.tif")], preprocess).render(parse_view(view))
    assert torch.equal(as_source(image, preprocess).render(parse_view(view)), wanted)
    pixels = preprocess.denormalise(wanted)
    assert pixels.min() < 0.2 and pixels.max() > 0.8 and pixels.unique().numel() > 50


def test_transparent_images_are_on_white_as_open_image_has_them():
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert as_source(clear, Preprocess(None, None, (0,) * 3, (1,) * 3)).render(PLAIN).min() == 1


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", ["RGB", "BGR", "L"])
def test_uint8_tensors_are_prepared_as_images_are(image, last, channels):
    count = len(channels)
    preprocess = Preprocess(mean=(0.4,) * count, std=(0.2,) * count, channels=channels)
    images = [image, image.transpose(Image.Transpose.ROTATE_180)]
    x = torch.from_numpy(np.stack([np.asarray(i) for i in images]))
    batch = x if last else x.permute(0, 3, 1, 2)
    for view in map(parse_view, ("plain", "1.3x", "ShiftX=16")):
        assert torch.equal(as_source(batch, preprocess).render(view), PILImages(images, preprocess).render(view))


def test_a_channels_last_batch_is_like_any_other(image):
    x = Preprocess()(image)[None]
    other = x.to(memory_format=torch.channels_last)
    for view in map(parse_view, ("plain", "flip", "1.3x")):
        torch.testing.assert_close(as_source(other).render(view), as_source(x).render(view))


def test_an_enhanced_model_takes_deep_images_and_uint8():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
    preprocess = Preprocess(resize=None, crop=32)
    example = torch.zeros(1, 3, 32, 32)
    better = unstride.enhance(model, example, recipe="flip", task="classification", preprocess=preprocess)
    rgb = torch.from_numpy(np.asarray(open_deep()).copy())[None]
    x = preprocess(open_deep())[None]
    wanted = (model(x) + model(x.flip(-1))) / 2
    for batch in (deep("I;16"), [deep("I")], rgb, rgb.permute(0, 3, 1, 2)):
        torch.testing.assert_close(better(batch), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="got int, expected a Preprocess"):
        unstride.enhance(model, example, recipe="flip", task="classification", preprocess=32)


def open_deep() -> Image.Image:
    """The ramp in 8 bits, worked out by hand."""
    ramp = np.linspace(0, 1, 32 * 32, dtype=np.float32).reshape(32, 32)
    return Image.fromarray(np.rint((ramp * 65535).astype(np.uint16) / 257.0).astype(np.uint8)).convert("RGB")


def test_images_of_different_sizes_need_a_crop():
    images = [Image.new("RGB", (20, 30)), Image.new("RGB", (40, 30))]
    assert as_source(images, Preprocess(32, 32)).render(PLAIN).shape == (2, 3, 32, 32)
    with pytest.raises(InputError, match=r"different sizes.*\(30, 20\) and \(30, 40\).*one image at a time"):
        as_source(images, Preprocess(None, None)).render(PLAIN)


def test_a_truncated_image_is_an_input_error(tmp_path, image):
    image.save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with Image.open(tmp_path / "cut.jpg") as cut, pytest.raises(InputError, match="cannot be decoded"):
        as_source(cut, Preprocess()).render(PLAIN)


X = torch.zeros(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: as_source(X.to("meta")), InputError, "meta tensor"),
        (lambda: as_source(X.to_sparse()), InputError, "to_dense"),
        (lambda: as_source(torch.zeros(1, 3, 8).to_sparse()), InputError, "to_dense"),
        (lambda: as_source(X.byte()), InputError, "uint8.*preprocess=Preprocess"),
        (lambda: as_source(torch.zeros(1, 2, 8, 8).byte(), Preprocess()), InputError, "1 or 3 channels"),
        (lambda: as_source(X.byte().to("meta"), Preprocess()), InputError, "meta tensor"),
        (lambda: as_source(X, {"crop": 8}), OptionError, "got dict, expected a Preprocess"),
        (lambda: as_source(Image.new("RGB", (8, 8)), {"crop": 8}), InputError, "got preprocess={'crop': 8}"),
        (lambda: PILImages([X], Preprocess()), InputError, "got Tensor"),
        (lambda: PILImages([Image.new("RGB", (8, 8))], None), InputError, "got preprocess=None"),
        (lambda: as_source([Image.new("RGB", (8, 8)), X], Preprocess()), InputError, "expected a tensor"),
        (lambda: Canvas(X, preprocess={}), OptionError, "got dict"),
        (lambda: Canvas(X, crop="a"), OptionError, "crop is 'a'"),
        (lambda: Canvas(X, crop=3.5), OptionError, r"crop is 3\.5"),
        (lambda: Canvas(X, crop=(32,)), OptionError, "not inside the image of 8x8"),
        (lambda: Canvas(X, crop=(4, 4, 4)), OptionError, "crop is"),
        (lambda: Canvas(X, crop=0), OptionError, "crop is 0"),
        (lambda: Canvas(X, box=(0, 0, 4)), OptionError, "box is"),
        (lambda: Canvas(X, box=(0, 0, 4, 2.5)), OptionError, "box is"),
        (lambda: Canvas(X, box=7), OptionError, "box is"),
        (lambda: Canvas(X, box=(0, 0, 9, 4)), OptionError, "not inside"),
    ],
)
def test_what_cannot_be_used_is_a_clear_error(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_images_that_are_none() -> None:
    with pytest.raises(InputError, match="not a nested one"):
        check_images(torch.nested.nested_tensor([torch.rand(3, 8, 8), torch.rand(3, 8, 8)]))
    with pytest.raises(InputError, match="0 x 0 pixels"):
        Preprocess()(Image.new("RGB", (0, 0)))
