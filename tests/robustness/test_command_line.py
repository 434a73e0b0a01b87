"""The command line under bad arguments, full disks, narrow screens and images that no memory holds."""

import contextlib
import errno
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_nets import photo, write_nets
from typer.testing import CliRunner

from unstride.cli import app
from unstride.errors import OptionError
from unstride.evaluation.evaluate import evaluate
from unstride.views.images import Preprocess

ME = [sys.executable, "-m", "unstride"]


def run(*arguments: Any, code: int | None = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert code is None or result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    write_nets(tmp_path)
    x = np.stack([np.asarray(photo(k, (32, 32))) for k in range(12)])
    np.savez("d.npz", x=x, y=np.arange(12) % 4)
    photo().save("a.png")
    return tmp_path


# ------------------------------------------------------------------------------------------------------ counts

EVALUATE = ("evaluate", "sample", "--data", "sample", "--recipe", "paper", "--set", "budget=2")
FIT = ("fit", "sample", "--data", "sample", "--out", "f.toml")


@pytest.mark.parametrize(
    "arguments",
    [
        *((*EVALUATE, "--budgets", text) for text in (
            "1-400000000", "1-2000", ",".join(["1-900"] * 3), "9" * 5000, "1-" + "9" * 5000, "0", "4-2", "-3", "",
            "1,,4", "٤",
        )),
        (*EVALUATE, "--seed", "-1"),
        (*EVALUATE, "--seed", "9" * 30),
        (*EVALUATE, "--limit", "0"),
        (*EVALUATE, "--batch-size", "9" * 30),
        ("bench", "sample", "--budgets", "1-400000000"),
        ("bench", "sample", "--batch-sizes", "100000000"),
        ("inspect", "sample", "--image-size", "1000000"),
        (*FIT, "--epochs", "9" * 20),
        (*FIT, "--seed", "-1"),
        ("studio", "--port", "70000"),
    ],
    ids=lambda arguments: " ".join(word[:20] for word in arguments),
)  # fmt: skip
def test_a_count_that_cannot_be_is_wrong_usage(here: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, code=2)
    assert len(result.stderr) < 2000


@pytest.mark.parametrize("seed", [-1, 2**64, True, 0.5, "0"])
def test_a_seed_that_cannot_be_is_found_before_the_work(seed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_, **__: pytest.fail("worked"))
    with pytest.raises(OptionError, match="seed"):
        evaluate("sample", "sample", seed=seed, limit=2)


# ------------------------------------------------------------------------------------------------------ strips


def test_a_strip_is_one_counted_error_everywhere(here: Path) -> None:
    strip = "60000 x 1 pixels would become 1920000 x 32"
    Image.new("RGB", (60_000, 1)).save("strip.png")
    shown = run("predict", "nets.py:net", "strip.png", "a.png", "--recipe", "flip", code=3)
    assert strip in shown.stderr
    assert "a.png" in shown.stdout
    lines = ["strip.png,0"]
    for k in range(12):
        photo(k).save(f"{k}.png")
        lines.append(f"{k}.png,{k % 4}")
    Path("t.csv").write_text("\n".join(lines))
    shown = run("evaluate", "nets.py:net", "--data", "csv:t.csv", "--recipe", "flip", code=3)
    assert "1 image could not be measured" in shown.stderr and strip in shown.stderr
    shown = run("fit", "nets.py:net", "--data", "csv:t.csv", "--out", "f.toml", "--epochs", 1, "--budget", 2, code=3)
    assert strip in shown.stderr
    assert Path("f.toml").is_file()


def test_the_bound_is_on_what_is_made_not_on_the_aspect() -> None:
    Preprocess(32, 32)(Image.new("RGB", (2000, 10)))
    Preprocess(32, 32)(Image.new("RGB", (60_000, 300)))
    Preprocess(None, 32)(Image.new("RGB", (60_000, 1)))
    with pytest.raises(Exception, match="when it is resized"):
        Preprocess((8192, 8192), 32)(Image.new("RGB", (10, 10)))


@pytest.mark.parametrize(
    "settings",
    [
        {"resize": 10**9},
        {"resize": 0},
        {"resize": 2.5},
        {"resize": True},
        {"resize": "256"},
        {"crop": 10**9},
        {"crop": (3, 4, 5)},
        {"crop": (0, 8)},
        {"mean": (float("nan"), 0, 0)},
        {"mean": 0.5},
        {"mean": ("a", "b", "c")},
        {"std": (float("inf"), 1, 1)},
        {"std": (float("nan"),) * 3},
        {"std": (0, 1, 1)},
        {"channels": ["RGB"]},
        {"channels": "HSV"},
        {"interpolation": None},
    ],
    ids=str,
)
def test_preprocessing_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Preprocess(**settings)


# ------------------------------------------------------------------------------------------------------ outputs

DATA = ("--data", "npz:d.npz")
OUTPUTS: dict[str, tuple[str, ...]] = {
    "evaluate --report": ("evaluate", "nets.py:net", *DATA, "--report", "{}.html"),
    "evaluate --out": ("evaluate", "nets.py:net", *DATA, "--out", "{}"),
    "predict --plot": ("predict", "nets.py:net", "a.png", "--plot", "{}.png"),
    "predict --out": ("predict", "nets.py:net", "a.png", "--out", "{}.csv"),
    "compare --out": ("compare", "plain", "flip", "nets.py:net", "a.png", "--out", "{}.csv"),
    "fit --out": ("fit", "nets.py:net", *DATA, "--out", "{}.toml"),
    "tune --out": ("tune", "nets.py:net", *DATA, "--cost", "2", "--out", "{}.toml"),
    "export --out": ("export", "nets.py:net", "--out", "{}.onnx"),
    "recipe --out": ("recipe", "paper", "--out", "{}.toml"),
    "demo --out": ("demo", "--out", "{}"),
}


@pytest.mark.parametrize("which", OUTPUTS)
@pytest.mark.parametrize("where", ["file/x", "/proc/self/x", "x" * 300], ids=["file", "proc", "long"])
def test_an_output_that_cannot_be_written_is_found_before_the_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, which: str, where: str
) -> None:
    pytest.importorskip("matplotlib")
    if where.startswith("/proc") and not Path("/proc/self").is_dir():
        pytest.skip("no folder here that takes no files")
    Path("file").write_text("")
    monkeypatch.setattr(torch.nn.Conv2d, "forward", lambda *_, **__: pytest.fail("worked"))
    result = run(*(word.format(where) for word in OUTPUTS[which]), code=1)
    assert result.stderr.splitlines()[-1].startswith("unstride: ")
    assert "cannot write" in result.stderr or "no folder" in result.stderr


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_plot_that_cannot_be_written_does_not_lose_the_answer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    result = run("predict", "nets.py:net", "a.png", "--recipe", "flip", "--plot", "p.png", "--json", code=3)
    assert "p.png" in result.stderr and "No space left on device" in result.stderr
    assert strict(result.stdout)
    assert not Path("p.png").exists()


