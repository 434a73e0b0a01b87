"""Where the models and data of a run come from: a folder with the paper's, or the embedded sample for all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from unstride import models
from unstride.compat import import_torchvision
from unstride.data import Dataset
from unstride.data import load as load_data
from unstride.errors import DataError, OptionError
from unstride.models import LoadedModel
from unstride.paper.exhibits import SEGMENTATION
from unstride.views.images import Preprocess

TRAIN, VALIDATION = 20_000, 5_000  # images that the paper draws from a training split
PAPER_LR = 1e-6
Splits = tuple[Dataset, Dataset]


class Place(Protocol):
    """`note` says what is substituted; `lr`: of the attention's training, None for the default of `unstride.fit`."""

    @property
    def note(self) -> str: ...

    @property
    def lr(self) -> float | None: ...

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        """A DataError that names everything missing, before anything is run."""

    def key(self, model: str, data: str) -> str:
        """What is the same network on the same images has the same key."""

    def load(self, model: str, data: str) -> LoadedModel: ...
    def test(self, loaded: LoadedModel, data: str) -> Dataset: ...
    def fitting(self, loaded: LoadedModel, data: str) -> Splits: ...


class Nowhere:
    """No data: only what can be counted."""

    note: str = "without data: only what can be counted is filled in"
    lr: float | None = None

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        raise DataError("this one needs images: give --data-root DIR, or --data sample for the embedded ones")

    def key(self, model: str, data: str) -> str:
        return f"{model} on {data}"

    def load(self, model: str, data: str) -> LoadedModel:
        raise DataError(f"{model} on {data}: there is no data")

    def test(self, loaded: LoadedModel, data: str) -> Dataset:
        raise DataError(f"{data}: there is no data")

    def fitting(self, loaded: LoadedModel, data: str) -> Splits:
        raise DataError(f"{data}: there is no data")


@dataclass(frozen=True)
class Sample:
    """The embedded networks and images in place of all others; every second image is kept for fitting."""

    limit: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    @property
    def note(self) -> str:
        return (
            "substituted: the embedded network for every model, the embedded sample for every data set; "
            "the paper's numbers are for its own and cannot be compared"
        )

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        return

    def key(self, model: str, data: str) -> str:
        return self._name(data)

    def load(self, model: str, data: str) -> LoadedModel:
        return models.load(self._name(data))

    def test(self, loaded: LoadedModel, data: str) -> Dataset:
        return _part(load_data(self._name(data), loaded.preprocess), 0, 2, self.limit)

    def fitting(self, loaded: LoadedModel, data: str) -> Splits:
        train, validation = _sizes(self.limit)
        rest = load_data(self._name(data), loaded.preprocess)
        return _part(rest, 1, 4, train), _part(rest, 3, 4, validation)

    @staticmethod
    def _name(data: str) -> str:
        return "sample-segmentation" if data in SEGMENTATION else "sample"


