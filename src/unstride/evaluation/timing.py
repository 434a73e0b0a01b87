"""How long recipes take beside the base model. The calls take turns in one run, and only ratios of neighbours count.

time_ratio(better, model, images).ratio            # 1.62, with its interval
print(*bench(better, images), sep="\\n")
"""

from __future__ import annotations

import copy
import importlib.util
import io
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from unstride.enhanced import Enhanced
from unstride.errors import InputError, OptionError
from unstride.evaluation.intervals import LEVEL, ConfidenceInterval
from unstride.models.weights import place
from unstride.recipe.view import PLAIN, View
from unstride.storage.progress import progress as show_progress
from unstride.views.images import Preprocess
from unstride.views.source import PILImages, Source, as_source, for_network

ROUNDS = 9
FEWEST = 3  # rounds, however long they take
ROW_SECONDS = 0.05  # a shorter call is repeated for so long, because it meets few of the machine's hiccups
SLOWER = 1.25  # times what the cost says: worth a warning
STREAM = 16  # images, where gates decide image by image

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
        advance: is told which call was measured.
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
    calls = {name: _call(recipe, batch) for name, recipe in recipes.items()}
    return compare_times(_call(base, batch), calls, rounds=rounds, seconds=seconds, device=device)


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

    On a CPU every allocation of torch is recorded. The process's own peak never shrinks, so it cannot compare two calls.
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
    _wait(device)
    start, spent = time.perf_counter(), 0.0
    with torch.no_grad():
        for done in count(1):
            call()
            _wait(device)
            spent = time.perf_counter() - start
            if spent >= least:
                break
    return spent / done


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device is not None and device.type == "mps":
        torch.mps.synchronize()


def _call(function: Callable[[Any], Any], *inputs: Any) -> Call:
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


# ---------------------------------------------------------------- the table of `unstride bench`
@dataclass(frozen=True)
class BenchRow:
    """One way to run the network, beside the base model called directly, on the same images in the same batches.

    Args:
        cost: in forward passes of the base model, by MACs; None where it was not counted.
        memory: peak memory of one batch beyond weights and images, as a multiple of the base model's.
        alone: of a recipe, its time as a multiple of its own passes run one after the other in batches of this size.
        base_seconds: of the base model, for one batch.
    """

    name: str
    batch_size: int
    time: TimeRatio
    cost: float | None
    memory: float | None
    alone: float | None
    base_seconds: float

    @property
    def images_per_second(self) -> float:
        return self.batch_size / (self.base_seconds * self.time.ratio.estimate)

    @property
    def warning(self) -> str:
        """Why the time is more than the cost says, where it is more than 1.25 times as much; else empty."""
        ratio = self.time.ratio.estimate
        if self.cost is None or ratio <= SLOWER * self.cost:
            return ""
        head = f"{self.name} at batch size {self.batch_size}: time {ratio:.2f}x, but cost {self.cost:.2f}x"
        if self.alone is not None and self.alone > 1.1:
            between = "what happens between passes, and passes of only a few images, take the rest"
            return f"{head}; its passes alone take {ratio / self.alone:.2f}x, {between}. Larger batches help."
        if self.alone is not None:
            return f"{head}; its passes alone take {ratio / self.alone:.2f}x: they run fewer MACs per second here."
        return f"{head}; small networks and small batches leave the processor waiting. Larger batches help."

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "images_per_second": self.images_per_second, "warning": self.warning}


@dataclass(frozen=True)
class BenchResult:
    """The rows, what was left out and why, and where it was measured."""

    rows: tuple[BenchRow, ...]
    left_out: tuple[str, ...]
    base_macs: int
    device: str
    threads: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.to_json() for row in self.rows]}


