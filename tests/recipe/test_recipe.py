"""One noun: defined, documented and checked once."""

from dataclasses import fields

import numpy as np
import pytest

import unstride
from unstride.errors import OptionError
from unstride.procedure.gates import Gate, Stage
from unstride.recipe import PRESETS, Recipe, field_table, get
from unstride.recipe.view import parse_view


def test_recipes_compare_hash_and_print_in_a_few_lines():
    assert get("paper") == get("paper") and hash(get("flip")) == hash(get("flip"))
    assert len({get(name) for name in PRESETS}) == len(PRESETS)
    for name in PRESETS:
        assert 1 <= len(str(get(name)).splitlines()) <= 6
    assert get("paper").digest() == get("paper").changed(name="mine").digest() != get("flip").digest()


def test_the_paper_is_todays_default():
    paper = get("paper")
    assert (paper.budget, paper.criterion, paper.aggregate, paper.order) == (10, "entropy", "entropy", "paper")
    assert (paper.align, paper.border, paper.space, paper.layers) == (True, "renormalise", None, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budgett": 4}, "did you mean 'budget'"),
        ({"nonsense": 4}, "a recipe has no 'nonsense'"),
        ({"budget": 0}, "at least 1"),
        ({"budget": True}, "whole number"),
        ({"budget": 2.5}, "whole number"),
        ({"layers": 2}, "contiguous range"),
        ({"layers": "2-3"}, "contiguous range"),
        ({"layers": (1, 3)}, "contiguous range"),
        ({"states": 5}, "list of states"),
        ({"align": 1}, "True, False, 'stitch'"),
        ({"criterion": "learned"}, "attention"),
        ({"temperature": 0}, "positive"),
        ({"temperature": float("nan")}, "positive"),
        ({"precision": "int8"}, "bfloat16"),
        ({"stop": 0.9}, "Confident"),
        ({"task": "juggling"}, "classification"),
        ({"stages": "plain"}, "tuple of Stage"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(changes, words):
    with pytest.raises(OptionError, match=words):
        get("paper").changed(**changes)


def test_looks_and_search_are_not_mixed():
    with pytest.raises(OptionError, match="recipe='paper'"):
        get("flip").changed(budget=4)
    with pytest.raises(OptionError, match="not both"):
        Recipe(stages=(Stage(),), budget=4)
    with pytest.raises(OptionError, match="first stage"):
        Recipe(stages=(Stage((parse_view("flip"),)),))
    with pytest.raises(OptionError, match="first stage"):
        Recipe(stages=(Stage(gate=Gate(below=0.5)),))


def test_a_recipe_prints_all_that_it_changes():
    assert "temperature 2" in str(get("plain").changed(temperature=2.0))
    assert "precision bfloat16" in str(get("flip").changed(precision="bfloat16"))
    warm = Stage((parse_view("plain"), parse_view("1.3x")), weights=(1, 0.5), temperatures=(1, 1.2))
    assert "1.3x (weight 0.5, temperature 1.2)" in str(Recipe(stages=(warm,)))


def test_fields_of_the_search_are_refused_beside_stages():
    for changes in ({"align": False}, {"border": "zeros"}, {"criterion": "random"}, {"stop": unstride.Confident(0.9)}):
        with pytest.raises(OptionError, match=next(iter(changes))):
            Recipe(stages=(Stage(),), **changes)
        with pytest.raises(OptionError, match="recipe='paper'"):
            get("flip").changed(**changes)


def test_recipes_that_are_equal_hash_alike_however_they_were_written():
    state, mirror = unstride.State(((0, 1), (1, 0))), parse_view("flip")
    one = Recipe(stages=[Stage(), Stage([mirror], [state], Gate(below=1), weights=[1])], temperature=np.float64(1.5))
    two = Recipe(
        stages=(Stage(), Stage((mirror,), (((0, 1), (1, 0)),), Gate(below=1.0), weights=(1.0,))), temperature=1.5
    )
    assert one == two and hash(one) == hash(two) and one.digest() == two.digest()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"views": (3,)}, "expected a View or its name"),
        ({"views": "flip"}, "wanted several"),
        ({"states": 3}, "near:4"),
        ({"states": ("x",)}, "near:4"),
        ({"gate": "margin"}, "Gate"),
        ({"weights": ("a",)}, "positive number"),
        ({"temperatures": (1.0, 2.0)}, "positive number"),
    ],
)
def test_what_a_stage_cannot_be_is_refused_in_words(asked, words):
    with pytest.raises(OptionError, match=words):
        Stage(**asked)


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(OptionError, match="Did you mean 'flip'"):
        get("flipp")


def test_every_field_is_documented():
    table = field_table()
    assert [name for name, _, _ in table] == [f.name for f in fields(Recipe)]
    assert all(doc for _, _, doc in table)
    assert unstride.Recipe is Recipe
