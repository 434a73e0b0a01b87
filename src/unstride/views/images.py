"""From an image file to the tensor that a network was trained on.

image = open_image("photo.jpg")  # PIL, RGB, upright, whatever is in the file
x = Preprocess()(image)          # (3, 224, 224), as ImageNet networks take it
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from unstride.compat import import_torchvision
from unstride.errors import DataError, InputError, OptionError

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MAX_PIXELS = 89_478_485  # Pillow's own limit: a quarter of a gigabyte of RGB
MAX_ENLARGED = 1 << 24  # pixels that a smaller image may be enlarged to
MAX_SIDE = 1 << 16  # pixels of a network's input

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".jp2", ".avif")
# Named one by one because Pillow also opens formats that start other programs (EPS).
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF", "MPO", "ICO")

_LOSSY = ("JPEG", "MPO", "WEBP", "JPEG2000", "AVIF")

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
_MODES = {"RGB": "RGB", "BGR": "RGB", "L": "L"}


def open_image(source: str | Path | bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image in a file (or in its bytes) as 8-bit RGB, rotated as its EXIF tag says.

    Transparent pixels are composited on white. 16-bit values are scaled to 8 bits, not clipped; floats are read as
    0..1. An animation gives its first frame. A damaged or implausible file raises DataError with its name.
    """
    return _decoded(source, max_pixels, _upright)


def open_mask(source: str | Path | bytes, max_pixels: int = MAX_PIXELS) -> Array:
    """The class indices in a mask file, (H, W): gray values, or indices into a palette, whatever its colours."""
    return _decoded(source, max_pixels, _indices)


def _indices(image: Image.Image, name: str) -> Array:
    jpeg_inside = image.info.get("compression") == "jpeg"  # of a TIFF
    if image.format in _LOSSY or jpeg_inside:
        raise DataError(
            f"{name}: a mask as {'JPEG in ' if jpeg_inside else ''}{image.format}, which may change labels when it "
            "compresses; expected a PNG. Save the masks again from their source"
        )
    if image.mode not in ("P", "L", "1") and not image.mode.startswith("I"):
        raise DataError(
            f"{name}: a mask with {image.mode} pixels; expected one number per pixel: save it as a gray or palette PNG "
            "whose values are class indices"
        )
    return np.asarray(image).astype(np.int64)


def _decoded(source: str | Path | bytes, max_pixels: int, finish: Callable[[Image.Image, str], _T]) -> _T:
    if isinstance(source, bytes):
        name, stream = f"an image given as {len(source):,} bytes", io.BytesIO(source)
    elif isinstance(source, str | Path):
        name, stream = str(source), None
        if not Path(source).is_file():
            raise DataError(f"{name}: no such image file")
    else:
        raise InputError(f"an image comes as a path or as the bytes of a file, not as {type(source).__name__}")
    Image.init()
    formats = [known for known in _FORMATS if known in Image.OPEN]
    try:
        with Image.open(stream or source, formats=formats) as image:
            if image.width * image.height > max_pixels:
                raise DataError(
                    f"{name}: {image.width} x {image.height} pixels are more than the limit of {max_pixels}; "
                    "make the image smaller, or raise max_pixels if you trust it"
                )
            image.load()
            return finish(image, name)
    except DataError:
        raise
    except UnidentifiedImageError as error:  # its own message names a stream's address in memory
        known = ", ".join(formats)
        raise DataError(f"{name}: cannot be read as an image; it is damaged, or not one of {known}") from error
    except Exception as error:  # decoders raise nearly anything on a damaged file
        reason = str(error).strip() or type(error).__name__
        raise DataError(f"{name}: cannot be read as an image ({reason}); it is damaged, or not an image") from error


def _upright(image: Image.Image, name: str) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)  # one copy less of what may be a hundred million pixels
    return to_rgb(image, name)


