"""The invariants as functions: what holds for a model, a batch and a set of states, by the referee of oracle.py."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from unstride.engine.engine import Engine
from unstride.geometry.find import find_layers
from unstride.geometry.layers import Subsampling
from unstride.geometry.states import State
from unstride.graph.capture import Graph, capture
from unstride.graph.verify import tolerance

STRIDED = {"conv", "max_pool", "avg_pool", "slice", "merge", "resize"}


@dataclass
class Net:
    """A model with its analysis."""

    model: nn.Module
    graph: Graph
    found: Subsampling

    @classmethod
    def of(cls, model: nn.Module, example: Tensor) -> "Net":
        graph = capture(model, example)
        return cls(model, graph, find_layers(graph))

    @property
    def outputs(self) -> list[Node]:
        return [leaf for leaf in self.graph.leaves if isinstance(leaf, Node)]

    def engine(self, **options: Any) -> Engine:
        return Engine(self.graph, self.found, list(dict.fromkeys(self.outputs)), **options)

    def leaves(self, values: dict[Node, Tensor]) -> list[Tensor]:
        return [values[n] for n in self.outputs]

    def referee(self, images: Tensor, state: State) -> list[Tensor]:
        out = oracle.run(self.model, images, state, places(self.graph, self.found))
        return [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]


def in_chunks(engine: Engine, size: int) -> Engine:
    """An engine whose chunks take no more than so many bytes: row by row, if that is one."""
    engine.chunk_bytes = size
    return engine


def path_of(n: Node) -> str:
    stack = n.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("L__self___").removeprefix("L['self'].").split("@")[0]


def kind_of(n: Node) -> str | None:
    """As what the referee counts a graph's op, or None; only kinds and strides are read, no analysis."""
    name = str(n.target).split(".")[1] if str(n.target).startswith("aten.") else ""
    value = n.args[0].meta.get("val") if n.args and isinstance(n.args[0], Node) else None
    args = dict(enumerate(n.args))
    if value is None or not isinstance(value, Tensor):
        return None
    if name in ("conv1d", "conv2d", "conv3d") or (name == "convolution" and not args[6]):
        return "conv" if _strided(args.get(3, n.kwargs.get("stride", 1))) else None
    if name.removesuffix("_with_indices")[:-2] in ("max_pool", "avg_pool"):
        kind = "max_pool" if "max" in name else "avg_pool"
        return kind if _strided(args.get(2, n.kwargs.get("stride")) or args[1]) else None
    if name == "slice":
        return "slice" if args.get(4, n.kwargs.get("step", 1)) != 1 else None
    if name == "pixel_unshuffle":
        return "merge"
    return "resize" if "upsample" in name else None


def _strided(stride: Any) -> bool:
    return max(stride) > 1 if isinstance(stride, list | tuple) else stride > 1


def places(graph: Graph, found: Subsampling) -> dict[oracle.Place, int]:
    """Which op of the eager model belongs to which layer: by module path, kind, and order in that module."""
    count: Counter[tuple[str, str]] = Counter()
    nth: dict[Node, oracle.Place] = {}
    for n in graph.nodes:
        kind = kind_of(n)
        if kind is not None:
            key = (path_of(n), kind)
            nth[n] = (*key, count[key])
            count[key] += 1
    layer_of: dict[oracle.Place, int] = {}
    merges: Counter[str] = Counter()
    for shift in found.shifts:
        if shift.site is None:
            continue
        layer = next(layer for axis in shift.steps for layer in axis)
        if shift.node in nth:
            layer_of[nth[shift.node]] = layer
        else:
            path = path_of(shift.node)
            layer_of[path, shift.site.kind, merges[path]] = layer
            merges[path] += 1
    return layer_of


def some_states(found: Subsampling, count: int, seed: int = 0) -> list[State]:
    """Random states on both sides of the plain one, that first, and the farthest ones of either side."""
    rng = random.Random(seed)
    rates = [layer.rate for layer in found.layers]
    far = State(tuple(tuple(r - 1 for r in rate) for rate in rates))
    states = [found.space.zero, far, State(tuple(tuple(-k for k in s) for s in far.selections))]
    while len(states) < count:
        states.append(State(tuple(tuple(rng.randrange(1 - r, r) for r in rate) for rate in rates)))
    return list(dict.fromkeys(states))[:count]


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if a.numel() == 0:
        return 0.0
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    scale = b.abs().amax().clamp(min=1e-6)
    return float((a.double() - b.double()).abs().amax() / scale.double())


def check_identity(net: Net, images: Tensor, tol: float | None = None) -> None:
    with torch.no_grad():
        wanted = [t for t in pytree.tree_leaves(net.model(images)) if isinstance(t, Tensor)]
    got = net.leaves(net.engine().start(images).plain)
    for a, b in zip(got, wanted, strict=True):
        assert gap(a, b) <= (tol or tolerance(b.dtype)), f"base model differs by {gap(a, b):.1e}"


