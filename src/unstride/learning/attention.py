"""The paper's learned aggregation on a network and labelled images (sections 4.1 and 5.1).

The network is frozen, so the aligned maps of its states are computed once, image by image, where they fit; otherwise
anew in every epoch. Every epoch leaves a checkpoint in the same cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.errors import InputError, NothingToSubsample
from unstride.execution.aggregation import together
from unstride.execution.executors import Network
from unstride.execution.graph_executor import GraphExecutor, GraphPasses
from unstride.geometry.states import State, StateSpace
from unstride.learning.images import LearningImages, batches_of
from unstride.method.aggregate import aligned
from unstride.method.search import default_layers
from unstride.method.training import AttentionTraining, Schedule, TrainingResult
from unstride.pipeline import Pipeline
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Search, Stage
from unstride.recipe.view import PLAIN
from unstride.storage.cache import Cache, RunKey, tell_reused
from unstride.storage.distributed import World
from unstride.storage.progress import progress as show_progress
from unstride.storage.provenance import versions
from unstride.tasks.tasks import TASKS, two_class
from unstride.views.source import as_source, autocast

MAP_BYTES = 4 << 30  # maps that are kept; above, they are computed anew in every epoch
MOST_STATES = 1024  # of a search space whose maps are kept
WRITTEN = 32  # images whose maps are written at once: no more work is lost to a kill


class FrozenNetwork:
    """A network at one image size: maps of states, aligned as a stage says, and the head behind them."""

    def __init__(self, pipeline: Pipeline, recipe: Recipe, example: LearningImages) -> None:
        base = pipeline.better.networks["base"]
        # Live weights: gradients pass through the head, which rewritten graphs do not allow.
        network = Network(base.name, base.model, base.preprocess, "auto")
        self.recipe, self.pipeline = recipe, pipeline
        self.stage, self.search = _searched(recipe)
        self.executor = GraphExecutor(network, TASKS[recipe.task], self.stage.state_space, self.stage.pinned)
        self.example = example.source([0]).render(PLAIN)
        with self.autocast():
            self.split = self.executor.prepare(self.example)[0]
        self.space: StateSpace = self.split.found.space
        self.layers = self.search.layers or default_layers(self.space, maps=False)
        self.states = list(self.space.states(self.layers)) if self._count() <= MOST_STATES else []
        if self._count() < 2:
            raise NothingToSubsample("the layers that are searched have one state, so there is nothing to aggregate")

    def _count(self) -> int:
        count = 1
        for layer in self.layers:
            count *= len(self.space.selections(layer))
        return count

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(as_source(self.example), self.recipe.precision)

    def start(self, images: Tensor) -> GraphPasses:
        if images.shape[1:] != self.example.shape[1:]:
            got, expected = tuple(images.shape[1:]), tuple(self.example.shape[1:])
            raise InputError(f"images: got {got} after {expected}, expected one size. Use a preprocessing with a crop.")
        passes = self.executor.start(images)
        passes.keep_for([layer - 1 for layer in self.layers])
        return passes

    @torch.no_grad()
    def maps(self, passes: GraphPasses, requests: Sequence[tuple[int, State]]) -> Tensor:
        """The aligned maps (R, C, ...) of (row, state) requests, as the attention reads them (Eq. 9)."""
        target = self.split.targets[0]
        with self.autocast():
            maps = self.split.maps(passes.run(requests)[0], target).float()
        out = torch.empty_like(maps)
        for state, _, rows in together(requests):
            offset = None if self.stage.align == "none" else self.split.offset(state, target)
            if offset is not None and self.stage.align == "nearest":
                offset = offset.nearest()
            out[rows] = aligned(maps[rows], offset, self.stage.at_border)
        return out

    def logits(self, maps: Tensor) -> Tensor:
        """Aggregated maps (N, C, ...) -> (N, K) through the network's own head, with gradients for the maps."""
        target, graph = self.split.targets[0], self.split.graph
        shape = self.split.found.trace.shapes[target.tap]
        like = torch.empty((len(maps), *shape[1:]), dtype=graph.dtype, device="meta")
        values = self.split.unmap(maps, like, target)
        return two_class((values if target.head is None else target.head.module(len(maps), (), values)[0]).float())

    def settings(self) -> dict[str, Any]:
        """What the maps of an image depend on beside the image."""
        key = self.pipeline.key(self.example)
        stage = [self.stage.align, self.stage.at_border, self.stage.state_space, self.stage.pinned, self.layers]
        return {
            "network": key["networks"],
            "device": key["device"],
            "maps": [*stage, self.recipe.precision],
            "versions": versions(),
        }


