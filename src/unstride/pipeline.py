"""Models by name with a recipe, ready to run: what `evaluate`, `predict`, `export` and the command line start from.

open_pipeline("timm:resnet18", recipe="flip").better(images)
open_pipeline(["timm:mobilenetv2_100", "timm:resnet50"], recipe="best.toml")
open_pipeline(recipe="best.toml")        # loads the networks that the file names, and checks their weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unstride.enhanced import Enhanced, enhance, named_models
from unstride.errors import OptionError, SpecError
from unstride.execution.opening import is_file
from unstride.models import LoadedModel, load
from unstride.models.devices import device_named
from unstride.models.libraries import from_timm
from unstride.models.tasks import library_task
from unstride.models.weights import place
from unstride.recipe.files import StoredNetwork, StoredRecipe, read, to_data
from unstride.recipe.recipe import Recipe
from unstride.storage.fingerprint import computation_key, digest, fingerprint
from unstride.tasks.tasks import task_named
from unstride.views.images import Preprocess

_UNKNOWN = Preprocess()  # of a module that came without


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Networks and a recipe.

    Attributes:
        better: what runs: `pipeline.better(images)`.
        networks: by name, the base network first.
        stored: the recipe file, where the recipe was read from one.
    """

    better: Enhanced
    networks: Mapping[str, LoadedModel]
    stored: StoredRecipe | None = None
    _keys: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def base(self) -> LoadedModel:
        return next(iter(self.networks.values()))

    @property
    def task(self) -> str:
        return self.better.task

    @property
    def classes(self) -> tuple[str, ...]:
        return self.base.classes

    @property
    def spec(self) -> str:
        """The models by name: `timm:mobilenetv2_100 + timm:resnet50`."""
        return " + ".join(loaded.spec for loaded in self.networks.values())

    @property
    def weights(self) -> str:
        return " + ".join(dict.fromkeys(loaded.weights for loaded in self.networks.values()))

    @property
    def untrained(self) -> bool:
        """True if a network has random weights, so that its accuracy means nothing."""
        return any(loaded.untrained for loaded in self.networks.values())

    def with_recipe(self, recipe: str | Path | Recipe | None = None, **changes: Any) -> Pipeline:
        """The same networks with another recipe, or with changes of this one."""
        return replace(self, better=self.better.replace(recipe, **changes))

    def stored_networks(self) -> dict[str, StoredNetwork]:
        """The networks as a recipe file names them."""
        return {name: self._stored(name, loaded) for name, loaded in self.networks.items()}

    def key(self, images: Tensor) -> dict[str, Any]:
        """What the results depend on beside the images, as plain values: the recipe, and what each network computes.

        Args:
            images: at least one image, as the base network takes it. Noise of its shape passes through each network.
        """
        better = self.better
        return {
            "recipe": to_data(better.recipe.changed(name="")),
            "attention": None if better.attention is None else digest(dict(better.attention.state_dict()))[:16],
            "view_weights": None if better.view_weights is None else digest({"w": better.view_weights})[:16],
            "networks": {name: self._network_key(name, images) for name in self.networks},
            "device": place(better.model)[0].type,
        }

    def _network_key(self, name: str, images: Tensor) -> dict[str, Any]:
        network = self.better.networks[name]
        if name not in self._keys:
            self._keys[name] = computation_key(network.model, images[:1].to(*place(network.model)))
        prepared = network.preprocess or self.better.preprocess
        return {
            "computes": self._keys[name],
            "preprocess": None if prepared is None else prepared.to_json(),
            "classes": list(network.classes),
        }

    def _stored(self, name: str, loaded: LoadedModel) -> StoredNetwork:
        network = self.better.networks[name]
        prepared = network.preprocess or self.better.preprocess
        data = None if prepared is None else {k: v for k, v in prepared.to_json().items() if v is not None}
        spec = loaded.spec if is_spec(loaded.spec) else None
        named = loaded.weights in ("default", "random") or Path(loaded.weights).is_file()
        weights = loaded.weights if spec is not None and named else None
        return StoredNetwork(spec, fingerprint(loaded.model), data, network.classes, weights)

    def __repr__(self) -> str:
        return f"Pipeline({self.spec}; {self.better.recipe.name or 'own recipe'}, {self.task})"


def open_pipeline(
    model: Any = None,
    *,
    recipe: str | Path | Recipe = "default",
    weights: str | Path | None = "default",
    task: str | None = None,
    device: str | None = None,
    execution: str = "frozen",
    **changes: Any,
) -> Pipeline:
    """Load models and open a recipe.

    Args:
        model: a SPEC such as "timm:resnet18", a `LoadedModel`, a module, what `enhance` returned; a list or a dict of
            these; or None, where `recipe` is a file that names its networks.
        recipe: a name, a file, or a `Recipe`. A file must have been made for these networks.
        weights: of models given by SPEC: "default", "random", or the path of a weights file.
        device: "cpu", "cuda", "cuda:1", "mps" or "auto"; by default the models stay where they are.
        execution: as in `enhance`; "frozen" is the fastest, for models that do not change.
        changes: fields of the recipe, as in `enhance`.
    """
    stored = read(Path(str(recipe))) if is_file(recipe) else None
    if isinstance(model, Enhanced):
        return _enhanced(model, recipe, stored, task, device, changes)
    networks = _loaded(model, stored, weights, recipe)
    where = device_named(device)
    if where is not None:
        for loaded in networks.values():
            loaded.model.to(where)
    if task is not None:
        task = task_named(task).name
        networks = {name: loaded.for_task(task) for name, loaded in networks.items()}
    better = enhance(_as_given(networks), recipe=recipe, task=task, execution=execution, **changes)
    return Pipeline(better, _base_first(networks, better), stored)


