"""`unstride inspect`: the table, the JSON, and one clear line for every way in which it can go wrong."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unstride.cli import app

NETS = """
import torch
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, (2, 3), 1), nn.Conv2d(8, 6, 3, padding=1),
        nn.AvgPool2d((8, 6)), nn.Flatten(), nn.Linear(6, 4),
    )

def volumes():
    return nn.Sequential(nn.Conv3d(1, 4, 3, (1, 2, 3), 1), nn.ReLU(), nn.Conv3d(4, 2, 1))

class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("no such thing")

class Asks(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else -x.mean((2, 3))

def raises():
    return Raises()

def asks():
    return Asks()

def tokens():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))

def number():
    return 3
"""


def run(tmp_path: Path, *words: str) -> Result:
    file = tmp_path / "nets.py"
    file.write_text(NETS)
    return CliRunner().invoke(app, ["inspect", *(w.replace("nets.py", str(file)) for w in words)])


def test_json(tmp_path: Path) -> None:
    result = run(tmp_path, "nets.py:net", "--image-size", "32", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {"layers", "left_out", "features"} <= report.keys()
    first, second = report["layers"]
    ops = [{"path": "0", "kind": "conv"}]
    where = {"stride": [2, 2], "map": [16, 16], "sides": [[0, 1], [0, 1]]}
    assert first == {"index": 1, "rate": [2, 2], "ops": ops, **where, "cost": 1.0}
    assert (second["rate"], second["stride"], second["map"]) == ([2, 3], [4, 6], [8, 6])
    pool = 8 * 6 * 6 * 8 * 9 + 6 * 4  # MACs behind the pool: a convolution and the classifier
    assert second["cost"] == pytest.approx(pool / (pool + 8 * 16 * 16 * 3 * 9))
    assert report["macs"] == pool + 8 * 16 * 16 * 3 * 9
    assert report["features"] == {"op": "3", "map": [8, 6]}
    assert [(x["op"], "global pool" in x["reason"]) for x in report["left_out"]] == [("4 (avg_pool2d)", True)]


def test_table(tmp_path: Path) -> None:
    result = run(tmp_path, "nets.py:net", "--image-size", "32")
    assert result.exit_code == 0, result.output
    for words in (
        "One forward pass uses 1 of 24 states",
        "1 of 6",
        "0 (conv)",
        "2 (max_pool)",
        "2x3",
        "8x6",
        "100% of a forward pass",
        "The features end at 3",
    ):
        assert words in " ".join(result.output.split())  # a long path breaks the line
    assert "Not used: 4 (avg_pool2d)" in result.output


def test_the_table_of_a_volume_has_all_its_axes(tmp_path: Path) -> None:
    result = run(tmp_path, "nets.py:volumes", "--image-size", "12")
    assert result.exit_code == 0, result.output
    for words in ("1 of 6 states", "12x12x12", "1x2x3", "12x6x4"):
        assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nets.py:raises"], "the model raised KeyError on images of shape"),
        (["nets.py:asks", "--image-size", "32"], "torch.export cannot capture Asks"),
        (["nets.py:tokens", "--image-size", "32"], "throws nothing away that could be moved"),
        (["nets.py:tokens", "--image-size", "16"], "Pass images of the size"),
        (["nets.py:number"], "it returned int, expected a torch.nn.Module"),
        (["nets.py:nobody"], "has no function 'nobody'"),
        (["elsewhere.py:net"], "there is no file elsewhere.py"),
        (["torchvision:resnet19"], "did you mean"),
        (["resnet18"], "expected torchvision:NAME"),
        (["nets.py:net", "--weights", "none.pt"], "none.pt"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, words: list[str], message: str) -> None:
    result = run(tmp_path, *words)
    shown = " ".join(result.output.split()) or str(result.exception)
    assert result.exit_code != 0
    assert message in shown
    assert "Traceback" not in shown


def test_a_recipe_is_described_with_its_cost(tmp_path: Path) -> None:
    words = ("nets.py:net", "--image-size", "32", "--recipe", "paper", "--set", "budget=3", "--json")
    result = run(tmp_path, *words)
    assert result.exit_code == 0, result.output
    recipe = json.loads(result.stdout)["recipe"]
    assert "search of 3 states" in recipe["text"]
    assert 1 < recipe["costs"][0] <= 3
    assert "Cost of each stage" in run(tmp_path, *words[:-1]).output
