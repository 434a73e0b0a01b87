"""`unstride bench`: what it prints, what it writes, what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from unstride.cli import app

NET = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )
"""


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:net"


def test_bench_prints_ratios_and_writes_an_image(spec, tmp_path):
    image = tmp_path / "cost.png"
    args = ["bench", spec, "--image-size", "32", "--budget", "2,4", "--batch", "1,2", "--repeats", "1", "--growth"]
    result = CliRunner().invoke(app, [*args, "--json", "--plot", str(image)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(r["batch"], r["budget"]) for r in found["rows"]] == [(1, 2), (1, 4), (2, 2), (2, 4)]
    # conv1: 16 x 16 x 4 x 27 MACs; conv2: 8 x 8 x 8 x 36; head: 40. Layer 1 is expanded first, so nothing is shared.
    assert found["plain_macs"] == 16 * 16 * 4 * 27 + 8 * 8 * 8 * 36 + 40
    assert [r["macs"] for r in found["rows"][:2]] == pytest.approx([2, 4])
    assert all(r["time"] > 0 and r["tta"] > 0 and r["memory"] > 0 and r["images_per_second"] > 0 for r in found["rows"])
    assert [r["budget"] for r in found["growth"]["budget"]] == [1, 4, 16]  # the net has 16 states, not 256
    assert [r["batch"] for r in found["growth"]["batch"]] == [1, 2, 4]
    assert len({tuple(r["image"]) for r in found["growth"]["image"]}) > 1
    assert image.read_bytes().startswith(b"\x89PNG")


def test_bench_table_names_the_plain_forward(spec):
    args = ["bench", spec, "--image-size", "32", "--budget", "2", "--batch", "3", "--repeats", "1"]
    result = CliRunner().invoke(app, [*args, "--learned"])
    assert result.exit_code == 0, result.output
    assert "plain" in result.stdout
    assert "TTA time" in result.stdout
    assert "growth" not in result.stdout


@pytest.mark.parametrize("bad", ["", "0", "4,x", "-1", "4;10"])
def test_budgets_that_are_none_are_refused(spec, bad):
    result = CliRunner().invoke(app, ["bench", spec, "--budget", bad])
    assert result.exit_code == 2
    assert "whole numbers" in result.output


def test_a_recipe_of_looks_is_measured_stage_by_stage(spec):
    args = ["bench", spec, "--image-size", "32", "--batch", "2", "--repeats", "1", "--recipe"]
    found = json.loads(CliRunner().invoke(app, [*args, "default", "--json"]).stdout)
    assert [(r["batch"], r["budget"]) for r in found["rows"]] == [(2, 2)]
    assert found["rows"][0]["macs"] == pytest.approx(2)
    refused = CliRunner().invoke(app, [*args, "flip", "--budget", "4"])
    assert refused.exit_code == 1
    assert "stages of looks" in refused.stderr
