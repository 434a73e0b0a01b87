"""Where the networks and images of a run come from: a folder with the paper's, or the embedded sample for all."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from unstride import models
from unstride.compat import import_torchvision
from unstride.data import Dataset, check_limit
from unstride.data import load as load_data
from unstride.errors import DataError
from unstride.models import LoadedModel
from unstride.paper.exhibits import SEGMENTATION
from unstride.views.images import Preprocess

FITTING = 25_000  # images of the training split that are drawn: 20,000 to train on, 5,000 to validate on
FEWEST = 500
ABLATION = 5_000  # images of the training split that the ablations are measured on


@dataclass(frozen=True)
class FittingImages:
    """What is fitted on. Without `validation`, a fifth of what is drawn from `train` by the seed validates.

    Args:
        limit: images drawn from `train`, others for each seed. None: all of them.
    """

    train: Dataset
    validation: Dataset | None = None
    limit: int | None = None


class ExhibitSource(Protocol):
    """Where networks and images come from.

    Attributes:
        note: what stands in for the paper's networks and images.
        schedule, epochs: of the attention's training.
    """

    @property
    def note(self) -> str: ...

    @property
    def schedule(self) -> str: ...

    @property
    def epochs(self) -> int | None: ...

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        """A DataError that names everything that is missing, before anything runs."""

    def key(self, model: str, data: str) -> str:
        """Equal for the same network on the same images."""

    def load(self, model: str, data: str) -> LoadedModel: ...
    def test(self, loaded: LoadedModel, data: str) -> Dataset: ...
    def fitting(self, loaded: LoadedModel, data: str) -> FittingImages: ...


@dataclass(frozen=True)
class EmbeddedSample:
    """The embedded network and images in place of all others; half of the images are for fitting."""

    limit: int | None = None
    schedule: str = "fast"
    epochs: int | None = 15  # so few images need more steps than the schedule has

    def __post_init__(self) -> None:
        check_limit(self.limit)

    @property
    def note(self) -> str:
        return (
            "A rehearsal: the embedded network stands for every network, the embedded images for every data set, and "
            f"the {self.schedule} schedule trains. These numbers cannot be compared with the paper's."
        )

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        return

    def key(self, model: str, data: str) -> str:
        return self._name(data)

    def load(self, model: str, data: str) -> LoadedModel:
        return models.load(self._name(data))

    def test(self, loaded: LoadedModel, data: str) -> Dataset:
        whole = load_data(self._name(data), loaded.preprocess)
        return _part(whole, _halves(len(whole))[0][: self.limit])

    def fitting(self, loaded: LoadedModel, data: str) -> FittingImages:
        whole = load_data(self._name(data), loaded.preprocess)
        return FittingImages(_part(whole, _halves(len(whole))[1]), limit=_fitting_limit(self.limit))

    @staticmethod
    def _name(data: str) -> str:
        return "sample-segmentation" if data in SEGMENTATION else "sample"


@dataclass(frozen=True)
class DataLayout:
    """A data set in the folder: its SPEC, its own folder, and what a message says is expected there."""

    spec: str
    folder: str
    words: str


LAYOUTS = {
    "imagenet": DataLayout(
        "imagenet:{}/imagenet", "imagenet", "imagenet/val and imagenet/train with a folder per class (n01440764, ...)"
    ),
    "flowers102": DataLayout(
        "flowers102:{}", "flowers-102", "flowers-102/ with jpg/, imagelabels.mat and setid.mat (torchvision's)"
    ),
    "cifar10": DataLayout("cifar10:{}", "cifar-10-batches-py", "cifar-10-batches-py/ (torchvision's own files)"),
    "cifar100": DataLayout("cifar100:{}", "cifar-100-python", "cifar-100-python/ (torchvision's own files)"),
    "cityscapes": DataLayout(
        "cityscapes:{}/cityscapes",
        "cityscapes",
        "cityscapes/leftImg8bit and cityscapes/gtFine, each with val/",
    ),
    "ade20k": DataLayout("ade20k:{}", "ADEChallengeData2016", "ADEChallengeData2016/ with images/ and annotations/"),
}
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
# The paper names no variant of XCiT; this is the one nearest in size to the others. Table 6's DeepLab is DeepLabV3+.
PAPER = {
    "ResNet50-FCN": "fcn-r50-d8", "ResNet50-DeepLab": "deeplabv3plus-r50-d8", "MobileNet-FCN": "fcn-m-v2-d8",
    "MobileNet-DeepLab": "deeplabv3plus-m-v2-d8", "MiT-SegFormer": "segformer-mit-b0",
    "MobileNetV3-LRASPP": "lraspp-m-v3-d8", "UNet": "fcn-unet-s5-d16", "Swin-UperNet": "upernet-swin-t",
    "Twins-UperNet": "upernet-twins-pcpvt-s", "antialiased WideResNet50": "antialiased-wide-resnet50-2",
    "antialiased MobileNetV2-050": "antialiased-mobilenet-v2",
}  # fmt: skip
_SUFFIXES = (".safetensors", ".pth", ".pt")
FIRST = "IMAGENET1K_V1"


@dataclass(frozen=True)
class PaperFolder:
    """A folder with the data sets in their usual layouts, and with weights that no library fetches.

    These are weights/NAME.pth, such as weights/flowers102-resnet18.pth; `weights_name` is NAME.
    """

    path: Path
    limit: int | None = None
    schedule: str = "paper"
    note: str = ""
    epochs: int | None = None  # those of the schedule

    def __post_init__(self) -> None:
        check_limit(self.limit)
        if not self.path.is_dir():
            raise DataError(f"{self.path}: there is no such folder, expected one with the data sets.")

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        missing = [
            f"{data}: {LAYOUTS[data].words}"
            for data in dict.fromkeys(_images(data) for _, data in needs)
            if not (self.path / LAYOUTS[data].folder).is_dir()
        ]
        for model, data in needs:
            if self._spec(model, _images(data)) is None:
                missing.append(_missing_weights(model, _images(data)))
        if missing:
            raise DataError(f"{self.path}: this is missing:\n  " + "\n  ".join(missing))

    def key(self, model: str, data: str) -> str:
        return f"{_slug(model)}-{data}"

    def load(self, model: str, data: str) -> LoadedModel:
        found = self._spec(model, _images(data))
        if found is None:
            raise DataError(f"{self.path}: this is missing: {_missing_weights(model, _images(data))}")
        spec, weights = found
        loaded = first_weights(spec) if weights == FIRST else models.load(spec, weights)
        if spec.startswith("torchvision:"):
            loaded = replace(loaded, preprocess=Preprocess())
            if hasattr(loaded.model, "transform_input"):  # Inception's released weights were trained with it
                loaded.model.transform_input = True  # type: ignore[assignment]
        return loaded

    def test(self, loaded: LoadedModel, data: str) -> Dataset:
        if data == "imagenet-train":
            whole = self._split(loaded, "imagenet", "train")
            return _part(whole, self._ablation(len(whole))[: self.limit])
        return load_data(LAYOUTS[data].spec.format(self.path), loaded.preprocess, None, self.limit)

    def fitting(self, loaded: LoadedModel, data: str) -> FittingImages:
        limit = _fitting_limit(self.limit)
        if data == "flowers102":
            train, validation = (self._split(loaded, data, split) for split in ("train", "val"))
            return FittingImages(train, validation, None if self.limit is None else limit)
        whole = self._split(loaded, _images(data), "train")
        kept = set(self._ablation(len(whole))) if data == "imagenet-train" else set()
        return FittingImages(_part(whole, [i for i in range(len(whole)) if i not in kept]), limit=limit)

    @staticmethod
    def _ablation(count: int) -> list[int]:
        """The images of the training split that ablations are measured on: drawn once, never fitted on."""
        return random.Random("ablation").sample(range(count), min(ABLATION, count // 2))

    def _split(self, loaded: LoadedModel, data: str, split: str) -> Dataset:
        return load_data(LAYOUTS[data].spec.format(self.path), loaded.preprocess, split)

    def _spec(self, model: str, data: str) -> tuple[str, str] | None:
        """(SPEC, weights): a weights file, or what a library fetches; None if there is neither."""
        spec, file = _library(model, data), self._weights(weights_name(model, data))
        if file is not None:
            return spec, str(file)
        if spec.startswith("paper:") or data != "imagenet":
            return None
        return spec, FIRST if model in TORCHVISION else "default"

    def _weights(self, name: str) -> Path | None:
        """A file of that name, also with underscores, or with the digest that its publisher added."""
        pattern = re.compile(re.escape(name) + r"(-[0-9a-f]{8})?")
        for file in sorted((self.path / "weights").glob("*")):
            if file.suffix in _SUFFIXES and pattern.fullmatch(file.stem.lower().replace("_", "-")):
                return file
        return None


def weights_name(model: str, data: str) -> str:
    """What a weights file of a network is called: `cifar10-resnet20`, `flowers102-resnet18`."""
    network = _paper_network(model, data)
    return network if network is not None else f"{data}-{_slug(model)}"


def first_weights(spec: str) -> LoadedModel:
    """A torchvision network with the first weights that were released. Today's default is another training recipe."""
    import_torchvision()
    from torchvision.models import get_model_weights

    loaded = models.load(spec, weights=None)
    name = spec.partition(":")[2]
    chosen = get_model_weights(name)[FIRST]
    try:
        state = chosen.get_state_dict(progress=False, check_hash=True)
    except OSError as error:
        raise DataError(
            f"{spec}: its weights {FIRST} could not be fetched ({error}). Put them into the data root as "
            f"weights/imagenet-{name}.pth (of {chosen.url})."
        ) from error
    loaded.model.load_state_dict(state)
    loaded.model.eval()
    return replace(loaded, weights=FIRST)


