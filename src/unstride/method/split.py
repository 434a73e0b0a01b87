"""Section 3, Eq. 3 and 4: the network as `C(F(x))`. Which map is aggregated (F), and the head that follows it (C).

For classification F is the last map that lies on a grid; for segmentation, the logit map before its upsampling.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from unstride.engine.engine import Engine
from unstride.engine.movers import Batch
from unstride.engine.segments import Segment, batch_of, unchanged
from unstride.errors import CaptureError, OptionError
from unstride.geometry.grids import Grid, by
from unstride.geometry.layers import Subsampling, feature_node
from unstride.geometry.states import State
from unstride.graph.capture import SHAPES, Graph
from unstride.graph.ops import ancestors, op_name
from unstride.method.align import Offset, from_map, to_map
from unstride.tasks.tasks import Task

SPACES = ("features", "logits")
_RESIZE = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
)


@dataclass(frozen=True, eq=False)
class Target:
    """One output: states are aggregated at `tap` (F), and `head` (C) computes the output `leaf` from it."""

    leaf: Node
    tap: Node
    grid: Grid | None
    head: Segment | None  # None: the tap is the output

    def finish(self, values: Tensor) -> Tensor:
        """Values of the tap -> the output."""
        if self.head is None:
            return values
        with torch.no_grad():
            return self.head.module(values.shape[0], (), values)[0]


@dataclass(frozen=True, eq=False)
class Split:
    """A captured model at one image size, split for one task and space. `targets[0]` leads the search."""

    graph: Graph
    found: Subsampling
    engine: Engine
    targets: tuple[Target, ...]
    task: Task
    space: str
    also: tuple[tuple[Node, Segment], ...]  # other outputs that follow from the first target's tap
    macs: int  # of one forward pass

    @cached_property
    def pinned(self) -> Engine:
        """The same engine with pinned edges: the edges of large maps stay where they are."""
        return self.engine.with_pinned_edges()

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """Which output leaves the targets are; none where the features are inside the model."""
        inside = self.targets[0].leaf not in self.graph.leaf_nodes
        return () if inside else tuple(self.graph.index(t.leaf) for t in self.targets)

    @property
    def head_macs(self) -> int:
        return sum(t.head.macs for t in self.targets if t.head is not None)

    @property
    def total_stride(self) -> tuple[int, ...]:
        """Pixels after which the whole network repeats itself, per axis."""
        layers = zip(self.found.strides, self.found.layers, strict=True)
        steps = [[round(s * r) for s, r in zip(before, layer.rate, strict=True)] for before, layer in layers]
        return tuple(math.lcm(*along) for along in zip(*steps, strict=True))

    @property
    def reads(self) -> str:
        """What the output is taken for: nothing in a network says whether its numbers are scores of classes."""
        shape = self.found.trace.shapes[self.targets[0].leaf]
        return f"output ({', '.join(map(str, ('B', *shape[1:])))}) read as {self.task.reads(shape)}"

    @property
    def channels(self) -> int:
        """Of the map that is aggregated, in whatever layout."""
        target = self.targets[0]
        shape = (1, *self.found.trace.shapes[target.tap][1:])
        return self.maps(torch.empty(shape, device="meta"), target).shape[1]

    def offset(self, state: State, target: Target) -> Offset | None:
        """Delta / T of a state at a target; None where there is no grid to move."""
        if target.grid is None:
            return None
        paths = self.found.paths[target.tap]
        strides = self.found.strides
        delta = [
            sum(state.selections[layer - 1][a] * strides[layer - 1][a] for layer in sorted(path))
            for a, path in enumerate(paths)
        ]
        return Offset.of(delta, target.grid.spacing)

    def maps(self, values: Tensor, target: Target) -> Tensor:
        """Values of a tap -> (B, C, H, W), or (B, K) as they are combined where there is no grid."""
        if target.grid is not None:
            return to_map(values, target.grid)
        return self.task.encode(values, self.task.combines[0])

    def unmap(self, maps: Tensor, like: Tensor, target: Target) -> Tensor:
        """The inverse of `maps`, in the layout of `like`."""
        if target.grid is None:
            out = self.task.decode(maps, self.task.combines[0])
            return out.reshape(len(out), *like.shape[1:]).to(like.dtype)
        return from_map(maps, like, target.grid).to(like.dtype)


def split_model(
    graph: Graph,
    found: Subsampling,
    task: Task,
    space: str = "",
    run_segment: Callable[[nn.Module], nn.Module] = unchanged,
) -> Split:
    """Where to aggregate for this task; a CaptureError where the maps of states cannot be aligned."""
    found.require_layers()
    leaves = [leaf for leaf in graph.leaf_nodes if leaf in graph.from_image]
    pairs = _pairs(graph, found, leaves, task, space)
    taps = list(dict.fromkeys(tap for _, tap, _ in pairs))
    chosen = {leaf for leaf, _, _ in pairs}
    others = [leaf for leaf in dict.fromkeys(leaves) if leaf not in chosen]
    first = pairs[0][1]
    after = [leaf for leaf in others if graph.image not in ancestors([leaf], until={first}) and leaf is not first]
    engine = Engine(graph, found, taps, [leaf for leaf in others if leaf not in after], run_segment=run_segment)

    def head(tap: Node, leaf: Node) -> Segment | None:
        if tap is leaf:
            return None
        return engine.cutter.segment(found.level[leaf], [leaf], moved=False, start=[tap])

    targets = tuple(Target(leaf, tap, grid, head(tap, leaf)) for leaf, tap, grid in pairs)
    also = tuple((leaf, s) for leaf in after if (s := head(first, leaf)) is not None)
    heads = sum(t.head.macs for t in targets if t.head is not None) + sum(s.macs for _, s in also)
    macs = sum(s.macs for s in engine.as_trained) + heads
    return Split(graph, found, engine, targets, task, "features" if pairs[0][2] else "logits", also, macs)


def _pairs(
    graph: Graph, found: Subsampling, leaves: Sequence[Node], task: Task, space: str
) -> list[tuple[Node, Node, Grid | None]]:
    """(output, tap, grid) of every output that is aggregated."""
    if task.name == "features":
        return _feature_pairs(graph, found, leaves)
    if task.maps:
        if space == "features":
            raise OptionError(
                f"space='features' is for classification; {task.name} aggregates the maps of its output, space='logits'"
            )
        return _map_pairs(graph, found, leaves, task)
    main = _vector_leaf(graph, found, leaves, task)
    tap, grid = _feature(graph, found, main)
    if space == "features" and tap is None:
        raise OptionError(
            "space='features': this model's last map does not lie on a grid (class token, or several maps). "
            "Use space='logits'."
        )
    return [(main, main, None) if space == "logits" or tap is None else (main, tap, grid)]


def _vector_leaf(graph: Graph, found: Subsampling, leaves: Sequence[Node], task: Task) -> Node:
    """The first output of the task's form; of numbers also (B,), of embeddings also (B, C, 1, 1)."""
    shapes = found.trace.shapes
    forms: list[Callable[[Sequence[int]], bool]] = [lambda shape: len(shape) == 2]
    if task.name == "regression":
        forms.append(lambda shape: len(shape) == 1)
    if task.name == "embedding":
        forms.append(lambda shape: len(shape) > 2 and set(shape[2:]) == {1})
    for fits in forms:
        for leaf in leaves:
            if fits(shapes[leaf]):
                return leaf
    maps = any(len(shapes[leaf]) == 2 + len(graph.size) for leaf in leaves)
    hint = " For logit maps pass task='segmentation', for other maps 'dense' or 'features'." if maps else ""
    raise CaptureError(f"{task.name} needs an output {task.shape}; this model returns {_shown(shapes, leaves)}.{hint}")


