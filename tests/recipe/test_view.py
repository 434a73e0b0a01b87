"""A view is written as people say it, read back exactly, and compares and hashes by its ops."""

import subprocess
import sys

import pytest

from unstride.errors import OptionError
from unstride.recipe.view import PLAIN, Op, View, as_view, parse_view


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("plain", [Op("Identity")]),
        ("flip", [Op("FlipLR")]),
        ("1.3x", [Op("Size", 1.3)]),
        ("flip + 1.3x", [Op("FlipLR"), Op("Size", 1.3)]),
        ("1.1428571428571428x + Crop=1.1428571428571428", [Op("Size", 8 / 7), Op("Crop", 8 / 7)]),
        ("FlipLR=False + Scale=1.04", [Op("FlipLR", False), Op("Scale", 1.04)]),
        ("FiveCrop=LeftTop", [Op("FiveCrop", "LeftTop")]),
        ("ShiftX=-8", [Op("ShiftX", -8)]),
        ("Cutout=4@0.25,1.0", [Op("Cutout", 4, (0.25, 1))]),
    ],
)  # fmt: skip
def test_a_view_is_written_and_read_the_same(text, ops):
    view = View(tuple(ops))
    assert str(view) == text
    assert View.parse(text) == view == parse_view(text) == as_view(text)
    assert {view: 1}[View(list(ops))] == 1


def test_names_of_ops_and_whole_numbers_are_read_too():
    assert View.parse("Identity") == PLAIN
    assert View.parse("FlipLR + Size=1.0") == View.parse("flip + 1x")
    assert str(View((Op("Rotate", 10.0),))) == "Rotate=10"


def test_what_is_no_view_is_an_error():
    for value in (None, 3, ("flip",), Op("FlipLR")):
        with pytest.raises(OptionError, match="expected a View or its name"):
            as_view(value)
    for ops in ((), ("flip",), "flip", None):
        with pytest.raises(OptionError, match="at least one Op"):
            View(ops)
    for text in (
        "",
        "wobble",
        "mirror",
        "0.1x",
        "9" * 400,
        "Rotate=" + "9" * 400,
        "Rotate=" + "9" * 100,
        "Rotate=1e999",
    ):
        with pytest.raises(OptionError):
            View.parse(text)
    with pytest.raises(OptionError, match="place"):
        Op("Cutout", 4, ("a", "b"))


def test_views_and_policies_are_data_and_load_no_torch():
    code = "import sys; import unstride.recipe.view, unstride.recipe.policies; print([m for m in sys.modules])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'torch'" not in modules and "'torchvision'" not in modules
