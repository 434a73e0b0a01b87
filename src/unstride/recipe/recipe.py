"""What is done to every image, in one frozen noun: from Python to the command line to a file and back.

    recipe = unstride.recipe.get("paper").changed(budget=4)
    print(recipe)

Either `stages` of looks with gates between them, or the paper's search (`budget` > 1, or given `states`); neither is
the plain network. Each field is defined and checked here and nowhere else; `words` says what it is.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from unstride.errors import OptionError
from unstride.procedure.aggregate import BORDERS
from unstride.procedure.gates import Gate, Stage, written_states
from unstride.procedure.meaning import ALIASES, MERGES, NEAR, TASKS
from unstride.procedure.search import CRITERIA, ORDERS
from unstride.procedure.stopping import Stop
from unstride.procedure.tasks import SPACES
from unstride.recipe.words import DOCS
from unstride.views.policies import IDENTITY

AGGREGATES = ("mean", "entropy", "attention", "max")
OWN = ("merge", "criterion")  # what a task has a usual one of; "" asks for that
PRECISIONS = (None, "bfloat16", "float16")


def _one_of(*allowed: Any) -> Callable[[Any], str | None]:
    wanted = ", ".join(map(repr, allowed))
    return lambda value: None if any(value is a or (value == a and type(value) is type(a)) for a in allowed) else wanted


def _whole(least: int, what: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return None if fits else what

    return check


def _range(value: Any) -> str | None:
    whole = isinstance(value, tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    wanted = "a contiguous range such as range(2, 5)"
    return None if value is None or (whole and value and value == tuple(range(value[0], value[-1] + 1))) else wanted


def _positive(value: Any) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if number and 0 < value < float("inf") else "a positive number"


def _ask(name: str, default: Any, check: Callable[[Any], str | None], search: bool = False) -> Any:
    return field(default=default, metadata={"doc": DOCS[name], "check": check, "search": search})


@dataclass(frozen=True)
class Recipe:
    """Everything the procedure does. `print(recipe)` says it in a few lines; recipes compare, hash, fit in a file."""

    name: str = _ask("name", "", lambda v: None if isinstance(v, str) else "a name")
    task: str = _ask("task", "classification", _one_of(*TASKS))
    stages: tuple[Stage, ...] = _ask(
        "stages",
        (),
        lambda v: None if isinstance(v, tuple) and all(isinstance(s, Stage) for s in v) else "a tuple of Stage",
    )
    merge: str = _ask("merge", "", _one_of(*MERGES))
    temperature: float = _ask("temperature", 1.0, _positive)
    budget: int = _ask(
        "budget", 1, _whole(1, "a whole number of states, at least 1 (1 is the model itself)"), search=True
    )
    layers: tuple[int, ...] | None = _ask("layers", None, _range, search=True)
    criterion: str = _ask("criterion", "", _one_of(*CRITERIA), search=True)
    order: str = _ask("order", "paper", _one_of(*ORDERS), search=True)
    states: tuple[Any, ...] | None = _ask(
        "states",
        None,
        lambda v: None if v is None or written_states(v) else "a list of states, one selection per layer",
        search=True,
    )
    stop: Stop | None = _ask(
        "stop",
        None,
        lambda v: None if v is None or hasattr(v, "reason") else "a rule such as unstride.Confident(p=0.9)",
        search=True,
    )
    seed: int = _ask("seed", 0, _whole(0, "a whole number"), search=True)
    aggregate: str = _ask("aggregate", "mean", _one_of(*AGGREGATES), search=True)
    space: str | None = _ask("space", None, _one_of(None, *SPACES), search=True)
    align: bool | str = _ask("align", True, _one_of(True, False, "stitch"), search=True)
    border: str = _ask("border", "renormalise", _one_of(*BORDERS), search=True)
    precision: str | None = _ask("precision", None, _one_of(*PRECISIONS))
    fitted: str | None = _ask(
        "fitted", None, lambda v: None if v is None or isinstance(v, str) else "the name of a .safetensors file"
    )

    def __post_init__(self) -> None:
        for name in ("layers", "states", "stages"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str | tuple):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.states, tuple):
            object.__setattr__(self, "states", written_states(self.states) or self.states)
        if isinstance(self.task, str) and self.task in ALIASES:
            object.__setattr__(self, "task", ALIASES[self.task])
        for name in OWN:
            if getattr(self, name) == "" and isinstance(self.task, str) and self.task in TASKS:
                object.__setattr__(self, name, _usual(name, self.task))
        for f in fields(self):
            wanted = f.metadata["check"](getattr(self, f.name))
            if wanted is not None:
                raise OptionError(f"{f.name}: got {getattr(self, f.name)!r}, wanted {_listed(wanted)}")
        object.__setattr__(self, "temperature", float(self.temperature))  # 1 and 1.0, and numpy's, are written alike
        self._check_together()

    def _check_together(self) -> None:
        if self.stages and (search := [name for name in SEARCH if getattr(self, name) != self._usual(name)]):
            raise OptionError(f"a recipe has stages of looks, or a search ({', '.join(search)}), not both")
        if self.stages and (self.stages[0].gate is not None or self.stages[0].views[0] != IDENTITY):
            raise OptionError(
                "the first stage is for every image, so it has no gate, and it begins with the plain view"
            )
        if self.criterion == "learned" and self.aggregate != "attention":
            raise OptionError("criterion='learned' is the attention's own score: it goes with aggregate='attention'")
        self._check_task()
        self._check_gates([s.gate for s in self.stages if s.gate is not None])

    def _check_task(self) -> None:
        """What the task's output cannot say is refused, and what can be had instead is named."""
        task = TASKS[self.task]
        if self.aggregate == "attention" and "attention" not in task.aggregates:
            raise OptionError(
                f"aggregate='attention' is for classification; {task.name} is learning-free "
                f"({', '.join(task.aggregates)})"
            )
        if self.align == "stitch" and (not task.stitches or self.aggregate == "max"):
            raise OptionError(
                "align='stitch' is for segmentation and dense maps, with aggregate 'entropy' or 'mean'; finer "
                "features come from better.features(images, finer=2)"
            )
        if self.merge not in task.merges:
            raise OptionError(f"merge={self.merge!r}: {task.name} has {', '.join(map(repr, task.merges))}")
        if self.temperature != 1 and not task.classes:
            raise OptionError(f"temperature divides logits of classes, and task={task.name!r} has none; leave it out")
        if not self.searches:
            return
        if not task.searches:
            raise OptionError(f"task={task.name!r} takes stages of looks and no search: stages with states='near:4'")
        for name, allowed in (("criterion", task.criteria), ("aggregate", task.aggregates)):
            if getattr(self, name) not in allowed:
                needs = "one class for each image or pixel" if task.classes else "classes"
                raise OptionError(
                    f"{name}={getattr(self, name)!r} needs {needs}, which task={task.name!r} has not: it takes "
                    f"{', '.join(map(repr, allowed))}; or {NEAR}"
                )
        if self.stop is not None and not task.one_label:
            raise OptionError(f"stop rules ask for one class, and task={task.name!r} has none: {NEAR}")

    def _check_gates(self, gates: list[Gate]) -> None:
        task, tiles = TASKS[self.task], {gate.tile for gate in gates}
        for gate in gates:
            if gate.by not in task.gates:
                needs = "one class for each image" if task.classes else "classes"
                able = f"it has a gate by {', '.join(task.gates)}; or " if task.gates else ""
                raise OptionError(
                    f"a gate by {gate.by!r} needs {needs}, which task={task.name!r} has not: {able}{NEAR}"
                )
        if not task.maps and tiles - {None}:
            raise OptionError("gate: tile is for segmentation, where an answer has places; leave it out")
        if len(tiles) > 1:
            raise OptionError("gate: all gates of a recipe act on tiles of one size, or all on whole images")

    def changed(self, **changes: Any) -> Recipe:
        """`recipe.changed(budget=4)`: another recipe; names that there are not are refused."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
                raise OptionError(f"a recipe has no {name!r}{hint}")
        searching = [name for name in changes if name in SEARCH and changes[name] != getattr(self, name)]
        if self.stages and searching and "stages" not in changes:
            raise OptionError(
                f"{searching[0]} belongs to the paper's search, and recipe {self.name or 'of looks'!r} has stages of "
                "looks instead: give recipe='paper' with it"
            )
        if "task" in changes:  # what was the old task's usual becomes the new one's
            usual = {name: "" for name in OWN if getattr(self, name) == _usual(name, self.task)}
            changes = {**usual, **changes}
        return replace(self, **changes)

    @property
    def plain(self) -> bool:
        """Whether this is the model as it came."""
        only = self.budget == 1 and self.states is None and self.temperature == 1
        return only and all(s.views == (IDENTITY,) and s.states == "plain" for s in self.stages)

    @property
    def searches(self) -> bool:
        return not self.stages and (self.budget > 1 or self.states is not None)

    def warmed(self, logits: Any) -> Any:
        """Merged logits, divided by the temperature."""
        return logits if self.temperature == 1 else logits / self.temperature

    def digest(self) -> str:
        """The same for recipes that do the same, whatever they are called."""
        return hashlib.sha256(repr(replace(self, name="")).encode()).hexdigest()[:12]

    def _usual(self, name: str) -> Any:
        """What a field is where nothing is asked."""
        return _usual(name, self.task) if name in OWN else type(self).__dataclass_fields__[name].default

    def __str__(self) -> str:
        """What it is called, what it does, and every field that is not as usual."""
        head = f"{self.name or 'recipe'} ({self.task})"
        names = [f.name for f in fields(self) if f.name not in ("name", "task", "stages")]
        asked = {name: getattr(self, name) for name in names if getattr(self, name) != self._usual(name)}
        if self.searches:
            return f"{head}: search, {', '.join(f'{k}={v!r}' for k, v in asked.items())}"
        asked.pop("merge", None)
        more = "".join(f", {k} {v:.4g}" if isinstance(v, float) else f", {k} {v}" for k, v in asked.items())
        if not self.stages:
            return f"{head}: the network as it came{more}"
        lines = [f"  {i}. {stage}" for i, stage in enumerate(self.stages, 1)]
        how = self.merge if self.merge == "median" else f"mean of {self.merge}"
        return "\n".join([head, *lines, f"  {how}{more}"])


def _usual(name: str, task: str) -> str:
    """The merge or criterion that a task takes where none is asked for."""
    return (TASKS[task].merges if name == "merge" else TASKS[task].criteria)[0]


SEARCH = tuple(f.name for f in fields(Recipe) if f.metadata["search"])
EITHER = ("temperature", "precision")  # what looks and a search have in common


def _listed(wanted: str) -> str:
    return f"one of {wanted}" if "'" in wanted and "," in wanted and not wanted.startswith(("a ", "the ")) else wanted


def field_table() -> list[tuple[str, str, str]]:
    """(name, default of a classifier, what it is) of every field, for help and docs."""
    usual = Recipe()
    return [(f.name, repr(getattr(usual, f.name)), str(f.metadata["doc"])) for f in fields(Recipe)]
