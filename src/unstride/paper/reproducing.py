"""Measures the runs of an exhibit: fits what must be fitted, evaluates, and puts the numbers into its cells."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from unstride.data import Dataset
from unstride.enhanced import Enhanced
from unstride.errors import DataError, LeftOut, OptionError, UnstrideWarning
from unstride.evaluation.evaluate import evaluate
from unstride.evaluation.rows import Row
from unstride.evaluation.timing import TimeRatio, time_ratio
from unstride.geometry.report import inspect
from unstride.learning.fitting import fit
from unstride.models import LoadedModel
from unstride.models.weights import place
from unstride.paper import macs
from unstride.paper.catalogue import get
from unstride.paper.exhibits import ACCURACIES, LEARNED_TTA, PRINTED, Cell, Exhibit, Run, Value
from unstride.paper.sources import ExhibitSource
from unstride.pipeline import open_pipeline
from unstride.recipe.files import read
from unstride.storage.contents import file_stamp
from unstride.storage.fingerprint import fingerprint
from unstride.storage.progress import progress as show_progress
from unstride.views.source import PILImages

COUNTED = ("gmacs", "macs")
TIMED = ("time", "milliseconds")
SEEDS = 5  # as the paper repeats its experiments
_TIMED_IMAGES, _TIME = 4, 5.0  # images of one timed batch, and seconds for one ratio
_BATCH = 16  # images of the criterion figure


@dataclass(frozen=True)
class Reproduction:
    """An exhibit with numbers, ours beside the paper's."""

    exhibit: Exhibit
    values: tuple[Value, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        head = {name: getattr(self.exhibit, name) for name in ("name", "where", "title")}
        more = {"labels": list(self.exhibit.labels), "notes": list(self.notes)}
        return {**head, **more, "values": [asdict(value) for value in self.values]}


def reproduce(
    name: str | Exhibit,
    source: ExhibitSource | None = None,
    out: str | Path | None = None,
    *,
    seeds: int = 1,
    epochs: int | None = None,
    device: str | None = None,
    progress: bool = False,
) -> Reproduction:
    """`reproduce("table1", PaperFolder(Path("/data")), "runs/paper")`: our numbers beside the paper's.

    Args:
        source: networks and images; None: only what needs no data.
        out: folder for what is fitted and evaluated; a killed run continues where it was.
        seeds: of everything that is drawn (5 in the paper). Each draws its own training images and initialises anew;
            the values are their mean and standard deviation.
        epochs: of what is trained; by default those of the source or the schedule.
        device: cpu, cuda, cuda:1, mps or auto; by default the CPU.
    """
    exhibit = get(name) if isinstance(name, str) else name
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= 100:
        raise OptionError(f"seeds: got {seeds!r}, expected a number from 1 to 100. The paper takes {SEEDS}.")
    if exhibit.make is not None:
        return Reproduction(exhibit, tuple(exhibit.make()), exhibit.notes)
    if source is None:
        if not any(cell.measure in COUNTED for cell in exhibit.cells):
            raise DataError(f"{exhibit.name}: it needs images. Give --data-root DIR, or --data sample to rehearse it.")
        return Reproduction(exhibit, tuple(map(_counted, exhibit.cells)), exhibit.notes)
    source.check(exhibit.needs)
    with ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner = ExhibitRunner(source, folder, seeds, epochs, device, progress)
        if exhibit.shape == "scatter":
            values = tuple(value for cell in exhibit.cells for value in runner.every_state(cell))
        else:
            runner.measure(exhibit.cells)
            values = tuple(runner.value(cell) for cell in exhibit.cells)
    notes = (*exhibit.notes, *([source.note] if source.note else []), *runner.notes)
    return Reproduction(exhibit, values, tuple(dict.fromkeys(notes)))


def _counted(cell: Cell) -> Value:
    """What a cell is without data: MACs of views and states. GPS runs three of its views."""
    ours = None
    if cell.measure in COUNTED:
        work, run = macs.work(cell.run.model), cell.run
        views = macs.GPS_VIEWS if run.method == "gps-shanmugam" else run.views
        total = views * work.ours[run.budget]
        ours = total / (1e9 if cell.measure == "gmacs" else work.base)
    return Value(cell.row, cell.group, cell.column, ours, cell.paper)


@dataclass(frozen=True)
class _Measured:
    """The row of a run, and its time where the exhibit has one."""

    row: Row
    time: TimeRatio | None = None


@dataclass(eq=False)
class ExhibitRunner:
    """Loads, fits and measures everything once."""

    source: ExhibitSource
    folder: Path
    seeds: int = 1
    epochs: int | None = None
    device: str | None = None
    progress: bool = False
    notes: list[str] = field(default_factory=list)
    loaded: dict[str, LoadedModel] = field(default_factory=dict)
    base: dict[str, Enhanced] = field(default_factory=dict)
    tests: dict[str, Dataset] = field(default_factory=dict)
    measured: dict[tuple[Any, ...], _Measured] = field(default_factory=dict)

    # -- measuring
    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure the runs of the cells; those that differ only in the budget at once."""
        timed = {cell.run for cell in cells if cell.measure in TIMED}
        groups: dict[tuple[Any, ...], list[Run]] = {}
        for run in dict.fromkeys(cell.run for cell in cells if cell.measure != PRINTED):
            alone = run.budget == 1 or run.method in LEARNED_TTA or run in timed
            key = (self._where(run), replace(run, budget=run.budget if alone else 2))
            groups.setdefault(key, []).append(run)
        jobs = [(group, seed) for group in groups.values() for seed in self._seeds(group[0])]
        start = time.monotonic()
        for done, (group, seed) in enumerate(jobs):
            left = f", about {_minutes((time.monotonic() - start) / done * (len(jobs) - done))} left" if done else ""
            self._tell(f"run {done + 1} of {len(jobs)}{left}: {_described(group, seed)}")
            if any(self._key(run, seed) not in self.measured for run in group):
                self._evaluate(group, seed, any(run in timed for run in group))

    def value(self, cell: Cell) -> Value:
        """The cell with our number: of several seeds, their mean and standard deviation."""
        if cell.measure == PRINTED:
            return Value(cell.row, cell.group, cell.column, None, cell.paper)
        found = [self.measured[self._key(cell.run, seed)] for seed in self._seeds(cell.run)]
        numbers = [number for number in (_number(cell.measure, one) for one in found) if number is not None]
        ours = mean(numbers) if numbers else None
        gain = found[0].row.gain if cell.measure in ("top1", "miou") and len(found) == 1 else None
        return Value(
            cell.row,
            cell.group,
            cell.column,
            ours,
            cell.paper,
            None if gain is None else 100 * gain.low,
            None if gain is None else 100 * gain.high,
            found[0].row.images,
            stdev(numbers) if len(numbers) > 1 else None,
            len(found),
        )

    def _evaluate(self, group: list[Run], seed: int, timed: bool) -> None:
        run = max(group, key=lambda r: r.budget)
        better, budgets = self._enhanced(run, seed), sorted({r.budget for r in group})
        with _only_what_is_missing():
            rows = evaluate(
                better,
                self._test(run),
                budgets=budgets if len(budgets) > 1 else None,
                out=self.folder / "evaluated",
                task=run.task,
                progress=self.progress,
            )
        ratio = self._time(better, run) if timed else None
        ours = rows[1:] if len(rows) > 1 else rows  # the base model itself has one row
        for budget, row in zip(budgets, ours, strict=True):
            self.measured[self._key(replace(run, budget=budget), seed)] = _Measured(row, ratio)

    def _time(self, better: Enhanced, run: Run) -> TimeRatio:
        test = self._test(run)
        images = [test[i].read()[0] for i in range(min(_TIMED_IMAGES, len(test)))]
        like = torch.empty(0, device=place(better.model)[0])
        return time_ratio(better, self._base(run), PILImages(images, test.preprocess, like), seconds=_TIME)

    def _tell(self, text: str) -> None:
        if self.progress:
            print(text, file=sys.stderr, flush=True)

    def _seeds(self, run: Run) -> range:
        return range(self.seeds if run.random else 1)

    def _key(self, run: Run, seed: int) -> tuple[Any, ...]:
        """Runs with the same key give the same number. Without states and views only the network counts."""
        same = Run("", run.data, 1) if run.budget == 1 and run.views == 1 else replace(run, model="")
        return (self._where(run), same, seed if run.random else 0)

    def _where(self, run: Run) -> str:
        return f"{self.source.key(run.model, run.data)} {run.data}"

    # -- a point for each state
    def every_state(self, cell: Cell) -> Iterator[Value]:
        """Mean criterion and accuracy of each state by itself. The search visits all states of its layers."""
        better, test = self._enhanced(cell.run, 0), self._test(cell.run)
        device, dtype = place(better.model)
        right: dict[str, float] = {}
        criterion: dict[str, float] = {}
        with show_progress(f"states by {cell.row[0]}", len(test), self.progress) as advance:
            for start in range(0, len(test), _BATCH):
                pairs = [test.tensors(i) for i in range(start, min(start + _BATCH, len(test)))]
                images = torch.stack([image for image, _ in pairs]).to(device, dtype)
                for prediction, (_, label) in zip(better.explain(images), pairs, strict=True):
                    for one in prediction.passes:
                        name = str(one.state)
                        right[name] = right.get(name, 0.0) + (int(one.output.argmax()) == label)
                        criterion[name] = criterion.get(name, 0.0) + float(one.criterion or 0.0)
                advance(len(pairs), "")
        for name, count in right.items():
            row = (*cell.row, name)
            yield Value(row, "", "mean value", criterion[name] / len(test), images=len(test))
            yield Value(row, "", "top-1 %", 100 * count / len(test), images=len(test))

    # -- networks, images, recipes
    def _network(self, run: Run) -> LoadedModel:
        key = self.source.key(run.model, run.data)
        if key not in self.loaded:
            self.loaded[key] = self.source.load(run.model, run.data)
        return self.loaded[key]

    def _base(self, run: Run) -> Enhanced:
        """The network alone; every recipe of it shares its captures."""
        key = self.source.key(run.model, run.data)
        if key not in self.base:
            loaded = self._network(run)
            self.base[key] = open_pipeline(loaded, recipe="plain", task=run.task, device=self.device).better
        return self.base[key]

    def _test(self, run: Run) -> Dataset:
        key = self._where(run)
        if key not in self.tests:
            self.tests[key] = self.source.test(self._network(run), run.data)
        return self.tests[key]

    def _enhanced(self, run: Run, seed: int) -> Enhanced:
        """The network with a run's recipe, and with what is fitted for it."""
        base = self._base(run)
        recipe = run.recipe(self._layers(run), seed)
        if run.method in LEARNED_TTA:
            return base.replace(self._fitted_views(run, seed))
        if not run.attention:
            return base.replace(recipe)
        attention = base.replace(self._attention(run, seed)).attention
        return Enhanced(base.networks, recipe, attention, base.preprocess)

    def _layers(self, run: Run) -> int:
        if run.span is None:
            return 0
        loaded = self._network(run)
        return len(inspect(loaded.model, loaded.example().to(*place(loaded.model))).layers)

    # -- fitting
    def _attention(self, run: Run, seed: int) -> Path:
        """The recipe file with the attention of a network: one for all criteria and budgets, one for each align."""
        usual = Run(run.model, run.data, 2, True, span=run.span, align=run.align)
        recipe = usual.recipe(self._layers(run))
        schedule = self.source.schedule
        return self._fit(run, seed, "attention", recipe, method="attention", schedule=schedule)

    def _fitted_views(self, run: Run, seed: int) -> Path:
        """The recipe file of a learned TTA method, fitted on the outputs of this run's own states."""
        recipe: Any = "plain"
        changes: dict[str, Any] = {}
        if run.budget > 1:
            recipe, changes = "paper", {"budget": run.budget}
            if run.attention:
                recipe = self._attention(run, seed)
        policy = f"{run.policy}:{run.views}"
        return self._fit(run, seed, f"tta-{run.method}", recipe, method=run.method, policy=policy, **changes)

    def _fit(self, run: Run, seed: int, what: str, recipe: Any, **options: Any) -> Path:
        loaded = self._network(run)
        images = self.source.fitting(loaded, run.data)
        epochs = self.epochs or (self.source.epochs if options["method"] == "attention" else None)
        about = [fingerprint(loaded.model), str(recipe), sorted(options.items()), seed, epochs, images.limit]
        about += [_stamp(images.train), None if images.validation is None else _stamp(images.validation)]
        digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        file = self.folder / "fitted" / f"{what}-{digest}.toml"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with _only_what_is_missing(self.notes):
                fit(
                    loaded,
                    images.train,
                    validation=images.validation,
                    recipe=recipe,
                    seed=seed,
                    limit=images.limit,
                    epochs=epochs,
                    cache=self.folder / "fitting",
                    out=file,
                    progress=self.progress,
                    **options,
                )
        self._note_fit(", ".join([what, *_switches(run), f"seed {seed}"]), file)
        return file

    def _note_fit(self, what: str, file: Path) -> None:
        """What was fitted, beside the plain mean of the same states or views, on the validation images."""
        figures = read(file).figures
        if {"mean", "fitted", "mean_nll", "fitted_nll"} <= set(figures):
            note = (
                f"{what}: validation accuracy {figures['mean']:.2%} by the mean and "
                f"{figures['fitted']:.2%} fitted, NLL {figures['mean_nll']:.4f} and {figures['fitted_nll']:.4f}."
            )
            self.notes += [note] if note not in self.notes else []


def _described(group: Sequence[Run], seed: int) -> str:
    """What is measured, in a few words."""
    run = group[0]
    states = ", ".join(str(r.budget) for r in group)
    parts = [f"{run.model} on {run.data}", f"{states} state{'s' * (states != '1')}", "learned" * run.learned]
    parts += [*_switches(run), f"criterion {run.criterion}" if run.criterion else ""]
    parts += [f"aggregate {run.aggregate}" if run.aggregate else ""]
    parts += [f"{run.method} of {run.views} views" if run.views > 1 else "", f"seed {seed}" if run.random else ""]
    return ", ".join(part for part in parts if part)


def _switches(run: Run) -> list[str]:
    """What is unusual about the attention that a run needs."""
    parts = [f"align {run.align}"] if run.align != "average" else []
    if run.span is not None:
        parts.append(f"layers {run.span[0]} .. L{'-1' * run.span[1]}")
    return parts


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _number(measure: str, one: _Measured) -> float | None:
    """The number of a cell. Accuracies are in per cent."""
    if measure in ACCURACIES:
        return 100 * float(one.row.metrics[ACCURACIES[measure]])
    if measure == "nll":
        return float(one.row.metrics["NLL"])
    if measure in TIMED:
        ratio = None if one.time is None else one.time.ratio.estimate
        if ratio is None or one.time is None or measure == "time":
            return ratio
        return 1e3 * ratio * one.time.seconds / _TIMED_IMAGES
    return one.row.macs / 1e9 if measure == "gmacs" else one.row.cost.estimate


def _stamp(data: Dataset) -> list[Any]:
    """Which images these are, by the names, sizes and times of their files: contents would take hours to read."""
    digest = hashlib.sha256()
    for item in data:
        digest.update(repr([item.id, [file_stamp(path) for path in item.files]]).encode())
    return [data.name, len(data), data.listing.stamp, digest.hexdigest()[:16]]


@contextmanager
def _only_what_is_missing(notes: list[str] | None = None) -> Iterator[None]:
    """Warnings about missing images pass. What a fit says is noted; advice on small runs is not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, LeftOut) or not issubclass(warning.category, UnstrideWarning):
            warnings.warn(warning.message, warning.category, stacklevel=3)
        elif notes is not None and str(warning.message) not in notes:
            notes.append(str(warning.message))
