"""Every argument with a value that it cannot have: an UnstrideError that names it, nothing written."""

import os

import pytest
from small_nets import photo, write_nets

import unstride
from unstride.errors import UnstrideError
from unstride.predicting.compare import compare

WRONG = (True, -1, float("nan"), float("inf"), "", "é", "a\0b", [], {}, object(), b"x", 2.5)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo().save("a.png")
    return f"{write_nets(tmp_path)}:net"


@pytest.mark.parametrize(
    "name", ["model", "images", "out", "recipe", "weights", "task", "device", "top", "batch_size", "ray"]
)
@pytest.mark.parametrize("value", [*WRONG, 0], ids=lambda value: "object" if type(value) is object else repr(value))
def test_predict(here, name, value):
    good = {"model": here, "images": "a.png", "out": "a.csv", "recipe": "plain"}
    before = sorted(os.listdir())
    with pytest.raises(UnstrideError):
        unstride.predict(**{**good, name: value})
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "name", ["base", "new", "images", "out", "labels", "model", "count", "margin", "seed", "batch_size"]
)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: "object" if type(value) is object else repr(value))
def test_compare(here, name, value):
    if (name, value) in (("margin", True), ("seed", -1)):
        pytest.skip("a number that it can have")
    good = {"base": "plain", "new": "flip", "images": "a.png", "out": "a.csv", "model": here}
    with pytest.raises(UnstrideError):
        compare(**{**good, name: value})
    assert not os.path.exists("a.csv")
