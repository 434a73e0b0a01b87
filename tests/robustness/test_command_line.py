"""The command line under bad arguments, full disks, narrow screens and images that no memory holds."""

import errno
import fcntl
import json
import os
import pty
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
from unstride.evaluation import evaluate
from unstride.storage.locks import exclusive
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

EVALUATE = ("evaluate", "sample", "--data", "sample")


@pytest.mark.parametrize(
    "arguments",
    [
        (*EVALUATE, "--budget", "1-400000000"),
        (*EVALUATE, "--budget", "1-2000"),
        (*EVALUATE, "--budget", ",".join(["1-900"] * 3)),
        (*EVALUATE, "--budget", "9" * 5000),
        (*EVALUATE, "--budget", "1-" + "9" * 5000),
        (*EVALUATE, "--budget", "0"),
        (*EVALUATE, "--budget", "4-2"),
        (*EVALUATE, "--budget", "-3"),
        (*EVALUATE, "--budget", ""),
        (*EVALUATE, "--budget", "1,,4"),
        (*EVALUATE, "--budget", "٤"),
        (*EVALUATE, "--layers", "1-400000000"),
        (*EVALUATE, "--seed", "-1"),
        (*EVALUATE, "--seed", "9" * 30),
        (*EVALUATE, "--seed", "9" * 5000),
        (*EVALUATE, "--limit", "0"),
        (*EVALUATE, "--batch-size", "9" * 30),
        ("bench", "sample", "--budget", "1-400000000"),
        ("bench", "sample", "--batch", "100000000"),
        ("bench", "sample", "--batch", "9" * 5000),
        ("bench", "sample", "--repeats", "9" * 20),
        ("bench", "sample", "--image-size", "1000000"),
        ("inspect", "sample", "--image-size", "1000000"),
        ("predict", "sample", "a.png", "--budget", "9" * 20),
        ("predict", "sample", "a.png", "--budget", "0"),
        ("fit", "sample", "--data", "sample", "--out", "f.safetensors", "--epochs", "9" * 20),
        ("fit", "sample", "--data", "sample", "--out", "f.safetensors", "--seed", "-1"),
        ("fit", "sample", "--data", "sample", "--out", "f.safetensors", "--budget", "9" * 20),
        ("tta", "list", "standard", "--budget", "9" * 30),
        ("studio", "--port", "70000"),
    ],
    ids=lambda arguments: " ".join(word[:20] for word in arguments),
)
def test_a_count_that_cannot_be_is_wrong_usage(here: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, code=2)
    assert len(result.stderr) < 2000


@pytest.mark.parametrize("seed", [-1, 2**64, True, 0.5, "0"])
def test_a_seed_that_cannot_be_is_found_before_the_work(seed: Any) -> None:
    with pytest.raises(OptionError, match="seed"):
        evaluate("sample", "sample", (1,), seed=seed, limit=2)


@pytest.mark.parametrize("views", ["9" * 5000, "99999999", "-1", "0"])
def test_views_that_cannot_be(here: Path, views: str) -> None:
    result = run(*EVALUATE, "--tta", f"standard:{views}", "--limit", 2, code=1)
    assert result.stderr.splitlines()[-1].startswith("unstride: ")
    assert len(result.stderr) < 2000


# ------------------------------------------------------------------------------------------------------ strips


def test_a_strip_is_one_counted_error_everywhere(here: Path) -> None:
    strip = "60000 x 1 pixels would become 1920000 x 32"
    Image.new("RGB", (60_000, 1)).save("strip.png")
    shown = run("predict", "nets.py:net", "strip.png", "a.png", "--budget", 2, code=3)
    assert strip in shown.stderr
    assert "a.png" in shown.stdout
    lines = ["strip.png,0"]
    for k in range(12):
        photo(k).save(f"{k}.png")
        lines.append(f"{k}.png,{k % 4}")
    Path("t.csv").write_text("\n".join(lines))
    shown = run("evaluate", "nets.py:net", "--data", "csv:t.csv", "--budget", 2, code=3)
    assert "1 image could not be evaluated" in shown.stdout
    assert strip in shown.stdout
    fit = ("fit", "nets.py:net", "--data", "csv:t.csv", "--out", "f.safetensors", "--epochs", 1, "--budget", 2)
    shown = run(*fit, "--json", code=3)
    assert "strip.png" in strict(shown.stdout)["failed"]
    assert strip in shown.stderr
    assert Path("f.safetensors").is_file()


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


