"""Carries out the runs of an exhibit: fits what must be fitted, evaluates, and puts the rows into its cells."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unstride.data import Dataset
from unstride.data.batches import Batches
from unstride.enhanced import Enhanced, enhance
from unstride.errors import ArtefactError
from unstride.evaluation import Row, evaluate
from unstride.evaluation.metrics import score
from unstride.evaluation.runner import make_tta
from unstride.models import LoadedModel
from unstride.paper import macs
from unstride.paper.catalogue import get
from unstride.paper.exhibits import LEARNED, PERCENT, Cell, Exhibit, Run, Value
from unstride.paper.places import Nowhere, Place
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.fingerprint import computation_key
from unstride.tta import TTA

COUNTED = ("gmacs", "macs")
KIND = "paper-attention"
_BATCH = 32
_FIT_BUDGET = 30


@dataclass(frozen=True)
class Result:
    """An exhibit with its numbers, ours beside the paper's."""

    exhibit: Exhibit
    values: tuple[Value, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.exhibit.name,
            "where": self.exhibit.where,
            "title": self.exhibit.title,
            "labels": list(self.exhibit.labels),
            "notes": list(self.notes),
            "values": [asdict(value) for value in self.values],
        }


def reproduce(
    name: str | Exhibit,
    place: Place = Nowhere(),  # noqa: B008 - it has no state
    out: str | Path | None = None,
    *,
    epochs: int = 20,
    seed: int = 0,
    progress: bool = False,
) -> Result:
    """`reproduce("segmentation", Root(Path("/data")), "runs/paper")`: ours beside the paper's.

    With `out`, what was fitted and evaluated is kept there, and a killed run goes on where it was. Without a place only
    what needs no data is filled in.
    """
    exhibit = get(name) if isinstance(name, str) else name
    if exhibit.make is not None:
        return Result(exhibit, tuple(exhibit.make()), exhibit.notes)
    notes = (*exhibit.notes, *((place.note,) if place.note else ()))
    if isinstance(place, Nowhere):
        if not any(cell.measure in COUNTED for cell in exhibit.cells):
            place.check(exhibit.needs)
        return Result(exhibit, tuple(_counted(cell) for cell in exhibit.cells), notes)
    place.check(exhibit.needs)
    with ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = Job(place, folder, epochs, seed, progress)
        if exhibit.shape == "scatter":
            return Result(exhibit, tuple(v for cell in exhibit.cells for v in job.every_state(cell)), notes)
        job.run([cell.run for cell in exhibit.cells])
        return Result(exhibit, tuple(job.value(cell) for cell in exhibit.cells), notes)


def _counted(cell: Cell) -> Value:
    """What a cell is without data: views x states' work; GPS runs 3 of its views."""
    ours = None
    if cell.measure in COUNTED:
        work, run = macs.work(cell.run.model), cell.run
        views = macs.GPS_VIEWS if run.method == "gps-shanmugam" else run.views
        total = views * work.ours[run.budget]
        ours = total / (1e9 if cell.measure == "gmacs" else work.plain)
    return Value(cell.row, cell.column, ours, cell.paper)


Key = tuple[str, tuple[Any, ...]]


