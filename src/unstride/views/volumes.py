"""Volumes from NIfTI files: values as they are stored, and where they lie in the world. Needs nibabel.

    volume = open_volume("brain.nii.gz")
    volume.values.shape, volume.frame.affine     # (C, X, Y, Z), and how voxels become millimetres

Axes stay as they are in the file, X Y Z, as MONAI's loaders have them; nothing is resampled or turned.
"""

from __future__ import annotations

import gzip
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unstride.errors import DataError, OptionError

SUFFIXES = (".nii", ".nii.gz")
MAX_VOXELS = 1 << 29  # two gigabytes of float32
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Frame:
    """Where a file's voxels lie: its affine (4, 4), and its header with the spacing and units."""

    affine: NDArray[np.float64]
    header: Any


@dataclass(frozen=True, eq=False)
class Volume:
    """Values (C, X, Y, Z) as they are stored, float32; a fourth axis of the file is that of channels."""

    values: Tensor
    frame: Frame

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def slice(self, at: int) -> Image.Image:
        """The plane (X, Y) at this Z as a gray image, from its darkest voxel to its brightest."""
        plane = self.values[0, :, :, at]
        low, high = plane.aminmax()
        gray = (plane - low) / (high - low).clamp(min=1e-12) * 255
        return Image.fromarray(gray.numpy().astype(np.uint8)).convert("RGB")

    def normalised(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Values less the mean, by the deviation, of each channel, or one for all."""
        channels = len(self.values)
        if len(mean) not in (1, channels):
            raise OptionError(
                f"the preprocessing is for {len(mean)} channels, this volume has {channels}: give a mean and std for "
                "each of them, or one for all (channels='L')"
            )
        centre, spread = (torch.tensor(v, dtype=torch.float32).view(-1, 1, 1, 1) for v in (mean, std))
        return (self.values - centre) / spread


def is_volume_name(path: Path) -> bool:
    """By its suffix; hidden files are not volumes."""
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")


def volume_stem(path: Path) -> str:
    """`case_1.nii.gz` -> `case_1`."""
    return path.name[: path.name.lower().rindex(".nii")]


def open_volume(path: str | Path) -> Volume:
    """A NIfTI file of three axes, or of four where the last is that of channels. DataError, with its name, if not."""
    return _opened(Path(path), _values)


def open_volume_mask(path: str | Path) -> NDArray[np.int64]:
    """The class indices (X, Y, Z) in a NIfTI file; values that are no whole numbers are not labels."""
    return _opened(Path(path), _labels)


def volume_bytes(labels: NDArray[Any], frame: Frame) -> bytes:
    """Class indices (X, Y, Z) as the contents of a .nii.gz that lies where `frame` does."""
    nibabel = _nibabel()
    kind = np.uint8 if labels.max(initial=0) < 256 else np.uint16
    header = frame.header.copy()
    header.set_data_dtype(kind)
    header.set_slope_inter(1, 0)  # of the intensities, not of labels
    header["cal_min"] = header["cal_max"] = 0
    image = nibabel.Nifti1Image(labels.astype(kind), frame.affine, header)
    return gzip.compress(image.to_bytes(), mtime=0)


def _values(image: Any, name: str) -> Volume:
    shape = image.shape
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise DataError(f"{name}: a volume of shape {shape}; wanted (X, Y, Z), or (X, Y, Z, C)")
    values = torch.from_numpy(np.asarray(image.dataobj, dtype=np.float32))
    if not bool(torch.isfinite(values).all()):
        raise DataError(f"{name}: some of its voxels are not finite; fill them first")
    values = values.movedim(3, 0).contiguous() if values.ndim == 4 else values[None]
    return Volume(values, Frame(np.asarray(image.affine, np.float64), image.header))


def _labels(image: Any, name: str) -> NDArray[np.int64]:
    values = np.asarray(image.dataobj)
    if values.ndim == 4 and values.shape[3] == 1:
        values = values[..., 0]
    if values.ndim != 3:
        raise DataError(f"{name}: a mask of shape {values.shape}; wanted (X, Y, Z) with a class index in each voxel")
    labels = np.rint(values).astype(np.int64)
    if not np.array_equal(labels, values):
        raise DataError(f"{name}: a mask with {values.dtype} values that are no whole numbers; wanted class indices")
    return labels


def _opened(path: Path, finish: Callable[[Any, str], _T]) -> _T:
    nibabel = _nibabel()
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        image = nibabel.load(path)
        if np.prod([float(n) for n in image.shape]) > MAX_VOXELS:
            raise DataError(f"{path}: {image.shape} voxels are more than the limit of {MAX_VOXELS}; cut it first")
        return finish(image, str(path))
    except DataError:
        raise
    except Exception as error:  # readers raise nearly anything on a damaged file
        reason = str(error).strip() or type(error).__name__
        raise DataError(f"{path}: cannot be read as NIfTI ({reason}); it is damaged, or not a volume") from error


def _nibabel() -> Any:
    try:
        return importlib.import_module("nibabel")
    except ImportError as error:
        raise DataError("NIfTI volumes need nibabel: pip install 'unstride[medical]'") from error