def _searched(recipe: Recipe) -> tuple[Stage, Search]:
    stage = recipe.search
    assert stage is not None and isinstance(stage.states, Search)  # checked by `fit`
    return stage, stage.states


@dataclass(frozen=True, eq=False)
class StoredBatch:
    """Images whose maps of all states are at hand."""

    network: FrozenNetwork
    labels: Tensor
    places: dict[State, int]
    stored: list[Tensor]  # of each image, (S, C, ...)

    def maps(self, requests: Sequence[tuple[int, State]]) -> Tensor:
        rows = [self.stored[i][self.places[state]] for i, state in requests]
        return torch.stack(rows).to(self.network.example.device)

    def logits(self, maps: Tensor) -> Tensor:
        return self.network.logits(maps)


@dataclass(frozen=True, eq=False)
class LiveBatch:
    """Images whose maps are computed when a search asks for them, in chunks that fit in memory."""

    network: FrozenNetwork
    labels: Tensor
    chunks: list[tuple[range, GraphPasses]]

    def maps(self, requests: Sequence[tuple[int, State]]) -> Tensor:
        out: list[Tensor | None] = [None] * len(requests)
        for rows, passes in self.chunks:
            places = [k for k, (i, _) in enumerate(requests) if i in rows]
            if places:
                own = self.network.maps(passes, [(requests[k][0] - rows.start, requests[k][1]) for k in places])
                for place, value in zip(places, own, strict=True):
                    out[place] = value
        return torch.stack([value for value in out if value is not None])

    def logits(self, maps: Tensor) -> Tensor:
        return self.network.logits(maps)


@dataclass(eq=False)
class NetworkImages:
    """Labelled images in a frozen network, as `AttentionTraining` takes them. Without a store, maps are not kept."""

    network: FrozenNetwork
    images: LearningImages
    store: Cache | None = None
    rows: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {key: row for row, key in enumerate(self.images.keys)}
        self.places = {state: k for k, state in enumerate(self.network.states)}

    @property
    def keys(self) -> Sequence[str]:
        return self.images.keys

    @property
    def space(self) -> StateSpace:
        return self.network.space

    @property
    def layers(self) -> tuple[int, ...]:
        return self.network.layers

    @property
    def channels(self) -> int:
        return self.network.split.channels

    @property
    def device(self) -> torch.device:
        return self.network.example.device

    def batch(self, keys: Sequence[str]) -> StoredBatch | LiveBatch:
        rows = [self.rows[key] for key in keys]
        labels = torch.tensor([self.images.labels[row] for row in rows])
        if self.store is not None:
            values = [self.store.get(key) for key in keys]
            stored = [value["maps"] for value in values if value is not None]
            return StoredBatch(self.network, labels, self.places, stored)
        pixels = self.images.source(rows).render(PLAIN)
        size = self.network.executor.rows_at_once(self.network.stage, pixels)
        chunks = [(part, self.network.start(pixels[part.start : part.stop])) for part in batches_of(len(pixels), size)]
        return LiveBatch(self.network, labels, chunks)


