"""What runs forward passes: the user's model as it is, or its captured graph with shared prefixes.

executor.start(images)            the base state of some images in one view -> Passes
passes.run([(image, state)])      values of further states, each prefix computed once
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from unstride.engine.engine import Request
from unstride.errors import CaptureError, InputError, LessAtOnce, ModelRaised, is_out_of_memory
from unstride.execution.graph_executor import Captures
from unstride.execution.padding import Crop, cropped_output, on_padded, sized
from unstride.execution.record import ModelOutput, joined_outputs, reshaped
from unstride.execution.tiles import Tiling, Window
from unstride.geometry.states import State, StateSpace
from unstride.graph.capture import calling, wanted_axes
from unstride.graph.evaluation import evaluating
from unstride.recipe.stage import Stage
from unstride.recipe.view import View
from unstride.tasks.tasks import Task, meant_outputs
from unstride.views.images import Preprocess

NO_STATES = StateSpace((), ())


@dataclass(eq=False)
class Network:
    """One of the networks of a recipe, with what was captured of it."""

    name: str
    model: nn.Module
    preprocess: Preprocess | None = None
    execution: str = "auto"
    classes: tuple[int, ...] = ()  # of each class of the base network, its index here; () if they are the same
    captures: Captures = field(init=False)
    counted: dict[tuple[Any, ...], int] = field(default_factory=dict)  # MACs of a forward pass, by input
    timed: dict[tuple[Any, ...], float] = field(default_factory=dict)  # its seconds, where MACs cannot be counted
    most_rows: int | None = None  # at once, once memory ran out
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.captures = Captures(self.model, self.execution)

    def base_classes(self, output: Tensor) -> Tensor:
        """An output (B, K, ...) in the order of the base network's classes."""
        if not self.classes:
            return output
        if max(self.classes) >= output.shape[1]:
            raise InputError(
                f"{self.name}: its outputs have {output.shape[1]} classes, and the class map names class "
                f"{max(self.classes)}. Load the model with the names of its own classes."
            )
        return output.index_select(1, torch.tensor(self.classes, device=output.device))

    @cached_property
    def counts_macs(self) -> bool:
        """False for quantised ops, whose work torch does not count."""
        return not any("quantized" in type(m).__module__ for m in self.model.modules())

    @cached_property
    def axes(self) -> int:
        """Spatial axes of the input: 1 for signals, 2 for images, 3 for volumes."""
        return wanted_axes(self.model)

    def forward(self, images: Tensor, model: nn.Module | None = None) -> Any:
        """What the model returns in evaluation mode, whatever mode its modules are in.

        Where memory runs out, half as many images run at once, from then on.

        Args:
            model: the model in evaluation mode, if the caller has it already.
        """
        model = evaluating(self.model) if model is None else model
        while True:
            rows = min(len(images), self.most_rows or len(images))
            try:
                with torch.no_grad(), calling(images):
                    outputs = [model(some) for some in images.split(rows)]
                return outputs[0] if len(outputs) == 1 else joined_outputs(outputs, rows)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or rows == 1:
                    raise
            if self.most_rows is None:  # said once
                what = f"{self.name}: out of memory on {images.device} with {rows} images at once; goes on with fewer"
                warnings.warn(LessAtOnce(what), stacklevel=2)
            self.most_rows = max(1, rows // 2)

    def forward_seconds(self, images: Tensor) -> float:
        """Time of one forward pass of one image of this size: the least of three, after one that does not count."""
        key = (*images.shape[1:], images.dtype, images.device)
        if key not in self.timed:
            with self.lock:
                self.timed[key] = min([self._seconds(images[:1]) for _ in range(4)][1:])
        return self.timed[key]

    def _seconds(self, images: Tensor) -> float:
        start = time.perf_counter()
        self.forward(images)
        if images.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    def forward_macs(self, images: Tensor) -> int:
        """Multiply-accumulates of one forward pass of one image of this size; 1 where they cannot be counted."""
        key = (*images.shape[1:], images.dtype, images.device)
        if key not in self.counted:
            # what torch compiles while it counts (torch.cond does) could not run afterwards
            eager = torch.compiler.set_stance("force_eager")
            with self.lock, eager, FlopCounterMode(display=False) as counter:
                self.forward(images[:1])
            self.counted[key] = max(1, counter.get_total_flops() // 2) if self.counts_macs else 1
        return self.counted[key]

    def __reduce__(self) -> Any:
        """A copy captures its model anew: graphs can neither be copied nor sent elsewhere."""
        return Network, (self.name, self.model, self.preprocess, self.execution, self.classes)


@dataclass(frozen=True, eq=False)
class Part:
    """Some images in one view, or the windows of one image.

    Args:
        rows: which images of the batch.
        passes: begun by an earlier stage; None: to be started.
        windows: of one image, each a row of `images`.
        where: (1, 1, H, W), the share of each output pixel that these windows decide; None: everything.
    """

    rows: list[int]
    view: View
    images: Tensor
    passes: Passes | None = None
    tiling: Tiling | None = None
    windows: tuple[Window, ...] = ()
    where: Tensor | None = None


class Passes(Protocol):
    """Some images in one view, under way through one network."""

    images: Tensor

    @property
    def space(self) -> StateSpace: ...
    @property
    def padded(self) -> bool:
        """Whether the model takes these images only padded to a multiple of 32."""
        ...

    def keep_for(self, levels: Sequence[int] | None) -> None:
        """Levels from which later requests continue; None: all."""
        ...

    def run(self, requests: Sequence[Request]) -> list[Tensor]:
        """Values of (image, state) requests, in order: a tensor for each target."""
        ...

    def output(self, state: State, value: Tensor, target: int = 0) -> Tensor:
        """A target's value in one state -> the model's output, aligned with the base state, without padding."""
        ...

    def macs(self, states: Sequence[int]) -> list[int]:
        """MACs of each image since the last call, in which so many outputs were made of it."""
        ...

    def state_macs(self, states: Sequence[State]) -> list[int]:
        """MACs that each of these states of one image adds; shared prefixes count once."""
        ...

    def result(self) -> ModelOutput:
        """What the model returns for these images in the base state."""
        ...


class Executor(Protocol):
    """Starts passes. `space` are the states that it can run: a single one where the model is called directly."""

    @property
    def network(self) -> Network: ...
    @property
    def task(self) -> Task: ...

    def space(self, images: Tensor) -> StateSpace: ...
    def start(self, images: Tensor) -> Passes: ...
    def rows_at_once(self, stage: Stage, images: Tensor) -> int: ...
    def stride(self, images: Tensor) -> tuple[int, ...] | None:
        """Pixels after which the network repeats itself; None if that is unknown."""
        ...

    def forward_macs(self, images: Tensor) -> int:
        """MACs of one forward pass of one image."""
        ...


# ---------------------------------------------------------------------------------------- the model, called directly


@dataclass(eq=False)
class ModelExecutor:
    """Calls the user's model. Captures nothing. For one batch: the mode of the model's modules is looked at once."""

    network: Network
    task: Task

    @cached_property
    def model(self) -> nn.Module:
        return evaluating(self.network.model)

    def forward(self, images: Tensor) -> Any:
        return self.network.forward(images, self.model)

    def space(self, images: Tensor) -> StateSpace:
        return NO_STATES

    def start(self, images: Tensor) -> ModelPasses:
        return ModelPasses(self, images)

    def rows_at_once(self, stage: Stage, images: Tensor) -> int:
        return len(images)

    def stride(self, images: Tensor) -> None:
        return None

    def forward_macs(self, images: Tensor) -> int:
        def count(x: Tensor) -> int:
            return self.network.forward_macs(x)

        return sized(self.network.model, images, self.task.pads, count)[0]


class ModelPasses:
    """One forward pass of the user's model."""

    def __init__(self, executor: ModelExecutor, images: Tensor) -> None:
        self.executor, self.images, self.space = executor, images, NO_STATES
        network, task = executor.network, executor.task
        self.prepared: Tensor = images
        self.crop: Crop = None
        try:
            output = executor.forward(images)
        except ModelRaised as error:
            again = on_padded(network.model, images, task.pads, executor.forward, error)
            output, self.prepared, self.crop = again
        leaves, spec = pytree.tree_flatten(output)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        meant = meant_outputs(task, [leaves[i].shape for i in tensors], images.ndim - 2)
        self.targets = tuple(tensors[i] for i in meant)
        self.leaves = leaves if self.crop is None else [cropped_output(leaf, self.crop) for leaf in leaves]
        self.spec, self._counted, self.padded = spec, False, self.crop is not None

    def keep_for(self, levels: Sequence[int] | None) -> None:
        """Nothing is kept: there is only one state."""

    def run(self, requests: Sequence[Request]) -> list[Tensor]:
        rows = [i for i, _ in requests]
        whole = rows == list(range(len(self.images)))
        for target in self.targets:
            if not self.leaves[target].ndim or len(self.leaves[target]) != len(self.images):
                raise CaptureError(
                    f"the model returns {tuple(self.leaves[target].shape)} for {len(self.images)} images; unstride "
                    "needs a row for each image"
                )
        return [self.leaves[t] if whole else self.leaves[t][rows] for t in self.targets]

    def output(self, state: State, value: Tensor, target: int = 0) -> Tensor:
        return value

    def macs(self, states: Sequence[int]) -> list[int]:
        """Of the forward pass, once."""
        done, self._counted = self._counted, True
        return [0 if done else self.executor.network.forward_macs(self.prepared)] * len(self.images)

    def state_macs(self, states: Sequence[State]) -> list[int]:
        return [self.executor.network.forward_macs(self.prepared)] * len(states)

    def result(self) -> ModelOutput:
        return ModelOutput(self.leaves, self.targets, self.spec, len(self.images), reshaped)
