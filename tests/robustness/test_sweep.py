"""Every argument of every public callable with 22 kinds of bad value: an UnstrideError, or a result where it is one.

Arguments are read from the signature, so that a new one is swept without being added here.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from procedure_nets import SmallNet, SmallSegmenter, seeded
from robustness.bad_values import BAD, Tally, prepare_folder
from torch import nn

import unstride
from unstride import data, extend, models
from unstride.recipe import presets
from unstride.recipe.files import read, write
from unstride.recipe.view import Op, View, parse_view
from unstride.views.images import open_image, open_mask
from unstride.windows import SlidingWindow

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NET: nn.Module = seeded(SmallNet())
FLIP = unstride.enhance(NET, recipe="flip", task="classification")
GATED = unstride.enhance(NET, recipe="default", task="classification")
PAPER = unstride.enhance(NET, recipe="paper", task="classification", budget=2)
PLAIN = unstride.Preprocess(None, None)


def change(name: str) -> Callable[..., Any]:
    """A field of the recipe by keyword, as `enhance` and `replace` take it."""

    def changed(**values: Any) -> Any:
        return PAPER.replace(**values)(IMAGES)

    fields = (
        "budget",
        "criterion",
        "layers",
        "until",
        "stop",
        "seed",
        "aggregate",
        "align",
        "space",
        "border",
        "edges",
    )
    fields += ("stages", "task", "combine", "temperature", "precision", "name", "tensors")
    changed.__signature__ = inspect.Signature([inspect.Parameter(f, inspect.Parameter.KEYWORD_ONLY) for f in fields])  # type: ignore[attr-defined]
    return changed


def reader(kind: Any, task: Any) -> Any:
    """What the decorator does when it is applied."""
    made = extend.reader(kind, task)(lambda path, split, classes: None)  # type: ignore[arg-type, return-value]
    del data.KINDS[kind], data.TASKS[kind]
    return made


# What is called, with arguments that work.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "enhance": (unstride.enhance, {"model": NET, "recipe": "flip", "task": "classification"}),
    "replace": (FLIP.replace, {}),
    "change": (change("fields"), {}),
    "forward": (FLIP.forward, {"images": IMAGES}),
    "run": (FLIP.run, {"images": IMAGES}),
    "explain": (FLIP.explain, {"images": IMAGES}),
    "prepare": (PAPER.prepare, {"example": IMAGES}),
    "curve": (PAPER.curve, {"images": IMAGES, "budgets": (1, 2)}),
    "calibrate": (GATED.calibrate, {"images": IMAGES, "cost": 1.5}),
    "save": (FLIP.save, {"path": "r.toml"}),
    "inspect": (unstride.inspect, {"model": NET, "example": IMAGES}),
    "Recipe": (unstride.Recipe, {}),
    "Stage": (unstride.Stage, {"states": unstride.Near(2)}),
    "Search": (unstride.Search, {}),
    "Near": (unstride.Near, {}),
    "Gate": (unstride.Gate, {"below": 0.5}),
    "Canvas": (unstride.Canvas, {"pixels": IMAGES}),
    "Preprocess": (unstride.Preprocess, {}),
    "models.load": (models.load, {"spec": "sample"}),
    "data.load": (data.load, {"name": "sample", "preprocess": PLAIN, "limit": 2}),
    "SlidingWindow": (SlidingWindow, {"model": seeded(SmallSegmenter()), "window": 16}),
    "open_image": (open_image, {"source": "a.png"}),
    "open_mask": (open_mask, {"source": "a.png"}),
    "presets.get": (presets.get, {"name": "flip"}),
    "read": (read, {"path": "r.toml"}),
    "write": (write, {"path": "r.toml", "recipe": presets.get("flip")}),
    "View": (View, {"ops": (Op("FlipLR"),)}),
    "Op": (Op, {"name": "Rotate", "value": 10.0}),
    "parse_view": (parse_view, {"text": "flip"}),
    "extend.reader": (reader, {"kind": "tiles", "task": "classification"}),
}
HEAVY: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "evaluate": (
        unstride.evaluate,
        {"model": "sample", "data": "sample", "recipe": "flip", "limit": 4, "progress": False},
    ),
    "predict": (unstride.predict, {"model": "sample", "images": "a.png", "out": "out.csv", "recipe": "flip"}),
    "export": (unstride.export, {"model": "sample", "path": "net.onnx", "recipe": "flip"}),
    "fit": (
        unstride.fit,
        {"model": "sample", "data": "sample", "limit": 8, "epochs": 1, "budget": 2, "progress": False},
    ),
    "tune": (unstride.tune, {"models": "sample", "data": "sample", "limit": 8, "progress": False}),
}
CLASSES = {"Enhanced", "Prediction"}  # made by `enhance` and `explain`; nobody builds them by hand
FLAGS = {"details", "open_gates", "progress", "moves", "from_pixels"}  # true or false by Python's own rules

# Values that have a meaning, by argument of a callable, or of any ("*").
FINE: dict[tuple[str, str], set[str]] = {
    ("*", "preprocess"): {"none"},
    ("*", "task"): {"none"},
    ("*", "weights"): {"none"},
    ("*", "limit"): {"none", "number", "huge"},
    ("*", "cache"): {"none", "text", "unicode", "missing path", "directory"},
    ("*", "budgets"): {"none"},
    ("*", "max_time_ratio"): {"none", "number", "fraction"},
    ("tune", "frontier"): {"empty list"},
    ("evaluate", "out"): {"none", "text", "unicode", "missing path", "directory"},
    ("evaluate", "recipe"): {"empty list"},
    ("evaluate", "margin"): {"none", "zero", "number", "fraction"},
    ("tune", "margin"): {"none", "zero", "number", "fraction"},
    ("tune", "cost"): {"number", "fraction"},
    ("fit", "validation"): {"none"},
    ("fit", "budget"): {"none"},
    ("fit", "epochs"): {"none", "number"},
    ("fit", "out"): {"none"},
    ("fit", "recipe"): {"none"},
    ("*", "seed"): {"zero", "number"},
    ("*", "budget"): {"number"},
    ("*", "name"): {"empty text", "text", "unicode", "missing path", "directory", "unreadable"},
    ("*", "batch_size"): {"none", "number"},
    ("*", "device"): {"none"},
    ("*", "split"): {"none"},
    ("*", "report"): {"none"},
    ("*", "group"): {"none"},
    ("*", "against"): {"none"},
    ("*", "metric"): {"none"},
    ("*", "margin"): {"none", "zero"},
    ("enhance", "example"): {"none"},
    ("run", "budgets"): {"empty list"},
    ("run", "batch_size"): {"none", "number"},
    ("calibrate", "cost"): {"number", "fraction"},
    ("replace", "recipe"): {"none"},
    ("change", "layers"): {"none"},
    ("change", "until"): {"none"},
    ("change", "aggregate"): {"empty text"},
    ("change", "space"): {"empty text"},
    ("change", "border"): {"empty text"},
    ("change", "edges"): {"empty text"},
    ("change", "combine"): {"empty text"},
    ("change", "temperature"): {"number", "fraction"},
    ("change", "precision"): {"none"},
    ("change", "tensors"): {"none"},
    ("Recipe", "combine"): {"empty text"},
    ("Recipe", "temperature"): {"number", "fraction"},
    ("Recipe", "precision"): {"none"},
    ("Recipe", "tensors"): {"none", "empty text", "text", "unicode", "missing path", "directory", "unreadable", "nul"},
    ("Recipe", "name"): {"nul"},
    ("change", "name"): {"nul"},
    ("Stage", "views"): set(),
    ("Stage", "network"): {"text", "unicode", "nul", "missing path", "directory", "unreadable"},
    ("Stage", "gate"): {"none"},
    ("Stage", "weights"): {"empty list"},
    ("Stage", "temperatures"): {"empty list"},
    ("Stage", "aggregate"): {"empty text"},
    ("Stage", "space"): {"empty text"},
    ("Stage", "border"): {"empty text"},
    ("Stage", "edges"): {"empty text"},
    ("Search", "layers"): {"none"},
    ("Search", "until"): {"none"},
    ("Stage", "states"): {"none"},
    ("parse_view", "seed"): set(BAD),
    ("extend.reader", "kind"): {"unreadable"},  # "noise" is a name
    ("Near", "count"): {"number"},
    ("Gate", "below"): {"none", "zero"},
    ("Gate", "share"): {"none", "zero"},
    ("Gate", "tile"): {"none", "number"},
    ("Gate", "context"): {"zero", "number"},
    ("Canvas", "box"): {"none"},
    ("Canvas", "crop"): {"none", "number"},
    ("Preprocess", "resize"): {"none", "number"},
    ("Preprocess", "crop"): {"none", "number"},
    ("models.load", "weights"): {"none"},
    ("data.load", "classes"): {"none", "number"},
    ("data.load", "ignore"): {"none", "number"},
    ("SlidingWindow", "window"): {"number", "huge"},
    ("SlidingWindow", "overlap"): {"zero"},
    ("presets.get", "axes"): set(BAD),
    ("export", "example"): {"none", "number"},
    ("export", "images"): {"none"},
    ("export", "checked"): {"number"},
    ("export", "quantize"): {"none"},
    ("predict", "images"): {"unreadable"},  # a row with its error
    ("open_image", "max_pixels"): set(BAD),
    ("open_mask", "max_pixels"): set(BAD),
    ("write", "networks"): {"none"},
    ("write", "figures"): {"none"},
    ("write", "cost_of"): set(BAD),
    ("Op", "value"): {"zero", "negative", "number", "fraction"},
    ("Op", "place"): {"none"},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    prepare_folder(tmp_path)
    from PIL import Image

    Image.new("L", (16, 16), 1).save("a.png")
    write("r.toml", presets.get("flip"))
    return tmp_path


def sweep(name: str, function: Callable[..., Any], usual: dict[str, Any]) -> None:
    tally = Tally()
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or argument in FLAGS:
            continue
        fine = FINE.get((name, argument), set()) | FINE.get(("*", argument), set())
        for kind, value in BAD.items():
            given = {**usual, argument: value}
            tally.call(f"{name}({argument})", kind, lambda given=given: function(**given), kind in fine)
    tally.check()


@pytest.mark.usefixtures("here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments(name: str) -> None:
    sweep(name, *CALLS[name])


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEAVY)
def test_bad_arguments_of_what_takes_long(name: str) -> None:
    sweep(name, *HEAVY[name])


def test_every_root_function_and_class_is_swept() -> None:
    swept = {name.split(".")[0] for name in (*CALLS, *HEAVY)}
    assert set(unstride.__all__) - CLASSES - swept == set()
    methods = {name for name, value in vars(unstride.Enhanced).items() if inspect.isfunction(value) and name[0] != "_"}
    assert methods - {"train", "refresh"} <= set(CALLS)
