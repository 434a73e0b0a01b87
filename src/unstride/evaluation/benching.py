"""What the procedure costs: time, work and memory against the plain forward and against test-time augmentation.

    result = bench(model, torch.randn(1, 3, 224, 224), budgets=(4, 10), batches=(1, 8))
    result.rows[0].time, result.rows[0].macs, result.rows[0].tta

All figures are medians of ratios within one run; what is compared takes turns, so that a busy machine slows it all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from unstride.data.batches import reusable, unpacked
from unstride.enhanced import Enhanced, enhance
from unstride.errors import OptionError
from unstride.evaluation.pacing import LEAST, paced
from unstride.evaluation.runner import own_budgets
from unstride.graph.capture import check_images
from unstride.procedure.gates import Stage
from unstride.recipe import Recipe, policies
from unstride.storage.progress import progress as show_progress
from unstride.tta import TTA

GROWTH = (1, 4, 16, 64, 256)  # states
_MARGIN = 8 / 7  # views are cropped out of images of 256 px where the model takes 224
_POLICY = {"classification": "standard", "segmentation": "segmentation"}
Call = Callable[[], Any]
Tick = Callable[[str], None]


@dataclass(frozen=True)
class BenchRow:
    """One setting, as multiples of a plain forward of the same batch in the same run.

    time        seconds
    macs        work of the states that were visited, by their prefix trie: what the time would be without any overhead
    tta         seconds of test-time augmentation with as many views; None: its policy has fewer, or it was not asked
    memory      the most bytes of tensors alive beyond the weights and the images
    beside      seconds of other calls that took turns with it
    """

    budget: int
    batch: int
    image: tuple[int, ...]
    learned: bool
    time: float
    macs: float
    tta: float | None
    memory: float | None
    plain_ms: float
    plain_bytes: int | None
    repeats: int
    beside: Mapping[str, float]

    @property
    def overhead(self) -> float:
        """Time over work: 1 means that everything beside the network's own ops is free."""
        return self.time / self.macs

    @property
    def images_per_second(self) -> float:
        return self.batch / (self.plain_ms * self.time) * 1e3

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "overhead": self.overhead, "images_per_second": self.images_per_second}


@dataclass(frozen=True)
class Bench:
    """`rows`: every budget at every batch. `growth`: one thing varied at a time ("budget", "batch", "image")."""

    rows: tuple[BenchRow, ...]
    growth: Mapping[str, tuple[BenchRow, ...]]
    plain_macs: int
    threads: int
    device: str
    left_out: tuple[tuple[int, int], ...] = ()  # (batch, states) that would have taken longer than was asked for

    def to_json(self) -> dict[str, Any]:
        return {
            "plain_macs": self.plain_macs,
            "threads": self.threads,
            "device": self.device,
            "left_out": [list(one) for one in self.left_out],
            "rows": [row.to_json() for row in self.rows],
            "growth": {name: [row.to_json() for row in rows] for name, rows in self.growth.items()},
        }


def interleaved(
    plain: Call, calls: Mapping[str, Call], repeats: int, device: torch.device | None = None, tick: Tick | None = None
) -> tuple[float, dict[str, float]]:
    """Median seconds of `plain`, and of each call as a multiple of that: the median over rounds, each by its own plain.

    All take turns, and `plain`, the shortest, goes before each of the others: a busy minute slows whole rounds, and the
    more often it is measured, the better its median. Short calls are repeated in a row, because a long call meets every
    hiccup of the machine and a short one few. A first call of each, which sets things up, is not counted. `tick` is
    told which call has been measured.
    """
    if repeats < 1:
        raise OptionError(f"repeats: got {repeats}, wanted at least 1")
    plains: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for call in (plain, *calls.values()):
        call()
    for _ in range(repeats):
        turns = []
        for name, call in calls.items():
            turns.append((_seconds(plain, device), _seconds(call, device)))
            if tick is not None:
                tick(name)
        usual = median(own for own, _ in turns)
        plains.append(usual)
        for name, (_, seconds) in zip(calls, turns, strict=True):
            ratios[name].append(seconds / usual)
    return median(plains), {name: median(values) for name, values in ratios.items()}


def _seconds(call: Call, device: torch.device | None) -> float:
    """Of one call, by as many in a row as take a fifth of a second."""
    _settle(device)
    start, done, spent = time.perf_counter(), 0, 0.0
    while spent < LEAST:
        call()
        _settle(device)
        done, spent = done + 1, time.perf_counter() - start
    return spent / done


