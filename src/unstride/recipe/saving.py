"""A recipe with its learned aggregation, for one network, in one file; never the network itself."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unstride.errors import ArtefactError, OptionError
from unstride.graph.capture import wanted_axes
from unstride.procedure.aggregate import Attention
from unstride.procedure.plans import check_run
from unstride.procedure.tasks import Plan
from unstride.recipe.files import from_data, read, to_data
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.storage.artefacts import check_finite, read_artefact, write_artefact
from unstride.storage.fingerprint import check_model, fingerprint
from unstride.views.images import Preprocess

KIND = "enhanced"


@dataclass(frozen=True, eq=False)
class Saved:
    """What is kept of an enhanced model."""

    recipe: Recipe
    attention: Attention | None
    preprocess: Preprocess | None
    max_bytes: int | None = None
    optimise: bool | str = True


def write_saved(path: str | Path, model: nn.Module, kept: Saved, plan: Plan | None = None) -> Path:
    """Into a file, with the network's fingerprint; of the `plan` that it ran with, what a reader may want to know."""
    attention = kept.attention
    meta = {
        "kind": KIND,
        "model": fingerprint(model),
        "recipe": to_data(kept.recipe),
        "layers": [layer.rate for layer in plan.found.layers] if plan is not None else None,
        "image": [plan.graph.channels, *plan.graph.size] if plan is not None else None,
        "channels": attention.channels if attention is not None else None,
        "preprocess": asdict(kept.preprocess) if kept.preprocess is not None else None,
        "max_bytes": kept.max_bytes,
        "optimise": kept.optimise,
    }
    return write_artefact(path, attention.state_dict() if attention is not None else {}, meta)


def read_saved(path: str | Path, model: nn.Module, preprocess: Preprocess | None = None) -> Saved:
    """From a file, checked: whole, ours, for this network, and with this preprocessing where one is given."""
    tensors, meta = read_artefact(path, KIND)
    check_model(path, meta.get("model"), model)
    try:
        recipe = from_data(meta["recipe"]) if "recipe" in meta else _first_version(meta)
        channels, stored = meta["channels"], meta["preprocess"]
        max_bytes, optimise = meta.get("max_bytes"), meta.get("optimise", True)
        check_run(max_bytes, optimise)
        old = Preprocess.from_json(stored) if stored is not None else None
        attention = None
        if channels is not None:
            check_finite(path, tensors)
            if channels != tensors["out"].numel():  # before so much memory is asked for
                raise ValueError(f"{channels} channels, but weights for {tensors['out'].numel()}")
            attention = Attention(channels)
            attention.load_state_dict(tensors)
            attention.requires_grad_(False)
            attention.to(next((p.device for p in model.parameters()), torch.device("cpu")))
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError, OptionError) as error:
        raise ArtefactError(f"{path} does not hold a usable enhanced model ({error}). Save it again.") from error
    if preprocess is not None and old is not None and preprocess != old:
        names = [f.name for f in fields(old) if getattr(preprocess, f.name) != getattr(old, f.name)]
        raise ArtefactError(
            f"{path} was fitted with other preprocessing ({', '.join(names)} differ): {old}. "
            "Prepare the images in the same way, or fit again."
        )
    return Saved(recipe, attention, old, max_bytes, optimise)


def opened(
    recipe: str | Path | Recipe, model: nn.Module, preprocess: Preprocess | None = None, task: str | None = None
) -> Saved:
    """What a name, a file or a Recipe asks for on this network, which must be the one that the file was made for."""
    kind = "" if isinstance(recipe, Recipe) else Path(recipe).suffix
    if kind == ".safetensors":
        kept = read_saved(Path(str(recipe)), model, preprocess)
    elif kind in (".toml", ".json"):
        written = read(Path(str(recipe)))
        written.check(model, preprocess)
        written.warn()
        kept = Saved(written.recipe, None, written.preprocess)
        if written.recipe.fitted is not None:
            beside = Path(str(recipe)).parent / written.recipe.fitted
            kept = replace(kept, attention=read_saved(beside, model).attention)
    else:
        kept = Saved(get(recipe, task, wanted_axes(model)), None, None)
    return replace(kept, recipe=get(kept.recipe, task), preprocess=preprocess or kept.preprocess)


def task_said(recipe: Any) -> str | None:
    """The task that a file or a Recipe was made for; None where that is left open, as by every name.

    Example: `task_said("tuned.toml") == "embedding"`
    """
    if isinstance(recipe, Recipe):
        return None if recipe.task == Recipe().task else recipe.task  # the default may not have been meant
    kind = Path(recipe).suffix if isinstance(recipe, str | Path) else ""
    if kind in (".toml", ".json"):
        return read(recipe).task
    if kind != ".safetensors":
        return None
    meta = read_artefact(recipe, KIND)[1]
    stated = meta.get("recipe", meta)
    return (
        stated.get("task") if isinstance(stated, dict) else None
    )  # of a damaged file, `read_saved` says what is wrong


def _first_version(meta: dict[str, Any]) -> Recipe:
    """Files of version 0.1 have the options of the search, all of them, None where nothing was asked for."""
    asked = {k: v for k, v in meta["options"].items() if v is not None or k in ("layers", "states")}
    return from_data({"task": meta["task"], "space": meta["space"], **asked})
