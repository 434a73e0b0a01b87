"""A recipe: everything that is done to an image, in one frozen noun that prints, compares, hashes and fits in a file.

    recipe = unstride.Recipe((Stage(), Stage(("flip",), gate=Gate(below=0.5))))
    print(recipe)

It describes and checks; it runs nothing.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from unstride.errors import OptionError
from unstride.recipe.stage import STATE_FIELDS, Gate, Near, Search, Stage, is_number
from unstride.recipe.view import PLAIN
from unstride.tasks.tasks import COMBINES, NEAR, TASKS, task_named

PRECISIONS = (None, "bfloat16", "float16")
DOCS = {
    "stages": "stages of passes, one after the other, each behind its gate",
    "task": "what the model's output means: classification, multilabel, segmentation, dense, embedding, ...",
    "combine": "how passes are combined: mean of logits, probabilities, values or directions; median; max of logits",
    "temperature": "the combined logits are divided by it: changes the confidence, not the predicted class",
    "precision": "autocast to bfloat16 or float16; by default the precision of the images",
    "name": "name of the recipe",
    "tensors": "safetensors file beside the recipe with what was fitted: attention, view weights per class",
}


@dataclass(frozen=True)
class Recipe:
    """Stages of passes and how they are combined. `print(recipe)` describes it in a few lines.

    Example: `Recipe((Stage(), Stage(network="large", gate=Gate(below=0.6), join="replace")))`
    """

    stages: tuple[Stage, ...] = (Stage(),)
    task: str = "classification"
    combine: str = ""
    temperature: float = 1.0
    precision: str | None = None
    name: str = ""
    tensors: str | None = None

    def __post_init__(self) -> None:
        stages = tuple(self.stages) if isinstance(self.stages, Iterable) and not isinstance(self.stages, str) else ()
        if not stages or not all(isinstance(s, Stage) for s in stages):
            raise OptionError(f"recipe: stages: got {self.stages!r}, expected a list of Stage.")
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "task", task_named(self.task).name)
        if self.combine == "":
            object.__setattr__(self, "combine", TASKS[self.task].combines[0])
        if not is_number(self.temperature) or not 1e-6 <= self.temperature <= 1e6:
            raise OptionError(f"recipe: temperature: got {self.temperature!r}, expected a number from 1e-6 to 1e6.")
        object.__setattr__(self, "temperature", float(self.temperature))  # numpy's is written otherwise
        if self.precision not in PRECISIONS:
            raise OptionError(f"recipe: precision: got {self.precision!r}, expected 'bfloat16', 'float16' or None.")
        for name in ("name", "tensors"):
            if not isinstance(getattr(self, name), str) and not (name == "tensors" and self.tensors is None):
                raise OptionError(f"recipe: {name}: got {getattr(self, name)!r}, expected text.")
        if stages[0].gate is not None:
            raise OptionError(
                "recipe: the first stage is for every image. Remove its gate, or put a Stage() before it."
            )
        if stages[0].join == "replace":
            raise OptionError("recipe: join='replace' in the first stage: there is no answer to replace yet.")
        self._check_task()

    # -- checks against the task
    def _check_task(self) -> None:
        task = TASKS[self.task]
        if self.combine not in COMBINES or self.combine not in task.combines:
            allowed = ", ".join(map(repr, task.combines))
            raise OptionError(f"recipe: combine: got {self.combine!r}; task={task.name!r} takes {allowed}.")
        if self.temperature != 1 and not task.classes:
            raise OptionError(f"recipe: temperature divides logits of classes, and task={task.name!r} has none.")
        for stage in self.stages:
            self._check_states(stage)
            if stage.gate is not None:
                self._check_gate(stage.gate)
        if task.maps and self.stages[0].views[0] != PLAIN:
            raise OptionError(
                f"recipe: task={task.name!r}: the first view must be 'plain'; other maps are aligned to it."
            )
        if not task.classes and any(stage.join == "replace" for stage in self.stages):
            raise OptionError(
                f"recipe: join='replace' needs classes, which task={task.name!r} does not have. Its networks are "
                "averaged: leave join out."
            )
        if len({s.gate.tile for s in self.stages if s.gate is not None}) > 1:
            raise OptionError("recipe: all gates act on tiles of one size, or all on whole images.")

    def _check_states(self, stage: Stage) -> None:
        task = TASKS[self.task]
        if stage.states is None:
            return
        if stage.aggregation not in task.aggregates:
            allowed = ", ".join(map(repr, task.aggregates))
            raise OptionError(f"stage: aggregate: got {stage.aggregate!r}; task={task.name!r} takes {allowed}.")
        if stage.align == "stitch" and (not task.stitches or stage.aggregate in ("max", "learned")):
            raise OptionError("stage: align='stitch' is for maps, with aggregate 'mean' or 'entropy'.")
        if not isinstance(stage.states, Search):
            return
        if not task.searches:
            raise OptionError(f"task={task.name!r} takes lists of states and no search: Stage(states=Near(4)).")
        if stage.states.criterion not in task.criteria:
            needs = "one class for each image or pixel" if task.classes else "classes"
            raise OptionError(
                f"search: criterion={stage.states.criterion!r} needs {needs}, which task={task.name!r} does not have. "
                f"It takes {', '.join(map(repr, task.criteria))}; or {NEAR}."
            )
        if stage.states.until is not None and not task.one_label:
            raise OptionError(
                f"search: until needs one class for each image, which task={task.name!r} has not; {NEAR}."
            )

    def _check_gate(self, gate: Gate) -> None:
        task = TASKS[self.task]
        if gate.by not in task.gates:
            needs = "one class for each image" if task.classes else "classes"
            able = f"It takes a gate by {', '.join(task.gates)}; or " if task.gates else ""
            raise OptionError(
                f"gate: by={gate.by!r} needs {needs}, which task={task.name!r} does not have. {able}{NEAR}."
            )
        if not task.maps and gate.tile is not None:
            raise OptionError("gate: tile is for segmentation, where an output has places. Leave it out.")

    # -- changes
    def changed(self, **changes: Any) -> Recipe:
        """Another recipe: fields of Recipe, or of the one Search, Near, Gate or Stage with states that it has.

        Example: `recipe.changed(budget=4)`, `recipe.changed(below=0.3, temperature=1.2)`.
        """
        own = {f.name for f in fields(self)}
        if not isinstance(changes.get("stages", ()), list | tuple):
            raise OptionError(f"recipe: stages: got {changes['stages']!r:.80}, expected a list of Stage.")
        stages = list(changes.pop("stages", self.stages))
        for name in [n for n in changes if n not in own]:
            index = _owner(stages, name)
            stages[index] = _stage_with(stages[index], name, changes.pop(name))
        if "task" in changes and "combine" not in changes:  # what was the usual of the old task becomes the new one's
            usual = self.combine == TASKS[self.task].combines[0]
            changes["combine"] = "" if usual else self.combine
        return replace(self, **{**changes, "stages": tuple(stages)})

    # -- what it does
    @cached_property
    def plain(self) -> bool:
        """Whether this is the base model as it is."""
        return self.temperature == 1 and all(
            s.views == (PLAIN,) and s.states is None and s.network == "base" for s in self.stages
        )

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks that run, the base first where it does."""
        return tuple(dict.fromkeys(s.network for s in self.stages))

    @property
    def search(self) -> Stage | None:
        """The stage with the recipe's only Search, or None."""
        found = [s for s in self.stages if isinstance(s.states, Search)]
        return found[0] if len(found) == 1 else None

    def digest(self) -> str:
        """Equal for recipes that do the same, whatever their name."""
        return hashlib.sha256(repr(replace(self, name="")).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        head = f"{self.name or 'recipe'} ({self.task})"
        if self.plain:
            return f"{head}: the base model as it is"
        lines, gated = list[str](), False
        for i, stage in enumerate(self.stages, 1):
            lines.append(f"  {i}. {'the same images: ' if gated and stage.gate is None else ''}{stage}")
            gated = gated or stage.gate is not None
        other = {"median": "median", "max": "the largest logit of each class"}
        how = other.get(self.combine, f"mean of {self.combine}")
        more = "" if self.temperature == 1 else f", temperature {self.temperature:.4g}"
        more += "" if self.precision is None else f", {self.precision}"
        more += "" if self.tensors is None else f", fitted in {self.tensors}"
        return "\n".join([head, *lines, f"  {how}{more}"])


def _owner(stages: list[Stage], name: str) -> int:
    """The index of the one stage that has a field of this name, in itself, its states or its gate."""
    owners = [i for i, stage in enumerate(stages) if _has(stage, name)]
    if len(owners) == 1:
        return owners[0]
    if owners:
        raise OptionError(f"recipe: {name!r} is in {len(owners)} stages, so it is not clear which. Change the stages.")
    known = {f.name for f in fields(Recipe)} | {n for s in stages for n in _names(s)}
    close = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    search = " It belongs to a Search: pass recipe='paper' with it." if name in _field_names(Search) else ""
    raise OptionError(f"this recipe has no {name!r}.{hint}{search} It has {', '.join(sorted(known))}.")


def _field_names(kind: type) -> set[str]:
    return {f.name for f in fields(kind)}


def _names(stage: Stage) -> set[str]:
    parts = [p for p in (stage.states, stage.gate) if isinstance(p, Search | Near | Gate)]
    own = set(STATE_FIELDS) if stage.states is not None else set()
    return own.union(*map(_field_names, map(type, parts)))


def _has(stage: Stage, name: str) -> bool:
    return name in _names(stage)


def _stage_with(stage: Stage, name: str, value: Any) -> Stage:
    for part in ("states", "gate"):
        noun = getattr(stage, part)
        if isinstance(noun, Search | Near | Gate) and name in _field_names(type(noun)):
            changed: dict[str, Any] = {part: replace(noun, **{name: value})}
            return replace(stage, **changed)
    return replace(stage, **{name: value})


def field_table() -> list[tuple[str, str, str]]:
    """(name, default, what it is) of every field, for help and docs."""
    usual = Recipe()
    return [(f.name, repr(getattr(usual, f.name)), DOCS[f.name]) for f in fields(Recipe)]