def _shown(shapes: dict[Node, Any], leaves: Sequence[Node]) -> str:
    return ", ".join(f"({', '.join(map(str, ('B', *shapes[leaf][1:])))})" for leaf in leaves)


def _feature_pairs(graph: Graph, found: Subsampling, leaves: Sequence[Node]) -> list[tuple[Node, Node, Grid | None]]:
    """The outputs that lie on the image, the coarsest first; of a model that returns none, its last map."""
    layers = set(range(1, len(found.layers) + 1))
    pairs: list[tuple[Node, Node, Grid | None]] = []
    for leaf in dict.fromkeys(leaves):
        grid = found.grid(leaf)
        if grid is not None and None not in grid.dims and any(found.paths.get(leaf, ())):
            pairs.append((leaf, leaf, grid))
    if pairs:
        return sorted(pairs, key=lambda pair: -max(pair[2].spacing))  # type: ignore[union-attr]
    for leaf in leaves:
        node, grid = _feature(graph, found, leaf, prefix=True)
        if node is not None and layers:
            return [(node, node, grid)]
    raise CaptureError(
        "features need a map or tokens that lie on the image; this model returns "
        f"{_shown(found.trace.shapes, leaves)}, and its last map does not lie on a grid. Give the part of it that "
        "returns a map (timm: features_only=True)."
    )