def train_attention(
    pipeline: Pipeline,
    recipe: Recipe,
    train: LearningImages,
    validation: LearningImages,
    schedule: Schedule,
    *,
    seed: int,
    heads: int,
    folder: Path | None,
    us: World,
    show: bool,
) -> TrainingResult:
    """Train the attention of a recipe with a Search. The leading process trains; all compute maps."""
    network = FrozenNetwork(pipeline, recipe, train)
    settings = network.settings()
    store = _kept_maps(network, [train, validation], settings, folder, us, show)
    own, held = NetworkImages(network, train, store), NetworkImages(network, validation, store)
    training = AttentionTraining(own, held, schedule, seed, heads)
    keys = [sorted(images.keys) for images in (train, validation)]
    run = {**settings, "schedule": asdict(schedule), "seed": seed, "heads": heads, "images": keys}
    checkpoints = Cache.open(folder, RunKey("attention", run))
    _continue(training, checkpoints)
    if us.leads:
        tell_reused(max(0, len(training.epochs) - 1), schedule.epochs, checkpoints.folder, "epochs")
        _run(training, checkpoints, show)
    us.wait()
    if not us.leads:
        checkpoints.reload()
        _continue(training, checkpoints)
    return training.result()


def _run(training: AttentionTraining, checkpoints: Cache, show: bool) -> None:
    with show_progress("epochs", training.schedule.epochs + 1, show) as advance:
        advance(len(training.epochs), "")

        def after(epoch: Any) -> None:
            tensors, meta = training.checkpoint()
            checkpoints.put({_item(epoch.epoch): {**tensors, "meta": meta}})
            advance(1, f"validation accuracy {epoch.accuracy:.2%}")

        training.run(after)


def _continue(training: AttentionTraining, checkpoints: Cache) -> None:
    """Take over the last epoch that an earlier run, or another process, has finished."""
    finished = [n for n in range(training.schedule.epochs + 1) if _item(n) in checkpoints]
    values = checkpoints.get(_item(finished[-1])) if finished else None
    if values is not None:
        meta = values.pop("meta")
        training.restore(values, meta)


def _item(epoch: int) -> str:
    return f"epoch {epoch}"


def _kept_maps(
    network: FrozenNetwork,
    parts: Sequence[LearningImages],
    settings: dict[str, Any],
    folder: Path | None,
    us: World,
    show: bool,
) -> Cache | None:
    """The maps of all states of all images, each image by itself, so that neither batch, order nor process matters.

    None where they need more than `MAP_BYTES`.
    """
    todo = [(images, row) for images in parts for row in range(len(images))]
    if not network.states or len(todo) * len(network.states) * _map_bytes(network) > MAP_BYTES:
        return None
    store = Cache.open(folder, RunKey("maps", settings))
    earlier = sum(images.keys[row] in store for images, row in todo)
    if us.leads:
        tell_reused(earlier, len(todo), store.folder)
    places = {images.keys[row]: (images, row) for images, row in todo}
    fresh = us.share([key for key in places if key not in store])  # one list, whatever others have written meanwhile
    own = fresh[us.rank :: us.size]
    with show_progress("maps of images", len(own), show and us.leads) as advance:
        for part in batches_of(len(own), WRITTEN):
            values = {}
            for key in own[part.start : part.stop]:
                values[key] = {"maps": _all_maps(network, *places[key])}
                advance(1, "")
            store.put(values)
    us.wait()
    store.reload()
    us.wait()
    return store


def _map_bytes(network: FrozenNetwork) -> int:
    """Of one state of one image, in float32."""
    target = network.split.targets[0]
    shape = network.split.found.trace.shapes[target.tap]
    return 4 * network.split.maps(torch.empty((1, *shape[1:]), device="meta"), target)[0].numel()


def _all_maps(network: FrozenNetwork, images: LearningImages, row: int) -> Tensor:
    passes = network.start(images.source([row]).render(PLAIN))
    maps = network.maps(passes, [(0, state) for state in network.states])
    if not bool(maps.isfinite().all()):
        raise InputError(
            f"{images.part} images, {images.names[row]}: the network's maps are not finite, so nothing can be learned "
            "from this image. Half precision may have overflowed: use float32, or leave the image out."
        )
    return maps.cpu()
