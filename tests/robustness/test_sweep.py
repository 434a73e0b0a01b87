"""A sweep: every command and Python entry point with things that cannot work. Always a clear error, never a traceback.

Each case is one line of a table. A clear error is an UnstrideError (in Python), or exit code 1, 2 or 3 with words on
stderr (on the command line), in a few lines that name what came.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_nets import photo, write_nets
from typer.testing import CliRunner

import unstride
from unstride import data, models
from unstride.cli import app
from unstride.errors import UnstrideError
from unstride.evaluation import read_rows
from unstride.models import read_weights
from unstride.recipe import policies
from unstride.studio import Studio
from unstride.tta import TTA
from unstride.views.images import Preprocess, find_images, open_image, open_mask

BROKEN = """
import sys
from torch import nn
def nothing(): return None
def number(): return 5
def wants_arguments(a, b): return nn.Identity()
def raises(): raise ValueError("no")
def ends(): sys.exit(0)
def asserts(): assert False
def recurses(): return recurses()
def three(): return nn.Identity(), 1, 2
def odd_preprocess(): return nn.Identity(), 7
def wrong_fields(): return nn.Identity(), {"size": 3}
def wrong_values(): return nn.Identity(), {"mean": "gray"}
def wrong_channels(): return nn.Identity(), {"channels": ["RGB"]}
value = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a bit of everything that is wrong."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    write_nets(tmp_path)
    Path("broken.py").write_text(BROKEN)
    Path("syntax.py").write_text("def net(:\n")
    Path("exits.py").write_text("raise SystemExit(0)\n")
    Path("binary.py").write_bytes(bytes(range(256)))
    Path("empty").mkdir()
    Path("empty.txt").write_text("")
    Path("noise").write_bytes(np.random.default_rng(0).bytes(5000))
    for suffix in ("png", "csv", "npz", "pt", "safetensors", "toml", "json", "jsonl", "html"):
        Path(f"noise.{suffix}").write_bytes(np.random.default_rng(0).bytes(5000))
        Path(f"dir.{suffix}").mkdir()
    Path("zeros.npz").write_bytes(bytes(5000))
    Path("nul.csv").write_bytes(b"a\0b.png,1\n")
    Path("quotes.csv").write_text('"a.png,1\n' * 5)
    Path("wide.csv").write_text("a.png,1" + ",2" * 200_000)
    Path("long.csv").write_text("a.png," + "x" * 200_000)
    Path("utf16.csv").write_bytes("a.png,1\n".encode("utf-16"))
    Path("up.csv").write_text("../../../../etc/passwd,1\n")
    np.savez("shapes.npz", x=np.zeros((3, 8, 8, 4), np.uint8), y=np.zeros(3, int))
    np.savez("none.npz", x=np.zeros((0, 8, 8, 3), np.uint8), y=np.zeros(0, int))
    np.savez("flat.npz", x=np.zeros((3, 0, 8, 3), np.uint8), y=np.zeros(3, int))
    np.savez("huge_labels.npz", x=np.zeros((3, 8, 8, 3), np.uint8), y=np.array([0, 1, 2**62]))
    np.savez("d.npz", x=np.stack([np.asarray(photo(k, (32, 32))) for k in range(12)]), y=np.arange(12) % 4)
    photo().save("a.png")
    Path("cut.png").write_bytes(Path("a.png").read_bytes()[:300])
    Image.new("1", (20_000, 20_000)).save("vast.png")
    Path("mixed/x").mkdir(parents=True)
    photo().save("mixed/x/a.png")
    Path("pipe").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe/pipe.png")
        os.mkfifo("pipe/pipe.csv")
    return tmp_path


