"""`unstride export`: the library's file, from the command line."""

import json

import numpy as np
import pytest
from small_nets import write_nets
from typer.testing import CliRunner

import unstride
from unstride.cli.main import app
from unstride.exporting.checking import noise_photos

pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")


def test_a_recipe_from_pixels(tmp_path):
    spec, out = f"{write_nets(tmp_path)}:net", tmp_path / "net.onnx"
    arguments = [spec, "--recipe", "flip", "--out", str(out), "--from-pixels", "--limit", "4", "--json"]
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["path"] == str(out)
    assert summary["outputs"] == ["output", "confidence", "pass_count", "cost"]
    assert summary["size"] == out.stat().st_size
    photos = noise_photos((32, 32), 2)[:1]
    better = unstride.enhance(unstride.models.load(spec), recipe="flip")
    got = ort.InferenceSession(out).run(["output"], {"images": np.asarray(photos[0])[None]})[0]
    np.testing.assert_allclose(got, better(photos), atol=0.05)


def test_what_cannot_be_exported_ends_with_the_reason(tmp_path):
    arguments = [f"{write_nets(tmp_path)}:net", "--recipe", "paper", "--out", str(tmp_path / "net.onnx")]
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 1
    assert "Search" in done.stderr