def check_sharing(net: Net, images: Tensor, states: Sequence[State], tol: float | None = None, seed: int = 0) -> None:
    """Any set of states, asked for in several steps, equals re-running the model from the image, state by state."""
    run = net.engine().start(images)
    requests = [(i, s) for s in states for i in range(images.shape[0])]
    random.Random(seed).shuffle(requests)
    cut = max(1, len(requests) // 3)
    got: dict[tuple[int, State], list[Tensor]] = {}
    taps = list(dict.fromkeys(net.outputs))
    for part in (requests[:cut], requests[cut:]):
        if part:
            out = run.add(part)
            for row, request in enumerate(part):
                got[request] = net.leaves({tap: v[row] for tap, v in zip(taps, out, strict=True)})
    for s in states:
        wanted = net.referee(images, s)
        for i in range(images.shape[0]):
            for a, b in zip(got[i, s], wanted, strict=True):
                assert gap(a, b[i]) <= (tol or tolerance(b.dtype)), (
                    f"state {s}, image {i}: differs by {gap(a, b[i]):.1e}"
                )


def check_budget(net: Net, images: Tensor, states: Sequence[State]) -> None:
    engine = net.engine()
    run = engine.start(images)
    half = len(states) // 2
    for part in (states[:half], states[half:]):
        if part:
            run.add([(i, s) for i in range(images.shape[0]) for s in part])
    visited = [net.found.space.zero, *states]
    assert run.macs == [engine.trie_macs(visited)] * images.shape[0]


def check_independence(net: Net, images: Tensor, states: Sequence[State], tol: float | None = None) -> None:
    """Neither other images, nor the size of chunks, nor the order of requests change a result."""
    requests = [(i, s) for i in range(images.shape[0]) for s in states]
    wide = dict(zip(requests, net.engine().start(images).add(requests)[0], strict=True))
    narrow_run = in_chunks(net.engine(), 1).start(images)
    narrow = dict(zip(requests[::-1], narrow_run.add(requests[::-1])[0], strict=True))
    alone = net.engine().start(images[-1:]).add([(0, s) for s in states])[0]
    for r in requests:
        assert gap(narrow[r], wide[r]) <= (tol or tolerance(wide[r].dtype)), (
            f"{r}: depends on the size of chunks or the order"
        )
    for s, row in zip(states, alone, strict=True):
        other = wide[images.shape[0] - 1, s]
        assert gap(row, other) <= (tol or tolerance(other.dtype)), f"{s}: depends on the other images"


def check_all(net: Net, images: Tensor, states: Sequence[State], tol: float) -> float:
    """All invariants at once; returns how much the output depends on the state.

    Identity, budget, sharing (in two steps, images mixed), independence (row by row).
    """
    engine = net.engine()
    run = engine.start(images)
    with torch.no_grad():
        wanted = [t for t in pytree.tree_leaves(net.model(images)) if isinstance(t, Tensor)]
    for a, b in zip(net.leaves(run.plain), wanted, strict=True):
        assert gap(a, b) <= tol, f"base model differs by {gap(a, b):.1e}"
    requests = [(i, s) for s in states for i in reversed(range(images.shape[0]))]
    parts = [run.add(requests[:1]), run.add(requests[1:])]
    got = [torch.cat(values) for values in zip(*parts, strict=True)]
    assert run.macs == [engine.trie_macs([net.found.space.zero, *states])] * images.shape[0], "work is not the trie's"
    narrow = in_chunks(net.engine(), 1).start(images)
    rows = list(range(len(requests)))[-images.shape[0] :]
    for a, b in zip(narrow.add([requests[r] for r in rows]), got, strict=True):
        assert gap(a, b[rows]) <= tol, f"depends on batch or chunk: {gap(a, b[rows]):.1e}"
    taps = dict(zip(dict.fromkeys(net.outputs), got, strict=True))
    for s in states:
        for a, b in zip(net.leaves(taps), net.referee(images, s), strict=True):
            values = torch.stack([a[requests.index((i, s))] for i in range(images.shape[0])])
            assert gap(values, b) <= tol, f"state {s}: differs by {gap(values, b):.1e}"
    return max(gap(got[0][r], run.plain[net.outputs[0]][i]) for r, (i, _) in enumerate(requests))


def check_briefly(net: Net, images: Tensor, states: Sequence[State], tol: float) -> tuple[float, float]:
    """With as few passes as will do: image i is asked for state i only. Returns what states change, and the error."""
    engine = net.engine()
    run = engine.start(images)
    with torch.no_grad():
        wanted = [t for t in pytree.tree_leaves(net.model(images)) if isinstance(t, Tensor)]
    for a, b in zip(net.leaves(run.plain), wanted, strict=True):
        assert gap(a, b) <= tol, f"base model differs by {gap(a, b):.1e}"
    pairs = list(enumerate(states))
    got = run.add(pairs)
    floor = [engine.trie_macs([net.found.space.zero, *states[i : i + 1]]) for i in range(images.shape[0])]
    assert run.macs == floor, "work is not the trie's"
    alone = in_chunks(net.engine(), 1).start(images[:1]).add(pairs[:1])
    for a, b in zip(alone, got, strict=True):
        assert gap(a, b[:1]) <= tol, f"depends on batch or chunk: {gap(a, b[:1]):.1e}"
    taps = dict(zip(dict.fromkeys(net.outputs), got, strict=True))
    worst = 0.0
    for i, s in pairs:
        for a, b in zip(net.leaves(taps), net.referee(images[i : i + 1], s), strict=True):
            worst = max(worst, gap(a[i : i + 1], b))
            assert worst <= tol, f"state {s}: differs by {worst:.1e}"
    return max(gap(got[0][i], run.plain[net.outputs[0]][i]) for i, _ in pairs), worst
