"""Tuning for segmentation: `unstride.tune(model, data, task="segmentation", objective="miou", cost=2)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.evaluation.metrics import Integers, compare_segmentation, summarise_areas
from unstride.procedure.gates import tile_gate
from unstride.recipe.recipe import Recipe
from unstride.storage.distributed import world
from unstride.tuning.candidates import candidates, usual
from unstride.tuning.certificate import Measured, crossed
from unstride.tuning.choose import fold_of, laid
from unstride.tuning.choose_pixels import FOLDS, OBJECTIVES, PixelChooser, Places, areas, losses, stages_of
from unstride.tuning.gather import PAPER, kept_in, looks_of, usable
from unstride.tuning.parts import each
from unstride.tuning.pixels import Pixels, Scene, answer_pixels, gather_pixels, simulate_pixels
from unstride.tuning.timing import estimate, with_times
from unstride.tuning.tuned import Line, Tuned, settled
from unstride.views.source import Source


def tune_scenes(
    better: Enhanced, given: Sequence[Scene], ceilings: Sequence[float], cost: float, pool: str, objective: str,
    guard: float | None, cache_dir: str | Path | None, seed: int, progress: bool, paper: bool = False,
) -> Tuned:  # fmt: skip
    """The best recipe under the ceiling `cost`, and its proof by bootstrap over images."""
    if objective not in OBJECTIVES:
        raise OptionError(f"objective: got {objective!r}, wanted one of {', '.join(OBJECTIVES)} in segmentation")
    units, work, left_out = usable(better, given[0].source, candidates(given[0].source, pool, "segmentation"))
    gate = tile_gate(given[0].source.size)
    with ExitStack() as stack:
        us = stack.enter_context(world())
        folder = stack.enter_context(kept_in(cache_dir, us))
        pixels = each(len(given))

        def told(images: int) -> str:
            kept = 2 * better.plan.classes * min(pixels, given[0].mask.numel())
            return estimate(better, given[0].source, kept, looks_of(units, work), work, images, paper)

        found = gather_pixels(better, given, units, gate, pixels, folder, us, progress, told)
        beside = {}
        if paper:
            search = better.with_options(recipe="paper").with_options(budget=PAPER)
            label = "the paper's search" if progress else ""
            beside[f"paper, {PAPER} states"] = answer_pixels(search, given, pixels, folder, us, label)
    notes = [f"left out: {why}" for why in left_out]
    most = max(len(s.pixels) for s in found.said)
    if any(s.stands > 1 for s in found.said):
        notes.append(f"figures are of {most:,} labelled pixels of each image at the most, always the same")
    return Mapped(found, better, objective, seed, beside, given[0].source).tuned(ceilings, cost, guard, notes)


class Mapped:
    """A pool of pixels, and all that is chosen and proved from it."""

    def __init__(
        self, pool: Pixels, better: Enhanced, objective: str, seed: int,
        beside: Mapping[str, tuple[Tensor, Tensor]], source: Source,
    ) -> None:  # fmt: skip
        self.pool, self.better, self.objective, self.seed = pool, better, objective, seed
        self.beside, self.source = beside, source
        self.folds = fold_of(len(pool), FOLDS, seed + 1)
        self.plain = areas(pool, pool.p[0])
        self.right = pool.p[0].argmax(1) == pool.labels

    def tuned(self, ceilings: Sequence[float], cost: float, guard: float | None, notes: Sequence[str]) -> Tuned:
        pool = self.pool
        lines = [self.line("plain", pool.p[0], torch.ones(len(pool)))]
        run: dict[str, Recipe] = {}
        for name, units in usual(list(pool.units)).items():
            seen = simulate_pixels(pool, [pool.units.index(u) for u in units])
            lines.append(self.line(name, seen.p, seen.costs, ", ".join(map(str, units))))
            run[name] = Recipe(name, "segmentation", laid(units), "probabilities")
        lines += [self.line(name, *found) for name, found in self.beside.items()]
        frontier: dict[float, Recipe] = {}
        chosen: dict[float, Places] = {}
        chooser = PixelChooser(pool, self.objective, self.seed)
        for ceiling, told in self.crossed(ceilings).items():
            places = chosen[ceiling] = chooser.choice(ceiling)
            name = f"tuned for {ceiling:g}"
            frontier[ceiling] = Recipe(name, "segmentation", stages_of(places, pool), "probabilities")
            line = self.line(name, *told, places.told(pool))
            lines.append(replace(line, certificate=crossed(line.certificate, FOLDS)))
            run |= {name: frontier[ceiling]} if ceiling <= cost else {}
        recipe, proof, words = settled(lines, frontier, cost, guard, self.objective)
        places = Places() if recipe.plain else chosen[cost]
        spent = float(simulate_pixels(pool, places.units, places.below).costs.mean())
        ours = self.better.with_options(recipe=recipe)
        lines, time = with_times(lines, run, self.better, self.source)
        return Tuned(
            recipe, cost, spent, frontier, tuple(lines), proof, words, ours, pool, (*notes, time), metric="mIoU %"
        )  # fmt: skip

    def crossed(self, ceilings: Sequence[float]) -> dict[float, tuple[Tensor, Tensor]]:
        """At each ceiling probabilities (M, K) and costs (N,) of each image by a recipe chosen without it."""
        plain, each = self.pool.p[0], torch.ones(len(self.pool), dtype=torch.float64)
        out = {ceiling: (torch.empty_like(plain), each.clone()) for ceiling in ceilings}
        for k in range(FOLDS):
            train, held = ((self.folds != k).nonzero()[:, 0], (self.folds == k).nonzero()[:, 0])
            chooser = PixelChooser(self.pool.rows(train.tolist()), self.objective, self.seed)
            own = self.pool.rows(held.tolist())
            for ceiling, (p, costs) in out.items():
                places = chooser.choice(ceiling)
                seen = simulate_pixels(own, places.units, places.below)
                p[(self.folds == k)[self.pool.image]], costs[held] = seen.p, seen.costs
        return out

    def line(self, name: str, p: Tensor, costs: Tensor, what: str = "") -> Line:
        now: Integers = areas(self.pool, p)
        gain = compare_segmentation(self.plain, now)
        right, stands = p.argmax(1) == self.pool.labels, torch.tensor([s.stands for s in self.pool.said])
        each = stands[self.pool.image]
        turned = [round(float(each[a & ~b].sum())) for a, b in ((right, self.right), (self.right, right))]
        proof = Measured(len(self.pool), turned[0], turned[1], gain.low, gain.high, gain.gain)
        nll = float(losses(self.pool, p, "likelihood").mean())
        return Line(name, summarise_areas(now.sum(0)).miou, nll, proof, float(costs.mean()), what)