def peak_bytes(call: Call, device: torch.device | None = None) -> int:
    """The most bytes of tensors that `call` had alive at once, beyond those that were there before.

    On CPU every allocation is recorded, which says nothing of what libraries take for themselves; the process's own
    peak would, but it never shrinks, so it cannot compare two calls.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    recorder = torch.autograd.profiler.profile(profile_memory=True)
    with _silent():
        recorder.__enter__()
    try:
        call()
    finally:
        with _silent():
            recorder.__exit__(None, None, None)
    found: Any = recorder.kineto_results
    events = [e for e in found.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def bench(
    model: nn.Module,
    example: Tensor | Iterable[Any],
    budgets: Sequence[int] | None = None,
    batches: Sequence[int] = (1, 8),
    *,
    task: str = "classification",
    recipe: str | Path | Recipe | None = None,
    learned: bool = False,
    tta: bool = True,
    memory: bool = True,
    growth: bool = True,
    repeats: int = 5,
    seconds: float | None = None,
    progress: bool = False,
    **options: Any,
) -> Bench:
    """Measure `model` on noise of the example's size, which batches of (images, labels) may give as well.

    `learned`: with attention, untrained: the cost is the same.
    `recipe` and `options` are those of `enhance`: the paper's search at 4 and 10 states where neither it nor `budgets`
    say anything else. A recipe with stages of looks is measured after each stage, with all gates open. `seconds`
    bounds the rows (not the growth): fewer rounds, and what does not fit once is left out.
    """
    if not isinstance(example, Tensor):
        reusable(example, "example")
        example = check_images(next((unpacked(batch, "example")[0] for batch in example), None), "example")
    check_images(example, "example")
    asked = (4, 10) if budgets is None else budgets
    for name, values in (("budgets", asked), ("batches", batches)):
        if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in values):
            raise OptionError(f"{name}: got {list(values)!r}, wanted whole numbers, at least 1")
    options |= {"criterion": "learned", "aggregate": "attention"} if learned else {}
    better = enhance(model, example, task=task, recipe=recipe or "paper", **options)
    if not better.recipe.stages and not better.recipe.searches and budgets is None:
        better = better.with_options(stages=(Stage(),))
    if budgets is None:
        asked = own_budgets(better, asked)
    if better.recipe.stages:
        if budgets is not None:
            raise OptionError(f"budgets are of a search; recipe {better.recipe.name!r} has stages of looks instead")
        asked, growth = sorted(_variants(better)), False
    plan = better.fitted(example[:1])[1]
    plain = _plain(better, example[:1])
    pace = paced(
        {n: sorted(set(asked)) for n in batches},
        min(_seconds(plain, example.device) for _ in range(2)),
        seconds,
        repeats,
    )
    rows: list[BenchRow] = []
    tta = tta and better.task in _POLICY
    beside = range(1, len(policies.get(_POLICY[better.task])) + 1) if tta else ()
    with show_progress("measuring, in plain forwards", pace.total(beside), progress) as advance:
        for batch, kept in pace.settings.items():

            def tick(name: str, batch: int = batch) -> None:
                budget = int(name.split()[-1])
                advance(pace.weight(batch, budget) + pace.weight(batch, 1), f"batch {batch}, {name}")

            images = _noise(example, batch)
            rows += measure(better, images, kept, tta=tta, memory=memory, repeats=pace.rounds, tick=tick)
    grown = _all_growth(better, example, sorted(batches), max(1, repeats // 2), progress) if growth else {}
    return Bench(tuple(rows), grown, plan.plain_macs, torch.get_num_threads(), example.device.type, pace.left_out)


def _variants(better: Enhanced, budgets: Sequence[int] = ()) -> dict[int, Enhanced]:
    """What is measured: a search at each budget, or the looks up to each stage, as if every gate were open."""
    stages = better.recipe.stages
    if not stages:
        return {b: better.with_options(budget=b) for b in sorted(set(budgets))}
    found: dict[int, Enhanced] = {}
    space = better.plan.found.space
    for n in range(1, len(stages) + 1):
        some = tuple(replace(stage, gate=None) for stage in stages[:n])
        looks = sum(len(stage.views) * len(stage.chosen(space)) for stage in some)
        found[looks] = better.with_options(recipe=better.recipe.changed(stages=some))
    return {looks: one for looks, one in found.items() if looks > 1} or found


def _work(better: Enhanced, variants: Mapping[int, Enhanced], images: Tensor) -> dict[int, float]:
    """Mean MACs of each, in plain forwards."""
    if better.recipe.stages:
        return {b: mean(one.looks(images)[1]) for b, one in variants.items()}
    return {b: mean(macs) for b, (_, macs) in better.costs(images, list(variants)).items()}


def _plain(better: Enhanced, images: Tensor) -> Call:
    return lambda: better.plans.plain(images)


def measure(
    better: Enhanced,
    images: Tensor,
    budgets: Sequence[int],
    *,
    tta: bool = True,
    memory: bool = True,
    repeats: int = 5,
    beside: Mapping[str, Call] | None = None,
    tick: Tick | None = None,
) -> list[BenchRow]:
    """One row per budget for these images; the plain forward, the budgets, TTA and what is `beside` take turns."""
    device, plain = images.device, _plain(better, images)
    variants = {b: one for b, one in _variants(better, budgets).items() if b in budgets}
    calls: dict[str, Call] = {f"beside {name}": call for name, call in (beside or {}).items()}
    calls |= {f"ours {b}": _call(one, images) for b, one in variants.items()}
    if tta:
        calls |= {f"tta {b}": call for b, call in _tta_calls(better, images, list(variants)).items()}
    seconds, times = interleaved(plain, calls, repeats, device, tick)
    work = _work(better, variants, images)
    plain_bytes = peak_bytes(plain, device) if memory else None
    return [
        BenchRow(
            budget=b,
            batch=len(images),
            image=tuple(int(n) for n in images.shape[2:]),
            learned=better.recipe.aggregate == "attention",
            time=times[f"ours {b}"],
            macs=work[b],
            tta=times.get(f"tta {b}"),
            memory=peak_bytes(calls[f"ours {b}"], device) / max(1, plain_bytes) if plain_bytes is not None else None,
            plain_ms=seconds * 1e3,
            plain_bytes=plain_bytes,
            repeats=repeats,
            beside={name: times[f"beside {name}"] for name in beside or {}},
        )
        for b in variants
    ]


def _all_growth(
    better: Enhanced, example: Tensor, batches: Sequence[int], repeats: int, progress: bool
) -> dict[str, tuple[BenchRow, ...]]:
    found: dict[str, tuple[BenchRow, ...]] = {}
    with show_progress("growth", 3, progress) as advance:
        for kind in ("budget", "batch", "image"):
            found[kind] = _growth(better, example, kind, batches, repeats)
            advance(1, f"with {kind}")
    return found


def _growth(better: Enhanced, example: Tensor, kind: str, batches: Sequence[int], repeats: int) -> tuple[BenchRow, ...]:
    """Rows with only `kind` varied. States: over all layers, because the usual range may not have 256."""

    def rows(images: Tensor, budgets: Sequence[int], of: Enhanced = better) -> list[BenchRow]:
        return measure(of, images, budgets, tta=False, memory=False, repeats=repeats)

    if kind == "budget":
        plan = better.fitted(example[:1])[1]
        everything = better.with_options(layers=tuple(range(1, len(plan.found.layers) + 1)))
        return tuple(rows(_noise(example, 1), [b for b in GROWTH if b <= len(plan.found.space)], everything))
    if kind == "batch":
        return tuple(row for n in sorted({1, 2, 4, *batches}) for row in rows(_noise(example, n), (10,)))
    sides = sorted({max(32, round(example.shape[2] * scale / 32) * 32) for scale in (0.5, 0.75, 1.0, 1.5)})
    found: list[BenchRow] = []
    for side in sides:
        size = [side] * (example.ndim - 2)
        images = torch.randn(1, example.shape[1], *size, generator=_seed()).to(example)
        try:
            found += rows(images, (10,))
        except Exception:  # many transformers take one size only; what the model says is of no use here
            if side == example.shape[2]:
                raise
    return tuple(found)


def _call(module: nn.Module, images: Tensor) -> Call:
    return lambda: module(images)


def _tta_calls(better: Enhanced, images: Tensor, budgets: Sequence[int]) -> dict[int, Call]:
    """Test-time augmentation with as many views as each budget has states, where its policy has so many."""
    if images.ndim != 4:  # policies are of images
        return {}
    wide = _noise(images, len(images), _MARGIN) if better.task == "classification" else images
    found = {b: _tta(better, b, (int(images.shape[2]), int(images.shape[3]))) for b in budgets}
    return {b: _call(augmented, wide) for b, augmented in found.items() if augmented is not None}


def _tta(better: Enhanced, views: int, size: tuple[int, int]) -> TTA | None:
    """Flips and crops (segmentation: flips and scales) with so many views, or None where the policy has fewer."""
    policy = policies.get(_POLICY[better.task]) if better.task in _POLICY else None
    if policy is None or views > len(policy):
        return None
    crop = size if better.task == "classification" else None
    # Normalised noise is not in [0, 1]; with a wide normalisation it is, and views cost what they cost on photographs.
    channels = better.plan.graph.channels
    return TTA(
        better.model, policy, "mean", views, mean=[0.5] * channels, std=[0.1] * channels, task=better.task, crop=crop
    )


def _noise(example: Tensor, count: int, scale: float = 1.0) -> Tensor:
    """(count, C, H, W) like the example, the same each time."""
    size = [round(side * scale) for side in example.shape[2:]]
    return torch.randn(count, example.shape[1], *size, generator=_seed()).to(example)


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing on stderr: the profiler announces itself there, below Python."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _settle(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
