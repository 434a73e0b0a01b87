"""What torchvision, timm, segmentation_models_pytorch and transformers say about a model's name, in one form."""

from __future__ import annotations

import difflib
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unstride.compat import import_torchvision
from unstride.errors import SpecError, UnstrideWarning
from unstride.models.tasks import library_task
from unstride.tasks.tasks import TASKS
from unstride.views.given import from_torchvision, side_of
from unstride.views.images import Preprocess

_SEGMENTATION_CLASSES = 21  # of random networks, where the library has no number of its own; torchvision's choice


@dataclass(frozen=True)
class Blueprint:
    """How to make one model, and what is known of it once it is made."""

    build: Callable[..., nn.Module]  # (classes: int | None, names: of a checkpoint's tensors) -> random weights
    pretrained: Callable[[], nn.Module]
    preprocess: Callable[[str, nn.Module], Preprocess]  # (weights: random, default or path; model)
    task: Callable[[nn.Module], str]
    classes: Callable[[nn.Module], tuple[str, ...]] = lambda model: ()
    decoder_random: bool = False  # also of what is called pretrained
    convert: Callable[[Mapping[str, Tensor], str], Mapping[str, Tensor]] = lambda state, origin: state  # a checkpoint's


def close_to(name: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?`, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=5, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else ""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _optional(module: str, extra: str) -> Any:
    import_torchvision()  # which these libraries need
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SpecError(f"this model needs {module}: pip install 'unstride[{extra}]' ({first_line(error)})") from error


def _torchvision(name: str) -> Blueprint:
    import_torchvision()
    import torchvision
    from torchvision.models import get_model, get_model_weights, list_models

    segmenters = list_models(module=torchvision.models.segmentation)
    known = [*list_models(module=torchvision.models), *segmenters]
    if name not in known:
        other = " (that one neither classifies nor segments images)" if name in list_models() else ""
        raise SpecError(f"torchvision has no model {name!r} to use here{other}{close_to(name, known)}")
    best = get_model_weights(name).DEFAULT
    segments = name in segmenters

    def build(classes: int | None = None, names: Iterable[str] = ()) -> nn.Module:
        settings: dict[str, Any] = {} if classes is None else {"num_classes": classes}
        if segments:
            settings["weights_backbone"] = None  # or torchvision fetches them
            if any("aux_classifier." in tensor for tensor in names):
                settings["aux_loss"] = True
        elif name in ("googlenet", "inception_v3"):
            settings["init_weights"] = True  # the default, but not saying so is warned about
        return get_model(name, weights=None, **settings)

    def preprocess(kind: str, model: nn.Module) -> Preprocess:
        made = from_torchvision(best.transforms())
        fixed = getattr(model, "image_size", None)  # of a ViT, whose best weights may have come with another size
        return made if fixed is None or made.size == (fixed, fixed) else replace(made, resize=fixed, crop=fixed)

    return Blueprint(
        build,
        lambda: get_model(name, weights=best),
        preprocess,
        lambda model: "segmentation" if segments else "classification",
        lambda model: tuple(best.meta["categories"]),
    )


def imagenet_names() -> tuple[str, ...]:
    """The 1,000 class names in the order that torchvision and timm share."""
    import_torchvision()
    from torchvision.models import ResNet18_Weights

    return tuple(ResNet18_Weights.DEFAULT.meta["categories"])


def _timm(name: str) -> Blueprint:
    import_torchvision()
    import timm

    if not timm.is_model(name):
        raise SpecError(f"timm has no model {name!r}{close_to(name, timm.list_models())}")

    def build(classes: int | None = None, names: Iterable[str] = ()) -> nn.Module:
        settings: dict[str, Any] = {} if classes is None else {"num_classes": classes}
        return timm.create_model(name, **settings)

    def preprocess(kind: str, model: nn.Module) -> Preprocess:
        return from_timm(timm.data.resolve_data_config(model=model), exact=kind == "default")

    def classes(model: nn.Module) -> tuple[str, ...]:
        subset = timm.data.infer_imagenet_subset(model)
        if subset == "imagenet-1k":
            return imagenet_names()
        return tuple(timm.data.ImageNetInfo(subset).label_descriptions()) if subset else ()

    return Blueprint(
        build, lambda: timm.create_model(name, pretrained=True), preprocess, lambda model: "classification", classes
    )


def from_timm(config: Mapping[str, Any], exact: bool = True) -> Preprocess:
    """timm's `resolve_data_config` as Preprocess. The few that frame an image are refused where it matters."""
    channels, height, width = config["input_size"]
    scaled = int(height / config["crop_pct"]), int(width / config["crop_pct"])
    cropped = config["crop_mode"] == "center" and height == width
    if exact and not cropped and config["crop_mode"] != "squash":
        raise SpecError(
            f"timm prepares images for this model by {config['crop_mode']!r} to {height}x{width}, which is not "
            "supported; wrap it in a file.py:function with a preprocessing of your own"
        )
    return Preprocess(
        resize=scaled if config["crop_mode"] == "squash" else min(scaled),
        crop=(height, width),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
        channels="L" if channels == 1 else "RGB",
    )


def _smp(name: str) -> Blueprint:
    smp = _optional("segmentation_models_pytorch", "segmentation")
    import timm

    arch, _, encoder = name.partition(":")
    known = [made.__name__ for made in smp.MODEL_ARCHITECTURES_MAPPING.values()]
    if arch.lower() not in smp.MODEL_ARCHITECTURES_MAPPING or not encoder:
        raise SpecError(f"smp:{name}: expected smp:ARCH:ENCODER, ARCH one of {', '.join(known)}{close_to(arch, known)}")
    universal = encoder.startswith("tu-")  # any timm model as an encoder
    if not (timm.is_model(encoder[3:]) if universal else encoder in smp.encoders.encoders):
        names = [f"tu-{n}" for n in timm.list_models()] if universal else smp.encoders.get_encoder_names()
        raise SpecError(f"segmentation_models_pytorch has no encoder {encoder!r}{close_to(encoder, names)}")

    def build(classes: int | None = None, names: Iterable[str] = ()) -> nn.Module:
        return smp.create_model(arch, encoder, encoder_weights=None, classes=classes or _SEGMENTATION_CLASSES)

    def pretrained() -> nn.Module:
        warnings.warn(
            f"smp:{name}: only the encoder is pretrained, the decoder is random; give the path of trained weights",
            UnstrideWarning,
            stacklevel=2,
        )
        choices = [True] if universal else list(smp.encoders.encoders[encoder]["pretrained_settings"])
        chosen = "imagenet" if "imagenet" in choices else choices[0]
        return smp.create_model(arch, encoder, encoder_weights=chosen, classes=_SEGMENTATION_CLASSES)

    def preprocess(kind: str, model: nn.Module) -> Preprocess:
        plain = Preprocess(resize=None, crop=None)
        if universal:
            config = timm.get_pretrained_cfg(encoder[3:])
            if config is None:
                return plain
            fixed = config.input_size[1:] if config.fixed_input_size else None
            return replace(plain, resize=fixed, mean=config.mean, std=config.std, interpolation=config.interpolation)
        if kind != "default":
            return plain  # smp keeps its table on the network; nearly all of it is ImageNet's mean and std
        settings = smp.encoders.get_preprocessing_params(encoder)
        top = settings["input_range"][1]
        mean, std = (tuple(v / top for v in settings[key]) for key in ("mean", "std"))
        return replace(plain, mean=mean, std=std, channels=settings["input_space"])

    return Blueprint(build, pretrained, preprocess, lambda model: "segmentation", decoder_random=True)


def _hf(name: str) -> Blueprint:
    found = _Transformers(name)
    return Blueprint(found.build, found.pretrained, found.preprocess, found.task, found.classes)


class _Transformers:
    """One model of transformers: stored in a folder or on the hub, or a bare configuration such as `segformer`."""

    def __init__(self, name: str) -> None:
        self.hf, self.name = _optional("transformers", "segmentation"), name
        from transformers.models.auto import modeling_auto

        self.segmenters = modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES
        self.classifiers = modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        self.depths = modeling_auto.MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES
        self.bare, _, self.backbone = name.partition(":")
        self.stored = Path(name).is_dir() or "/" in name
        known = {**self.segmenters, **self.classifiers, **self.depths}
        if not self.stored and self.bare not in known:
            raise SpecError(
                f"hf:{name} is no folder, no id such as nvidia/segformer-b0-finetuned-ade-512-512, and no vision model "
                f"of transformers{close_to(self.bare, known)}"
            )

    def build(self, classes: int | None = None, names: Iterable[str] = ()) -> nn.Module:
        try:
            config = self._config(local=True)
        except OSError as error:
            folder = Path(self.name).is_dir()
            hint = "save the model with save_pretrained" if folder else "weights default fetches it"
            raise SpecError(
                f"hf:{self.name}: there is no configuration of it here ({first_line(error)}); {hint}"
            ) from error
        if classes is not None or not self.stored:
            config.num_labels = classes or (_SEGMENTATION_CLASSES if self._segments(config) else 1000)
        return self._auto(config).from_config(config)

    def pretrained(self) -> nn.Module:
        if not self.stored:
            raise SpecError(
                f"hf:{self.name} is a configuration without weights; name a folder or an id, as hf:microsoft/resnet-18"
            )
        return self._auto(self._config(local=False)).from_pretrained(self.name, trust_remote_code=False)

    def preprocess(self, kind: str, model: Any) -> Preprocess:
        if self.stored and (kind == "default" or (Path(self.name) / "preprocessor_config.json").is_file()):
            made = self.hf.AutoImageProcessor.from_pretrained(self.name, trust_remote_code=False)
            return from_transformers(made.to_dict())
        if TASKS[self.task(model)].maps:
            return Preprocess(resize=None, crop=None)
        size = side_of(getattr(model.config, "image_size", 224))
        return Preprocess(resize=size, crop=size)

    def task(self, model: Any) -> str:
        return library_task(model) or "classification"

    def classes(self, model: Any) -> tuple[str, ...]:
        names = tuple(model.config.id2label[i] for i in sorted(model.config.id2label))
        return () if all(re.fullmatch(r"LABEL_\d+", label) for label in names) else names

    def _config(self, local: bool) -> Any:
        if self.stored:
            return self.hf.AutoConfig.from_pretrained(self.name, local_files_only=local, trust_remote_code=False)
        more = {"backbone_config": _backbone(self.hf, self.backbone)} if self.backbone else {}
        return self.hf.AutoConfig.for_model(self.bare, **more)

    def _segments(self, config: Any) -> bool:
        # A saved model names its class; a bare name means the classifier where there is one, except for SegFormer.
        names = " ".join(config.architectures or ())
        only = {*self.segmenters} - ({*self.classifiers} - {"segformer"})
        return "Segmentation" in names if names else config.model_type in only

    def _auto(self, config: Any) -> Any:
        hf = self.hf
        names = " ".join(config.architectures or ())
        only = {*self.depths} - {*self.segmenters} - {*self.classifiers}
        if "DepthEstimation" in names if names else config.model_type in only:
            return hf.AutoModelForDepthEstimation
        return hf.AutoModelForSemanticSegmentation if self._segments(config) else hf.AutoModelForImageClassification


def _backbone(hf: Any, name: str) -> Any:
    if name not in hf.CONFIG_MAPPING:
        raise SpecError(f"transformers has no backbone {name!r}{close_to(name, list(hf.CONFIG_MAPPING.keys()))}")
    return hf.AutoConfig.for_model(name, out_features=["stage1", "stage2", "stage3", "stage4"])


def from_transformers(settings: Mapping[str, Any]) -> Preprocess:
    """The `to_dict()` of a transformers image processor as Preprocess."""
    get = settings.get
    size = get("size") or {}
    side: int | None = size.get("shortest_edge")
    crop: tuple[int, int] | None = None
    resize = side if side else (size["height"], size["width"]) if "height" in size else None
    if side and get("crop_pct") is not None:  # ConvNeXt's way: large images are squeezed, smaller ones are cut
        crop = (side, side)
        resize = crop if side >= 384 else int(side / settings["crop_pct"])
    if get("do_center_crop"):
        crop = (settings["crop_size"]["height"], settings["crop_size"]["width"])
    top = 255 * (get("rescale_factor", 1 / 255) if get("do_rescale", True) else 1)  # what 255 is when the mean is taken
    mean, std = (settings["image_mean"], settings["image_std"]) if get("do_normalize") else ([0.0] * 3, [1.0] * 3)
    if get("rescale_offset"):
        mean = [v + 1 for v in mean]
    if get("include_top"):  # EfficientNet's processor divides by std twice, as its weights were trained
        std = [v * v for v in std]
    return Preprocess(
        resize=resize if get("do_resize", True) else None,
        crop=crop,
        mean=tuple(v / top for v in mean),
        std=tuple(v / top for v in std),
        interpolation=("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")[int(get("resample", 2))],
        channels="BGR" if get("do_flip_channel_order") else "RGB",
    )


def _paper(name: str) -> Blueprint:
    from unstride.models import paper_networks

    network = paper_networks.get(name)

    def build(classes: int | None = None, names: Iterable[str] = ()) -> nn.Module:
        return network.build(network.classes if classes is None else classes)

    def pretrained() -> nn.Module:
        raise SpecError(
            f"paper:{network.name}: no library fetches its weights. They are {network.checkpoint}; give the path of "
            "that file, or weights random where accuracy does not matter"
        )

    return Blueprint(
        build,
        pretrained,
        lambda kind, model: network.preprocess,
        lambda model: network.task,
        lambda model: imagenet_names() if network.classes == 1000 else (),
        convert=lambda state, origin: paper_networks.convert(network, state, origin),
    )


LIBRARIES: dict[str, Callable[[str], Blueprint]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "smp": _smp,
    "hf": _hf,
    "paper": _paper,
}