def to_rgb(image: Image.Image, name: str = "image") -> Image.Image:
    """A decoded image of any mode as 8-bit RGB: deep ones are scaled, transparent ones composited on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image), name)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: Array, name: str) -> Array:
    """16-bit integers, or floats in 0..1, (H, W) -> uint8. Wider values have no agreed range, so they are an error."""
    low, high = float(values.min()), float(values.max())
    top = 1.0 if values.dtype.kind == "f" else 65535.0
    if not (low >= 0 and high <= top):
        raise DataError(
            f"{name}: {values.dtype} values from {low:g} to {high:g}; integers up to 65535 or floats in 0..1 "
            "are understood, save the image with 8 or 16 bits"
        )
    return np.rint(values.astype(np.float64) * (255.0 / top)).astype(np.uint8)


def find_images(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """The image files among `paths`: files in the order given, folders searched to the bottom in sorted order.

    Each real file once, whatever links point to it: `find_images(["cat.png", "photos/"])`
    """
    found: dict[str, Path] = {}  # ordered; an image that is named twice counts once
    listed = [paths] if isinstance(paths, str | Path) else list(paths) if isinstance(paths, Iterable) else [paths]
    if not all(isinstance(path, str | Path) for path in listed):
        raise InputError(f"images are given by their paths, or those of folders, not as {paths!r}")
    for path in map(Path, listed):
        if path.is_file():
            found.setdefault(os.path.realpath(path), path)
        elif path.is_dir():
            inside = images_below(path)
            if not inside:
                raise DataError(f"{path}: no image in this folder; expected {' '.join(SUFFIXES)}")
            for image in inside:
                found.setdefault(os.path.realpath(image), image)
        else:
            raise DataError(f"{path}: no such file or folder")
    return list(found.values())


def images_below(root: Path) -> list[Path]:
    """The images in a folder and below it, sorted; each real file once, whatever links point to it.

    Links to folders are followed, but never to a folder that contains the link.
    """
    found: dict[str, Path] = {}
    folders, links = [root], list[Path]()
    visited = set[str]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)  # links last: a file's own name is better than another's
        here = os.path.realpath(folder)
        if here in visited:
            continue
        visited.add(here)
        for entry in _entries(folder):
            path, link = folder / entry.name, entry.is_symlink()  # the disk is read again only for links
            real = os.path.realpath(path) if link else os.path.join(here, entry.name)
            if os.path.isdir(real) if link else entry.is_dir():
                if not link:
                    folders.append(path)
                elif not Path(here).is_relative_to(real):
                    links.append(path)
            elif is_image_name(path) and (os.path.isfile(real) if link else entry.is_file()):
                found[real] = found.get(real, path) if link else path
    return sorted(found.values())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from error


def is_image_name(path: Path) -> bool:
    """By its suffix; hidden files (`._x.jpg`) are not images."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


