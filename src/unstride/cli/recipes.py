"""`--recipe NAME|FILE` and `--set KEY=VALUE`: defined once, for every command.

@takes_recipe
def predict(spec: Spec, recipe: RecipeOptions, ...): ...    # unstride predict SPEC --recipe paper --set budget=4
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import numbers, weights_named

if TYPE_CHECKING:
    from unstride.pipeline import Pipeline

PRESETS = "default, plain, flip, multiscale-flip, paper, paper-refined, paper-learned"
Recipe = Annotated[str | None, typer.Option("--recipe", help=f"{PRESETS}, or a .toml file that `tune` or `fit` wrote.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a field of the recipe, or of its one Search, Near or Gate: budget=4, below=0.3. Repeatable.",
    ),
]
_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}


@dataclass(frozen=True)
class RecipeOptions:
    """What the command line says of the recipe; the library decides everything else."""

    recipe: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.recipe is not None or bool(self.changes)

    def keywords(self) -> dict[str, Any]:
        """As `enhance` and `evaluate` take them."""
        return {**({} if self.recipe is None else {"recipe": self.recipe}), **self.changes}

    def pipeline(
        self, specs: Sequence[str] | None, weights: str, task: str | None, device: str | None, **more: Any
    ) -> Pipeline:
        """The models with the recipe. Without models, those in the recipe file."""
        from unstride.pipeline import open_pipeline

        options = {"weights": weights_named(weights), "task": task, "device": device, **more}
        return open_pipeline(list(specs) if specs else None, **options, **self.keywords())


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """`["budget=4", "layers=2-4"]` -> {"budget": 4, "layers": (2, 3, 4)}."""
    found: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f"--set: got {text[:60]!r}, expected KEY=VALUE, such as budget=4.")
        if key in found:
            raise typer.BadParameter(f"--set: {key} is set twice.")
        found[key] = tuple(numbers("--set layers", value)) if key == "layers" else _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text[:400])
        except ValueError:
            continue
    return text


def takes_recipe(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command whose parameter is `recipe: RecipeOptions` the options --recipe and --set."""
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        chosen = RecipeOptions(values.pop("recipe"), parsed(values.pop("settings") or []))
        return command(**values, recipe=chosen)

    kept = [p for p in own.parameters.values() if p.name != "recipe"]
    added = [
        inspect.Parameter("recipe", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Recipe),
        inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Set),
    ]
    places = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*kept, *added]]
    run.__signature__ = own.replace(parameters=places)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in places}
    del run.__wrapped__  # typer would read the signature below this one
    return run
