"""A batch of images -> the logits of every asked setting, from one search per view, and what each cost.

A setting is (views, budget): so many views of the image, so many states in each. (1, 1) is the network as it came.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.recipe import PRESETS, policies
from unstride.recipe.view import parse_view
from unstride.tta import TTA, Policy, View
from unstride.tta.methods import Merger
from unstride.views import transforms
from unstride.views.images import Preprocess
from unstride.views.source import Source

_PLANS = 8  # captures kept: images of many sizes would otherwise fill the memory with them


class Setting(NamedTuple):
    views: int
    budget: int

    @property
    def plain(self) -> bool:
        return self == (1, 1)


class Outcome(NamedTuple):
    """Logits (B, K) or (B, K, h, w), and each image's cost as a multiple of a plain forward."""

    logits: Tensor
    macs: list[float]


@dataclass(frozen=True, eq=False)
class Runner:
    """Evaluates all `settings` of a batch; `wide` images have the margin that cropping views need."""

    better: Enhanced
    budgets: tuple[int, ...]
    tta: TTA | None = None

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Without views first; the plain network is the first of all. Stages of looks are one setting of their own."""
        if self.better.recipe.stages:
            return Setting(1, 1), self.looks
        views = [1] if self.tta is None else [1, len(self.tta.used)]
        return tuple(Setting(v, b) for v in dict.fromkeys(views) for b in self.budgets)

    @property
    def looks(self) -> Setting:
        """The stages of a recipe: as many looks as an image takes at most, in the states of each."""
        return Setting(max(2, sum(len(s.views) for s in self.better.recipe.stages)), 1)

    def __call__(
        self, images: Tensor, wide: Tensor | None = None, source: Source | None = None
    ) -> dict[Setting, Outcome]:
        self._forget()
        if self.better.recipe.stages:
            plain = Outcome(self.better.plain(images), [1.0] * len(images))
            return {Setting(1, 1): plain, self.looks: Outcome(*self.better.looks(source or images))}
        base = self._search(images)
        found = {Setting(1, b): base[b] for b in self.budgets}
        if self.tta is not None and len(self.tta.used) > 1:
            merged = self._views(images, images if wide is None else wide, base)
            found |= {Setting(len(self.tta.used), b): merged[b] for b in self.budgets}
        return found

    def plain_macs(self, images: Tensor) -> int:
        """Of one image of this size."""
        return self.better.fitted(images[:1])[1].plain_macs

    def seconds(self, images: Tensor, wide: Tensor | None, setting: Setting, source: Source | None = None) -> float:
        """Wall clock of one setting by itself. Call it on a batch that has been run: nothing is left to set up."""
        if self.better.recipe.stages and not setting.plain:
            _settle(images)
            start = time.perf_counter()
            self.better.looks(source or images)
            _settle(images)
            return time.perf_counter() - start
        better = self.better.with_options(budget=setting.budget) if setting.budget > 1 else self.better
        seen = [images]
        if setting.views > 1:
            assert self.tta is not None
            seen = [self.tta.see(images if wide is None else wide, view) for view in self.tta.used]
        _settle(images)
        start = time.perf_counter()
        for x in seen:
            if setting.budget == 1:
                self.better.plain(x)
            else:
                better(x)
        _settle(images)
        return time.perf_counter() - start

    def _search(self, images: Tensor) -> dict[int, Outcome]:
        found = {1: Outcome(self.better.plain(images), [1.0] * len(images))}
        more = [b for b in self.budgets if b > 1]
        if more:
            found |= {b: Outcome(*one) for b, one in self.better.costs(images, more).items()}
        return found

    def _views(self, images: Tensor, wide: Tensor, base: dict[int, Outcome]) -> dict[int, Outcome]:
        assert self.tta is not None
        mergers = {b: Merger(self.tta.method, self.tta.budget, self.tta.weights) for b in self.budgets}
        macs = {b: [0.0] * len(images) for b in self.budgets}
        size = (int(images.shape[-2]), int(images.shape[-1]))
        whole = self.plain_macs(images)
        for index, view in enumerate(self.tta.views):
            if view not in self.tta.used:
                continue
            seen = self.tta.see(wide, view)
            same = seen.shape == images.shape and torch.equal(seen, images)
            found = base if same else self._search(seen)
            scale = self.plain_macs(seen) / whole
            for b in self.budgets:
                logits, valid = found[b].logits, None
                if self.tta.task == "segmentation":
                    target = (int(base[b].logits.shape[-2]), int(base[b].logits.shape[-1]))
                    logits, valid = transforms.undo(view, logits, size, target, self.tta.divisor)
                mergers[b].add(index, logits, valid)
                macs[b] = [m + scale * one for m, one in zip(macs[b], found[b].macs, strict=True)]
        return {b: Outcome(mergers[b].result(), macs[b]) for b in self.budgets}

    def _forget(self) -> None:
        while len(self.better.plans) > _PLANS:
            del self.better.plans[next(iter(self.better.plans))]


def _settle(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)


def check_budgets(budgets: Sequence[int]) -> tuple[int, ...]:
    """Sorted, each once, and 1 among them: a number without the plain network's beside it says nothing."""
    many = isinstance(budgets, Sequence) and not isinstance(budgets, str | bytes) and len(budgets) > 0
    if not many or not all(isinstance(b, int) and not isinstance(b, bool) and b >= 1 for b in budgets):
        raise OptionError(f"budgets: got {budgets!r}, wanted whole numbers of states, such as (1, 4, 10)")
    return tuple(sorted({1, *budgets}))


