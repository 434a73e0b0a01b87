"""Send image coordinates through a Graph: where is each value, what thins the grid out, what does each op cost?"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.geometry.positions import (
    LOST,
    OTHER_DIRECTION,
    LostPosition,
    Pos,
    Trace,
    has_axis,
    no_position,
    position_of,
)
from unstride.geometry.rules import RULES
from unstride.geometry.rules.elementwise import pointwise
from unstride.geometry.rules.resize import unpool
from unstride.graph.capture import Graph, run_nodes
from unstride.graph.ops import arguments, is_pointwise, op_name

# what they make of a map is a vector
_FLATTENING = {*(f"adaptive_avg_pool{n}d" for n in (1, 2, 3)), "mean", "sum", "amax", "max"}


class Walk:
    """One pass over the graph with an image of coordinates; `RULES` are its table."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.trace, self.values = graph, Trace(), {}  # type: ignore[var-annotated]
        self.indices: dict[Node, Tensor] = {}  # whole numbers, masks and places that are the same for every image
        self.node: Node | None = None

    @property
    def axes(self) -> int:
        """How many the image has."""
        return len(self.graph.size)

    def run(self) -> Trace:
        size = self.graph.size
        shape = (1, self.graph.channels, *size)
        image = torch.zeros(shape, dtype=self.graph.dtype, device=self.graph.device)
        coords = [
            torch.arange(n, dtype=torch.float32).view(-1, *[1] * (len(size) - 1 - a)).expand(shape)
            for a, n in enumerate(size)
        ]
        trace = self.trace
        for n in self.graph.fx.nodes:
            if n.op == "placeholder":
                trace.pos[n] = position_of(*coords) if n is self.graph.image else None
                trace.shapes[n] = (
                    tuple(image.shape) if n is self.graph.image else _shape(self.graph.constants.get(n.name))
                )
                self._keep(n, self.graph.constants.get(n.name))
        with torch.no_grad():
            for n, value in run_nodes(self.graph, image):
                trace.shapes[n] = _shape(value)
                if not isinstance(value, Tensor | tuple | list):
                    self.values[n] = value
                self._keep(n, value)
                trace.macs[n] = macs(n, trace.shapes)
                self._place(n, value)
        return trace

    def _keep(self, n: Node, value: Any) -> None:
        if not isinstance(value, Tensor) or n in self.graph.from_image:
            return
        if not value.is_floating_point() or any(op_name(u).startswith("grid_sampler") for u in n.users):
            self.indices[n] = value.to("cpu")

    def _place(self, n: Node, value: Any) -> None:
        trace = self.trace
        inputs = [i for i in n.all_input_nodes if trace.pos.get(i) is not None]
        if not inputs or not isinstance(value, Tensor | tuple | list):
            trace.pos[n], trace.sources[n] = None, ([],) * self.axes
            return
        if n.target is operator.getitem:
            whole = trace.pos[arguments(n)[0]]
            trace.pos[n] = whole[arguments(n)[1]] if isinstance(whole, list) else whole
            trace.sources[n] = self._from(n, [arguments(n)[0]])
            return
        name = op_name(n)
        rule = RULES.get(name)
        if rule is None and is_pointwise(n):
            rule = pointwise
        if rule is None:
            trace.unknown[n] = f"no rule for {name}"
        self.node = n
        lost = [i for i in inputs if isinstance(trace.pos[i], LostPosition)]
        if rule is None or (lost and rule not in (pointwise, unpool)):
            trace.pos[n] = self._without_rule(name, value, self.lost(lost))
            trace.sources[n] = ((inputs if _placed(trace.pos[n]) else []),) * self.axes
            return
        trace.pos[n], carriers = rule(self, n, value)
        trace.sources[n] = self._from(n, carriers)

    def _without_rule(self, name: str, value: Any, lost: LostPosition) -> Any:
        """What an op without a rule makes: it may lie somewhere, unless it is a vector."""
        if isinstance(value, tuple | list):
            return [self._without_rule(name, v, lost) for v in value]
        shape = value.shape if isinstance(value, Tensor) else ()
        cell = len(shape) == 2 + self.axes and set(shape[2:]) == {1}
        return lost if (len(shape) > 2 and not cell) or (len(shape) == 2 and name not in _FLATTENING) else None

    def _from(self, n: Node, carriers: list[Node]) -> tuple[list[Node], ...]:
        out = self.trace.pos[n]
        kept = out if not isinstance(out, list) else next((p for p in out if p is not None), None)

        def axis(a: int) -> list[Node]:
            if not has_axis(kept, a):
                return []
            return [c for c in dict.fromkeys(carriers) if _axis_of(self.trace.pos.get(c), a)]

        return tuple(map(axis, range(self.axes)))

    # -- what rules use
    def lost(self, inputs: Sequence[Node]) -> LostPosition:
        """What becomes of values whose place is not known."""
        return OTHER_DIRECTION if any(self.trace.pos[i] is OTHER_DIRECTION for i in inputs) else LOST

    def pos(self, n: Any) -> Pos | None:
        p = self.trace.pos.get(n) if isinstance(n, Node) else None
        return p if isinstance(p, Pos) else None

    def coords(self, n: Any, a: int) -> Tensor:
        p = self.pos(n)
        return p.axis(a) if p is not None else no_position(self.trace.shapes[n])

    def fill(self, arg: Any) -> Any:
        """A node argument that is a Python number (symbolic size) -> its value for one image."""
        return torch.fx.map_arg(arg, lambda n: self.values.get(n, n))

    def mixing(self, n: Node, mixed: Sequence[bool]) -> None:
        if any(mixed):
            self.trace.merges[n] = tuple(map(int, mixed))


def _placed(p: Any) -> bool:
    return any(q is not None for q in p) if isinstance(p, list) else p is not None


def _axis_of(p: Any, a: int) -> bool:
    return any(has_axis(q, a) for q in p) if isinstance(p, list) else has_axis(p, a)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple | list):
        return [_shape(v) for v in value]
    return None


# ---------------------------------------------------------------- cost
def macs(n: Node, shapes: dict[Node, Any]) -> int:
    """Multiply-accumulates of one op for one image; element-wise work is not counted, as is the custom."""
    name = op_name(n)
    out: Any = shapes.get(n)
    if name in ("conv2d", "conv1d", "conv3d", "convolution", "_convolution") and not (
        name == "convolution" and arguments(n)[6]
    ):
        kernel = shapes[arguments(n)[1]]
        return math.prod(out) * math.prod(kernel[1:])
    if name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"):
        kernel = shapes[arguments(n)[1]]
        return math.prod(shapes[arguments(n)[0]]) * math.prod(kernel[1:])
    if name == "linear":
        return math.prod(out) * shapes[arguments(n)[1]][-1]
    if name in ("matmul", "bmm", "mm"):
        return math.prod(out) * shapes[arguments(n)[0]][-1]
    if name in ("addmm", "baddbmm"):
        return math.prod(out) * shapes[arguments(n)[1]][-1]
    if name == "einsum":
        left, _ = arguments(n)[0].replace(" ", "").split("->")
        size: dict[str, int] = {}
        for term, operand in zip(left.split(","), arguments(n)[1], strict=True):
            size.update(zip(term, shapes[operand], strict=False))
        return math.prod(size.values()) if len(arguments(n)[1]) > 1 else 0
    if "scaled_dot_product" in name:
        q, k, v = (shapes[arguments(n)[i]] for i in range(3))
        return math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    return 0


def walk(graph: Graph) -> Trace:
    """Positions, strided ops and costs of every node, for one image."""
    return Walk(graph).run()
