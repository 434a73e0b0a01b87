"""Tuning for several labels, numbers, depth and embeddings: `unstride.tune(model, data, task="depth", cost=2)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.tuning.candidates import usual
from unstride.tuning.certificate import crossed
from unstride.tuning.choose import FOLDS, Choice, fold_of, laid
from unstride.tuning.choose_looks import Heard, choose_looks
from unstride.tuning.gather import Gathered
from unstride.tuning.judges import judge_of
from unstride.tuning.simulate import simulate
from unstride.tuning.timing import with_times
from unstride.tuning.tuned import Line, Tuned, settled
from unstride.views.source import Source

Answer = tuple[str, Tensor, Tensor, str]  # a row of the table: its name, answers, costs, and looks in words


class Judged:
    """A pool of a task without one class, and all that is chosen and proved from it."""

    def __init__(
        self,
        found: Gathered,
        better: Enhanced,
        seed: int,
        beside: Mapping[str, tuple[Tensor, Tensor]],
        source: Source | None = None,
    ) -> None:
        self.found, self.pool, self.better, self.seed, self.source = found, found.pool, better, seed, source
        self.beside, self.judge = beside, judge_of(found.pool, seed)
        self.whole = Heard(self.pool, found.units)
        self.folds = fold_of(len(self.pool), FOLDS, seed + 1)
        trains = [(self.folds != k).nonzero()[:, 0] for k in range(FOLDS)]
        self.parts = [Heard(self.pool.rows(train), found.units) for train in trains]

    def tuned(self, ceilings: Sequence[float], cost: float, guard: float | None) -> Tuned:
        run: dict[str, Recipe] = {}
        rows = [self._row("plain", self.pool.plain, torch.ones(len(self.pool)))]
        for name, units in usual(list(self.found.units)).items():
            done = simulate(self.pool, laid(units))
            rows.append(self._row(name, done.logits, done.costs, ", ".join(map(str, units))))
            run[name] = get("plain", self.pool.task).changed(stages=laid(units))
        rows += [self._row(name, *found) for name, found in self.beside.items()]
        frontier: dict[float, Recipe] = {}
        for ceiling in ceilings:
            choice = choose_looks(self.whole, ceiling, self.seed)
            name = f"tuned for {ceiling:g}"
            frontier[ceiling] = self._recipe(choice, name)
            run |= {name: frontier[ceiling]} if ceiling <= cost else {}
            rows.append((name, *self._crossed(ceiling), str(choice)))
        lines = self._lines(rows, len(ceilings))
        recipe, proof, words = settled(lines, frontier, cost, guard)
        spent = simulate(self.pool, recipe.stages).cost
        ours = self.better.with_options(recipe=recipe)
        notes = tuple(f"left out: {why}" for why in self.found.left_out)
        if self.source is not None:
            lines, time = with_times(lines, run, self.better, self.source)
            notes += (time,)
        return Tuned(
            recipe, cost, spent, frontier, tuple(lines), proof, words, ours, self.pool, notes,
            metric=self.judge.metric, beside=self.judge.beside,
        )  # fmt: skip

    def _row(self, name: str, outputs: Tensor, costs: Tensor, what: str = "") -> Answer:
        return name, self.judge.answers(outputs), costs, what

    def _crossed(self, ceiling: float) -> tuple[Tensor, Tensor]:
        """Answers and costs of each image by a recipe that was chosen without it."""
        answers, costs = self.judge.answers(self.pool.plain).clone(), torch.ones(len(self.pool), dtype=torch.float64)
        for k, heard in enumerate(self.parts):
            held = self.folds == k
            done = simulate(self.pool, heard.stages(choose_looks(heard, ceiling, self.seed)))
            answers[held], costs[held] = self.judge.answers(done.logits)[held], done.costs[held]
        return answers, costs

    def _lines(self, rows: Sequence[Answer], chosen: int) -> list[Line]:
        """The last of them were chosen."""
        scores = self.judge.scores([answers for _, answers, _, _ in rows])
        proofs = [s.certificate for s in scores[:-chosen]]
        proofs += [crossed(s.certificate, FOLDS) for s in scores[-chosen:]]
        return [
            Line(name, s.value, s.beside, proof, float(costs.mean()), what)
            for (name, _, costs, what), s, proof in zip(rows, scores, proofs, strict=True)
        ]

    def _recipe(self, choice: Choice, name: str) -> Recipe:
        stages = self.whole.stages(choice)
        temperature = self.judge.temperature(simulate(self.pool, stages).logits)
        return Recipe(name, self.pool.task, stages, temperature=temperature)
