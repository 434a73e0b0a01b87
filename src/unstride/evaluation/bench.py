"""Time, cost and memory of a recipe beside its base model in several forms: the table of `unstride bench`.

result = bench(better, images, batch_sizes=(1, 8))
print(result.rows[-1].time, result.rows[-1].warning)
"""

from __future__ import annotations

import copy
import importlib.util
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.evaluation.timing import (
    ROUNDS,
    SLOWER,
    Call,
    TimeRatio,
    call_with,
    compare_times,
    peak_bytes,
    prepared_once,
)
from unstride.graph.evaluation import evaluating, unwrapped
from unstride.models.weights import place
from unstride.recipe.view import PLAIN
from unstride.storage.progress import progress as show_progress
from unstride.views.source import Source, as_source, for_network

STREAM = 16  # images, where gates decide image by image


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
    calls: dict[str, Call] = {"eager": call_with(network.forward, *inputs)}
    firsts: dict[str, Call] = {"eager": call_with(network.forward, inputs[0])}  # of one batch, for its memory
    for name, form in (("channels_last", _channels_last), ("ONNX Runtime", _onnx_runtime)):
        function, why = form(network.forward, better.model, inputs[0])
        if function is None:
            left_out[f"{name}: {why}"] = None
        else:
            calls[name], firsts[name] = call_with(function, *inputs), call_with(function, inputs[0])
    calls |= {name: call_with(variant, *batches) for name, variant in variants.items()}
    firsts |= {name: call_with(variant, batches[0]) for name, variant in variants.items()}
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


def _onnx_runtime(
    forward: Callable[[Tensor], Any], model: nn.Module, images: Tensor
) -> tuple[Callable[[Tensor], Any] | None, str]:
    """The model exported at this size, on the CPU with as many threads as torch has."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")):
        return None, "not installed: pip install 'unstride[onnx]'"
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        path = Path(folder) / "net.onnx"
        try:
            program = torch.onnx.export(evaluating(unwrapped(model)), (images,), dynamo=True, verbose=False)
            assert program is not None
            program.save(str(path))
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # not every model can be exported
            return None, f"the model cannot be exported ({type(error).__name__})"
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.cpu().numpy()}), ""