def test_a_page_that_cannot_be_written_does_not_lose_the_rows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def page_is_full(handle: int) -> None:
        name = os.readlink(f"/proc/self/fd/{handle}")
        full() if ".html" in name else fsync(handle)

    monkeypatch.setattr(os, "fsync", page_is_full)
    result = run("evaluate", "nets.py:net", *DATA, "--recipe", "flip", "--report", "r.html", "--json", code=3)
    assert len(strict(result.stdout)["rows"]) == 2
    assert "r.html" in result.stderr and "No space left on device" in result.stderr


# ------------------------------------------------------------------------------------------------------ JSON

NAN = """
import torch
from torch import nn
from unstride.models import LoadedModel, Preprocess

class Net(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1),
                                  nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
        self.body[-1].bias.data[1] = value

    def forward(self, x):
        return self.body(x)

def overflowing():
    return LoadedModel("x", Net(float("inf")).eval(), Preprocess(32, 32))

def hopeless():
    return LoadedModel("x", Net(-float("inf")).eval(), Preprocess(32, 32))
"""


@pytest.mark.parametrize("name", ["overflowing", "hopeless"])
@pytest.mark.parametrize("command", ["predict", "evaluate", "inspect", "fit", "compare", "bench"])
def test_json_is_json_whatever_the_model_says(here: Path, command: str, name: str) -> None:
    Path("odd.py").write_text(NAN)
    arguments: tuple[Any, ...] = {
        "predict": ("a.png", "--recipe", "paper", "--set", "budget=2"),
        "evaluate": (*DATA, "--recipe", "paper", "--set", "budget=2"),
        "inspect": (),
        "fit": (*DATA, "--out", "f.toml", "--epochs", 1, "--budget", 2),
        "compare": ("a.png", "--out", "c.csv"),
        "bench": ("--batch-sizes", 1, "--recipe", "flip"),
    }[command]
    first = ("plain", "flip") if command == "compare" else ()
    result = run(command, *first, f"odd.py:{name}", *arguments, "--json", code=None)
    assert result.exit_code in (0, 1, 3), result.output
    if result.stdout:
        strict(result.stdout)
    if result.exit_code:
        assert result.stderr.splitlines()[-1].startswith("unstride: ")


# ------------------------------------------------------------------------------------------------------ screens


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
@pytest.mark.parametrize("arguments", [("--help",), ("recipe",), ("inspect", "sample")], ids=" ".join)
def test_a_screen_that_takes_nothing(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as nowhere:
        done = subprocess.run([*ME, *arguments], stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "unstride: standard output: No space left on device\n"


def test_a_reader_that_leaves_and_a_screen_that_is_closed() -> None:
    shell = f"{sys.executable} -m unstride reproduce list"
    gone = subprocess.run(f"{shell} | head -1", shell=True, capture_output=True, text=True, check=False)
    assert gone.stdout
    assert "Traceback" not in gone.stderr
    closed = subprocess.run(f"{shell} >&-", shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in closed.stderr
    assert closed.returncode in (0, 1)


def in_a_terminal(columns: int, *arguments: Any) -> list[str]:
    """What a terminal of that width is sent, in a process of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "NO_COLOR": "1"}
    child = subprocess.Popen(
        [*ME, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    parts = []
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    os.close(ours)
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(parts).decode())
    return text.replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("command", ["predict", "inspect", "reproduce"])
def test_lines_end_at_the_edge_of_the_terminal(here: Path, command: str) -> None:
    arguments: tuple[Any, ...] = {
        "predict": ("predict", "sample", "a.png", "--recipe", "paper"),
        "inspect": ("inspect", "sample"),
        "reproduce": ("reproduce", "list"),
    }[command]
    lines = in_a_terminal(60, *arguments)
    assert len(lines) > 3
    assert max(map(len, lines)) <= 60, max(lines, key=len)
