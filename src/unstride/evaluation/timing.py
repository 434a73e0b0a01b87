"""How long recipes take beside the base model. The calls take turns in one run, and only ratios of neighbours count.

time_ratio(better, model, images).ratio            # 1.62, with its interval
print(*bench(better, images), sep="\\n")
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from unstride.errors import OptionError
from unstride.evaluation.intervals import LEVEL, ConfidenceInterval
from unstride.models.weights import place
from unstride.recipe.view import View
from unstride.views.images import Preprocess
from unstride.views.source import PILImages, as_source

ROUNDS = 9
FEWEST = 3  # rounds, however long they take
ROW_SECONDS = 0.05  # a shorter call is repeated for so long, because it meets few of the machine's hiccups
SLOWER = 1.25  # times what the cost says: worth a warning

Call = Callable[[], Any]


@dataclass(frozen=True)
class TimeRatio:
    """The time of a call as a multiple of the base call's: the median over rounds, and the interval of that median."""

    ratio: ConfidenceInterval
    seconds: float  # of one base call
    rounds: int

    def __str__(self) -> str:
        return f"{self.ratio.estimate:.2f}x ({self.ratio.low:.2f} to {self.ratio.high:.2f})"


def compare_times(
    base: Call,
    calls: Mapping[str, Call],
    *,
    rounds: int = ROUNDS,
    seconds: float | None = None,
    device: torch.device | None = None,
    advance: Callable[[int, str], None] = lambda step, note: None,
) -> dict[str, TimeRatio]:
    """Time several calls beside a base call.

    Every call runs between two base calls, and counts as a multiple of their mean: a busy minute slows all three. The
    order is reversed from round to round. Two calls of each warm up.

    Args:
        rounds: how often each call is measured, at most.
        seconds: as many rounds as fit into that time; at least 3.
        device: of a GPU, whose work is waited for.
        advance: called with each call that was measured.
    """
    if rounds < 1:
        raise OptionError(f"rounds: got {rounds}, expected at least 1.")
    for call in (base, *calls.values()):
        call()
    first = {name: _seconds(call, device, 0.0) for name, call in {"": base, **calls}.items()}
    if seconds is not None:
        each = sum(max(ROW_SECONDS, first[name]) + max(ROW_SECONDS, first[""]) for name in calls)
        rounds = max(min(rounds, FEWEST), min(rounds, int(seconds / max(each, 1e-9))))
    bases: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        before = _seconds(base, device)
        bases.append(before)
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            own, after = _seconds(calls[name], device), _seconds(base, device)
            ratios[name].append(2 * own / (before + after))
            bases.append(after)
            before = after
            advance(1, name)
    usual = median(bases)
    return {name: TimeRatio(median_interval(values), usual, rounds) for name, values in ratios.items()}


def time_ratio(
    better: Callable[[Any], Any],
    base: Callable[[Any], Any],
    images: Any,
    *,
    seconds: float = 10.0,
    rounds: int = ROUNDS,
) -> TimeRatio:
    """The time of a recipe as a multiple of the base model's on the same images, which are prepared ahead.

    Example: `time_ratio(better, better.replace("plain"), images).ratio.high <= 1.6`
    """
    return time_ratios({"": better}, base, images, seconds=seconds, rounds=rounds)[""]


def time_ratios(
    recipes: Mapping[str, Callable[[Any], Any]],
    base: Callable[[Any], Any],
    images: Any,
    *,
    seconds: float = 10.0,
    rounds: int = ROUNDS,
) -> dict[str, TimeRatio]:
    """The same for several recipes, which take turns."""
    device = place(base)[0] if isinstance(base, nn.Module) else None
    batch = prepared_once(images)
    calls = {name: call_with(recipe, batch) for name, recipe in recipes.items()}
    return compare_times(call_with(base, batch), calls, rounds=rounds, seconds=seconds, device=device)


def median_interval(values: Sequence[float]) -> ConfidenceInterval:
    """The median, and two order statistics that hold the true one with a probability of 95 % or as near as can be."""
    ordered, n = sorted(values), len(values)

    def level(k: int) -> float:
        """The probability that the true median lies between the k-th value from below and from above."""
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    k = max((k for k in range(1, (n + 1) // 2 + 1) if level(k) >= LEVEL), default=1)
    return ConfidenceInterval(median(ordered), ordered[k - 1], ordered[n - k], max(0.0, level(k)))


def peak_bytes(call: Call, device: torch.device | None = None) -> int:
    """The most bytes of tensors that a call has alive at once, beyond those that were there before.

    On a CPU every allocation of torch is recorded: the process's own peak never shrinks, so it compares no two calls.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorder:
        call()
    recorded: Any = recorder.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def _seconds(call: Call, device: torch.device | None, least: float = ROW_SECONDS) -> float:
    """Of one call, by as many in a row as take the least time."""
    wait_for(device)
    start, spent = time.perf_counter(), 0.0
    with torch.no_grad():
        done = 0
        while not done or spent < least:
            call()
            wait_for(device)
            done += 1
            spent = time.perf_counter() - start
    return spent / done


def wait_for(device: torch.device | None) -> None:
    """Until a GPU has done what it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device is not None and device.type == "mps":
        torch.mps.synchronize()


def call_with(function: Callable[[Any], Any], *inputs: Any) -> Call:
    """A call of a function on each of the inputs."""
    return lambda: [function(x) for x in inputs]


# ---------------------------------------------------------------- images that are prepared ahead
@dataclass(frozen=True, eq=False)
class PreparedOnce(PILImages):
    """PIL images of which each view is rendered once for each network, so that only the networks are timed."""

    rendered: dict[Any, Tensor] = field(default_factory=dict)

    def _render(self, image: Image, view: View) -> Tensor:
        key = (id(image), view, self.preprocess)
        if key not in self.rendered:
            self.rendered[key] = super()._render(image, view)
        return self.rendered[key]


def prepared_once(images: Any, preprocess: Preprocess | None = None) -> Any:
    """Images as a model takes them; what is known by its pixels only is prepared at its first use."""
    if not isinstance(images, PILImages):
        pil = isinstance(images, Image) or (
            isinstance(images, list | tuple) and any(isinstance(i, Image) for i in images)
        )
        if not pil:
            return images
        source = as_source(images, preprocess)
        assert isinstance(source, PILImages)
        images = source
    return PreparedOnce(images.images, images.preprocess, images.like, images.prepared)
