"""`unstride reproduce`: the list, a table on the embedded sample, formats, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from unstride.cli import app
from unstride.paper import EXHIBITS


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
    assert "flowers-expanded" in run("list").stdout


def test_a_table_on_the_embedded_sample(tmp_path):
    args = ("antialiased", "--data", "sample", "--limit", 20, "--out", tmp_path)
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert any("substituted" in note for note in found["notes"])
    assert all(v["images"] == 20 and v["ours"] > 60 for v in found["values"])  # it is a trained network
    assert {p.suffix for p in tmp_path.glob("antialiased.*")} == {".md", ".csv", ".tex", ".png"}
    again = run(*args, "--format", "csv")
    assert again.stdout == (tmp_path / "antialiased.csv").read_text()
    assert again.stdout.splitlines()[0] == "model,column,unstride,paper,gain_low,gain_high,images"


def test_without_data_what_can_be_made_is_made():
    result = run("policy-standard", "--format", "latex")
    assert result.exit_code == 0, result.output
    assert r"\begin{tabular}{lrrr}" in result.stdout
    result = run("segmentation")
    assert result.exit_code == 1
    assert "--data-root DIR" in result.stderr


def test_missing_data_names_the_layout(tmp_path):
    result = run("cifar10", "--data-root", tmp_path)
    assert result.exit_code == 1
    assert "cifar-10-batches-py/" in result.stderr
    assert "cifar10_resnet20() in models.py" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("antialized",), 1, "antialiased"),
        (("antialiased", "--format", "pdf"), 2, "md, csv, latex"),
        (("antialiased", "--data", "imagenet"), 2, "data-root"),
        (("antialiased", "--data", "sample", "--data-root", "."), 2, "not both"),
        (("antialiased", "--data", "sample", "--limit", "0"), 2, "limit"),
    ],
)
def test_bad_usage(args, code, text):
    result = run(*args)
    assert result.exit_code == code
    assert text in " ".join(result.output.replace("│", " ").split())
