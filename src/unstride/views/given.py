"""The preprocessing that a user gives, in the forms that libraries have for it, as a Preprocess.

check_preprocess(weights.transforms())                                  # a preset of torchvision
check_preprocess(v2.Compose([v2.Resize(256), v2.CenterCrop(224), ...])) # torchvision.transforms, also v2
check_preprocess(timm.data.create_transform(**config))                  # timm
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from unstride.errors import OptionError
from unstride.views.images import Preprocess

# Steps that only make a tensor in 0..1 of an image, which every Preprocess does.
_TO_TENSOR = {"ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "ConvertImageDtype", "ToDtype", "RGB", "Identity"}
_TO_TENSOR |= {"MaybeToTensor", "MaybePILToTensor"}  # timm's
_PRESET = ("resize_size", "mean", "std", "interpolation")  # the attributes of torchvision's presets


def check_preprocess(value: Any) -> Preprocess | None:
    """A Preprocess; None without one; an OptionError for what cannot be one, with the step that cannot."""
    if isinstance(value, Preprocess | None):
        return value
    if all(hasattr(value, name) for name in _PRESET):
        return from_torchvision(value)
    steps = list(_steps(value))
    if not callable(value) or steps == [value]:
        raise OptionError(
            f"preprocess: got {type(value).__name__}, expected a Preprocess, or transforms of torchvision or timm. "
            "From a dict, use Preprocess.from_json(...)"
        )
    return _of_steps(steps)


def from_torchvision(preset: Any) -> Preprocess:
    """A torchvision preset, `weights.transforms()`, as Preprocess."""
    return Preprocess(
        resize=side_of(preset.resize_size),
        crop=side_of(getattr(preset, "crop_size", None)),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=preset.interpolation.value,
    )


def _steps(transform: Any) -> Iterator[Any]:
    """The steps of transforms in one another (Compose, nn.Sequential), in order."""
    inner = getattr(transform, "transforms", None)
    if inner is None and isinstance(transform, Iterable) and not isinstance(transform, str | bytes | dict):
        inner = list(transform)
    if inner is None:
        yield transform
    for step in inner or ():
        yield from _steps(step)


def _of_steps(steps: Iterable[Any]) -> Preprocess:
    """Resize, crop, tensor, normalise: in this order, each at most once."""
    settings: dict[str, Any] = {"resize": None, "crop": None, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    order = ("Resize", "CenterCrop", "Normalize")
    last = -1
    for step in steps:
        name = type(step).__name__
        if name == "Grayscale" and step.num_output_channels == 1:
            settings["channels"] = "L"
            continue
        scaled = name != "ToDtype" or getattr(step, "scale", False)
        if name in _TO_TENSOR and scaled:
            continue
        if name not in order or order.index(name) <= last or getattr(step, "max_size", None) is not None:
            raise OptionError(
                f"preprocess: {step} cannot be read. Expected Resize, CenterCrop, a step that makes a tensor in 0..1, "
                "Normalize, in this order; or write it as unstride.Preprocess(resize=..., crop=..., mean=..., std=...)."
            )
        last = order.index(name)
        if name == "Resize":
            settings |= {
                "resize": side_of(step.size),
                "interpolation": getattr(step.interpolation, "value", step.interpolation),
            }
        elif name == "CenterCrop":
            settings["crop"] = side_of(step.size)
        else:
            settings |= {"mean": tuple(map(float, step.mean)), "std": tuple(map(float, step.std))}
    if settings.get("channels") == "L" and last < order.index("Normalize"):
        settings |= {"mean": (0.0,), "std": (1.0,)}
    return Preprocess(**settings)


def side_of(size: Any) -> int | tuple[int, int] | None:
    """Libraries write 256, [256] and [256, 192]."""
    if size is None or isinstance(size, int):
        return size
    return int(size[0]) if len(size) == 1 else (int(size[0]), int(size[1]))
