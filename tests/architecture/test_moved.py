"""What the docs of version 0.1 imported from is still found there, with a hint."""

import importlib
import sys

import pytest

import unstride
from unstride.compat.moved import MOVED

DOCUMENTED = {
    "benching": ["bench"],
    "evaluation": ["Row", "evaluate", "read_rows"],
    "fitting": ["FitReport", "fit"],
    "images": ["Preprocess", "open_image"],
    "plots": ["plot_classification", "plot_rows", "plot_segmentation"],
    "positions": ["Site", "resample"],
    "prediction": ["Visited"],
    "rules": ["RULES"],
    "saving": ["load"],
    "selecting": ["FixedStates", "fixed", "select_states"],
    "tta.policies": ["expanded", "load", "segmentation", "standard"],
    "windows": ["SlidingWindow"],
}


@pytest.fixture
def old(request, monkeypatch):
    """A module of before, imported for the first time; then forgotten."""
    monkeypatch.delitem(sys.modules, f"unstride.{request.param}", raising=False)
    if request.param == "tta.policies":  # importing it puts it in the place of the name that tta has from views
        monkeypatch.setattr(unstride.tta, "policies", unstride.tta.policies)
    with pytest.warns(DeprecationWarning, match=f"unstride.{request.param} is now unstride"):
        return importlib.import_module(f"unstride.{request.param}")


@pytest.mark.parametrize(("old", "names"), DOCUMENTED.items(), indirect=["old"], ids=list(DOCUMENTED))
def test_documented_names_are_found_with_a_hint(old, names):
    for name in names:
        public = name in unstride.__all__ and old.__name__ != "unstride.tta.policies"  # which has a `load` of its own
        home = unstride if public else importlib.import_module(MOVED[old.__name__])
        assert getattr(old, name) is getattr(home, name)


@pytest.mark.parametrize("old", ["plots"], indirect=True)
def test_what_was_never_there_is_not_there_now(old):
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        old.nonsense  # noqa: B018
