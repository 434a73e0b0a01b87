"""Recipes by name: what the paper does, what people do instead, and what we do by default."""

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from unstride.errors import OptionError
from unstride.procedure.gates import Gate, Stage
from unstride.procedure.meaning import TASKS, task_named
from unstride.recipe.recipe import Recipe
from unstride.views.policies import parse_view

SIGNAL_STATES = "near:2"  # plain among them


def _looks(*views: str, gate: Gate | None = None) -> Stage:
    return Stage(tuple(parse_view(v) for v in views), gate=gate)


def _flip(task: str) -> Recipe:
    return Recipe("flip", task, (_looks("plain", "mirror"),), merge=_merge(task))


def _multiscale(task: str) -> Recipe:
    """Segmentation: mmseg's six scales."""
    scales = ("0.5x", "0.75x", "1.25x", "1.5x", "1.75x") if TASKS[task].maps else ("1.15x", "1.3x")
    views = [f"{flip}{scale}" for scale in scales for flip in ("", "mirror + ")]
    return Recipe("multiscale-flip", task, (_looks("plain", "mirror", *views),), merge=_merge(task))


def _default(task: str, axes: int = 2) -> Recipe:
    """Once more, of classes where the network is not sure: the mirror image, or near states where a mirror misleads.

    A recording that runs backwards is another recording, and a mirrored output may mean something else: a signed
    coordinate, a left hand. Clips and volumes are mirrored along their last axis only.
    """
    if task in ("regression", "features"):
        return Recipe("default", task, (Stage(states="near:4"),))
    gated = "margin" in TASKS[task].gates and not TASKS[task].maps
    gate = Gate("margin", below=0.5) if gated else None
    again = Stage(states=SIGNAL_STATES, gate=gate) if axes == 1 else _looks("mirror", gate=gate)
    if (
        gated and axes > 1
    ):  # measured: half the weight is as good where mirrors help, and spares networks that know none
        again = replace(again, weights=(0.5,))
    return Recipe("default", task, (_looks("plain"), again), merge=_merge(task))


def _paper(task: str) -> Recipe:
    """By entropy where there are classes; nearest first, and the mean, where there are none."""
    weighed = "entropy" in TASKS[task].aggregates
    return Recipe("paper", task, budget=10, aggregate="entropy" if weighed else "mean")


def _merge(task: str) -> str:
    return "probabilities" if TASKS[task].classes and TASKS[task].maps else ""


PRESETS: dict[str, Callable[[str], Recipe]] = {
    "default": _default,
    "plain": lambda task: Recipe("plain", task),
    "paper": _paper,
    "paper-learned": lambda task: Recipe("paper-learned", task, budget=10, criterion="learned", aggregate="attention"),
    "flip": _flip,
    "multiscale-flip": _multiscale,
}


def get(name: str | Path | Recipe, task: str | None = None, axes: int = 2) -> Recipe:
    """A preset by its name, a recipe from its file, or a Recipe as it is.

    Example: `get("paper").changed(budget=4)`, `get("flip", "segmentation")`, `get("tuned.toml")`. `axes`: of what the
    model takes; the default of signals (1) is another one.
    """
    task = None if task is None else task_named(task).name
    if isinstance(name, Recipe):
        recipe = name
    elif str(name) in PRESETS:
        make = partial(_default, axes=axes) if str(name) == "default" else PRESETS[str(name)]
        return make(task or "classification")
    elif Path(name).suffix in (".toml", ".json"):
        from unstride.recipe.files import read

        recipe = read(name).recipe
    else:
        close = difflib.get_close_matches(str(name), PRESETS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OptionError(f"recipe: got {str(name)!r}, wanted {', '.join(PRESETS)}, or a .toml or .json file.{hint}")
    return recipe if task is None or task == recipe.task else recipe.changed(task=task)
