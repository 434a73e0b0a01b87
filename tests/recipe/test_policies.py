"""Policies are data: the paper's tables, an order of their own, and clear errors."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch

from unstride.errors import OptionError
from unstride.recipe import policies
from unstride.recipe.policies import Policy
from unstride.recipe.view import CROPS, SCALES, Op, View, cutout, parse_view

TABLE = {
    "Posterize": [1, 2, 3, 4], "Rotate": np.linspace(-30, 30, 10), "CropBilinear": range(1, 11),
    "Solarize": np.linspace(0, 1, 10), "Contrast": np.linspace(0.1, 1.9, 10), "Saturation": np.linspace(0.1, 1.9, 10),
    "Brightness": np.linspace(0.1, 1.9, 10), "Sharpness": np.linspace(0.1, 1.9, 10),
    "ShearX": np.linspace(-0.3, 0.3, 10), "ShearY": np.linspace(-0.3, 0.3, 10),
    "TranslateX": np.linspace(-9, 9, 10), "TranslateY": np.linspace(-9, 9, 10), "Cutout": np.linspace(2, 20, 10),
}  # fmt: skip
PLAIN = ("Identity", "FlipLR", "FlipUD", "Invert", "PIL_Blur", "PIL_Smooth", "AutoContrast", "Equalize")


def test_expanded_has_every_row_of_the_table_and_all_pairs() -> None:
    policy = policies.expanded()
    singles, pairs = policy[:132], policy[132:]
    assert (len(policy), len(pairs)) == (8778, 132 * 131 // 2)
    assert all(len(view.ops) == 1 for view in singles)
    ops = [view.ops[0] for view in singles]
    for name, values in TABLE.items():
        assert sorted(op.value for op in ops if op.name == name) == sorted(values), name
    assert sorted(op.name for op in ops if op.name in PLAIN) == sorted(PLAIN)
    assert len(set(ops)) == 132
    assert {frozenset(view.ops) for view in pairs} == {frozenset((a, b)) for a in ops for b in ops if a != b}


def test_standard_is_the_full_product_and_starts_with_the_original_policy() -> None:
    policy = policies.standard()
    assert len(policy) == len(set(policy)) == 190
    values = [{op.name: op.value for op in view.ops} for view in policy]  # ops that do nothing are left out
    assert Counter("FlipLR" in v for v in values) == {False: 95, True: 95}
    assert Counter(v.get("FiveCrop", "Center") for v in values) == dict.fromkeys(CROPS, 38)
    assert Counter(v.get("Scale", 1.0) for v in values) == dict.fromkeys(SCALES, 10)
    assert {v.get("Scale", 1.0) for v in values[:30]} == {1.0, 1.04, 1.1}
    assert list(map(str, policy[:4])) == ["plain", "flip", "FiveCrop=LeftTop", "flip + FiveCrop=LeftTop"]


def test_the_policy_of_maps_has_views_that_can_be_undone() -> None:
    assert list(map(str, policies.segmentation())) == [
        *("plain", "flip", "0.75x", "flip + 0.75x", "1.25x", "flip + 1.25x"),
        *("0.5x", "flip + 0.5x", "1.5x", "flip + 1.5x"),
    ]


def test_order_is_by_intensity() -> None:
    expanded = policies.expanded()
    repeats = [view.ops[0].name == "Identity" for view in expanded[132:]]
    assert repeats == sorted(repeats)
    assert sum(repeats) == 131
    for part in (expanded[:132], expanded[132 : 8778 - 131], expanded[8778 - 131 :], policies.standard()):
        strength = [view.intensity for view in part]
        assert strength == sorted(strength)
    assert str(expanded[0]) == "plain"


def test_order_and_cutout_depend_on_the_seed_alone() -> None:
    policies.expanded.cache_clear()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    one = policies.expanded()
    policies.expanded.cache_clear()
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert policies.expanded().views == one.views
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    other = policies.expanded(seed=1)
    assert [[(op.name, op.value) for op in v.ops] for v in other] == [
        [(op.name, op.value) for op in v.ops] for v in one
    ]
    assert {v.ops[0].place for v in other[:132] if v.ops[0].place} != {
        v.ops[0].place for v in one[:132] if v.ops[0].place
    }


@pytest.mark.parametrize("name", ["standard", "expanded", "segmentation"])
def test_specs_are_exact(name: str) -> None:
    for view in policies.get(name, seed=3):
        assert parse_view(str(view)) == view


def test_a_policy_is_a_sequence() -> None:
    policy = policies.standard()
    assert policy[-1] == list(policy)[189]
    assert policy[3] in policy
    assert policy.first(3) == policy[:3]


def test_custom_policies_from_files(tmp_path) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text('seed = 5\nviews = ["Identity", "FlipLR", "Rotate=10 + Contrast=1.1", "Cutout=8", "FlipLR=true"]\n')
    policy = policies.get(toml)
    assert (policy.name, policy.seed, len(policy)) == ("mine", 5, 5)
    assert policy[2] == View((Op("Rotate", 10), Op("Contrast", 1.1)))
    assert policy[3].ops[0] == cutout(8, 5) != cutout(8, 6)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"name": "other", "views": [str(view) for view in policy]}))
    assert policies.get(str(other)).views == policy.views


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('views = ["Wobble=3"]', "unknown op 'Wobble'"),
        ('views = ["Rotate=400"]', "-180 to 180"),
        ('views = ["Rotate"]', "not None"),
        ('views = ["Rotate=nan"]', "finite"),
        ('views = ["Posterize=2.5"]', "whole number"),
        ('views = ["FiveCrop=Middle"]', "Center"),
        ('views = ["Invert=1"]', "no value"),
        ('views = ["Solarize=-0.1"]', "0 to 1"),
        ('views = ["Cutout=4@0.5"]', "@y,x"),
        ('views = ["Cutout=4@0.5,2.0"]', "place"),
        ('views = [""]', "unknown op"),
        ("views = []", "needs a list"),
        ("views = [3]", "needs a list"),
        ('views = ["FlipLR"]\nspeed = 3', "speed"),
        ("views = [", "not valid toml"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        policies.get(path)


def test_bad_policies_and_budgets() -> None:
    with pytest.raises(OptionError, match="unknown policy 'nope'"):
        policies.get("nope")
    with pytest.raises(OptionError, match="cannot read"):
        policies.get("absent.toml")
    with pytest.raises(OptionError, match="budget 191 is above the 190 views"):
        policies.standard().first(191)
    for budget in (0, -1, True, 2.5):
        with pytest.raises(OptionError, match="whole number"):
            policies.standard().first(budget)
    with pytest.raises(OptionError, match="no view"):
        Policy("empty", ())
    with pytest.raises(OptionError, match="True"):
        Op("FlipLR", 1)
    with pytest.raises(OptionError):
        Op("Rotate", True)
