"""Image files of every kind become upright 8-bit RGB; damaged ones are named and nothing else breaks."""

import io

import numpy as np
import pytest
from PIL import Image

from unstride.errors import DataError, InputError
from unstride.views.images import find_images, open_image, open_mask


def saved(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def ramp(dtype, top):
    return np.linspace(0, top, 16 * 16).astype(dtype).reshape(16, 16)


def test_plain_rgb_is_untouched(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes()):
        image = open_image(source)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(orientation):
    # A bright corner and edge distinguish all eight orientations.
    upright = np.zeros((8, 16), np.uint8)
    upright[0, 0], upright[0, -1] = 255, 128
    turns = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright, 1),  # stored turned against the clock, to be shown turned back
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = open_image(saved(Image.fromarray(np.ascontiguousarray(turns[orientation])), exif=exif))
    np.testing.assert_array_equal(np.asarray(image)[..., 0], upright)


def test_grayscale_and_bilevel():
    gray = ramp(np.uint8, 255)
    np.testing.assert_array_equal(np.asarray(open_image(saved(Image.fromarray(gray)))), np.stack([gray] * 3, -1))
    image = open_image(saved(Image.fromarray(gray).convert("1")))
    assert set(np.unique(np.asarray(image))) == {0, 255}


def test_sixteen_bits_are_scaled_not_clipped():
    deep = ramp(np.uint16, 65535)
    for kind in ("PNG", "TIFF"):
        image = np.asarray(open_image(saved(Image.fromarray(deep), kind)))
        np.testing.assert_array_equal(image[..., 1], np.rint(deep / 257.0).astype(np.uint8))
    dim = np.asarray(open_image(saved(Image.fromarray(ramp(np.uint16, 4095)))))
    assert dim.max() == 16  # 12 bits in a 16-bit file stay dark, as every viewer shows them


def test_wide_integers_and_floats():
    inside = np.asarray(open_image(saved(Image.fromarray(ramp(np.int32, 65535)), "TIFF")))
    assert (inside.min(), inside.max()) == (0, 255)
    unit = np.asarray(open_image(saved(Image.fromarray(ramp(np.float32, 1.0)), "TIFF")))
    assert (unit.min(), unit.max()) == (0, 255)
    for values in (ramp(np.int32, 70000), ramp(np.float32, 2.0), ramp(np.float32, np.nan)):
        with pytest.raises(DataError, match="8 or 16 bits"):
            open_image(saved(Image.fromarray(values), "TIFF"))


def test_palettes():
    image = Image.fromarray(np.arange(4, dtype=np.uint8).reshape(2, 2), "L").convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 8, 7])
    wanted = [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 8, 7]]]
    assert np.asarray(open_image(saved(image))).tolist() == wanted
    assert np.asarray(open_image(saved(image, "GIF"))).tolist() == wanted
    clear = np.asarray(open_image(saved(image, transparency=1)))
    assert clear[0, 1].tolist() == [255, 255, 255]
    assert clear[0, 0].tolist() == [255, 0, 0]


def test_transparency_is_on_white():
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert np.asarray(open_image(saved(image))).tolist() == [[[200, 0, 0], [255, 255, 255]]]
    half = np.asarray(open_image(saved(Image.new("LA", (1, 1), (0, 128)))))
    assert half[0, 0] == pytest.approx([127] * 3, abs=1)


def test_cmyk():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    for kind in ("JPEG", "TIFF"):
        red = np.asarray(open_image(saved(image, kind)))[4, 4]
        assert red == pytest.approx([255, 0, 0], abs=4)


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    assert open_image(saved(frames[0], "GIF", save_all=True, append_images=frames[1:])).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_truncated_files_are_named(tmp_path, kind, share):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(pixels), kind)
    (tmp_path / "cut.img").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=r"cut\.img: cannot be read"):
        open_image(tmp_path / "cut.img")


def test_flipped_bits_never_escape_as_another_error():
    whole = bytearray(saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))))
    rng = np.random.default_rng(1)
    for _ in range(150):
        bad = bytearray(whole)
        for at in rng.integers(0, len(bad), 4):
            bad[at] = rng.integers(0, 256)
        try:
            assert open_image(bytes(bad)).mode == "RGB"
        except DataError:
            continue


def test_what_is_no_image(tmp_path):
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "script.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    for name in ("text.jpg", "script.eps"):  # EPS is a program for another program: not opened
        with pytest.raises(DataError, match=name):
            open_image(tmp_path / name)
    with pytest.raises(DataError, match="no such image file"):
        open_image(tmp_path / "absent.png")
    with pytest.raises(DataError):
        open_image(tmp_path)


@pytest.mark.parametrize("opened", [open_image, open_mask])
def test_bad_bytes_are_named_by_their_number_and_not_by_an_address_in_memory(opened):
    with pytest.raises(DataError, match=r"an image given as 5 bytes: cannot be read as an image; .*PNG") as caught:
        opened(b"hello")
    assert " at 0x" not in str(caught.value)
    with pytest.raises(InputError, match="a path or as the bytes of a file, not as BytesIO"):
        opened(io.BytesIO(b"hello"))


def test_decompression_bombs_are_refused_before_decoding():
    bomb = saved(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < 100_000
    with pytest.raises(DataError, match=r"limit|bomb"):
        open_image(bomb)
    small = saved(Image.new("L", (100, 100)))
    with pytest.raises(DataError, match="100 x 100 pixels are more than the limit of 9999"):
        open_image(small, max_pixels=9999)
    assert open_image(small, max_pixels=10_000).size == (100, 100)


def test_find_images(tmp_path):
    for name in ("b.png", "a.JPG", "deep/c.webp", "deep/notes.txt", "._a.jpg", "odd.dat"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    names = [p.relative_to(tmp_path).as_posix() for p in find_images(tmp_path)]
    assert names == ["a.JPG", "b.png", "deep/c.webp"]
    # A file that is named is taken at its word, and once.
    assert find_images([tmp_path / "odd.dat", str(tmp_path / "odd.dat")]) == [tmp_path / "odd.dat"]
    with pytest.raises(DataError, match="no such file or folder"):
        find_images(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no image in this folder"):
        find_images([tmp_path, tmp_path / "empty"])
