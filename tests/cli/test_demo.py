"""`unstride demo`: what it prints, its JSON, its exit code."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unstride.cli import app
from unstride.cli.demo import PARTS
from unstride.demo import story
from unstride.demo.parts import DemoPart
from unstride.show.html import Note, Table, Text

TABLE = Table(("", "accuracy"), (("small", "93.00 %"), ("tuned", "95.00 %")), "The caption.", frozenset({1}))


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(out: Path, say: Any) -> Iterator[DemoPart]:
        say("tuning")
        yield DemoPart("classifiers", "Two classifiers", {"rows": 2}, (Text("On 40 images."), TABLE), seconds=2.0)
        why = "This part could not run: no onnx"
        yield DemoPart("files", "One file", skipped="no onnx", blocks=(Note(why),))

    monkeypatch.setattr(story, "run", run)


def run(out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["demo", "--out", str(out), *more])


def test_the_parts_are_printed_and_a_part_that_could_not_run_gives_exit_code_3(
    small_demo: None, tmp_path: Path
) -> None:
    result = run(tmp_path / "out")
    assert result.exit_code == 3
    for words in ("Two classifiers", "On 40 images.", "95.00 %", "The caption.", "could not run: no onnx"):
        assert words in result.stdout
    assert f"part 1 of {PARTS}: tuning" in result.stderr


def test_json(small_demo: None, tmp_path: Path) -> None:
    found = json.loads(run(tmp_path / "out", "--json").stdout)
    assert found["classifiers"] == {"rows": 2}
    assert found["skipped"] == {"files": "no onnx"}
    assert found["seconds"]["classifiers"] == 2.0


def test_an_unwritable_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(tmp_path / "file" / "out")
    assert result.exit_code == 1
    assert "cannot write there" in result.stderr
