"""Something of your own, by name, wherever unstride asks for a name; docs/extending.md has an example of each.

    from unstride.extend import library, reader, rule, view

    @rule("acme.thin")                # an op of a network: where its result lies, whether it subsamples
    @reader("tiles", task="...")      # data "tiles:PATH", for `unstride.data.load` and --data
    @library("acme")                  # models "acme:NAME", for `unstride.models.load` and SPEC
    @view("Gamma", values=(0.5, 2))   # an op of a TTA policy, "Gamma=0.8", with its way back

A name is given once. Only the same function, defined anew (a notebook cell that is run again), takes its own place.
"""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import Node

from unstride import data
from unstride.data.items import Item, Listing, check_labels, file_item, of_arrays
from unstride.errors import DataError, OptionError, SpecError
from unstride.geometry import rules
from unstride.geometry.positions import LOST, OpWindow, Pos, Site, position_of, resample
from unstride.geometry.walk import Walk
from unstride.models import libraries
from unstride.models.libraries import Blueprint
from unstride.recipe.view import RULES as OPS
from unstride.recipe.view import Op
from unstride.recipe.view import Rule as OpRule
from unstride.tasks.tasks import task_named
from unstride.views.images import Preprocess, open_image, open_mask
from unstride.views.transforms import TRANSFORMS, Size, Transform, on_floats

__all__ = [
    "LOST",
    "Blueprint",
    "Item",
    "Listing",
    "Op",
    "OpWindow",
    "Pos",
    "Preprocess",
    "Site",
    "Walk",
    "check_labels",
    "file_item",
    "library",
    "of_arrays",
    "open_image",
    "open_mask",
    "position_of",
    "reader",
    "resample",
    "rule",
    "view",
]  # fmt: skip

Rule = Callable[[Walk, Node, Any], tuple[Any, list[Node]]]
Reader = Callable[[Path, str | None, int | None], Listing]
Library = Callable[[str], Blueprint]
Change = Callable[[Tensor, Op], Tensor]

_givers: dict[tuple[str, str], tuple[str, str]] = {}  # (what, name) -> where the function stands


def rule(op: str) -> Callable[[Rule], Rule]:
    """`@rule("acme.thin")`: how the result of an op lies on the image. "namespace.name"; torch's own have no namespace.

    The function gets (walk, node, value) and returns the position of the result and the operands it came from.
    """

    def take(made: Rule) -> Rule:
        _claim("a rule for", rules.RULES, op, r"\w+(\.\w+)?", made)

        @functools.wraps(made)
        def checked(walk: Walk, node: Node, value: Any) -> tuple[Any, list[Node]]:
            got = made(walk, node, value)
            if not (isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], list)):
                raise OptionError(f"the rule for {op} returned {got!r}; expected a position and a list of operands")
            if isinstance(got[0], Pos) and isinstance(value, Tensor) and got[0].shape != value.shape:
                here, there = tuple(got[0].shape), tuple(value.shape)
                raise OptionError(f"the rule for {op} gave positions of shape {here} to a result of {there}: expand")
            return got

        rules.RULES[op] = checked
        return made

    return take


def reader(kind: str, task: str) -> Callable[[Reader], Reader]:
    """`@reader("tiles", task="classification")`: data sets "tiles:PATH".

    The function gets (path, split or None, number of the model's classes or None) and returns a Listing.
    """
    task = task_named(task).name

    def take(made: Reader) -> Reader:
        _claim("data of kind", data.KINDS, kind, r"(?!sample)[a-z][\w-]+", made)

        @functools.wraps(made)
        def checked(path: Path, split: str | None, classes: int | None) -> Listing:
            got = made(path, split, classes)
            if not isinstance(got, Listing):
                raise DataError(f"{kind}:{path}: its reader returned {type(got).__name__}; expected a Listing")
            return got

        data.KINDS[kind], data.TASKS[kind] = checked, task
        return made

    return take


def library(name: str) -> Callable[[Library], Library]:
    """`@library("acme")`: models "acme:NAME". The function gets NAME and returns a Blueprint."""

    def take(made: Library) -> Library:
        _claim("a library", libraries.LIBRARIES, name, r"[a-z][\w-]+", made)

        @functools.wraps(made)
        def checked(model: str) -> Blueprint:
            got = made(model)
            if not isinstance(got, Blueprint):
                raise SpecError(f"{name}:{model}: the library returned {type(got).__name__}; expected a Blueprint")
            return got

        libraries.LIBRARIES[name] = checked
        return made

    return take


def view(
    name: str,
    values: tuple[float, float] | None = None,
    neutral: float = 0.0,
    moves: bool = False,
    undo: Change | None = None,
) -> Callable[[Change], Change]:
    """`@view("Gamma", values=(0.5, 2.0), neutral=1.0)`: an op of a policy, written "Gamma=0.8" there.

    The function gets (image, op): float (..., C, H, W) in [0, 1], and `op.number`; it keeps the shape.

    values   from where to where its number may go; None: it takes none
    neutral  the number that does nothing; intensity is the distance from it
    moves    it moves pixels, with black (0) for what is not of the image; by default it only changes their values
    undo     its way back on a segmentation output (B, K, h, w) of what it moved; without one it is for classification
    """
    if values is not None and not values[0] < values[1]:
        raise OptionError(f"view {name!r}: values are {values!r}; expected (low, high)")
    if undo is not None and not moves:
        raise OptionError(f"view {name!r} has an undo, but does not move pixels; say moves=True, or leave undo out")

    def back(output: Tensor, op: Op, size: Size) -> Tensor:
        assert undo is not None
        return undo(output, op)

    def take(made: Change) -> Change:
        _claim("a view", OPS, name, r"[A-Z]\w+", made)
        run = on_floats(made)
        home = back if undo is not None else None
        TRANSFORMS[name] = Transform(run, "place", home, hides=True) if moves else Transform(run)
        if values is None:
            OPS[name] = OpRule(base=1.0)
        else:
            reach = max(abs(value - neutral) for value in values)
            OPS[name] = OpRule(*values, neutral=neutral, reach=reach)
        return made

    return take


def _claim(what: str, table: Mapping[str, Any], name: str, form: str, made: Callable[..., Any]) -> None:
    """The name is of the right form and free, or this very function had it before."""
    if not isinstance(name, str) or not re.fullmatch(form, name):
        raise OptionError(f"{what} {name!r}: expected a name of the form {form}")
    where = (made.__module__, made.__qualname__)
    if name in table and _givers.get((what, name)) != where:
        by = " by {}.{}".format(*_givers[what, name]) if (what, name) in _givers else ", it is unstride's own"
        raise OptionError(f"{what} {name!r} is there already{by}; choose another name")
    _givers[what, name] = where
