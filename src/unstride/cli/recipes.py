"""`--recipe NAME|FILE` and the few fields of it that a command line may change: defined once, for every command.

    @takes_recipe()
    def predict(spec: Spec, asked: Asked, ...): ...    # unstride predict SPEC --recipe paper --budget 4

Help is that of the fields of `Recipe`, which also says what is allowed; here is only how a word becomes a value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import MOST, numbers
from unstride.recipe.words import DOCS, PRESETS

if TYPE_CHECKING:
    from torch import Tensor

    from unstride.enhanced import Enhanced
    from unstride.models import Loaded

ALIGNS: dict[str, bool | str] = {"on": True, "off": False, "stitch": "stitch"}


def _aligned(text: str) -> bool | str:
    if text not in ALIGNS:
        raise typer.BadParameter(f"--align is {text}; wanted {', '.join(ALIGNS)}")
    return ALIGNS[text]


# The fields that are words or numbers: the type that the command line reads, and how that becomes the field's value.
READ: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "budget": (int, int),
    "layers": (str, lambda text: tuple(numbers("--layers", text))),
    "criterion": (str, str),
    "order": (str, str),
    "aggregate": (str, str),
    "align": (str, _aligned),
    "merge": (str, str),
    "temperature": (float, float),
    "precision": (str, str),
}


@dataclass(frozen=True)
class Asked:
    """What the command line asks of the procedure; nothing said is left to the library."""

    recipe: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.recipe is not None or bool(self.changes)

    def options(self) -> dict[str, Any]:
        """As `enhance` and `evaluate` take it."""
        return {**({} if self.recipe is None else {"recipe": self.recipe}), **self.changes}

    def enhanced(self, loaded: Loaded, example: Tensor | None = None, **more: Any) -> Enhanced:
        """The model with the recipe; one that was made for another model or other preprocessing is refused."""
        from unstride.evaluation.loop import prepared

        task = loaded.task or "auto"
        x = loaded.example() if example is None else example
        asked = {"preprocess": loaded.preprocess, **self.options(), **more}
        return prepared(loaded.model, x, asked.pop("task", task), asked)


def takes_recipe(*without: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command whose parameter `asked` is given as --recipe and its overrides, but for those it has itself."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        added = _parameters(without)
        names = [p.name for p in added if p.name != "recipe"]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            recipe = values.pop("recipe")
            given = {name: values.pop(name) for name in names}
            changes = {name: READ[name][1](value) for name, value in given.items() if value is not None}
            return command(**values, asked=Asked(recipe, changes))

        kept = [p for p in own.parameters.values() if p.name != "asked"]
        places = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*kept, *added]]
        run.__signature__ = own.replace(parameters=places)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in places}
        del run.__wrapped__  # typer would read the signature below this one
        return run

    return give


def _parameters(without: tuple[str, ...]) -> list[inspect.Parameter]:
    help = f"What is done to every image: {', '.join(PRESETS)}, or a file that `tune` or `fit` wrote."
    changes = [_option(name, kind, f"{DOCS[name]}.") for name, (kind, _) in READ.items() if name not in without]
    return [_option("recipe", str, help), *changes]


def _option(name: str, kind: Any, help: str) -> inspect.Parameter:
    text = help[:1].upper() + help[1:]
    bounds = {"min": 1, "max": MOST} if kind is int else {}
    annotation = Annotated[kind | None, typer.Option(f"--{name}", help=text, rich_help_panel="Recipe", **bounds)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
