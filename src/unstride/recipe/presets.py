"""Recipes by name: the paper's, what people do already, and our default."""

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from unstride.errors import OptionError
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Search, Stage
from unstride.tasks.tasks import TASKS, task_named


def _flip(task: str) -> Recipe:
    return Recipe((Stage(("plain", "flip")),), task, _combine(task), name="flip")


def _multiscale(task: str) -> Recipe:
    """Segmentation: mmseg's six scales."""
    scales = ("0.5x", "0.75x", "1.25x", "1.5x", "1.75x") if TASKS[task].maps else ("1.15x", "1.3x")
    views = [f"{flip}{scale}" for scale in scales for flip in ("", "flip + ")]
    return Recipe((Stage(("plain", "flip", *views)),), task, _combine(task), name="multiscale-flip")


def _default(task: str, axes: int = 2) -> Recipe:
    """One more pass where the model is uncertain: the flipped image, or near states where a flip would mislead.

    A signal that runs backwards is another signal, and a flipped output may mean something else: a signed coordinate, a
    left hand. Clips and volumes are flipped along their last axis only.
    """
    if task in ("regression", "features"):
        return Recipe((Stage(states=Near(4)),), task, name="default")
    gated = "margin" in TASKS[task].gates and not TASKS[task].maps
    gate = Gate("margin", below=0.5) if gated else None
    weights = (0.5,) if gated and axes > 1 else ()  # measured: as good where flips help, and spares other models
    second = Stage(states=Near(2), gate=gate) if axes == 1 else Stage(("flip",), gate=gate, weights=weights)
    return Recipe((Stage(), second), task, _combine(task), name="default")


def _paper(task: str) -> Recipe:
    """As printed: aligned maps with zeros at the border, weighted by entropy where there are classes."""
    aggregate = "entropy" if "entropy" in TASKS[task].aggregates else "mean"
    search = Search(10, criterion=TASKS[task].criteria[0])
    return Recipe((Stage(states=search, aggregate=aggregate),), task, name="paper")


def _paper_refined(task: str) -> Recipe:
    """Ours: criterion and weights from each state's own prediction, the border renormalised."""
    criterion = "entropy-unaligned" if "entropy-unaligned" in TASKS[task].criteria else TASKS[task].criteria[0]
    aggregates = TASKS[task].aggregates
    aggregate = "mean" if "entropy" not in aggregates else "entropy" if TASKS[task].maps else "entropy-unaligned"
    stage = Stage(states=Search(10, criterion=criterion), aggregate=aggregate, border="renormalise")
    return Recipe((stage,), task, name="paper-refined")


def _paper_learned(task: str) -> Recipe:
    stage = Stage(states=Search(10, criterion="learned"), aggregate="learned")
    return Recipe((stage,), task, name="paper-learned")


def _combine(task: str) -> str:
    return "probabilities" if TASKS[task].classes and TASKS[task].maps else ""


PRESETS: dict[str, Callable[[str], Recipe]] = {
    "default": _default,
    "plain": lambda task: Recipe(task=task, name="plain"),
    "flip": _flip,
    "multiscale-flip": _multiscale,
    "paper": _paper,
    "paper-refined": _paper_refined,
    "paper-learned": _paper_learned,
}


def cascade(networks: tuple[str, ...], task: str) -> Recipe:
    """Each further network runs where the answer so far is uncertain, and is averaged with it."""
    gate = Gate("margin", below=0.5) if "margin" in TASKS[task].gates else None
    stages = [Stage(network=networks[0]), *(Stage(network=name, gate=gate) for name in networks[1:])]
    return Recipe(tuple(stages), task, _combine(task), name="cascade")


def get(name: str | Path | Recipe, task: str | None = None, axes: int = 2) -> Recipe:
    """A preset by its name, a recipe from its file, or a Recipe as it is.

    Args:
        task: for another task than the recipe's own.
        axes: of the model's input; the default recipe of signals (1) is another one.

    Example: `get("paper").changed(budget=4)`, `get("flip", "segmentation")`, `get("tuned.toml")`.
    """
    task = None if task is None else task_named(task).name
    if not isinstance(name, str | Path | Recipe):
        raise OptionError(f"recipe: got {name!r:.80}, expected a name such as 'default', a file, or a Recipe.")
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
        raise OptionError(f"recipe: got {str(name)!r}, expected {', '.join(PRESETS)}, or a .toml or .json file.{hint}")
    return recipe if task is None or task == recipe.task else recipe.changed(task=task)
