"""A recipe by name, by file or as it is, with the tensors that belong to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unstride.errors import ArtefactError, OptionError
from unstride.graph.capture import wanted_axes
from unstride.method.attention import Attention
from unstride.recipe.files import StoredRecipe, read
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.storage.artefacts import check_finite, read_artefact, write_artefact
from unstride.storage.fingerprint import check_model
from unstride.views.images import Preprocess

KIND = "fitted"
VIEW_WEIGHTS = "view_weights"  # (V, K) of ClassTTA


@dataclass(frozen=True, eq=False)
class OpenedRecipe:
    """A recipe that is ready to run, and what was stored with it."""

    recipe: Recipe
    attention: Attention | None = None
    preprocess: Preprocess | None = None
    stored: StoredRecipe | None = None
    view_weights: Tensor | None = None  # (V, K), of a recipe of one stage with V views


def is_file(recipe: object) -> bool:
    return isinstance(recipe, str | Path) and Path(recipe).suffix in (".toml", ".json")


def open_recipe(
    recipe: str | Path | Recipe, model: nn.Module, preprocess: Preprocess | None = None, task: str | None = None
) -> OpenedRecipe:
    """An ArtefactError where the file was made for other weights or another preprocessing."""
    if not isinstance(recipe, str | Path | Recipe):
        raise OptionError(f"recipe: got {recipe!r}, expected a name such as 'default', a file, or a Recipe.")
    if not is_file(recipe):
        return OpenedRecipe(get(recipe, task, wanted_axes(model)), None, preprocess)
    stored = read(Path(str(recipe)))
    stored.warn()
    found = stored.recipe if task is None or task == stored.recipe.task else stored.recipe.changed(task=task)
    base = stored.networks.get("base")
    if base is not None and base.fingerprint is not None:
        check_model(stored.path, base.fingerprint, model)
    attention, weights = None, None
    if found.tensors is not None:
        attention, weights = read_fitted(Path(str(recipe)).parent / found.tensors, model)
    if weights is not None and (found.task, *(len(s.views) for s in found.stages)) != ("classification", len(weights)):
        what = f"{found.tensors} has weights for {len(weights)} views of one stage of a classifier"
        raise ArtefactError(f"{stored.path}: {what}, the recipe has other stages. Fit it again.")
    return OpenedRecipe(found, attention, stored_preprocess(stored, preprocess), stored, weights)


def check_networks(stored: StoredRecipe, models: Mapping[str, nn.Module]) -> None:
    """An ArtefactError where a network that the file names was stored with other weights."""
    for name, network in stored.networks.items():
        if name in models and network.fingerprint is not None:
            check_model(f"{stored.path}, network {name!r}", network.fingerprint, models[name])


def stored_preprocess(stored: StoredRecipe, given: Preprocess | None) -> Preprocess | None:
    """The preprocessing of the base network; an error where another one is given."""
    base = stored.networks.get("base")
    if base is None or base.preprocess is None:
        return given
    old = Preprocess.from_json({"resize": None, "crop": None, **base.preprocess})
    if given is not None and given != old:
        names = [f.name for f in fields(old) if getattr(given, f.name) != getattr(old, f.name)]
        raise ArtefactError(
            f"{stored.path} was made with other preprocessing ({', '.join(names)} differ): {old}. "
            "Prepare the images in the same way, or tune again."
        )
    return given or old


def write_fitted(path: Path, attention: Attention | None, view_weights: Tensor | None, model: str) -> Path:
    """What was fitted into a file, with the fingerprint of the network that it was fitted on."""
    meta: dict[str, Any] = {"kind": KIND, "model": model}
    tensors: dict[str, Tensor] = {}
    if attention is not None:
        meta |= {"channels": attention.channels, "heads": attention.heads}
        tensors |= attention.state_dict()
    if view_weights is not None:
        tensors[VIEW_WEIGHTS] = view_weights
    return write_artefact(path, tensors, meta)


def read_fitted(path: Path, model: nn.Module) -> tuple[Attention | None, Tensor | None]:
    """The attention and the view weights of a file, checked: whole, ours, and for this network."""
    tensors, meta = read_artefact(path, KIND)
    check_model(path, meta.get("model"), model)
    check_finite(path, tensors)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    weights = tensors.pop(VIEW_WEIGHTS, None)
    try:
        if weights is not None and (weights.ndim != 2 or not bool((weights >= 0).all() and (weights.sum(0) > 0).all())):
            raise ValueError("view weights are not a non-negative (V, K)")
        attention = _attention(tensors, int(meta["channels"]), int(meta["heads"])) if tensors else None
    except (LookupError, TypeError, ValueError, RuntimeError, OptionError) as error:
        raise ArtefactError(f"{path} does not contain what `unstride fit` writes ({error}). Fit it again.") from error
    return None if attention is None else attention.to(device), None if weights is None else weights.to(device)


def _attention(tensors: dict[str, Tensor], channels: int, heads: int) -> Attention:
    if channels != tensors["out"].numel():  # before so much memory is asked for
        raise ValueError(f"{channels} channels, but weights for {tensors['out'].numel()}")
    attention = Attention(channels, heads)
    attention.load_state_dict(tensors)
    return attention.requires_grad_(False)


def check_budgets(budgets: Any) -> tuple[int, ...]:
    """Each budget once, in order."""
    several = isinstance(budgets, Iterable) and not isinstance(budgets, str | bytes)
    found = list(budgets)[:4097] if several else []
    if not found or len(found) > 4096 or any(type(b) is not int or b < 1 for b in found):
        raise OptionError(f"budgets: got {budgets!s:.60}, expected whole numbers from 1 on, such as [1, 4, 10].")
    return tuple(dict.fromkeys(found))
