"""Segments through `torch.compile`: one compilation serves all numbers of rows.

Moving operands is bookkeeping over states and stored prefixes, so it stays outside; the arithmetic after it is
compiled, with the weights as constants. Compiling a network takes minutes: it is an option, for long runs.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from unstride.engine.movers import Batch, Mover
from unstride.engine.segments import batch_of
from unstride.graph.ops import ancestors


class Compiled(nn.Module):
    """A segment in two parts: what moves operands, as it is, and the rest, compiled."""

    def __init__(self, movers: GraphModule, body: GraphModule, batches: list[Batch]) -> None:
        super().__init__()
        self.movers, self.batches = movers, batches
        self.body = torch.compile(body, options={"freezing": True})

    def forward(self, rows: int, states: Any, *values: Any) -> tuple[Tensor, ...]:
        moved = self.movers(rows, states, *values)
        for value, batch in zip(moved, self.batches, strict=True):
            torch._dynamo.maybe_mark_dynamic(value, batch.dim)
        return self.body(*moved)


def compile_segment(module: nn.Module) -> nn.Module:
    """A segment, compiled where there is arithmetic to compile."""
    assert isinstance(module, GraphModule)
    nodes = list(module.graph.nodes)
    output = nodes[-1]
    first = ancestors(n for n in nodes if n.op == "call_module")
    first |= {n for n in nodes if n.op == "placeholder"}
    rest = [n for n in nodes if n not in first and n is not output]
    cut = [n for n in nodes if n in first and n.name not in ("rows", "states")]
    cut = [n for n in cut if n.op != "get_attr" and any(u not in first for u in n.users)]
    if not cut or not any(n.op == "call_function" for n in rest):
        return module
    batches = [_batch(module, n) for n in cut]

    head = Graph()
    env: dict[Node, Node] = {}
    for n in nodes:
        if n in first:
            env[n] = head.node_copy(n, env.__getitem__)
    head.output(tuple(env[n] for n in cut))

    body = Graph()
    env = {n: body.placeholder(n.name) for n in cut}
    rows = next(n for n in nodes if n.name == "rows")
    if any(u not in first for u in rows.users):  # from a shape, so that the compiler takes it for a variable
        size = body.call_function(torch.ops.aten.sym_size.int, (env[cut[0]], batches[0].dim))
        env[rows] = body.call_function(operator.floordiv, (size, batches[0].factor))
    for n in [*rest, output]:
        for constant in n.all_input_nodes:
            if constant not in env:
                env[constant] = body.node_copy(constant)
        env[n] = body.node_copy(n, env.__getitem__)
    name = type(module).__name__
    return Compiled(GraphModule(module, head, name), GraphModule(module, body, name), batches)


def _batch(module: GraphModule, n: Node) -> Batch:
    mover = module.get_submodule(str(n.target)) if n.op == "call_module" else None
    return mover.batch if isinstance(mover, Mover) else batch_of(n)
