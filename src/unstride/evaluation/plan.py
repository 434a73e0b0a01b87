"""What an evaluation measures: each network alone, the baseline, and the recipes; nothing twice.

plan = plan_of(pipeline, more=["paper"], against=None, budgets=None, changes={})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstride.errors import OptionError
from unstride.evaluation.measuring import Variant
from unstride.models import load
from unstride.pipeline import Pipeline, is_spec, open_pipeline
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Stage


@dataclass(frozen=True, eq=False)
class Plan:
    """What is measured, in the order of the rows.

    Attributes:
        variants: the first network alone is the first; its forward pass costs 1.0.
        baseline: name of the row that gains are over.
        stored: the figures of recipe files.
    """

    variants: tuple[Variant, ...]
    baseline: str
    stored: tuple[Mapping[str, Any], ...] = ()

    @property
    def recipes(self) -> dict[str, Variant]:
        """The variant of each row, by the row's name."""
        return {name: variant for variant in self.variants for name in variant.names()}


def plan_of(
    pipeline: Pipeline,
    more: Sequence[str | Path | Recipe],
    against: str | Path | Recipe | None,
    budgets: Sequence[int] | None,
    changes: Mapping[str, Any],
) -> Plan:
    """Each network alone, the baseline, and the recipes; nothing twice."""
    alone: list[Variant] = []
    for name in pipeline.networks:
        alone, _ = _with(alone, network_alone(pipeline, name))
    variants, baseline = list(alone), alone[0]
    if against is not None:
        variants, baseline = _with(variants, _baseline(pipeline, against, alone))
    pipelines = [pipeline, *(pipeline.with_recipe(recipe, **changes) for recipe in more)]
    for own in pipelines:
        name = recipe_name(own)
        for variant in _at_budgets(Variant(name, own), budgets):
            variants, _ = _with(variants, variant)
    stored = tuple(own.stored.figures for own in pipelines if own.stored is not None)
    return Plan(tuple(variants), baseline.names()[0], stored)


def network_alone(pipeline: Pipeline, name: str) -> Variant:
    """One network of a pipeline, without a recipe."""
    network = "base" if name == next(iter(pipeline.networks)) else name
    recipe = Recipe((Stage(network=network),), pipeline.task, name="plain")
    return Variant(pipeline.networks[name].spec, pipeline.with_recipe(recipe))


def recipe_name(pipeline: Pipeline) -> str:
    """What a recipe is called in a table: its name, or that of its file."""
    path = pipeline.stored.path if pipeline.stored is not None else None
    return pipeline.better.recipe.name or (path.stem if path is not None else "recipe")


def _with(variants: list[Variant], variant: Variant) -> tuple[list[Variant], Variant]:
    """With one more, unless it is among them; and which of them it is. A name that is taken gets a number."""
    digest = variant.pipeline.better.recipe.digest()
    for other in variants:
        same = other.pipeline.better.recipe.digest() == digest and other.budgets == variant.budgets
        if same and _same_networks(other, variant):
            return variants, other
    taken = {name for other in variants for name in (other.name, *other.names())}
    names = [variant.name, *(f"{variant.name} ({k})" for k in range(2, len(taken) + 3))]
    named = Variant(next(name for name in names if name not in taken), variant.pipeline, variant.budgets)
    return [*variants, named], named


def _same_networks(one: Variant, other: Variant) -> bool:
    first, second = one.pipeline.better, other.pipeline.better
    wanted = {name: first.networks[name].model for name in first.recipe.networks}
    return all(name in second.networks and second.networks[name].model is m for name, m in wanted.items())


def _at_budgets(variant: Variant, budgets: Sequence[int] | None) -> list[Variant]:
    """A recipe that is one Search gives all budgets in one run; of others each is a run."""
    if budgets is None:
        return [variant]
    if not isinstance(budgets, Sequence):
        raise OptionError(f"budgets: got {budgets!r:.60}, expected whole numbers from 1 on, such as [1, 4, 10].")
    wanted = tuple(sorted(set(budgets)))
    recipe, own = variant.pipeline.better.recipe, variant.pipeline
    if not wanted or any(type(b) is not int or b < 1 for b in wanted):
        raise OptionError(f"budgets: got {list(budgets)!r}, expected whole numbers from 1 on, such as [1, 4, 10].")
    if recipe.search is None:
        raise OptionError(
            f"budgets: the recipe {variant.name!r} has no single Search. Use recipe='paper', for example."
        )
    if len(recipe.stages) == 1:
        return [Variant(variant.name, own.with_recipe(budget=max(wanted)), wanted)]
    names = [f"{variant.name}, {b} state{'s' * (b > 1)}" for b in wanted]
    return [Variant(name, own.with_recipe(budget=b)) for name, b in zip(names, wanted, strict=True)]


def _baseline(pipeline: Pipeline, against: str | Path | Recipe, alone: Sequence[Variant]) -> Variant:
    """A network of the pipeline by name or SPEC, another network by SPEC, or a recipe."""
    for name, variant in zip(pipeline.networks, alone, strict=True):
        if against in (name, variant.name):
            return variant
    if isinstance(against, str) and is_spec(against) and not against.endswith((".toml", ".json")):
        networks = {**pipeline.networks, "against": load(against)}
        return network_alone(open_pipeline(networks, recipe="plain", task=pipeline.task), "against")
    other = pipeline.with_recipe(against)
    return Variant(recipe_name(other), other)