@dataclass(eq=False)
class Job:
    """Everything that is loaded, fitted or measured once."""

    place: Place
    folder: Path
    epochs: int
    seed: int
    progress: bool
    loaded: dict[str, LoadedModel] = field(default_factory=dict)
    plain: dict[str, Enhanced] = field(default_factory=dict)
    fitted: dict[Key, Enhanced] = field(default_factory=dict)
    rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)

    # -- measuring
    def run(self, runs: Sequence[Run]) -> None:
        """Evaluate them, those that differ in nothing but the budget in one pass."""
        together: dict[tuple[Any, ...], list[Run]] = {}
        for run in dict.fromkeys(runs):
            alone = run.budget if run.method in LEARNED else None  # its weights were fitted inside this budget
            together.setdefault((self._where(run), self._how(run), self._tta(run), alone), []).append(run)
        for group in sorted(together.values(), key=lambda g: -g[0].views):  # a run with views gives those without, too
            if any(self._row_key(run) not in self.rows for run in group):
                self._evaluate(group)

    def row(self, run: Run) -> Row:
        """What `run` measured."""
        return self.rows[self._row_key(run)]

    def value(self, cell: Cell) -> Value:
        row = self.row(cell.run)
        if cell.measure in PERCENT:
            main = cell.measure == ("top1" if row.task == "classification" else "miou")
            low, high = (100 * row.gain[name] for name in ("low", "high"))
            found = 100 * float(row.metrics[cell.measure])
            return Value(
                cell.row, cell.column, found, cell.paper, low if main else None, high if main else None, row.images
            )
        ours = {"gmacs": row.macs * row.plain_macs / 1e9, "macs": row.macs, "latency": row.latency}[cell.measure]
        return Value(cell.row, cell.column, ours, cell.paper, images=row.images)

    def _evaluate(self, group: list[Run]) -> None:
        run = group[0]
        loaded, better = self._loaded(run), self._enhanced(run)
        tta: dict[str, Any] = {}
        if run.method in LEARNED:
            tta = {"tta": str(self._fitted_tta(run))}
        elif run.views > 1:
            tta = {"tta": "flip" if run.policy == "flip" else f"{run.policy}:{run.views}", "tta_method": run.method}
        rows = evaluate(
            replace(loaded, model=better),
            self.place.test(loaded, run.data),
            sorted({r.budget for r in group}),
            out=self.folder / "runs",
            seed=self.seed,
            progress=self.progress,
            **tta,
        )
        for row in rows:
            one = run if row.views > 1 else replace(run, views=1, policy="", method="")
            self.rows[self._row_key(replace(one, budget=row.budget))] = row

    def _row_key(self, run: Run) -> tuple[Any, ...]:
        how = self._how(run) if run.budget > 1 or run.method in LEARNED else ()  # without states nothing else counts
        return (self._where(run), how, self._tta(run), run.budget)

    def _where(self, run: Run) -> str:
        return f"{self.place.key(run.model, run.data)} {run.data if run.data == 'imagenet-train' else ''}"

    def _how(self, run: Run) -> tuple[Any, ...]:
        return (*run.options.items(), run.span)

    def _tta(self, run: Run) -> tuple[Any, ...]:
        return (run.views, run.policy, run.method) if run.views > 1 else ()

    # -- one point per state
    def every_state(self, cell: Cell) -> list[Value]:
        """Criterion and accuracy of each state by itself, over the test images."""
        run = cell.run
        loaded, better = self._loaded(run), self._enhanced(run)
        test = self.place.test(loaded, run.data)
        plan = better.prepare(next(iter(Batches(test, _BATCH)))[0][:1])
        states = list(plan.found.space.states(better.options(plan).layers))[: run.budget]
        looking = better.with_options(states=tuple(states))
        right = torch.zeros(len(states))
        criterion = torch.zeros(len(states))
        count = 0
        for images, labels in Batches(test, _BATCH):
            for prediction, label in zip(looking.explain(images), labels.tolist(), strict=True):
                found = {visited.state: visited for visited in prediction.states}
                ours = [found[state] for state in states]
                scores = score(torch.stack([visited.logits for visited in ours]), [label] * len(ours))
                right += torch.from_numpy(scores.top1).float()
                criterion += torch.tensor([visited.criterion for visited in ours])
                count += 1
        return [
            Value((*cell.row, str(state)), column, number / count * scale, images=count)
            for k, state in enumerate(states)
            for column, number, scale in (("criterion", float(criterion[k]), 1), ("top-1 %", float(right[k]), 100))
        ]

    # -- models
    def _loaded(self, run: Run) -> LoadedModel:
        key = self.place.key(run.model, run.data)
        if key not in self.loaded:
            self.loaded[key] = self.place.load(run.model, run.data)
        return self.loaded[key]

    def _enhanced(self, run: Run) -> Enhanced:
        """The model with a run's options, and with its attention fitted; captures are shared."""
        loaded, where = self._loaded(run), self.place.key(run.model, run.data)
        if where not in self.plain:
            test = self.place.test(loaded, run.data)
            example = next(iter(Batches(test, _BATCH)))[0][:1]
            self.plain[where] = enhance(loaded.model, example, task=run.task)
        better = self.plain[where]
        options: dict[str, Any] = {**run.options, "seed": self.seed}
        if run.span is not None:
            count = len(better.plan.found.layers)
            options["layers"] = tuple(range(run.span[0], count + 1 - run.span[1])) or (1,)
        if run.options["aggregate"] != "attention":
            return better.with_options(**options)
        # One attention for all criteria: the paper does not say whether it trained one for each.
        key = (where, (run.align, run.span))
        if key not in self.fitted:
            self.fitted[key] = self._fit(run, better.with_options(**{**options, "criterion": "learned"}), key)
        return self.fitted[key].with_options(**options)

    def _fit(self, run: Run, better: Enhanced, key: Key) -> Enhanced:
        from unstride.learning import fitting

        better.attention = None  # with_options hands on the one of other options
        plan = better.plan
        better.options(plan)
        assert better.attention is not None
        loaded = self._loaded(run)
        train, validation = self.place.fitting(loaded, run.data)
        about = [key, *self._inputs(better, train, validation), self.place.lr]
        file = self._file("attention", about)
        try:
            tensors, _ = read_artefact(file, KIND)
            better.attention.load_state_dict(tensors)
            return better
        except ArtefactError:
            pass
        fitting.fit(
            better,
            Batches(train, _BATCH),
            Batches(validation, _BATCH),
            familiar=False,  # training images as they are, as the paper has it
            budget=_FIT_BUDGET,
            epochs=self.epochs,
            seed=self.seed,
            cache_dir=file.with_suffix(""),
            show=self.progress,
            **({} if self.place.lr is None else {"lr": self.place.lr}),
        )
        write_artefact(file, dict(better.attention.state_dict()), {"kind": KIND, "about": repr(about)})
        return better

    def _fitted_tta(self, run: Run) -> Path:
        """The file of a TTA whose weights were fitted on the logits of this run's own model and budget."""
        loaded, better = self._loaded(run), self._enhanced(run)
        train, validation = self.place.fitting(loaded, run.data)
        about = [self._row_key(run), *self._inputs(better, train, validation)]
        file = self._file("tta", about)
        if file.is_file():
            return file
        ready, wide = make_tta(f"{run.policy}:{run.views}", "mean", better, loaded.preprocess, self.seed)
        inner = better.with_options(budget=run.budget)
        tta = TTA(
            inner,
            run.policy,
            run.method,
            run.views,
            preprocess=loaded.preprocess,
            crop=ready.crop,
            seed=self.seed,
        )
        seen = wide or loaded.preprocess
        tta.fit(
            Batches(train, _BATCH, preprocess=seen),
            Batches(validation, _BATCH, preprocess=seen),
            cache_dir=self.folder / "logits" / _digest([self._where(run), self._how(run), run.budget, about]),
            seed=self.seed,
            progress=self.progress,
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        return tta.save(file)

    def _inputs(self, better: Enhanced, train: Dataset, validation: Dataset) -> list[object]:
        """What a fit depends on, whatever its model and data are called."""
        model = computation_key(better.model)
        return [model, train.fingerprint(), validation.fingerprint(), self.epochs, self.seed]

    def _file(self, what: str, about: object) -> Path:
        folder = self.folder / what
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{_digest(about)}.safetensors"


def _digest(about: object) -> str:
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]
