"""One noun: defined, documented and checked once."""

from dataclasses import fields

import pytest

import unstride
from unstride.errors import OptionError
from unstride.procedure.gates import Gate, Stage
from unstride.recipe import PRESETS, Recipe, field_table, get
from unstride.views.policies import parse_view


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
        Recipe(stages=(Stage((parse_view("mirror"),)),))
    with pytest.raises(OptionError, match="first stage"):
        Recipe(stages=(Stage(gate=Gate(below=0.5)),))


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(OptionError, match="Did you mean 'flip'"):
        get("flipp")


def test_every_field_is_documented():
    table = field_table()
    assert [name for name, _, _ in table] == [f.name for f in fields(Recipe)]
    assert all(doc for _, _, doc in table)
    assert unstride.Recipe is Recipe