LAYOUTS = {
    "imagenet": ("imagenet:{}/imagenet", "imagenet/val and imagenet/train with a folder per class (n01440764, ...)"),
    "flowers102": ("flowers102:{}", "flowers-102/ with jpg/, imagelabels.mat and setid.mat (torchvision's)"),
    "cifar10": ("cifar10:{}", "cifar-10-batches-py/ (torchvision's own files)"),
    "cifar100": ("cifar100:{}", "cifar-100-python/ (torchvision's own files)"),
    "cityscapes": ("cityscapes:{}/cityscapes", "cityscapes/leftImg8bit and cityscapes/gtFine, each with val/"),
    "ade20k": ("ade20k:{}", "ADEChallengeData2016/ with images/ and annotations/"),
}
_FOLDERS = {
    "imagenet": "imagenet", "flowers102": "flowers-102", "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python", "cityscapes": "cityscapes", "ade20k": "ADEChallengeData2016",
}  # fmt: skip
# The paper's torchvision networks have the first weights that torchvision released, and see 256 px cropped to 224.
TORCHVISION = {
    "ResNet18": "resnet18", "ResNet50": "resnet50", "MobileNetV2": "mobilenet_v2", "InceptionV3": "inception_v3",
    "ResNext50": "resnext50_32x4d", "ShuffleNetV2": "shufflenet_v2_x1_0", "Swin": "swin_t", "SwinV2": "swin_v2_t",
}  # fmt: skip
TIMM = {
    "MobileNetV3": "mobilenetv3_small_100", "MViTv2": "mvitv2_tiny", "DenseNet": "densenet121", "VGG": "vgg11_bn",
    "RepVGG": "repvgg_a2", "DeiT": "deit_tiny_patch16_224", "CoaT": "coat_tiny", "ConvNeXtV2": "convnextv2_tiny",
    "XCiT": "xcit_tiny_12_p16_224", "VOLO": "volo_d1_224", "PvTV2": "pvt_v2_b0",
    "Efficientformer": "efficientformer_l1",
}  # fmt: skip
# The paper names no variant of XCiT; this is the one nearest in size to the others.
_SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True)
class Root:
    """A folder with the data sets in their usual layouts, and what models no library has weights for.

    models.py               functions such as cityscapes_resnet50_fcn() that return a module, or (module, Preprocess)
    weights/DATA-MODEL.pth  weights for a torchvision or timm network, such as weights/flowers102-resnet18.pth
    """

    path: Path
    limit: int | None = None
    lr: float | None = PAPER_LR
    note: str = ""

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        if not self.path.is_dir():
            raise DataError(f"{self.path}: no such folder; wanted one that holds the data sets")

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        missing = []
        for data in dict.fromkeys(_images(data) for _, data in needs):
            if not (self.path / _FOLDERS[data]).is_dir():
                missing.append(f"{data}: {LAYOUTS[data][1]}")
        for model, data in needs:
            if self._source(model, _images(data)) is None:
                name = _slug(model)
                missing.append(
                    f"{model} trained on {_images(data)}: a function {_images(data)}_{name}() in models.py"
                    + (f", or weights/{_images(data)}-{name}.pth" if model in TORCHVISION else "")
                )
        if missing:
            raise DataError(f"{self.path} lacks:\n  " + "\n  ".join(missing))

    def key(self, model: str, data: str) -> str:
        return f"{_slug(model)}-{data}"

    def load(self, model: str, data: str) -> LoadedModel:
        source = self._source(model, _images(data))
        if source is None:
            raise DataError(f"{self.path}: nothing there gives {model} for {data}")
        spec, weights = source
        loaded = _first_weights(spec, _slug(model)) if weights == "first" else models.load(spec, weights)
        if model in TORCHVISION and not spec.endswith(f"models.py:{_images(data)}_{_slug(model)}"):
            loaded = replace(loaded, preprocess=Preprocess())
        return loaded

    def test(self, loaded: LoadedModel, data: str) -> Dataset:
        if data == "imagenet-train":
            return _part(self._split(loaded, "imagenet", "train"), 3, 4, min(self.limit or VALIDATION, VALIDATION))
        whole = self._split(loaded, data, None)
        return whole if self.limit is None else _part(whole, 0, 1, self.limit)

    def fitting(self, loaded: LoadedModel, data: str) -> Splits:
        train, validation = _sizes(self.limit)
        if data == "flowers102":
            return tuple(
                _part(self._split(loaded, data, split), 0, 1, count)
                for split, count in (("train", train), ("val", validation))
            )  # type: ignore[return-value]
        whole = self._split(loaded, _images(data), "train")
        return _part(whole, 1, 4, train), _part(whole, 3, 4, validation)

    def _split(self, loaded: LoadedModel, data: str, split: str | None) -> Dataset:
        return load_data(LAYOUTS[data][0].format(self.path), loaded.preprocess, split)

    def _source(self, model: str, data: str) -> tuple[str, str] | None:
        """(spec, weights) of a model, or None: one of one's own first, then a file of weights, then the library's."""
        name, own = _slug(model), self.path / "models.py"
        if own.is_file() and re.search(rf"^def {data}_{name}\(", own.read_text(encoding="utf-8"), re.MULTILINE):
            return f"{own}:{data}_{name}", "default"
        spec = f"torchvision:{TORCHVISION[model]}" if model in TORCHVISION else None
        spec = f"timm:{TIMM[model]}" if model in TIMM else spec
        if spec is None:
            return None
        for suffix in _SUFFIXES:
            file = self.path / "weights" / f"{data}-{name}{suffix}"
            if file.is_file():
                return spec, str(file)
        if data != "imagenet":
            return None
        return spec, "first" if model in TORCHVISION else "default"


def _first_weights(spec: str, name: str) -> LoadedModel:
    """torchvision's IMAGENET1K_V1; its default is a later recipe with other accuracies."""
    import_torchvision()
    from torchvision.models import get_model_weights

    loaded = models.load(spec, weights=None)
    chosen = get_model_weights(spec.partition(":")[2])["IMAGENET1K_V1"]
    try:
        state = chosen.get_state_dict(progress=False, check_hash=True)
    except OSError as error:
        raise DataError(
            f"{spec}: its weights {chosen} could not be fetched ({error}); put them into the data root as "
            f"weights/imagenet-{name}.pth"
        ) from error
    loaded.model.load_state_dict(state)
    loaded.model.eval()
    return replace(loaded, weights="IMAGENET1K_V1")


def _images(data: str) -> str:
    return "imagenet" if data == "imagenet-train" else data


def _slug(model: str) -> str:
    """`MiT-SegFormer` -> `mit_segformer`, as in a function's name."""
    return re.sub(r"\W+", "_", model.lower())


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise OptionError(f"limit is {limit}; wanted a positive number of images")


def _sizes(limit: int | None) -> tuple[int, int]:
    """Training and validation images; of a limited run four times and once its limit, 64 and 32 at least."""
    if limit is None:
        return TRAIN, VALIDATION
    return min(TRAIN, max(64, 4 * limit)), min(VALIDATION, max(32, limit))


def _part(data: Dataset, first: int, step: int, limit: int | None) -> Dataset:
    """Every `step`-th item from `first` on, and of those at most `limit`, spread evenly."""
    chosen = list(data.chosen[first::step])
    count = min(limit or len(chosen), len(chosen))
    if not count:
        raise DataError(f"{data.name}: {len(data)} images are too few to set some aside for fitting")
    return replace(data, chosen=[chosen[i * len(chosen) // count] for i in range(count)])