def _library(model: str, data: str) -> str:
    if model in TORCHVISION:
        return f"torchvision:{TORCHVISION[model]}"
    network = _paper_network(model, data)
    return f"timm:{TIMM[model]}" if network is None else f"paper:{network}"


def _paper_network(model: str, data: str) -> str | None:
    """Its name in `models.paper_networks`, where no library has it."""
    name = PAPER.get(model, model).lower().replace(".", "-").replace(" ", "-")
    found = name if name.startswith("antialiased") else f"{data}-{name}"
    return found if found in _networks() else None


def _networks() -> dict[str, Any]:
    from unstride.models.paper_networks.catalogue import NETWORKS

    return dict(NETWORKS)


def _missing_weights(model: str, data: str) -> str:
    network = _paper_network(model, data)
    published = f" ({_networks()[network].checkpoint})" if network is not None else ""
    step = " (`unstride reproduce flowers102-finetune` makes it)" if data == "flowers102" else published
    return f"{model} trained on {data}: weights/{weights_name(model, data)}.pth{step}"


def _images(data: str) -> str:
    return "imagenet" if data == "imagenet-train" else data


def _slug(model: str) -> str:
    """`MiT-SegFormer` -> `mit-segformer`, as in a file's name."""
    return re.sub(r"\W+", "-", model.lower())


def _fitting_limit(limit: int | None) -> int:
    """Images for fitting; of a limited run five times its limit, at least 500."""
    return FITTING if limit is None else min(FITTING, max(FEWEST, 5 * limit))


def _halves(count: int) -> tuple[list[int], list[int]]:
    order = random.Random("halves").sample(range(count), count)
    return order[: count // 2], order[count // 2 :]


def _part(data: Dataset, chosen: Sequence[int]) -> Dataset:
    """Those of its images, in its order."""
    if not chosen:
        raise DataError(f"{data.name}: {len(data)} images are too few to keep some for fitting.")
    return replace(data, chosen=[data.chosen[i] for i in sorted(chosen)])
