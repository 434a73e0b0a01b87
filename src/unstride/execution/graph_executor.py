"""The captured graph as an executor: states that agree on their first layers share everything up to there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.engine.engine import Request, Run
from unstride.execution.captures import Crop, sized
from unstride.execution.executors import ModelOutput, Network, cropped, cropped_output, reshaped
from unstride.execution.selectors import searched_layers
from unstride.geometry.states import State, StateSpace
from unstride.method.align import align_covered
from unstride.method.split import Split, Target
from unstride.recipe.stage import Search, Stage
from unstride.tasks.tasks import Task


@dataclass(eq=False)
class GraphExecutor:
    """Runs the captured graph: states that agree on their first layers share everything up to there."""

    network: Network
    task: Task
    state_space: str = ""
    pinned: bool = False

    def prepare(self, images: Tensor) -> tuple[Split, Tensor, Crop]:
        """The split for images of this size, and the images as it takes them."""
        captures = self.network.captures
        capture, prepared, crop = sized(self.network.model, images, self.task.pads, captures.of)
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
            layers = searched_layers(stage.states, space, self.task.maps)
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
    engine_run: Run
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
        values |= graph.constant_outputs(count)
        leaves = [values[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves]
        returned = split.targets[0].leaf in graph.leaf_nodes  # features may be inside the model
        targets = tuple(graph.index(t.leaf) for t in split.targets) if returned else ()
        leaves = [cropped_output(leaf, self.crop) for leaf in leaves]
        return ModelOutput(leaves, targets, graph.rebuild, count, self._as_leaf)

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
