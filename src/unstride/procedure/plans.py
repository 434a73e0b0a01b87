"""A model's plans: captured and analysed once for every image size, forgotten when the model is changed.

Law: a changed model answers as it is now. What a plan was made from (weights folded and packed, attributes and hooks
traced) is compared with the model at every use, see `unstride.graph.snapshot`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.engine.bounds import mark_tame
from unstride.engine.compiled import compile_segment
from unstride.engine.fused import Fuser
from unstride.engine.packing import available
from unstride.engine.segments import as_it_is
from unstride.errors import InputError, ModelChanged, ModelRaised, OptionError
from unstride.geometry.find import find_layers
from unstride.geometry.grids import by
from unstride.graph.capture import SHAPES, calling, capture, check_images, wanted_axes
from unstride.graph.optimise import channels_last, optimise
from unstride.graph.snapshot import Snapshot
from unstride.graph.twin import evaluating
from unstride.procedure.meaning import TASKS
from unstride.procedure.prediction import cropped_output
from unstride.procedure.tasks import Plan, make_plan

MULTIPLE = 32  # what an image is padded to where the model takes only such sizes
Key = tuple[Any, ...]  # channels and size, dtype, device
Crop = tuple[float, ...] | None
Setup = tuple[str, str | None, int | None, bool | str]  # task, space, max_bytes, optimise: what a plan depends on
T = TypeVar("T")
OPTIMISE = (True, False, "compile")
_settled: ContextVar[tuple["Plans", ...]] = ContextVar("settled", default=())  # whose models were said to stay


class Plans(dict[Key, Plan]):
    """`plans.fitted(images)` -> images, plan, crop. Safe to use from several threads: a size is captured once."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__()
        self.model, self.setup = model, setup
        self.lock = threading.RLock()
        self._seen: Snapshot | None = None
        self._own: frozenset[str] = frozenset()  # names of what the model itself changes when it runs
        self._refused: dict[Key, ModelRaised] = {}

    def of(self, images: Tensor, fresh: bool = True) -> Plan:
        """The plan for images of this size, dtype and device; `fresh`: of the model as it is now."""
        check_images(images, axes=wanted_axes(self.model))
        key = (*images.shape[1:], images.dtype, images.device)
        if fresh:
            self._refresh()
        plan = self.get(key)
        if plan is None:
            with self.lock:
                plan = self.get(key) or self._make(key, images)
        return plan

    def fitted(self, images: Tensor, fresh: bool = True) -> tuple[Tensor, Plan, Crop]:
        """Images and their plan; where the model does not take this size, padded, with the share that is theirs."""
        plan, fitted, crop = self._sized(images, partial(self.of, fresh=fresh))
        return fitted, plan, crop

    def once(self) -> Callable[[Tensor], tuple[Tensor, Plan, Crop]]:
        """`fitted` for one call with many looks: whether the model was changed is asked now, and not for each look."""
        self._refresh()
        return partial(self.fitted, fresh=False)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, the model is taken to stay as it is; whether it did is found out at the end, and an error if not."""
        self._refresh()
        seen, token = self._seen, _settled.set((*_settled.get(), self))
        try:
            yield
        finally:
            _settled.reset(token)
        changed = None if seen is None else seen.changed(self._own)
        if changed is not None:
            raise ModelChanged(
                f"{changed} was changed inside `with better.unchanged()`: answers since then may be those of the model "
                "as it was. Change it outside, or leave the block away: then every call looks for changes"
            )

    def plain(self, images: Tensor) -> Any:
        """What the model itself returns, in evaluation mode, whatever mode its modules are in."""
        model = evaluating(self.model)

        def run(x: Tensor) -> Any:
            with torch.no_grad(), calling(x):
                return model(x)

        output, _, crop = self._sized(images, run)
        return output if crop is None else pytree.tree_map(lambda leaf: cropped_output(leaf, crop), output)

    def _sized(self, images: Tensor, call: Callable[[Tensor], T]) -> tuple[T, Tensor, Crop]:
        """`call(images)`; where the answer is a map and the model raises, on images padded to a multiple of 32."""
        try:
            return call(images), images, None
        except ModelRaised as error:
            axes = wanted_axes(self.model)
            if images.ndim != 2 + axes:
                raise InputError(
                    f"images: got shape {tuple(images.shape)}, wanted {SHAPES[axes]} by the model's first convolution "
                    f"({error})"
                ) from error
            more, crop = padded(images) if TASKS[self.setup[0]].pads else (images, None)
            if crop is None:
                raise
            try:
                return call(more), more, crop
            except ModelRaised:
                raise InputError(
                    f"the model does not take images of {by(images.shape[2:])} ({error}); padding to "
                    f"{by(more.shape[2:])} did not help: "
                    "resize or pad them to a size the model accepts"
                ) from error

    def _refresh(self) -> None:
        if any(plans is self for plans in _settled.get()):
            return
        seen = self._seen
        if seen is None or seen.changed(self._own) is not None:
            with self.lock:
                if self._seen is seen:  # nobody else was here meanwhile
                    self.clear()
                    self._refused.clear()
                    self._seen = Snapshot(self.model)

    def _make(self, key: Key, images: Tensor) -> Plan:
        if key in self._refused:
            raise self._refused[key]
        try:
            with torch.inference_mode(False), torch.autocast(images.device.type, enabled=False):
                plan = self._plan(images[:1])  # the graph is the model's; a run may be cast
        except ModelRaised as error:
            self._refused[key] = error
            raise
        self._own |= plan.graph.own
        self[key] = plan
        return plan

    def _plan(self, example: Tensor) -> Plan:
        task, space, max_bytes, rewrite = self.setup
        graph, run_segment = capture(self.model, example), as_it_is
        if rewrite:
            graph = optimise(graph)
        found = find_layers(graph)
        if rewrite and found.mostly_convolutions:
            graph = channels_last(graph)
            if available(graph.device, graph.dtype):
                mark_tame(graph)
                run_segment = Fuser(found.layers)
        if rewrite == "compile":
            run_segment = compile_segment
        return make_plan(graph, found, task, space, max_bytes, run_segment)

    def __reduce__(self) -> Any:
        """A copy captures the model anew: graphs and packed weights can neither be copied nor sent elsewhere."""
        return Plans, (self.model, self.setup)


def check_run(max_bytes: Any, optimise: Any) -> None:
    """Refuse what a plan cannot be made with; the recipe has checked itself."""
    whole = isinstance(max_bytes, int) and not isinstance(max_bytes, bool)
    if max_bytes is not None and not (whole and max_bytes > 0):
        raise OptionError(
            f"max_bytes: got {max_bytes!r}, wanted a positive whole number of bytes (256 << 20 are 256 MiB), or None"
        )
    if not any(optimise is o or (optimise == o and isinstance(o, str)) for o in OPTIMISE):
        raise OptionError(f"optimise: got {optimise!r}, wanted one of {', '.join(map(repr, OPTIMISE))}")


def padded(images: Tensor) -> tuple[Tensor, Crop]:
    """Images padded to a multiple of 32, and the share of each axis that is theirs; None if that is all."""
    size = images.shape[2:]
    more = [-n % MULTIPLE for n in size]
    if not any(more):
        return images, None
    sides = [side for k in reversed(more) for side in (0, k)]
    filled = F.pad(images, sides, mode="replicate" if min(size) > 1 else "constant")
    return filled, tuple(n / (n + k) for n, k in zip(size, more, strict=True))
