"""A recipe's file: readable, whole, checked by name when it is read."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import unstride
from unstride.errors import ArtefactError, OptionError
from unstride.procedure.gates import MEASURES, Gate, Stage
from unstride.recipe import PRESETS, Recipe, get, read, write
from unstride.recipe.view import PLAIN, parse_view

_VIEWS = ("flip", "1.3x", "flip + 1.3x", "ShiftX=8", "Size=1.15 + Crop=1.14", "FiveCrop=LeftTop", "Rotate=10")
_numbers = st.floats(0.25, 4, allow_nan=False)


@st.composite
def stages(draw):
    views = tuple(parse_view(v) for v in draw(st.lists(st.sampled_from(_VIEWS), min_size=1, unique=True)))
    gate = draw(st.none() | st.builds(Gate, st.sampled_from(MEASURES), st.floats(0, 1), st.none() | st.floats(0, 1)))
    states = draw(st.sampled_from(["plain", "near:4", ((0, 1), (2, 0)), (((0, 1), (-1, 0)),)]))
    warm = tuple(draw(st.lists(_numbers, min_size=len(views), max_size=len(views)))) if draw(st.booleans()) else ()
    return Stage(views, states, gate, temperatures=warm)


@given(st.lists(stages(), max_size=3), _numbers, st.sampled_from(["logits", "probabilities"]))
def test_a_trip_through_a_file_changes_nothing(tmp_path_factory, more, temperature, merge):
    recipe = Recipe("mine", stages=(Stage((PLAIN,)), *more), temperature=temperature, merge=merge)
    for suffix in ("toml", "json"):
        path = write(tmp_path_factory.mktemp("r") / f"r.{suffix}", recipe)
        assert read(path).recipe == recipe
        assert get(path) == recipe


@pytest.mark.parametrize("name", PRESETS)
def test_presets_and_searches_go_into_files(tmp_path, name):
    recipes = [
        get(name),
        get("paper").changed(states=((0, 1), (1, 0)), stop=unstride.Confident(p=0.8), layers=range(1, 3)),
    ]
    for recipe in recipes:
        assert read(write(tmp_path / "r.toml", recipe)).recipe == recipe


def test_a_file_holds_the_network_preprocessing_and_figures(tmp_path):
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    path = write(tmp_path / "r.toml", get("flip"), model, unstride.Preprocess(), {"gain": 0.5})
    written = read(path)
    assert written.preprocess == unstride.Preprocess() and written.figures["gain"] == 0.5
    written.check(model, unstride.Preprocess())
    with pytest.raises(ArtefactError, match="fingerprint"):
        written.check(other)
    with pytest.raises(ArtefactError, match="resize"):
        written.check(model, unstride.Preprocess(resize=300))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version = 1\nbudgett = 3\n", "budgett"),
        ("version = 2\n", "version"),
        ("budget = 3\n", "version"),
        ("version = 1\nbudget = -3\n", "at least 1"),
        ("version = 1\n[[stage]]\nviews = ['Spin']\n", "Spin"),
        ("version = 1\n[[stage]]\nvieews = ['flip']\n", "vieews"),
        ("version = 1\n[[stage]]\nviews = ['Identity']\ngate = {by = 'mood', below = 0.5}\n", "mood"),
        ("version = 1\nstop = {rule = 'os.system'}\n", "Confident"),
        ("version = ", "TOML"),
        ("version = 1\nstage = 3\n", r"\[\[stage\]\]"),
        ("version = 1\n[stage]\nviews = ['plain']\n", r"\[\[stage\]\]"),
        ("version = true\n", "version True"),
        ("version = 1\n[model]\nfingerprnt = 'x'\n", "model has no 'fingerprnt'"),
        ("version = 1\nfigures = 3\n", "figures: got 3"),
        ("version = 1\nstates = [[0, 1.5]]\n", "list of states"),
        ("version = 1\n[[stage]]\n", "views None"),
        ("version = 1\n[[stage]]\nviews = ['plain']\ngate = {by = 'margin', belo = 1}\n", "a gate has no 'belo'"),
        ("version = 1\nbudget = 3\nstop = {rule = 'Confident', q = 1}\n", "Confident has no 'q'"),
        ("version = 1\nbudget = 3\nstop = 'Confident'\n", "stop: got 'Confident', wanted a table"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ArtefactError, match=words):
        read(path)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_figures_of_any_library_are_written_as_numbers(tmp_path, suffix):
    figures = {"gain": np.float64(0.5), "images": np.int64(3), "each": [torch.tensor(0.25)], "nothing": None}
    path = write(tmp_path / f"r.{suffix}", get("flip"), figures={**figures, "interval": float("nan")})
    found = dict(read(path).figures)
    assert found.pop("interval") is None or suffix == "toml"
    assert found == {"gain": 0.5, "images": 3, "each": [0.25]}
    with pytest.raises(OptionError, match="figures: got"):
        write(path, get("flip"), figures={"rows": {1, 2}})


def test_only_known_forms_are_written(tmp_path):
    with pytest.raises(OptionError, match=r"\.toml or \.json"):
        write(tmp_path / "r.yaml", get("flip"))
    with pytest.raises(ArtefactError):
        read(tmp_path / "nothing.toml")


def test_a_file_that_is_not_there_is_asked_back_with_its_neighbours(tmp_path):
    write(tmp_path / "tuned.toml", get("flip"))
    (tmp_path / "tunned.csv").touch()
    with pytest.raises(ArtefactError, match=r"tunned.toml: cannot be read .*; did you mean tuned.toml\?$"):
        get(tmp_path / "tunned.toml")
    with pytest.raises(ArtefactError, match=r"cannot be read \(No such file or directory\)$"):
        get(tmp_path / "nowhere" / "tunned.toml")