NET, DATA = "nets.py:net", "npz:d.npz"
SPECS = [
    "", ":", " ", "timm", "timm:", "timm:../../etc/passwd", "timm:" + "x" * 5000, "torchvision:", "torchvision:nms",
    "torchvision:__init__", "smp:", "smp::", "smp:Unet:", "hf:", "hf:../..", "hf:empty", "hf:noise", "hf:noise.json",
    "nets.py", "nets.py:", "nets.py:nope", "nets.py:net:net", "nowhere.py:net", "empty:net", "syntax.py:net",
    "exits.py:net", "binary.py:net", "broken.py:value", "sample:x", "SAMPLE", "efficientnet-lite9", "/dev/null",
    *(f"broken.py:{name}" for name in (
        "nothing", "number", "wants_arguments", "raises", "ends", "asserts", "recurses", "three", "odd_preprocess",
        "wrong_fields", "wrong_values", "wrong_channels")),
]  # fmt: skip
SETS = [
    "", ":", "csv", "csv:", "npz:", "folder:", "sample:x", "unknown:x", "csv:nowhere", "csv:empty", "csv:empty.txt",
    "csv:noise", "csv:noise.csv", "csv:dir.csv", "csv:nul.csv", "csv:quotes.csv", "csv:wide.csv", "csv:long.csv",
    "csv:utf16.csv", "csv:up.csv", "csv:pipe/pipe.csv", "csv:/dev/zero", "npz:nowhere", "npz:empty", "npz:noise.npz",
    "npz:dir.npz", "npz:zeros.npz", "npz:shapes.npz", "npz:none.npz", "npz:flat.npz", "npz:huge_labels.npz",
    "npz:a.png", "npz:/dev/zero", "folder:nowhere", "folder:empty", "folder:noise", "folder:mixed", "folder:a.png",
    "folder:" + "x" * 5000, "imagenet:nowhere", "imagenet:empty", "imagenet:noise", "imagenet:mixed",
    "flowers102:empty", "flowers102:noise", "cifar10:empty", "cifar100:noise", "hf:empty", "hf:noise", "hf:nowhere",
    "masks:empty", "masks:noise", "masks:mixed", "cityscapes:empty", "cityscapes:noise", "ade20k:empty", "ade20k:noise",
]  # fmt: skip
IMAGES = [
    "nowhere.png", "noise.png", "cut.png", "dir.png", "empty", "empty.txt", "vast.png", "nets.py", "noise",
    "pipe/pipe.png", "x" * 5000, "/dev/null", "/dev/zero",
]  # fmt: skip
WEIGHTS = [
    "nowhere",
    "empty",
    "noise",
    "noise.pt",
    "noise.safetensors",
    "dir.pt",
    "a.png",
    "empty.txt",
    "/dev/zero",
    "",
]
OPTIONS = [
    ("--budget", "x"), ("--criterion", "x"), ("--criterion", "learned"), ("--aggregate", "x"), ("--order", "x"),
    ("--align", "x"), ("--layers", "9"), ("--layers", "x"), ("--task", "x"),
    ("--task", "segmentation"), ("--tta", "x"), ("--tta", ""), ("--tta", "standard"), ("--tta", "standard:0"),
    ("--tta", "noise.toml:3"), ("--tta", "noise.safetensors"), ("--tta", "dir.json:2"), ("--tta-method", "x"),
    ("--tta", "nowhere.safetensors"), ("--fitted", "nowhere"), ("--fitted", "noise.safetensors"), ("--fitted", "empty"),
    ("--split", "x"), ("--limit", "x"), ("--report", "dir.html"), ("--report", "a.txt"), ("--plot", "dir.png"),
    ("--plot", "x.doc"), ("--plot", "nowhere/x.png"), ("--out", "noise"), ("--out", "noise/x"),
    ("--weights", "noise.pt"),
]  # fmt: skip


