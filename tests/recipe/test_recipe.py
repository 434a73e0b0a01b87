"""One noun: defined, documented and checked once."""

from dataclasses import fields

import numpy as np
import pytest

import unstride
from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.recipe.presets import PRESETS, get
from unstride.recipe.recipe import Recipe, field_table
from unstride.recipe.stage import Gate, Near, Search, Stage


def test_recipes_compare_hash_and_print_in_a_few_lines():
    assert get("paper") == get("paper") and hash(get("flip")) == hash(get("flip"))
    assert len({get(name) for name in PRESETS}) == len(PRESETS)
    for name in PRESETS:
        assert 1 <= len(str(get(name)).splitlines()) <= 6
    assert get("paper").digest() == get("paper").changed(name="mine").digest() != get("flip").digest()


def test_the_paper_as_printed():
    (stage,) = get("paper").stages
    assert stage == Stage(states=Search(10, criterion="entropy"), aggregate="entropy")
    assert (stage.at_border, stage.align, stage.pinned, stage.states.stop) == ("zeros", "average", False, "exact")
    (near,) = (Stage(states=Near(4)),)
    assert (near.at_border, near.pinned) == ("renormalise", True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budgett": 4}, "Did you mean 'budget'"),
        ({"nonsense": 4}, "this recipe has no 'nonsense'"),
        ({"budget": 0}, "at least 1"),
        ({"budget": True}, "whole number"),
        ({"budget": 2.5}, "whole number"),
        ({"layers": 2}, "contiguous range"),
        ({"layers": "2-3"}, "contiguous range"),
        ({"layers": (1, 3)}, "contiguous range"),
        ({"align": 1}, "'average', 'nearest'"),
        ({"criterion": "learned"}, "aggregate='learned'"),
        ({"temperature": 0}, "1e-6"),
        ({"temperature": 1e-308}, "1e-6"),
        ({"temperature": float("nan")}, "1e-6"),
        ({"precision": "int8"}, "bfloat16"),
        ({"until": 0.9}, "Gate"),
        ({"until": Gate(share=0.5)}, "Gate"),
        ({"task": "juggling"}, "classification"),
        ({"stages": "plain"}, "list of Stage"),
        ({"stages": (3,)}, "list of Stage"),
        ({"name": 3}, "text"),
    ],
)
def test_a_wrong_change_is_an_error_in_words(changes, words):
    with pytest.raises(OptionError, match=words):
        get("paper").changed(**changes)


def test_a_change_must_have_one_owner():
    with pytest.raises(OptionError, match="recipe='paper'"):
        get("flip").changed(budget=4)
    both = Recipe((Stage(states=Search(4)), Stage(("flip",), Search(8))))
    with pytest.raises(OptionError, match="in 2 stages"):
        both.changed(budget=6)
    assert get("paper").changed(budget=4).search.states.budget == 4
    assert get("default").changed(below=0.3).stages[1].gate.below == 0.3
    assert Recipe((Stage(states=Near(4)),)).changed(count=2).stages[0].states == Near(2)


def test_the_first_stage_is_for_every_image():
    with pytest.raises(OptionError, match="first stage"):
        Recipe((Stage(gate=Gate(below=0.5)),))
    with pytest.raises(OptionError, match="no answer to replace"):
        Recipe((Stage(join="replace"),))
    with pytest.raises(OptionError, match="first view must be 'plain'"):
        Recipe((Stage(("flip",)),), "segmentation")


@pytest.mark.parametrize("task", ["embedding", "regression", "dense"])
def test_networks_without_classes_are_only_averaged(task):
    assert Recipe((Stage(), Stage(network="large")), task).networks == ("base", "large")
    with pytest.raises(OptionError, match="averaged: leave join out"):
        Recipe((Stage(), Stage(network="large", join="replace")), task)


def test_a_stage_without_a_gate_says_that_it_is_for_the_images_of_the_stage_before():
    stages = (Stage(), Stage(("flip",), gate=Gate(below=0.5)), Stage(("1.3x",)))
    assert str(Recipe(stages)).splitlines()[1:4] == [
        "  1. plain",
        "  2. where margin below 0.5: flip",
        "  3. the same images: 1.3x",
    ]


def test_a_recipe_prints_all_that_it_changes():
    assert "temperature 2" in str(get("plain").changed(temperature=2.0))
    assert "bfloat16" in str(get("flip").changed(precision="bfloat16"))
    stage = Stage(("plain", "1.3x"), weights=(1, 0.5), temperatures=(1, 1.2))
    assert "1.3x (weight 0.5, temperature 1.2)" in str(Recipe((stage,)))
    cascade = Recipe((Stage(), Stage(network="large", gate=Gate(below=0.6), join="replace")))
    assert "where margin below 0.6: large, replaces the answer so far" in str(cascade)


@pytest.mark.parametrize(
    "fields",
    [{"align": "none"}, {"border": "zeros"}, {"aggregate": "entropy"}, {"space": "logits"}, {"edges": "pinned"}],
)
def test_how_states_are_aggregated_needs_states(fields):
    with pytest.raises(OptionError, match=f"{next(iter(fields))} says how states are aggregated"):
        Stage(**fields)


def test_recipes_that_are_equal_hash_alike_however_they_were_written():
    state = State(((0, 1), (1, 0)))
    one = Recipe([Stage(), Stage(["flip"], [state], gate=Gate(below=1), weights=[1])], temperature=np.float64(1.5))
    other = Stage(("flip",), (((0, 1), (1, 0)),), gate=Gate(below=1.0), weights=(1.0,))
    two = Recipe((Stage(), other), temperature=1.5)
    assert one == two and hash(one) == hash(two) and one.digest() == two.digest()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"views": (3,)}, "3"),
        ({"views": "flip"}, "expected a list"),
        ({"views": ()}, "expected a list"),
        ({"views": ("flip", "flip")}, "each view once"),
        ({"states": 3}, "Near"),
        ({"states": ("x",)}, "Near"),
        ({"network": ""}, "a name such as 'base'"),
        ({"gate": "margin"}, "Gate"),
        ({"join": "add"}, "'average', 'replace'"),
        ({"weights": ("a",)}, "positive number"),
        ({"weights": (1e300,)}, "positive number"),
        ({"weights": (float("inf"),)}, "positive number"),
        ({"temperatures": (1.0, 2.0)}, "one positive number for each view"),
        ({"temperatures": (1e-308,)}, "positive number"),
    ],
)
def test_a_wrong_stage_is_an_error_in_words(fields, words):
    with pytest.raises(OptionError, match=words):
        Stage(**fields)


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(OptionError, match="Did you mean 'flip'"):
        get("flipp")


def test_every_field_is_documented():
    table = field_table()
    assert [name for name, _, _ in table] == [f.name for f in fields(Recipe)]
    assert all(doc for _, _, doc in table)
    assert unstride.Recipe is Recipe