def _feature(graph: Graph, found: Subsampling, leaf: Node, prefix: bool = False) -> tuple[Node | None, Grid | None]:
    """The last map on the way to an output; with `prefix`, also tokens with others before them."""
    node = feature_node(graph, found, leaf)
    grid = found.grid(node) if node is not None else None
    if node is None or grid is None or node is graph.image or None in grid.dims or (grid.prefix and not prefix):
        return None, None
    layers = set(range(1, len(found.layers) + 1))
    if not layers <= frozenset().union(*found.paths[node]):
        return None, None
    if batch_of(node) != Batch(0, 1):  # keys and values of a pooling attention, packed, have the images elsewhere
        return None, None
    return node, grid


def _map_pairs(
    graph: Graph, found: Subsampling, leaves: Sequence[Node], task: Task
) -> list[tuple[Node, Node, Grid | None]]:
    """Every map of the task's form among the outputs, with the map before its final upsampling."""
    shapes, axes = found.trace.shapes, len(graph.size)
    bare = (axes + 1,) if task.name == "dense" else ()  # (B, H, W): one number at each pixel
    pairs: list[tuple[Node, Node, Grid | None]] = []
    for leaf in dict.fromkeys(leaves):
        if len(shapes[leaf]) not in (axes + 2, *bare):
            continue
        dims = tuple(range(len(shapes[leaf]) - axes, len(shapes[leaf])))
        tap = leaf
        while tap.op == "call_function" and op_name(tap) in _RESIZE and _grows(shapes, tap):
            tap = tap.args[0]  # type: ignore[assignment]
        grid = found.grid(tap)
        if grid is None or grid.dims != dims:
            if pairs:
                continue  # an auxiliary map without a grid stays as the base model returns it
            if min(shapes[tap][-axes:]) == 1:
                raise CaptureError(
                    f"the logit map is {by(shapes[tap][-axes:])} before its upsampling at images of {by(graph.size)}: "
                    "a single row or column of cells has no place on the image. Use larger images, or pad them."
                )
            lost = f" ({'; '.join(found.unknown[:3])})" if found.unknown else ""
            raise CaptureError(
                f"the logit map {('B', *shapes[leaf][1:])} has no known place on the image{lost}: its states cannot be "
                "aligned. "
                "The guide 'extending' shows how to add a rule for an op."
            )
        if graph.image is tap:
            continue
        pairs.append((leaf, tap, grid))
    if not pairs:
        wanted = task.shape if axes == 2 else SHAPES[axes].replace("C", "K")
        raise CaptureError(f"{task.name} needs an output {wanted}; this model returns {_shown(shapes, leaves)}")
    return pairs


def _grows(shapes: dict[Node, Any], n: Node) -> bool:
    before, after = shapes[n.args[0]], shapes[n]  # type: ignore[index]
    return all(a >= b for a, b in zip(after[2:], before[2:], strict=True))