class Tally:
    """How many were tried, and which of them did not end in a clear error."""

    def __init__(self) -> None:
        self.tried, self.raw, self.silent = 0, list[str](), list[str]()

    def command(self, *arguments: str) -> None:
        self.tried += 1
        result = CliRunner().invoke(app, list(arguments))
        told = " ".join(arguments)[:200]
        if not isinstance(result.exception, SystemExit | None) or "Traceback" in result.output:
            self.raw.append(f"{told}: {result.exception!r}"[:400])
        elif result.exit_code == 0:
            self.silent.append(told)
        elif result.exit_code not in (1, 2, 3) or not 0 < len(result.output) < 20_000:
            self.raw.append(f"{told}: exit code {result.exit_code}, {len(result.output)} letters")

    def call(self, what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.tried += 1
        told = f"{what}: {arguments!r} {options!r}"[:200]
        try:
            function(*arguments, **options)
        except UnstrideError as error:
            if not 0 < len(str(error)) < 20_000:
                self.raw.append(f"{told}: {len(str(error))} letters")
        except Exception as error:
            self.raw.append(f"{told}: {error!r}"[:400])
        else:
            self.silent.append(told)


@pytest.fixture
def tally() -> Iterator[Tally]:
    found = Tally()
    yield found
    print(f"{found.tried} inputs: {len(found.raw)} raw errors, {len(found.silent)} without a word")
    assert not found.raw + found.silent, "\n".join(["", *found.raw, *(f"no error: {one}" for one in found.silent)])
    assert found.tried


REST = {  # what a command needs beside its model
    "predict": ("a.png",),
    "evaluate": ("--data", DATA),
    "fit": ("--data", DATA, "--out", "f.safetensors"),
    "studio": ("--port", "0"),
}


@pytest.mark.parametrize("command", ["inspect", "predict", "evaluate", "fit", "bench", "studio"])
def test_specs(here: Path, tally: Tally, command: str) -> None:
    for spec in SPECS:
        tally.command(command, spec, *REST.get(command, ()))


@pytest.mark.parametrize("command", ["evaluate", "fit"])
def test_data(here: Path, tally: Tally, command: str) -> None:
    for name in SETS:
        tally.command(command, NET, "--data", name, *(("--out", "f.safetensors") if command == "fit" else ()))


def test_images(here: Path, tally: Tally) -> None:
    for image in IMAGES:
        tally.command("predict", NET, image)
        tally.command("predict", NET, image, "a.png", "--budget", "1")


@pytest.mark.parametrize("command", ["inspect", "predict", "evaluate", "fit", "bench", "studio"])
def test_weights(here: Path, tally: Tally, command: str) -> None:
    for weights in WEIGHTS:
        tally.command(command, NET, *REST.get(command, ()), "--weights", weights)


def test_options(here: Path, tally: Tally) -> None:
    for option in OPTIONS:
        tally.command("evaluate", NET, "--data", DATA, "--budget", "2", *option)


def test_policies_and_exhibits(here: Path, tally: Tally) -> None:
    for name in ("", "x", "noise.toml", "noise.json", "dir.toml", "nowhere.json", "a.png", "empty.txt"):
        tally.command("tta", "list", name)
    for arguments in (
        ("x",),
        ("",),
        ("x", "--format", "pdf"),
        ("x", "--data", "mine"),
        ("x", "--data-root", "nowhere"),
    ):
        tally.command("reproduce", *arguments)
    tally.command("reproduce", "classification", "--data-root", "empty")
    for arguments in (("nope",), ("--nope",), ("predict",), ("evaluate", NET), ("fit", NET), ("tta", "nope")):
        tally.command(*arguments)


# ------------------------------------------------------------------------------------------------------ Python

ODD: list[Any] = [None, 5, -1, 0, 1.5, True, b"x", [], {}, object(), float("nan"), "", "x", ("a", "b")]


def test_entry_points_with_bad_names(here: Path, tally: Tally) -> None:
    plain = Preprocess(None, None)
    for value in ODD:
        tally.call("models.load", models.load, value)
        tally.call("data.load", data.load, value, plain)
        tally.call("open_image", open_image, value)
        tally.call("open_mask", open_mask, value)
        tally.call("policies.get", policies.get, value)
        tally.call("evaluate model", unstride.evaluate, value, "sample")
        tally.call("evaluate data", unstride.evaluate, "sample", value)
    for value in [v for v in ODD if v is not None]:
        tally.call("weights", models.load, "sample", weights=value)
        tally.call("Studio", Studio, value)
    for value in [v for v in ODD if v != [] and v != {} and v != ""]:  # nothing is no image, and no error
        tally.call("find_images", find_images, value)


def test_files_given_to_python(here: Path, tally: Tally) -> None:
    net = models.load(NET).model
    for name in sorted(str(p) for p in here.iterdir()):
        tally.call("load", unstride.load, name, net)
        tally.call("TTA.load", TTA.load, name, net)
        tally.call("read_weights", read_weights, name)
        if Path(name).name not in ("a.png",):
            tally.call("open_image", open_image, name)
        if Path(name).is_dir() or b"\n" in Path(name).read_bytes():  # a line without an end does not count
            tally.call("read_rows", read_rows, name)


OPTIONAL: dict[str, list[Any]] = {
    "budgets": [(), 0, 4, "4", (0,), (-1,), (1.5,), (True,), ("4",), ((1, 2),), {"a": 1}],
    "weights": ["nowhere", 5, ["x"]],
    "task": ["x", 5, "segmentation", ["classification"]],
    "tta": ["x", 5, ["flip"], "flip:", "standard:x", b"flip"],
    "tta_method": ["x", 5],
    "out": [5, ["x"], "noise", b"x"],
    "report": [5, "x.txt", ["x.html"], "nowhere/x.html"],
    "batch_size": [0, -1, "4", 1.5, True, [4]],
    "limit": [0, -1, "4", 1.5, True, [4]],
    "split": ["x", 5, ["test"]],
    "seed": [-1, "0", 1.5, True, 2**70],
    "criterion": ["x", 5, None],
    "aggregate": ["x", 5, None],
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_evaluate_with_bad_options(here: Path, tally: Tally, name: str) -> None:
    for value in OPTIONAL[name]:
        spec = NET if name == "weights" else "sample"
        options = {"budgets": (1,), "limit": 4, name: value}
        tally.call(name, unstride.evaluate, spec, "sample", **options)


@pytest.mark.parametrize("field", ["resize", "crop", "mean", "std", "interpolation", "channels"])
def test_preprocessing_from_a_file(tally: Tally, field: str) -> None:
    fine = {"resize": (None, 5), "crop": (None, 5)}.get(field, ())
    for value in ODD:
        if not (type(value) in (type(None), int) and value in fine):
            tally.call(field, Preprocess.from_json, {field: value})
    tally.call("unknown", Preprocess.from_json, {"sky": 1})


def test_data_with_bad_options(here: Path, tally: Tally) -> None:
    plain = Preprocess(None, None)
    for name, values in (
        ("split", [5, "x", ["test"], b"test"]),
        ("limit", [0, -1, "4", 1.5, True]),
        ("classes", [0, -1, "x", 1.5, [1], {}]),
        ("ignore", [0, "x", 1.5]),
    ):
        for value in values:
            tally.call(name, data.load, DATA, plain, **{name: value})
    for value in ODD:
        tally.call("preprocess", data.load, DATA, value)
