"""A captured model made ready for a task: which output is meant, where its map is, how the output is rebuilt."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from unstride.engine.engine import UNBOUNDED, Engine
from unstride.engine.movers import Batch
from unstride.engine.segments import Segment, as_it_is, batch_of
from unstride.errors import CaptureError, OptionError
from unstride.geometry.grids import Grid, by
from unstride.geometry.layers import Subsampling, feature_node
from unstride.geometry.states import State
from unstride.graph.capture import SHAPES, Graph
from unstride.graph.ops import ancestors, op_name
from unstride.procedure.align import Offset, from_map, to_map
from unstride.procedure.meaning import TASKS, Task

SPACES = ("features", "logits")
_RESIZE = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
)


@dataclass(frozen=True, eq=False)
class Target:
    """One output that is improved: states are aggregated at `tap`, and `head` makes the output `leaf` from it."""

    leaf: Node
    tap: Node
    grid: Grid | None
    head: Segment | None  # None: the tap is the output

    def finish(self, values: Tensor) -> Tensor:
        """Values of the tap, rows first -> the output."""
        if self.head is None:
            return values
        with torch.no_grad():
            return self.head(values.shape[0], (), [values])[0]


@dataclass(frozen=True, eq=False)
class Plan:
    """A captured model made ready for one task at one image size. `targets[0]` leads the search."""

    graph: Graph
    found: Subsampling
    engine: Engine
    targets: tuple[Target, ...]
    task: str
    space: str
    also: tuple[tuple[Node, Segment], ...]  # other outputs that follow from the first target's tap
    plain_macs: int

    def engine_for(self, states: Iterable[State]) -> Engine:
        """What runs looks in these states. The paper's search moves all of a map (`engine`); looks hold its edge."""
        return self._still if all(s.plain for s in states) else self._holding

    @cached_property
    def _still(self) -> Engine:
        return self.engine.still()

    @cached_property
    def _holding(self) -> Engine:
        return self.engine.holding()

    @property
    def reads(self) -> str:
        """What the output is taken for: nothing in a network says whether its numbers are scores of classes."""
        shape = self.found.trace.shapes[self.targets[0].leaf]
        return f"output ({', '.join(map(str, ('B', *shape[1:])))}) read as {self.meaning.reads(shape)}"

    @property
    def meaning(self) -> Task:
        return TASKS[self.task]

    @property
    def classes(self) -> int:
        """How many the output tells apart; one number is a yes or no, so two."""
        return max((2, *self.found.trace.shapes[self.targets[0].leaf][1:2]))

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
        moved = [
            sum(state.selections[layer - 1][a] * strides[layer - 1][a] for layer in sorted(path))
            for a, path in enumerate(paths)
        ]
        return Offset.of(moved, target.grid.spacing)

    def maps(self, values: Tensor, target: Target) -> Tensor:
        """Values of a tap -> (B, C, H, W), or (B, K) as they are merged where there is no grid."""
        if target.grid is not None:
            return to_map(values, target.grid)
        return self.meaning.encode(values, self.meaning.merges[0])

    def unmap(self, maps: Tensor, like: Tensor, target: Target) -> Tensor:
        if target.grid is None:
            out = self.meaning.decode(maps, self.meaning.merges[0])
            return out.reshape(len(out), *like.shape[1:]).to(like.dtype)
        return from_map(maps, like, target.grid).to(like.dtype)


def make_plan(
    graph: Graph,
    found: Subsampling,
    task: str,
    space: str | None,
    max_bytes: int | None,
    run_segment: Callable[[nn.Module], nn.Module] = as_it_is,
) -> Plan:
    """Where to aggregate, for this task; refuses clearly what cannot be aligned."""
    found.require_layers()
    leaves = [leaf for leaf in graph.leaf_nodes if leaf in graph.from_image]
    if task == "features":
        pairs = _feature_pairs(graph, found, leaves)
    elif not TASKS[task].maps:
        main = _vector_leaf(graph, found, leaves, TASKS[task])
        tap, grid = _feature(graph, found, main)
        if space == "features" and tap is None:
            raise OptionError(
                "space='features': this model's last map cannot be laid on a grid (class token, or several maps); "
                "use space='logits'"
            )
        if space == "logits" or tap is None:
            tap, grid = main, None
        pairs = [(main, tap, grid)]
    else:
        if space == "features":
            raise OptionError(
                f"space='features' is for classification; {task} aggregates the maps of its output (space='logits')"
            )
        pairs = _map_pairs(graph, found, leaves, TASKS[task])
    taps = list(dict.fromkeys(tap for _, tap, _ in pairs))
    given = {leaf for leaf, _, _ in pairs}
    others = [leaf for leaf in dict.fromkeys(leaves) if leaf not in given]
    first = pairs[0][1]
    after = [leaf for leaf in others if graph.image not in ancestors([leaf], until={first}) and leaf is not first]
    bound = UNBOUNDED if max_bytes is None else max_bytes
    engine = Engine(graph, found, taps, [leaf for leaf in others if leaf not in after], bound, run_segment)

    def head(tap: Node, leaf: Node) -> Segment | None:
        if tap is leaf:
            return None
        return engine.cutter.segment(found.level[leaf], [leaf], moved=False, start=[tap])

    targets = tuple(Target(leaf, tap, grid, head(tap, leaf)) for leaf, tap, grid in pairs)
    also = tuple((leaf, s) for leaf in after if (s := head(first, leaf)) is not None)
    heads = sum(t.head.macs for t in targets if t.head is not None) + sum(s.macs for _, s in also)
    plain = sum(s.macs for s in engine.as_trained) + heads
    return Plan(graph, found, engine, targets, task, space or ("features" if pairs[0][2] else "logits"), also, plain)


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
        f"{_shown(found.trace.shapes, leaves)}, and its last map cannot be laid on a grid. Give the part of it that "
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
                continue  # an auxiliary map without a grid stays as the plain network gives it
            if min(shapes[tap][-axes:]) == 1:
                raise CaptureError(
                    f"the logit map is {by(shapes[tap][-axes:])} before its upsampling at images of {by(graph.size)}: "
                    "a single row or column of cells has no place on the image. Use larger images, or pad them."
                )
            lost = f" ({'; '.join(found.unknown[:3])})" if found.unknown else ""
            raise CaptureError(
                f"the logit map {('B', *shapes[leaf][1:])} has no known place on the image{lost}: its states cannot be "
                "aligned. "
                "See the guide 'extending' for adding a rule for an op."
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