def is_spec(text: str) -> bool:
    """True if the text names a model that `load` can load without running a user's file."""
    return text in ("sample", "sample-large", "sample-segmentation") or (
        (":" in text or text.startswith("efficientnet-lite") or text.endswith(".onnx")) and ".py:" not in text
    )


def _enhanced(
    better: Enhanced, recipe: Any, stored: StoredRecipe | None, task: str | None, device: str | None, changes: Any
) -> Pipeline:
    """An enhanced model: its own recipe where no other is asked for."""
    if task not in (None, better.task):
        raise OptionError(f"task: got {task!r}, but the enhanced model is for {better.task!r}. Leave task out.")
    if (where := device_named(device)) is not None:
        better.to(where)
    other = None if recipe == "default" else recipe
    changed = better.replace(other, **changes) if other is not None or changes else better
    networks = {name: wrapped(network.model) for name, network in better.networks.items()}
    return Pipeline(changed, _base_first(networks, changed), stored)


def wrapped(model: nn.Module) -> LoadedModel:
    """A module with what its library says about it: its preprocessing (timm) and its task."""
    preprocess = _UNKNOWN
    if type(model).__module__.startswith("timm."):
        import timm

        preprocess = from_timm(timm.data.resolve_data_config(model=model), exact=False)
    return LoadedModel(type(model).__name__, model, preprocess, library_task(model), (), "its own")


def _as_given(networks: Mapping[str, LoadedModel]) -> dict[str, Any]:
    """A module whose preprocessing nobody knows goes to `enhance` without one, so that a recipe file may name it."""
    return {n: loaded.model if loaded.preprocess is _UNKNOWN else loaded for n, loaded in networks.items()}


def _loaded(model: Any, stored: StoredRecipe | None, weights: str | Path | None, recipe: Any) -> dict[str, LoadedModel]:
    """Each network loaded, under the name that the recipe has for it."""
    named = {} if model is None else named_models(model)
    loaded = {name: _one(given, weights) for name, given in named.items()}
    if stored is None or not stored.networks:
        if not loaded:
            raise OptionError(f"model: got none, and the recipe {str(recipe)!r} names no networks. Name a model.")
        return loaded
    wanted = {name: n for name, n in stored.networks.items() if name != "base" or not _alias(stored.networks)}
    return _matched(loaded, wanted, stored)


def _alias(networks: Mapping[str, StoredNetwork]) -> bool:
    """True if `base` is another name of a network that the file also lists."""
    prints = [n.fingerprint for name, n in networks.items() if name != "base"]
    return "base" in networks and networks["base"].fingerprint in prints


def _matched(
    given: Mapping[str, LoadedModel], wanted: Mapping[str, StoredNetwork], stored: StoredRecipe
) -> dict[str, LoadedModel]:
    """The networks that a file names: from those that were given, by their weights, else loaded by SPEC."""
    prints = {name: fingerprint(loaded.model) for name, loaded in given.items()}
    by_print = {value: name for name, value in prints.items()}
    found: dict[str, LoadedModel] = {}
    used = set()
    for name, network in wanted.items():
        source = by_print.get(network.fingerprint or "")
        if source is None and network.fingerprint is None and name in given:
            source = name
        if source is not None:
            used.add(source)
            found[name] = given[source]
        elif network.spec is not None and not (len(given) == len(wanted) or not is_spec(network.spec)):
            found[name] = load(network.spec, network.weights or "default")
        else:
            raise SpecError(_missing(name, network, given, prints, stored))
    unused = [loaded.spec for name, loaded in given.items() if name not in used]
    if unused:
        names = ", ".join(f"{name} ({n.spec or 'a model of the caller'})" for name, n in wanted.items())
        raise SpecError(f"{stored.path}: it was not made for {unused[0]} with these weights. Its networks are {names}.")
    return found


def _missing(
    name: str,
    network: StoredNetwork,
    given: Mapping[str, LoadedModel],
    prints: Mapping[str, str],
    stored: StoredRecipe,
) -> str:
    own = (network.fingerprint or "")[:12]
    what = f"{stored.path}: network {name!r} ({network.spec or 'a model of the caller'}, fingerprint {own})"
    if not given:
        return f"{what} is not named by a SPEC that can be loaded. Give the model."
    offered = ", ".join(f"{loaded.spec} ({prints[n][:12]})" for n, loaded in given.items())
    return f"{what} is none of the given models: {offered}. Give the models, with the weights, that it was made for."


def _one(given: Any, weights: str | Path | None) -> LoadedModel:
    if isinstance(given, LoadedModel):
        return given
    if isinstance(given, nn.Module):
        return wrapped(given)
    if isinstance(given, str):
        return load(given, weights)
    raise OptionError(
        f"model: got {type(given).__name__}, expected a SPEC such as 'timm:resnet18', a module, or a list."
    )


def _base_first(networks: Mapping[str, LoadedModel], better: Enhanced) -> dict[str, LoadedModel]:
    """Without the second name of the base network, and with the preprocessing that is in use."""
    ordered: dict[str, LoadedModel] = {}
    base = better.networks["base"].model
    for name, loaded in sorted(networks.items(), key=lambda item: item[1].model is not base):
        if all(loaded.model is not other.model for other in ordered.values()):
            prepared = better.networks[name].preprocess or (better.preprocess if loaded.model is base else None)
            ordered[name] = loaded if prepared is None else replace(loaded, preprocess=prepared)
    return ordered
