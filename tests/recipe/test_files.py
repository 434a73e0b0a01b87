"""A recipe's file: readable, whole, every name checked when it is read."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unstride
from unstride.errors import ArtefactError, OptionError
from unstride.recipe.files import StoredNetwork, read, write
from unstride.recipe.presets import PRESETS, get
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Search, Stage
from unstride.tasks.tasks import MEASURES

_VIEWS = ("flip", "1.3x", "flip + 1.3x", "ShiftX=8", "Size=1.15 + Crop=1.14", "FiveCrop=LeftTop", "Rotate=10")
_numbers = st.floats(0.25, 4, allow_nan=False)
_searches = st.builds(
    Search,
    st.integers(1, 40),
    st.sampled_from(["entropy", "displacement", "random-per-image"]),
    st.sampled_from([None, (1, 2), (2, 3, 4)]),
    st.none() | st.builds(Gate, st.sampled_from(MEASURES), st.floats(0, 1)),
)


@st.composite
def stages(draw):
    views = tuple(draw(st.lists(st.sampled_from(_VIEWS), min_size=1, unique=True)))
    gate = draw(st.none() | st.builds(Gate, st.sampled_from(MEASURES), st.floats(0, 1), st.none() | st.floats(0, 1)))
    listed = st.sampled_from([None, Near(4), ((0, 1), (2, 0)), (((0, 1), (-1, 0)),)])
    states = draw(listed | _searches)
    per_view = tuple(draw(st.lists(_numbers, min_size=len(views), max_size=len(views)))) if draw(st.booleans()) else ()
    network, join = draw(st.sampled_from(["base", "large"])), draw(st.sampled_from(["average", "replace"]))
    return Stage(views, states, network, gate, join, temperatures=per_view)


@given(st.lists(stages(), max_size=3), _numbers, st.sampled_from(["logits", "probabilities", "max"]))
def test_a_trip_through_a_file_changes_nothing(tmp_path_factory, more, temperature, combine):
    recipe = Recipe((Stage(), *more), combine=combine, temperature=temperature, name="mine")
    for suffix in ("toml", "json"):
        path = write(tmp_path_factory.mktemp("r") / f"r.{suffix}", recipe)
        assert read(path).recipe == recipe
        assert get(path) == recipe


@pytest.mark.parametrize("name", PRESETS)
def test_presets_go_into_files(tmp_path, name):
    assert read(write(tmp_path / "r.toml", get(name))).recipe == get(name)


def test_a_file_holds_networks_and_figures(tmp_path):
    preprocess = {k: v for k, v in unstride.Preprocess().to_json().items() if v is not None}
    networks = {
        "base": StoredNetwork("timm:resnet18", "ab" * 8, preprocess, weights="random"),
        "large": StoredNetwork(None, "cd" * 8, None, (2, 0, 1)),
    }
    path = write(tmp_path / "r.toml", get("flip"), networks, {"gain": 0.5})
    stored = read(path)
    assert stored.networks == networks and stored.figures["gain"] == 0.5 and stored.cost_of == "base"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("format = 1\ntemprature = 3\n", "'temprature'. Did you mean 'temperature'"),
        ("format = 2\n", "got format 2, expected format 1"),
        ("temperature = 3\n", "got format None"),
        ("format = true\n", "got format True"),
        ("format = ", "TOML"),
        ("format = 1\nstage = 3\n", r"\[\[stage\]\]"),
        ("format = 1\n[stage]\nviews = ['plain']\n", r"\[\[stage\]\]"),
        ("format = 1\n[[stage]]\nviews = ['Spin']\n", "Spin"),
        ("format = 1\n[[stage]]\nvieews = ['flip']\n", "'vieews'. Did you mean 'views'"),
        ("format = 1\n[[stage]]\nviews = 'plain'\n", "expected a list"),
        ("format = 1\n[[stage]]\nstates = {near = {count = 0}}\n", "at least 1"),
        ("format = 1\n[[stage]]\nstates = {search = {budget = -3}}\n", "at least 1"),
        ("format = 1\n[[stage]]\nstates = {search = {budgett = 3}}\n", "'budgett'. Did you mean 'budget'"),
        ("format = 1\n[[stage]]\nstates = {beam = {}}\n", "one table, near or search"),
        ("format = 1\n[[stage]]\nstates = [[0, 1.5]]\n", "list of states"),
        ("format = 1\n[[stage]]\n[[stage]]\ngate = {by = 'mood', below = 0.5}\n", "mood"),
        ("format = 1\n[[stage]]\n[[stage]]\ngate = {by = 'margin', belo = 1}\n", "'belo'. Did you mean 'below'"),
        ("format = 1\n[networks.base]\nfingerprnt = 'x'\n", "'fingerprnt'. Did you mean 'fingerprint'"),
        ("format = 1\n[networks.base]\nclasses = [-1]\n", "class indices"),
        ("format = 1\nfigures = 3\n", "figures: got 3"),
        ("format = 1\ntemperature = 1e-308\n", "1e-6 to 1e6"),
        ("format = 1\ntemperature = nan\n", "nan"),
        ("format = 1\ntemperature = " + "9" * 400 + "\n", "99999"),
        ("format = 1\n[[stage]]\nweights = [1e300]\n", "1e\\+300"),
        ("format = 1\n[[stage]]\nstates = {search = {seed = " + "9" * 400 + "}}\n", "99999"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(tmp_path, text, words):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ArtefactError, match=words):
        read(path)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_figures_of_any_library_are_written_as_numbers(tmp_path, suffix):
    figures = {"gain": np.float64(0.5), "images": np.int64(3), "each": [torch.tensor(0.25)], "nothing": None}
    path = write(tmp_path / f"r.{suffix}", get("flip"), figures={**figures, "interval": float("nan")})
    stored = dict(read(path).figures)
    assert stored.pop("interval") is None or suffix == "toml"
    assert stored == {"gain": 0.5, "images": 3, "each": [0.25]}
    with pytest.raises(OptionError, match="figures: got"):
        write(path, get("flip"), figures={"rows": {1, 2}})


def test_only_known_forms_are_written(tmp_path):
    with pytest.raises(OptionError, match=r"\.toml or \.json"):
        write(tmp_path / "r.yaml", get("flip"))
    with pytest.raises(ArtefactError):
        read(tmp_path / "nothing.toml")


def test_a_missing_file_is_an_error_with_its_neighbours(tmp_path):
    write(tmp_path / "tuned.toml", get("flip"))
    (tmp_path / "tunned.csv").touch()
    with pytest.raises(ArtefactError, match=r"tunned.toml: cannot be read .*\. Did you mean 'tuned.toml'\?$"):
        get(tmp_path / "tunned.toml")
    with pytest.raises(ArtefactError, match=r"cannot be read \(No such file or directory\)\.$"):
        get(tmp_path / "nowhere" / "tunned.toml")