def bench(
    better: Enhanced,
    images: Any,
    *,
    budgets: Sequence[int] = (),
    batch_sizes: Sequence[int] = (1, 8),
    noise: bool = False,
    rounds: int = ROUNDS,
    seconds: float = 60.0,
    progress: bool = False,
) -> BenchResult:
    """Measure time, cost and memory of the base model in several forms, and of the recipe.

    Args:
        images: a tensor as the base model takes it, or PIL images; repeated where a batch needs more.
        budgets: of a recipe with one Search, numbers of states instead of its own.
        noise: the images say nothing about gates, so each gate passes its share of them.
        seconds: for the measurement, all batch sizes together.
    """
    for name, values in (("batch_sizes", batch_sizes), ("budgets", budgets)):
        if any(type(v) is not int or v < 1 for v in values) or (name == "batch_sizes" and not values):
            raise OptionError(f"{name}: got {list(values)!r}, expected whole numbers from 1 on, such as [1, 8].")
    source = as_source(prepared_once(images, better.preprocess), better.preprocess)
    variants = _variants(better, source, budgets, noise)
    gated = any(stage.gate is not None for stage in better.recipe.stages)
    rows: list[BenchRow] = []
    left_out: dict[str, None] = {}
    with show_progress("measuring", None, progress) as advance:
        for size in batch_sizes:
            batch_count = max(1, STREAM // size) if gated else 1
            batches = [_rows(source, k * size, size) for k in range(batch_count)]
            rows += _measured(better, variants, batches, rounds, seconds / len(batch_sizes), left_out, advance)
    device, macs = place(better.model)[0], better.replace("plain").run(source.rows([0])).record.base_macs
    return BenchResult(tuple(rows), tuple(left_out), macs, device.type, torch.get_num_threads())


def _rows(source: Source, start: int, size: int) -> Source:
    return source.rows([(start + k) % len(source) for k in range(size)])


def _variants(better: Enhanced, source: Source, budgets: Sequence[int], noise: bool) -> dict[str, Enhanced]:
    recipe = better.recipe
    name = recipe.name or "recipe"
    if budgets:
        if recipe.search is None:
            raise OptionError(f"budgets: the recipe {name!r} has no single Search, so it has no budget.")
        return {f"{name}, {b} states": better.replace(budget=b) for b in dict.fromkeys(budgets)}
    gates = [stage.gate for stage in recipe.stages if stage.gate is not None]
    if recipe.plain or not gates:
        return {} if recipe.plain else {name: better}
    opened = recipe.changed(stages=tuple(replace(stage, gate=None) for stage in recipe.stages))
    every = {f"{name}, every gate open": better.replace(opened)} if all(g.tile is None for g in gates) else {}
    if not noise:
        return {name: better, **every}
    if any(gate.share is None for gate in gates):
        return every or {name: better}
    shared = better.replace()
    shared.calibrate([_rows(source, k, 8) for k in range(0, max(STREAM, len(source)), 8)])
    return {name: shared, **every}


def _measured(
    better: Enhanced,
    variants: Mapping[str, Enhanced],
    batches: Sequence[Source],
    rounds: int,
    seconds: float,
    left_out: dict[str, None],
    advance: Callable[[int, str], None],
) -> list[BenchRow]:
    """The rows of one batch size."""
    network, device = better.networks["base"], place(better.model)[0]
    inputs = [for_network(batch, network.preprocess).render(PLAIN) for batch in batches]
    calls: dict[str, Call] = {"eager": _call(network.forward, *inputs)}
    firsts: dict[str, Call] = {"eager": _call(network.forward, inputs[0])}  # of one batch, for its memory
    for name, form in (("channels_last", _channels_last), ("ONNX Runtime", _onnx_runtime)):
        function, why = form(network.forward, better.model, inputs[0])
        if function is None:
            left_out[f"{name}: {why}"] = None
        else:
            calls[name], firsts[name] = _call(function, *inputs), _call(function, inputs[0])
    calls |= {name: _call(variant, *batches) for name, variant in variants.items()}
    firsts |= {name: _call(variant, batches[0]) for name, variant in variants.items()}
    costs = {name: _costs(variant, batches) for name, variant in variants.items()}
    alone = {f"{name}: its passes alone": _passes_alone(variant, batches) for name, variant in variants.items()}
    calls |= {name: call for name, call in alone.items() if call is not None}
    base = calls["eager"]
    times = compare_times(base, calls, rounds=rounds, seconds=seconds, device=device, advance=advance)
    base_bytes = max(1, peak_bytes(firsts["eager"], device))
    rows = []
    for name, call in firsts.items():
        own, ratio = times.get(f"{name}: its passes alone"), times[name].ratio.estimate
        memory = None if name == "ONNX Runtime" else peak_bytes(call, device) / base_bytes
        together = None if own is None else ratio / own.ratio.estimate
        per_batch = times[name].seconds / len(batches)
        cost = costs.get(name, 1.0)
        rows.append(BenchRow(name, len(batches[0]), times[name], cost, memory, together, per_batch))
    return rows


def _costs(variant: Enhanced, batches: Sequence[Source]) -> float | None:
    """The mean over images; None where MACs cannot be counted, as of quantised networks."""
    results = [variant.run(batch) for batch in batches]
    if results[0].record.base_macs <= 1:
        return None
    return float(np.mean([cost for result in results for cost in result.costs]))


def _passes_alone(variant: Enhanced, batches: Sequence[Source]) -> Call | None:
    """The same passes in full batches, one stage after the other; None for states and tiles, which are parts of passes.

    Of a gate only the number of images counts that pass it.
    """
    stages = variant.recipe.stages
    if any(s.states is not None or (s.gate is not None and s.gate.tile is not None) for s in stages):
        return None
    passed = [variant.run(batch).record.passed_gates for batch in batches]
    size, count, gates = len(batches[0]), sum(map(len, batches)), 0
    calls: list[tuple[Callable[[Tensor], Any], Tensor]] = []
    for stage in stages:
        if stage.gate is not None:
            count = sum(len(rows[gates]) for rows in passed if len(rows) > gates)
            gates += 1
        network = variant.networks[stage.network]
        for view in stage.views:
            every = torch.cat([for_network(batch, network.preprocess).render(view) for batch in batches])
            calls += [(network.forward, x) for x in every[:count].split(size) if len(x)]
    return lambda: [forward(x) for forward, x in calls]


def _channels_last(
    forward: Callable[[Tensor], Any], model: nn.Module, images: Tensor
) -> tuple[Callable[[Tensor], Any] | None, str]:
    """The model in that memory format, as a copy."""
    if images.ndim != 4:
        return None, f"for images (B, C, H, W), not for {tuple(images.shape)}"
    try:
        own = evaluating(copy.deepcopy(unwrapped(model))).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            own(images)
    except Exception as error:  # not every model can be copied
        return None, f"the model cannot be copied ({type(error).__name__})"
    return lambda x: own(x.contiguous(memory_format=torch.channels_last)), ""
