"""`unstride bench`: what it prints, and what is wrong usage."""

import json

import pytest
from small_nets import photo
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
MACS = 16 * 16 * 4 * 27 + 8 * 8 * 8 * 36 + 40  # conv1, conv2 and the head at 32 pixels


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:net"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_rows_of_every_form_and_of_the_recipe(spec):
    options = ["--image-size", 32, "--recipe", "paper", "--budgets", "2,4", "--batch-sizes", "1,2", "--seconds", 1]
    found = json.loads(run(spec, *options, "--json").stdout)
    names = [row["name"] for row in found["rows"]]
    assert names[:2] == ["eager", "channels_last"] and names[-2:] == ["paper, 2 states", "paper, 4 states"]
    assert {row["batch_size"] for row in found["rows"]} == {1, 2}
    assert found["base_macs"] == MACS
    costs = {row["name"]: row["cost"] for row in found["rows"]}
    assert costs["eager"] == 1 and costs["paper, 2 states"] == pytest.approx(2)
    assert all(row["time"]["ratio"]["estimate"] > 0 and row["images_per_second"] > 0 for row in found["rows"])


def test_the_table_and_images_of_ones_own(spec, tmp_path):
    for k in range(2):
        photo(k).save(tmp_path / f"{k}.png")
    shown = run(spec, "--images", tmp_path, "--recipe", "flip", "--batch-sizes", "2", "--seconds", 1).stdout
    assert "eager" in shown and "flip" in shown and "2.00" in shown and "GMACs" in shown


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--budgets", "0"], 2, "--budgets"),
        (["--batch-sizes", "a"], 2, "--batch-sizes"),
        (["--images", ".", "--image-size", "32"], 2, "--image-size"),
        (["--recipe", "flip", "--budgets", "3"], 1, "no single Search"),
        (["--device", "cuda:77"], 1, "cuda:77"),
    ],
)
def test_wrong_usage(spec, options, code, word):
    assert word in run(spec, *options, code=code).output