@dataclass(frozen=True)
class Preprocess:
    """How an image is prepared for a network. `Preprocess()(image)` is (3, 224, 224), ImageNet style.

    resize         shorter side in pixels, or (height, width) regardless of the aspect, or None
    crop           (height, width) cut from the centre, black where the image is smaller, or None
    mean, std      per channel, of values in 0..1
    interpolation  of the resize: nearest, bilinear, bicubic, lanczos, box or hamming
    channels       "RGB", "BGR" or "L" (gray)
    """

    resize: int | tuple[int, int] | None = 256
    crop: tuple[int, int] | int | None = (224, 224)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    channels: str = "RGB"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "resize": self.resize
            if self.resize is None or _is_side(self.resize)
            else image_size("resize", self.resize),
            "crop": None if self.crop is None else image_size("crop", self.crop),
            "mean": _numbers("mean", self.mean),
            "std": _numbers("std", self.std),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.interpolation not in _INTERPOLATIONS:
            raise OptionError(f"interpolation is {self.interpolation!r}; choose from {', '.join(_INTERPOLATIONS)}")
        if not isinstance(self.channels, str) or self.channels not in _MODES:
            raise OptionError(f"channels is {self.channels!r}; it must be one of {', '.join(_MODES)}")
        wanted = len(_MODES[self.channels])
        if len(self.mean) != wanted or len(self.std) != wanted or min(self.std) <= 0:
            raise OptionError(
                f"mean {self.mean} and std {self.std}: {self.channels} images need {wanted} of each, and std above 0"
            )

    def __call__(self, image: Image.Image) -> Tensor:
        """PIL image -> float32 (C, H, W)."""
        return self.normalise(self.pixels(image))

    def pixels(self, image: Image.Image) -> Tensor:
        """PIL image -> float32 (C, H, W) in 0..1: everything but the normalisation."""
        import_torchvision()
        from torchvision.transforms import InterpolationMode  # only here: who brings tensors need not load it
        from torchvision.transforms import functional as TF

        image = self.converted(image)
        if self.resize is not None:
            _check_enlarged(image.size, self.resize)
            image = TF.resize(image, self.resize, InterpolationMode(self.interpolation))
        if self.crop is not None:
            image = TF.center_crop(image, list(image_size("crop", self.crop)))
        return self.tensor(image)

    def converted(self, image: Image.Image) -> Image.Image:
        """A PIL image of any mode in the network's mode, by the same rules as `open_image`; not rotated."""
        try:
            image.load()
        except Exception as error:  # decoders raise nearly anything on a damaged file
            raise InputError(f"a PIL image cannot be decoded ({error}); its file is damaged or closed") from error
        if 0 in image.size:
            raise InputError(f"a PIL image has {image.width} x {image.height} pixels, expected at least one")
        if image.mode not in ("RGB", "L") or image.has_transparency_data:
            image = to_rgb(image, f"a PIL image of mode {image.mode}")
        return image.convert(_MODES[self.channels])

    def tensor(self, image: Image.Image) -> Tensor:
        """PIL image of the right size and mode -> float32 (C, H, W) in 0..1."""
        array = np.asarray(image)
        x = torch.from_numpy(array.reshape(*array.shape[:2], -1).transpose(2, 0, 1).copy()).float().div_(255)
        return x.flip(0) if self.channels == "BGR" else x

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of an image after the resize, before the crop."""
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        short, long = min(height, width), max(height, width)
        other = int(self.resize * long / short)
        return (self.resize, other) if height <= width else (other, self.resize)

    @property
    def resample(self) -> Image.Resampling:
        """Pillow's name for the interpolation."""
        return Image.Resampling[self.interpolation.upper()]

    def normalise(self, x: Tensor) -> Tensor:
        """(..., C, H, W) in 0..1 -> the network's input."""
        mean, std = self._scale(x)
        return (x - mean) / std

    def denormalise(self, x: Tensor) -> Tensor:
        """The network's input (..., C, H, W) -> 0..1."""
        mean, std = self._scale(x)
        return x * std + mean

    def _scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(v, dtype=x.dtype, device=x.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return mean, std

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of every tensor that it makes, or None where that depends on the image."""
        fixed = self.crop if self.crop is not None else self.resize
        return fixed if isinstance(fixed, tuple) else None

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Everything but the normalisation."""
        return self.resize, self.crop, self.interpolation, self.channels

    def to_json(self) -> dict[str, Any]:
        """Plain types, to be stored in a row or an artefact. `Preprocess.from_json` is its inverse."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Preprocess:
        """The inverse of `to_json`, also for what was read from a JSON file."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(stored) - known):
            raise OptionError(f"preprocess: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return cls(**settings)

    def __str__(self) -> str:
        if isinstance(self.resize, tuple):
            steps = [f"resize to {self.resize[0]}x{self.resize[1]} ({self.interpolation})"]
        else:
            steps = [f"resize shorter side to {self.resize} ({self.interpolation})"] if self.resize else []
        if self.crop is not None:
            steps.append("crop {}x{}".format(*image_size("crop", self.crop)))
        numbers = [" ".join(f"{v:.4g}" for v in values) for values in (self.mean, self.std)]
        return ", ".join([*steps, f"{self.channels}/255, mean {numbers[0]}, std {numbers[1]}"])


def _check_enlarged(size: tuple[int, int], resize: int | tuple[int, int]) -> None:
    """Refuse a resize that would fill the memory: of a strip one pixel wide, before its centre is cut out."""
    width, height = size
    if isinstance(resize, int):
        scale = resize / min(size)
        resize = (round(height * scale), round(width * scale))
    if resize[0] * resize[1] > max(MAX_ENLARGED, width * height):
        raise DataError(
            f"an image of {width} x {height} pixels would become {resize[1]} x {resize[0]} when it is resized; "
            f"at most {MAX_ENLARGED} pixels are made. Cut it to its content first"
        )


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIDE


def image_size(name: str, value: Any) -> tuple[int, int]:
    """(height, width) of a number of pixels, or of two; `name` is for the error."""
    values = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    values = values * 2 if len(values) == 1 else values
    if len(values) != 2 or not all(map(_is_side, values)):
        raise OptionError(f"{name} is {value!r}; it must be 1 to {MAX_SIDE} pixels: a number, or (height, width)")
    return values


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        found = () if isinstance(values, str | bytes) else tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"{name} is {values!r}; it must be a number for each channel") from error
    if not all(map(math.isfinite, found)):
        raise OptionError(f"{name} is {values!r}; its numbers must be finite")
    return found


def reflected(image: Image.Image, box: tuple[float, ...]) -> tuple[Image.Image, tuple[float, ...]]:
    """An image that contains the whole box (left, top, width, height), reflected around itself where it does not."""
    before = (max(0, int(-box[0]) + 1) if box[0] < 0 else 0, max(0, int(-box[1]) + 1) if box[1] < 0 else 0)
    over = (box[0] + box[2] - image.width, box[1] + box[3] - image.height)
    after = tuple(int(v) + 1 if v > 1e-6 else 0 for v in over)
    if not any((*before, *after)):
        return image, (*box[:2], min(box[2], image.width - box[0]), min(box[3], image.height - box[1]))
    sides: list[Any] = [(before[1], after[1]), (before[0], after[0])]
    array = np.asarray(image)
    wide = np.pad(array, sides + [(0, 0)] * (array.ndim - 2), mode="reflect" if min(array.shape[:2]) > 1 else "edge")
    return Image.fromarray(wide), (box[0] + before[0], box[1] + before[1], *box[2:])


def uint8_images(images: Tensor) -> list[Image.Image]:
    """RGB or gray images of 8 bits, channels first or last; a shape that could be either has them first."""
    if images.shape[1] in (1, 3):
        images = images.permute(0, 2, 3, 1)
    elif images.shape[3] not in (1, 3):
        raise InputError(
            f"images: got uint8 {tuple(images.shape)}, expected (B, C, H, W) or (B, H, W, C) with 1 or 3 channels"
        )
    arrays = images.cpu().numpy()
    return [Image.fromarray(np.ascontiguousarray(a[..., 0] if a.shape[-1] == 1 else a)) for a in arrays]