def outputs(path: str) -> list[tuple[str, ...]]:
    data = ("--data", "npz:d.npz")
    return [
        ("evaluate", "nets.py:net", *data, "--plot", f"{path}.png"),
        ("evaluate", "nets.py:net", *data, "--report", f"{path}.html"),
        ("evaluate", "nets.py:net", *data, "--out", path),
        ("predict", "nets.py:net", "a.png", "--plot", f"{path}.png"),
        ("bench", "nets.py:net", "--plot", f"{path}.png"),
        ("fit", "nets.py:net", *data, "--out", f"{path}.safetensors"),
        ("demo", "--out", path),
        ("reproduce", "list-of-nothing" if path == "" else "macs", "--out", path),
    ]


@pytest.mark.parametrize("which", range(8))
@pytest.mark.parametrize("where", ["file/x", "/proc/self/x", "long"])
def test_an_output_that_cannot_be_written_is_found_before_the_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, which: int, where: str
) -> None:
    pytest.importorskip("matplotlib")
    if where.startswith("/proc") and not Path("/proc/self").is_dir():
        pytest.skip("no folder here that takes no files")
    Path("file").write_text("")
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_, **__: pytest.fail("worked"))
    arguments = outputs("x" * 300 if where == "long" else where)[which]
    if arguments[0] == "reproduce":
        from unstride import paper

        arguments = ("reproduce", next(iter(paper.EXHIBITS)), *arguments[2:])
        monkeypatch.setattr(paper, "reproduce", lambda *_, **__: pytest.fail("worked"))
    if arguments[0] == "demo":
        from unstride import demo

        monkeypatch.setattr(demo, "run", lambda *_: pytest.fail("worked"))
    result = run(*arguments, code=1)
    assert result.stderr.splitlines()[-1].startswith("unstride: ")
    assert "cannot write" in result.stderr or "no folder" in result.stderr


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("command", ["evaluate", "predict", "bench"])
def test_an_image_that_cannot_be_written_does_not_lose_the_answer(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: str, as_json: bool
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    arguments: tuple[Any, ...] = {
        "evaluate": ("evaluate", "nets.py:net", "--data", "npz:d.npz", "--budget", 2),
        "predict": ("predict", "nets.py:net", "a.png", "--budget", 2),
        "bench": ("bench", "nets.py:net", "--budget", 2, "--batch", 1, "--repeats", 1),
    }[command]
    result = run(*arguments, "--plot", "p.png", *(["--json"] if as_json else []), code=3)
    assert "p.png: cannot be written (No space left on device)" in result.stderr
    if as_json:
        told = strict(result.stdout)
        assert told["rows" if command != "predict" else "images"]
        assert "p.png" not in result.stdout
    else:
        assert "MACs" in result.stdout
    assert not Path("p.png").exists()


def test_a_page_that_cannot_be_written_does_not_lose_the_rows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstride.evaluation.page.write_atomic", full)
    result = run(*EVALUATE, "--limit", 20, "--budget", 2, "--report", "r.html", "--json", code=3)
    assert len(strict(result.stdout)["rows"]) == 2
    assert "r.html: cannot be written (No space left on device)" in result.stderr
    with pytest.warns(UserWarning, match=r"r\.html"):
        assert len(evaluate("sample", "sample", (1, 2), limit=20, report="r.html")) == 2


def test_two_fits_do_not_take_each_others_work_away(here: Path) -> None:
    fit = ("fit", "nets.py:net", "--data", "npz:d.npz", "--out", "f.safetensors", "--epochs", 1, "--budget", 2)
    with exclusive(Path("f.safetensors.partial")):
        Path("f.safetensors.partial/theirs").write_text("")
        assert "another run uses" in run(*fit, code=1).stderr
        assert Path("f.safetensors.partial/theirs").exists()
    run(*fit)
    assert not Path("f.safetensors.partial").exists()


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
@pytest.mark.parametrize("command", ["predict", "evaluate", "inspect", "fit"])
def test_json_is_json_whatever_the_model_says(here: Path, command: str, name: str) -> None:
    Path("odd.py").write_text(NAN)
    arguments: tuple[Any, ...] = {
        "predict": ("predict", f"odd.py:{name}", "a.png", "--budget", 2),
        "evaluate": ("evaluate", f"odd.py:{name}", "--data", "npz:d.npz", "--budget", 2),
        "inspect": ("inspect", f"odd.py:{name}"),
        "fit": ("fit", f"odd.py:{name}", "--data", "npz:d.npz", "--out", "f.safetensors", "--epochs", 1, "--budget", 2),
    }[command]
    result = run(*arguments, "--json", code=None)
    assert result.exit_code in (0, 1, 3), result.exception
    if result.stdout:
        strict(result.stdout)
    if result.exit_code:
        assert result.stderr.splitlines()[-1].startswith("unstride: ")


# ------------------------------------------------------------------------------------------------------ screens


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("tta", "list", "standard"), ("tta", "list", "standard", "--json"), ("inspect", "sample")],
    ids=" ".join,
)
def test_a_screen_that_takes_nothing(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as nowhere:
        done = subprocess.run([*ME, *arguments], stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "unstride: standard output: No space left on device\n"


def test_a_reader_that_leaves_and_a_screen_that_is_closed() -> None:
    shell = f"{sys.executable} -m unstride tta list expanded"
    gone = subprocess.run(f"{shell} | head -1", shell=True, capture_output=True, text=True, check=False)
    assert gone.stdout.startswith("expanded: 8778 of 8778 views")
    assert gone.stderr == ""
    closed = subprocess.run(f"{shell} >&-", shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in closed.stderr
    assert closed.returncode in (0, 1)


def in_a_terminal(columns: int, *arguments: Any) -> list[str]:
    """What a terminal of that width is sent, in a process of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {
        "TERM": "xterm",
        "NO_COLOR": "1",
    }
    child = subprocess.Popen(
        [*ME, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert child.wait() == 0
    import re

    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(parts).decode())
    return text.replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize(
    ("command", "columns"),
    [("evaluate", 60), ("evaluate", 100), ("predict", 60), ("inspect", 60), ("bench", 60), ("reproduce", 60)],
)
def test_lines_end_at_the_edge_of_the_terminal(here: Path, command: str, columns: int) -> None:
    arguments: tuple[Any, ...] = {
        "evaluate": (*EVALUATE, "--limit", 20, "--budget", 2, "--tta", "flip"),
        "predict": ("predict", "sample", "a.png", "--budget", 5),
        "inspect": ("inspect", "sample"),
        "bench": ("bench", "sample", "--budget", 2, "--batch", 1, "--repeats", 1),
        "reproduce": ("reproduce", "list"),
    }[command]
    lines = in_a_terminal(columns, *arguments)
    assert len(lines) > 3
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    if command == "evaluate":  # no figure is cut off
        rows = [json.loads(line) for line in next(here.glob("runs/*/rows.jsonl")).read_text().splitlines()]
        text = " ".join(" ".join(lines).split())
        for row in rows:
            for figure in (row["metrics"]["nll"], row["metrics"]["brier"]):
                assert f"{figure:.4f}" in text


def test_columns_are_respected_in_a_pipe(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = run("inspect", "nets.py:net").stdout
    monkeypatch.setenv("COLUMNS", "50")
    narrow = run("inspect", "nets.py:net").stdout
    assert max(map(len, narrow.splitlines())) <= 50 < max(map(len, wide.splitlines()))