def own_budgets(better: Enhanced, curve: Sequence[int]) -> Sequence[int]:
    """What is measured where no budgets are named: the curve of the paper's presets, or just what the recipe does."""
    name, budget = better.recipe.name, better.options(better.plan).budget
    preset = name.startswith("paper") and name in PRESETS and PRESETS[name](better.task).budget == budget
    return curve if preset else (budget,)


def make_tta(
    name: str, method: str, better: Enhanced, preprocess: Preprocess, seed: int
) -> tuple[TTA, Preprocess | None]:
    """`flip`, `POLICY:VIEWS` (standard:15), or the file of a fitted TTA; and the preprocessing of wide images."""
    task = better.task
    wide = None
    if task == "classification" and isinstance(preprocess.resize, int) and preprocess.crop is not None:
        crop = preprocess.size
        assert crop is not None
        if min(crop) <= preprocess.resize and max(crop) <= preprocess.resize and crop != (preprocess.resize,) * 2:
            wide = _replace_crop(preprocess, preprocess.resize)
    if name.endswith(".safetensors"):
        tta = TTA.load(name, better.model)
        if tta.task != task:
            raise OptionError(f"{name} is a TTA for {tta.task}, this is {task}")
        return tta, wide if tta.crop is not None else None
    if name == "flip":
        policy, count = Policy("flip", (parse_view("Identity"), parse_view("FlipLR"))), "2"
    else:
        known, _, count = name.rpartition(":")
        if not known or not count.isdecimal() or len(count) > 9:
            raise OptionError(
                f"tta: got {name[:60]!r}, wanted flip, POLICY:VIEWS such as standard:15 (policies: "
                f"{', '.join(policies.BUILT_IN)}, or a .toml or .json file), or the .safetensors file of a fitted TTA"
            )
        policy = policies.get(known, seed)
    crop = preprocess.size if wide is not None else None
    tta = TTA(better.model, policy, method, int(count), preprocess=preprocess, task=task, crop=crop, seed=seed)
    if tta.method.learned:
        raise OptionError(f"tta method {method!r} must be fitted first; here use mean or max, or give the fitted file")
    return tta, wide


def _replace_crop(preprocess: Preprocess, side: int) -> Preprocess:
    return Preprocess.from_json({**preprocess.to_json(), "crop": side})


def describe(tta: TTA | None) -> dict[str, object] | None:
    """What of a TTA decides its numbers."""
    if tta is None:
        return None
    weights = None if tta.weights is None else tta.weights.tolist()
    kept: Sequence[View] = tta.views
    return {
        "policy": tta.policy.name,
        "method": tta.method.name,
        "space": tta.method.space,
        "views": [str(view) for view in kept],
        "weights": weights if tta.method.learned else None,
        "crop": None if tta.crop is None else list(tta.crop),
    }
