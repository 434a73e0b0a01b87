"""The captured graph as an executor: states that agree on their first layers share everything up to there.

A graph is captured once for each image size. `execution="auto"`: it reads the live weights, and is captured again where
the model's structure changed (see `unstride.graph.freshness`). "frozen": copies of the weights and exact rewrites; a
changed model is an error until `refresh()` is called. "compile": frozen, with segments by `torch.compile`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from unstride.engine.compiled import compile_segment
from unstride.engine.engine import EngineRun, Request
from unstride.engine.packed import Packer, available
from unstride.engine.segments import unchanged
from unstride.errors import ModelChanged, ModelRaised, OptionError
from unstride.execution.padding import Crop, cropped, cropped_output, on_padded
from unstride.execution.record import ModelOutput, reshaped
from unstride.geometry.find import find_layers
from unstride.geometry.layers import Subsampling
from unstride.geometry.states import State, StateSpace
from unstride.graph.capture import Graph, capture
from unstride.graph.freshness import Freshness
from unstride.graph.rewrite import channels_last, frozen
from unstride.method.align import align_covered
from unstride.method.search import searched_layers
from unstride.method.split import Split, Target, split_model
from unstride.recipe.stage import Search, Stage
from unstride.tasks.tasks import Task

if TYPE_CHECKING:
    from unstride.execution.executors import Network

EXECUTION = ("auto", "frozen", "compile")
SIZES = 8  # captured sizes that are kept; the least recently used one goes first
Key = tuple[Any, ...]  # channels and size, dtype, device, layout


@dataclass(eq=False)
class Capture:
    """One captured graph and its subsampling layers; split for each task and space that is asked for."""

    graph: Graph
    found: Subsampling
    run_segment: Callable[[nn.Module], nn.Module] = unchanged
    splits: dict[tuple[str, str], Split] = field(default_factory=dict)

    def split(self, task: Task, space: str = "") -> Split:
        key = (task.name, space)
        if key not in self.splits:
            self.splits[key] = split_model(self.graph, self.found, task, space, self.run_segment)
        return self.splits[key]


class Captures(dict[Key, Capture]):
    """`captures.of(images)` -> Capture. Safe to use from several threads: a size is captured once."""

    def __init__(self, model: nn.Module, execution: str = "auto") -> None:
        super().__init__()
        self.model, self.execution = model, check_execution(execution)
        self.lock = threading.RLock()
        self._freshness: Freshness | None = None
        self._self_modified: frozenset[str] = frozenset()  # names of what the model itself changes when it runs
        self._refused: dict[Key, ModelRaised] = {}
        self._uses: dict[Key, int] = {}
        self._calls = count()

    def of(self, images: Tensor) -> Capture:
        """The capture for images of this size, dtype, device and layout. Call `check` first, once per batch."""
        key = (*images.shape[1:], images.dtype, images.device, _is_channels_last(images))
        found = self.get(key)
        if found is None:
            with self.lock:
                found = self.get(key) or self._make(key, images)
        self._uses[key] = next(self._calls)
        return found

    def check(self) -> None:
        """Forget the captures of a model that changed; a ModelChanged where they are frozen."""
        freshness = self._freshness
        changed = "" if freshness is None else freshness.change()
        if changed is None:
            return
        if changed and self.execution != "auto":
            raise ModelChanged(
                f"{changed} of the model was changed, and execution={self.execution!r} keeps copies of the weights. "
                "Call better.refresh() to take the model as it is now, or use execution='auto', which reads live ones."
            )
        with self.lock:
            if self._freshness is freshness:  # no other thread was here meanwhile
                self._forget()
                self._freshness = Freshness(self.model, numbers=self.execution != "auto", besides=self._self_modified)

    def refresh(self) -> None:
        """Take the model as it is now: everything is captured again when it is next used."""
        with self.lock:
            self._forget()
            self._freshness = None

    def _forget(self) -> None:
        self.clear()
        self._refused.clear()
        self._uses.clear()
        self._self_modified = frozenset()

    def _make(self, key: Key, images: Tensor) -> Capture:
        if key in self._refused:
            raise self._refused[key]
        try:
            off = torch.autocast(images.device.type, enabled=False)  # the graph is the model's; a run may be cast
            with torch.inference_mode(False), torch.no_grad(), off:
                made = self._capture(images[:1])
        except ModelRaised as error:
            self._refused[key] = error
            raise
        self._self_modified |= made.graph.self_modified
        if self._freshness is not None:
            self._freshness.besides = self._self_modified
            self._freshness.count(made.graph.decided)
        self[key] = made
        while len(self) > SIZES:
            del self[min((k for k in self if k != key), key=lambda k: self._uses.get(k, -1))]
        return made

    def _capture(self, example: Tensor) -> Capture:
        graph = capture(self.model, example)
        if self.execution == "auto":
            return Capture(graph, find_layers(graph))
        graph = frozen(graph)
        found = find_layers(graph)
        rewrite: Callable[[nn.Module], nn.Module] = compile_segment if self.execution == "compile" else unchanged
        if found.mostly_convolutions:
            graph = channels_last(graph)
            if self.execution == "frozen" and available(graph.device, graph.dtype):
                rewrite = Packer()
        return Capture(graph, found, rewrite)

    def __reduce__(self) -> Any:
        """A copy captures the model anew: graphs can neither be copied nor sent elsewhere."""
        return Captures, (self.model, self.execution)


def _is_channels_last(images: Tensor) -> bool:
    """Models may ask for it, so that such images have a capture of their own."""
    is_last = images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return is_last and not images.is_contiguous()


def check_execution(execution: Any) -> str:
    """One of the modes, or an OptionError."""
    if not isinstance(execution, str) or execution not in EXECUTION:
        raise OptionError(f"execution: got {execution!r}, expected one of {', '.join(map(repr, EXECUTION))}.")
    return execution


@dataclass(eq=False)
class GraphExecutor:
    """Runs the captured graph: states that agree on their first layers share everything up to there."""

    network: Network
    task: Task
    state_space: str = ""
    pinned: bool = False

    def prepare(self, images: Tensor) -> tuple[Split, Tensor, Crop]:
        """The split for images of this size, and the images as it takes them."""
        network, prepared, crop = self.network, images, None
        try:
            capture = network.captures.of(images)
        except ModelRaised as error:
            capture, prepared, crop = on_padded(network.model, images, self.task.pads, network.captures.of, error)
        return capture.split(self.task, self.state_space), prepared, crop

    def space(self, images: Tensor) -> StateSpace:
        return self.prepare(images)[0].found.space

    def start(self, images: Tensor) -> GraphPasses:
        split, prepared, crop = self.prepare(images)
        return GraphPasses(split, (split.pinned if self.pinned else split.engine).start(prepared), images, crop)

    def rows_at_once(self, stage: Stage, images: Tensor) -> int:
        split = self.prepare(images)[0]
        engine, space = split.engine, split.found.space
        if isinstance(stage.states, Search):
            layers = searched_layers(stage.states.layers, space, self.task.maps)
            return engine.images_at_once(layers, stage.states.budget, len(images))
        return engine.images_at_once(range(1, engine.depth + 1), len(stage.listed(space)))

    def stride(self, images: Tensor) -> tuple[int, ...]:
        return self.prepare(images)[0].total_stride

    def forward_macs(self, images: Tensor) -> int:
        return self.prepare(images)[0].macs


@dataclass(eq=False)
class GraphPasses:
    """Images under way through the engine. `places`: which of the engine's images these are."""

    split: Split
    engine_run: EngineRun
    images: Tensor
    crop: Crop
    places: Sequence[int] | None = None
    levels: Sequence[int] | None = None  # from which later requests continue; all by default
    counted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counted = self.counted or [0] * len(self.engine_run.macs)

    @property
    def space(self) -> StateSpace:
        return self.split.found.space

    @property
    def padded(self) -> bool:
        return self.crop is not None

    def keep_for(self, levels: Sequence[int] | None) -> None:
        self.levels = levels
        if levels and self.places is None:
            self.engine_run.keep(levels)

    @property
    def base(self) -> dict[Node, Tensor]:
        return self.engine_run.plain

    def subset(self, places: Sequence[int]) -> GraphPasses:
        """Some of these images, on the same run."""
        return GraphPasses(
            self.split, self.engine_run, self.images[list(places)], self.crop, places, None, self.counted
        )

    def run(self, requests: Sequence[Request]) -> list[Tensor]:
        """The base state is computed already; the others are computed together."""
        places = self.places
        at = [(i if places is None else places[i], state) for i, state in requests]
        base = [i for i, state in at if state.plain]
        moved = [(i, state) for i, state in at if not state.plain]
        if not moved:
            return [self._base(t.tap, base) for t in self.split.targets]
        values = dict(zip(self.split.engine.taps, self.engine_run.add(moved, self.levels), strict=True))
        if not base:
            return [values[t.tap] for t in self.split.targets]
        first = all(state.plain for _, state in at[: len(base)])  # a list of states begins with the base state
        order = None if first else _places([state.plain for _, state in at])
        both = [torch.cat([self._base(t.tap, base), values[t.tap]]) for t in self.split.targets]
        return both if order is None else [value[order] for value in both]

    def _base(self, tap: Node, places: list[int]) -> Tensor:
        value = self.base[tap]
        return value if places == list(range(len(self.engine_run.macs))) else value[places]

    def output(self, state: State, value: Tensor, target: int = 0) -> Tensor:
        split, t = self.split, self.split.targets[target]
        offset = split.offset(state, t) if split.task.maps else None
        features = split.task.name == "features"
        if offset is not None and not offset.is_zero:
            moved = align_covered(split.maps(value, t).float(), offset)
            value = moved if features else split.unmap(moved, value, t)
        elif features:
            value = split.maps(value, t)
        return self.cropped(value if features else t.finish(value))

    def finish(self, maps: Tensor, like: Tensor, target: Target) -> Tensor:
        """An aggregated map -> the output, without padding."""
        return self.cropped(target.finish(self.split.unmap(maps, like, target)))

    def cropped(self, output: Tensor) -> Tensor:
        """An output without padding; vectors have no place on the image."""
        return cropped(output, self.crop) if self.split.task.maps else output

    def macs(self, states: Sequence[int]) -> list[int]:
        out = []
        places = self.places if self.places is not None else range(len(self.engine_run.macs))
        for place, outputs in zip(places, states, strict=True):
            out.append(self.engine_run.macs[place] - self.counted[place] + outputs * self.split.head_macs)
            self.counted[place] = self.engine_run.macs[place]
        return out

    def state_macs(self, states: Sequence[State]) -> list[int]:
        engine, head = self.engine_run.engine, self.split.head_macs
        totals = [engine.trie_macs(states[: k + 1]) for k in range(len(states))]
        return [now - before + head for before, now in zip([0, *totals], totals, strict=False)]

    def result(self) -> ModelOutput:
        split, graph = self.split, self.split.graph
        count = len(self.images)
        leaves: list[Any] = list(graph.leaves)
        values: dict[Node, Tensor] = {n: v for n, v in self.base.items() if n in graph.leaf_nodes}
        for target in split.targets:
            values[target.leaf] = target.finish(self.base[target.tap])
        for leaf, segment in split.also:
            values[leaf] = segment.module(count, (), self.base[split.targets[0].tap])[0]
        if graph.constant_leaves:
            values |= graph.constant_outputs(count)
        leaves = [values[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves]
        if self.crop is not None:
            leaves = [cropped_output(leaf, self.crop) for leaf in leaves]
        return ModelOutput(leaves, split.returned, graph.out_spec, count, self._as_leaf)

    def _as_leaf(self, k: int, value: Tensor, leaf: Tensor) -> Tensor:
        if self.split.task.name == "features":  # combined as maps, whatever their layout
            return self.split.unmap(value, leaf, self.split.targets[k])
        return reshaped(k, value, leaf)

    @cached_property
    def also(self) -> tuple[int, ...]:
        """Which output leaves follow from the main target's map."""
        return tuple(self.split.graph.index(leaf) for leaf, _ in self.split.also)


def _places(plain: Sequence[bool]) -> list[int]:
    """Where each request's value is, when those of the base state come first."""
    base, moved = iter(range(sum(plain))), iter(range(sum(plain), len(plain)))
    return [next(base) if own else next(moved) for own in plain]
