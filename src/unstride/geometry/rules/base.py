"""What every rule is made of: its type, the table it stands in, how it reads an op's arguments and sums over cells."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.fx import Node

from unstride.errors import OptionError
from unstride.geometry.positions import Pos, contract, position_of
from unstride.graph.ops import arguments

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk

Result = tuple[Any, list[Node]]  # the position of the value, and the operands it came from
Rule = Callable[["Walk", Node, Any], Result]
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}


def register(name: str, rule: Rule) -> None:
    """Give an op its rule.

    Example: `register("acme.thin", thin_rule)`; aten ops go by their bare name, `"conv2d"`.
    """
    if not callable(rule):
        raise OptionError(f"rule of {name!r}: got {type(rule).__name__}, expected a function (walk, node, value)")
    if name in RULES:
        there = getattr(RULES[name], "__qualname__", repr(RULES[name]))
        raise OptionError(
            f"op {name!r} has a rule already ({there}); to put another in its place, first `RULES.pop({name!r})`"
        )
    RULES[name] = rule


def rule(names: str) -> Callable[[R], R]:
    """The function below is the rule of all these ops: `@rule("matmul bmm mm")`."""

    def enter(function: R) -> R:
        for name in names.split():
            register(name, function)
        return function

    return enter


def argument(n: Node, i: int, name: str, default: Any) -> Any:
    """An argument that may be given by place, by name, or not at all."""
    if len(n.args) > i:
        return arguments(n)[i]
    return n.kwargs.get(name, default)


def each(v: Any, count: int, default: int = 0) -> list[int]:
    """One number for all dimensions that an op slides over, one for each, or none: always one for each."""
    if v is None or v == []:
        return [default] * count
    if isinstance(v, int):
        return [v] * count
    v = [int(i) for i in v]
    return v if len(v) == count else [v[0]] * count


def summed(
    w: "Walk", n: Node, p: Pos, dims: Sequence[int], shape: Sequence[int] | None = None, keepdim: bool = True
) -> Pos | None:
    """Where a sum over `dims` lies, repeated to `shape`; a sum over neighbouring cells is noted as a merging."""
    done = [contract(t, dims, keepdim) for t in p.axes]
    w.mixing(n, [mixed for _, mixed in done])
    return position_of(*(t if shape is None else t.expand(tuple(shape)) for t, _ in done))
