"""`unstride evaluate`: what it prints, what it writes, and how it ends."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from typer.testing import CliRunner

from unstride.cli import app
from unstride.evaluation.rows import decision_of, read_rows

TINY = f"{Path(tiny.__file__)}:build"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_table_the_decision_and_the_rows(tmp_path):
    data = tiny.npz(tmp_path, 30)
    shown = run(TINY, "--data", data, "--recipe", "flip", "--out", "runs/mine").stdout
    rows = read_rows("runs/mine/rows.jsonl")
    assert [row.name for row in rows] == [TINY, "flip"]
    assert f"{rows[1].value * 100:.2f} %" in shown and rows[1].describe_gain() in shown
    assert str(decision_of(rows[1], rows)) in shown
    assert "runs/mine/rows.jsonl" in shown


def test_json_and_the_options_that_reach_the_rows(tmp_path):
    data = tiny.npz(tmp_path, 12)
    options = ["--recipe", "paper", "--set", "layers=1-2", "--set", "criterion=displacement", "--metric", "nll"]
    printed = json.loads(
        run(TINY, "--data", data, *options, "--budgets", "1,3", "--limit", 10, "--seed", 4, "--json").stdout
    )
    assert [row["name"] for row in printed["rows"]] == [TINY, "paper, 1 state", "paper, 3 states"]
    row = printed["rows"][-1]
    assert (row["images"], row["metric"], row["provenance"]["seed"]) == (10, "NLL", 4)
    search = row["recipe"]["stage"][0]["states"]["search"]
    assert (search["budget"], search["layers"], search["criterion"]) == (3, [1, 2], "displacement")
    assert set(printed["decisions"]) == {"paper, 1 state", "paper, 3 states"}
    assert printed["out"] == "runs/tiny.py-build-npz"  # where it goes by default
    assert (tmp_path / "runs/tiny.py-build-npz/rows.jsonl").is_file()


def test_against_a_recipe_with_a_margin_and_a_page(tmp_path):
    data = tiny.npz(tmp_path, 20)
    result = run(TINY, "--data", data, "--recipe", "flip", "--against", "default", "--margin", 2, "--report", "r.html")
    assert "baseline" in result.stdout and "report: r.html" in result.stdout
    assert Path("r.html").read_text().startswith("<!doctype html>")


def test_groups_of_a_csv(tmp_path):
    x, y = tiny.images(8)
    lines = ["path,label,site"]
    for k in range(8):
        Image.fromarray(x[k]).save(f"{k}.png")
        lines.append(f"{k}.png,{y[k]},{'ab'[k % 2]}")
    Path("d.csv").write_text("\n".join(lines))
    run(TINY, "--data", "csv:d.csv", "--recipe", "flip", "--group", "site", "--out", "o")
    assert read_rows("o/rows.jsonl")[1].provenance["group"] == "site"
    assert "site" in run(TINY, "--data", "csv:d.csv", "--group", "patient", code=1).stderr


def test_damaged_images_are_named_and_end_in_3(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for c in range(6):
        Path(f"d/{c}").mkdir(parents=True)
        for k in range(2):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(f"d/{c}/{k}.png")
    Path("d/2/1.png").write_bytes(b"nothing")
    result = run(TINY, "--data", "folder:d", "--recipe", "plain", code=3)
    assert "1 image could not be measured: 2/1.png" in result.stderr
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun would take any other code for a crash
    run(TINY, "--data", "folder:d", "--recipe", "plain", code=0)


def test_a_recipe_file_names_its_networks(tmp_path):
    recipe = 'format = 1\ntask = "classification"\n[[stage]]\nviews = ["plain", "flip"]\n'
    Path("net.toml").write_text(recipe + '[networks]\nbase = {spec = "sample"}\n')
    shown = run("--data", "sample", "--recipe", "net.toml", "--limit", 20).stdout
    assert "net" in shown and "sample: 20 images" in shown


def test_errors_are_explained(tmp_path):
    data = tiny.npz(tmp_path, 4)
    for options, word in (
        (["--data", "npz:none.npz"], "none.npz"),
        (["--data", data, "--recipe", "flop"], "flop"),
        (["--data", data, "--metric", "mIoU"], "mIoU"),
        (["--data", data, "--out", "data.npz"], "data.npz"),
        (["--data", data, "--against", "nothing"], "nothing"),
    ):
        result = run(TINY, *options, code=1)
        assert word in result.stderr and "Traceback" not in result.stderr
    for options in (
        [],
        ["--data", data, "--budgets", "0"],
        ["--data", data, "--margin", "-1"],
        ["--data", data, "--x"],
    ):
        run(TINY, *options, code=2)
