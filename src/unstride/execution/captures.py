"""A model's captured graphs, one for each image size, and how they are split for a task.

`execution="auto"`: the graph reads the live weights, and is captured again where the model's structure changed (see
`unstride.graph.freshness`). "frozen": copies of the weights and exact rewrites; a changed model is an error until
`refresh()` is called. "compile": frozen, with segments by `torch.compile`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.engine.compiled import compile_segment
from unstride.engine.packed import Packer, available
from unstride.engine.segments import unchanged
from unstride.errors import InputError, ModelChanged, ModelRaised, OptionError
from unstride.geometry.find import find_layers
from unstride.geometry.grids import by
from unstride.geometry.layers import Subsampling
from unstride.graph.capture import SHAPES, Graph, capture, wanted_axes
from unstride.graph.freshness import Freshness
from unstride.graph.rewrite import channels_last, frozen
from unstride.method.split import Split, split_model
from unstride.tasks.tasks import Task

MULTIPLE = 32  # what an image is padded to where the model takes only such sizes
EXECUTION = ("auto", "frozen", "compile")
SIZES = 8  # captured sizes that are kept; the least recently used one goes first
Key = tuple[Any, ...]  # channels and size, dtype, device
Crop = tuple[float, ...] | None  # the share of each axis of a padded image that is the image's own
T = TypeVar("T")


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
        """The capture for images of this size, dtype and device. Call `check` first, once per batch."""
        key = (*images.shape[1:], images.dtype, images.device)
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


def check_execution(execution: Any) -> str:
    """One of the modes, or an OptionError."""
    if not isinstance(execution, str) or execution not in EXECUTION:
        raise OptionError(f"execution: got {execution!r}, expected one of {', '.join(map(repr, EXECUTION))}.")
    return execution


def sized(model: nn.Module, images: Tensor, pads: bool, call: Callable[[Tensor], T]) -> tuple[T, Tensor, Crop]:
    """`call(images)`; where the output is a map and the model raises, on images padded to a multiple of 32."""
    try:
        return call(images), images, None
    except ModelRaised as error:
        return on_padded(model, images, pads, call, error)


def on_padded(
    model: nn.Module, images: Tensor, pads: bool, call: Callable[[Tensor], T], error: ModelRaised
) -> tuple[T, Tensor, Crop]:
    """`call` on padded images, after it raised `error` on the images themselves."""
    axes = wanted_axes(model)
    if images.ndim != 2 + axes:
        raise InputError(
            f"images: got shape {tuple(images.shape)}, expected {SHAPES[axes]} by the model's first convolution "
            f"({error})"
        ) from error
    more, crop = padded(images) if pads else (images, None)
    if crop is None:
        raise error
    try:
        return call(more), more, crop
    except ModelRaised:
        raise InputError(
            f"the model does not take images of {by(images.shape[2:])} ({error}); padding to "
            f"{by(more.shape[2:])} did not help. Resize or pad them to a size that the model accepts."
        ) from error


def padded(images: Tensor) -> tuple[Tensor, Crop]:
    """Images padded to a multiple of 32, and the share of each axis that is the image's own; None if that is all."""
    size = images.shape[2:]
    more = [-n % MULTIPLE for n in size]
    if not any(more):
        return images, None
    sides = [side for k in reversed(more) for side in (0, k)]
    filled = F.pad(images, sides, mode="replicate" if min(size) > 1 else "constant")
    return filled, tuple(n / (n + k) for n, k in zip(size, more, strict=True))
