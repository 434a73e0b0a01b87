"""`unstride reproduce`: the list, exhibits by name and number, formats, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from unstride.cli import app
from unstride.paper.catalogue import EXHIBITS


def run(*args):
    return CliRunner().invoke(app, ["reproduce", *map(str, args)])


def test_list_names_everything_and_what_it_needs():
    result = run("list", "--json")
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads(result.stdout)}
    assert set(found) == set(EXHIBITS)
    assert found["segmentation"]["data"] == ["cityscapes", "ade20k"]
    assert found["computation-resnet18"]["without_data"] == "MACs"
    assert found["policy-standard"]["without_data"] == "all"
    assert "flowers102-finetune" in run("list").stdout


def test_a_table_on_the_embedded_sample(tmp_path):
    args = ("Table A8", "--data", "sample", "--limit", 20, "--out", tmp_path)
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert any("A rehearsal" in note for note in found["notes"])
    assert all(v["images"] == 20 and v["ours"] > 60 for v in found["values"])  # it is a trained network
    assert {p.suffix for p in tmp_path.glob("antialiased.*")} == {".md", ".csv", ".tex"}
    again = run(*args, "--format", "csv", "--network", "resnet18")
    assert again.exit_code == 0, again.output
    lines = again.stdout.splitlines()
    assert lines[0] == "networks,group,column,unstride,paper,std,seeds,gain_low,gain_high,images"
    assert [line.split(",")[:3] for line in lines[1:]] == [["anti-aliased", "ResNet18", f"B = {b}"] for b in (1, 4, 10)]


def test_without_data_what_can_be_made_is_made():
    result = run("Table A9", "--format", "latex")
    assert result.exit_code == 0, result.output
    assert r"Scale & 19 (19) & 1, 1.04" in result.stdout
    result = run("table6")
    assert result.exit_code == 1
    assert "--data-root DIR" in result.stderr


def test_missing_data_names_the_layout(tmp_path):
    result = run("cifar10", "--data-root", tmp_path)
    assert result.exit_code == 1
    assert "cifar-10-batches-py/" in result.stderr
    assert "weights/cifar10-resnet20.pth" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("antialized",), 1, "Did you mean 'antialiased' (Table A8)?"),
        (("antialiased", "--format", "pdf"), 2, "md, csv, latex"),
        (("antialiased", "--schedule", "slow"), 2, "paper, fast"),
        (("antialiased", "--data", "imagenet"), 2, "--data-root"),
        (("antialiased", "--data", "sample", "--data-root", "."), 2, "not both"),
        (("antialiased", "--data", "sample", "--limit", "0"), 2, "limit"),
        (("antialiased", "--data", "sample", "--network", "ResNet19"), 1, "Did you mean 'ResNet18'?"),
        (("antialiased", "--seeds", "0"), 2, "seeds"),
        (("flowers102-finetune",), 2, "--data-root"),
        (("flowers102-finetune", "--data-root", "."), 1, "flowers-102/"),
    ],
)
def test_bad_usage(args, code, text):
    result = run(*args)
    assert result.exit_code == code
    assert text in " ".join(result.output.replace("│", " ").split())
