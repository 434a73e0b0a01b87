"""`unstride evaluate`: what it prints, what it writes, and how it ends."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from typer.testing import CliRunner

import unstride
from unstride import models
from unstride.cli import app
from unstride.evaluation import metrics

TINY = str(Path(tiny.__file__))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_table_the_words_and_the_rows(tmp_path):
    data = tiny.npz(tmp_path, 30)
    shown = run(f"{TINY}:build", "--data", data, "--budget", "3,6", "--out", "runs/mine").stdout
    rows = [json.loads(line) for line in (tmp_path / "runs/mine/rows.jsonl").read_text().splitlines()]
    assert [row["budget"] for row in rows] == [1, 3, 6]
    for row in rows:
        assert f"{row['metrics']['top1'] * 100:.2f}" in shown
        assert f"{row['macs']:.2f}x" in shown
    for row in rows[1:]:
        assert f"budget {row['budget']}: {row['verdict']}:" in shown
        assert f"{row['gain']['low'] * 100:+.2f} to {row['gain']['high'] * 100:+.2f}" in shown
    assert "recommended:" in shown
    assert "runs/mine/rows.jsonl" in shown


def test_json_and_the_options_that_reach_the_rows(tmp_path):
    data = tiny.npz(tmp_path, 12)
    options = ["--criterion", "displacement", "--aggregate", "mean", "--layers", "1-2", "--align", "off", "--seed", 4]
    result = run(
        f"{TINY}:build", "--data", data, "--budget", "1,3", "--limit", 10, "--tta", "expanded:3", "--json", *options
    )
    printed = json.loads(result.stdout)
    row = printed["rows"][-1]
    assert (row["views"], row["budget"], row["images"], row["seed"]) == (3, 3, 10, 4)
    wanted = {"criterion": "displacement", "aggregate": "mean", "layers": [1, 2], "align": False}
    assert {k: row["options"][k] for k in wanted} == wanted
    assert printed["out"] == "runs/tiny.py-build-npz"  # where it goes if nobody says
    assert (tmp_path / "runs/tiny.py-build-npz/rows.jsonl").is_file()


def test_a_page_and_an_image_of_it(tmp_path):
    pytest.importorskip("matplotlib")
    command = [f"{TINY}:build", "--data", tiny.npz(tmp_path, 12), "--budget", "3", "--tta", "flip"]
    shown = run(*command, "--report", "page.html", "--plot", "curve.png").stdout
    assert "report: page.html" in shown
    assert "plot: curve.png" in shown
    assert "Images that changed" in (tmp_path / "page.html").read_text("utf-8")
    assert Image.open(tmp_path / "curve.png").size == (1380, 585)
    printed = json.loads(run(*command, "--report", "page.html", "--json").stdout)  # from the shards of the first run
    assert (printed["report"], "plot" in printed) == ("page.html", False)
    assert "wanted a name that ends in" in run(*command, "--plot", "curve.doc", code=1).stderr
    assert "ends in .html" in run(*command, "--report", "page.pdf", code=1).stderr


def test_a_fitted_aggregation_is_evaluated_as_it_was_saved(tmp_path):
    data = tiny.npz(tmp_path, 12)
    loaded = models.load(f"{TINY}:build")
    better = unstride.enhance(loaded.model, loaded.example(16), aggregate="attention", criterion="learned", budget=3)
    generator = torch.Generator().manual_seed(0)
    for p in better.attention.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    better.save(tmp_path / "better.safetensors", tiny.PREPROCESS)
    common = [f"{TINY}:build", "--data", data, "--budget", "3", "--json"]
    row = json.loads(run(*common, "--fitted", tmp_path / "better.safetensors").stdout)["rows"][1]
    x, y = tiny.images(12)
    assert (row["options"]["aggregate"], row["options"]["criterion"]) == ("attention", "learned")
    assert row["metrics"]["nll"] == pytest.approx(metrics.summarise(metrics.score(better(tiny.normalised(x)), y)).nll)
    free = json.loads(run(*common).stdout)["rows"][1]
    assert free["metrics"]["nll"] != pytest.approx(row["metrics"]["nll"], abs=1e-4)
    assert free["run"] != row["run"]
    both = run(*common[:3], "--fitted", tmp_path / "better.safetensors", "--recipe", "flip", code=2)
    assert "brings its own recipe" in both.stderr


def test_damaged_images_are_listed_and_end_in_3(tmp_path, monkeypatch):
    x, y = tiny.images(12)
    for c in range(6):
        (tmp_path / "set" / str(c)).mkdir(parents=True)
    for i in range(12):
        Image.fromarray(x[i]).save(tmp_path / "set" / str(y[i]) / f"{i:02d}.png")
    broken = sorted((tmp_path / "set").glob("*/*.png"))[3]
    broken.write_bytes(broken.read_bytes()[:50])
    command = (f"{TINY}:build", "--data", f"folder:{tmp_path / 'set'}", "--budget", "3")
    shown = run(*command, code=3).stdout
    assert "11 images" in shown
    assert "1 image could not be evaluated:" in shown
    assert f"{broken.parent.name}/{broken.name}" in shown
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")  # torchrun starts again whatever ends with another code than 0
    assert "1 image could not be evaluated:" in run(*command, code=0).stdout


def test_segmentation_prints_the_papers_table(tmp_path):
    rng = np.random.default_rng(0)
    for name, shape in (("images", (16, 24, 3)), ("masks", (16, 24))):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(3):
            values = rng.integers(0, 256 if name == "images" else 6, shape).astype(np.uint8)
            Image.fromarray(values).save(tmp_path / "set" / name / f"{i}.png")
    arguments = ["--data", f"masks:{tmp_path / 'set'}", "--task", "segmentation", "--budget", "1,4", "--flip"]
    shown = run(f"{TINY}:build_maps", *arguments).stdout
    rows = [json.loads(line) for line in next(tmp_path.glob("runs/*/rows.jsonl")).read_text().splitlines()]
    cells = {(r["views"], r["budget"]): f"{r['metrics']['miou'] * 100:.2f}" for r in rows}
    lines = [line.replace("│", " ").replace("┃", " ").split() for line in shown.splitlines()]
    assert ["flip", "plain", "B", "=", "4"] in lines
    assert ["without", cells[1, 1], cells[1, 4]] in lines
    assert ["with", cells[2, 1], cells[2, 4]] in lines
    assert "pixels corrected" in shown


def test_a_segmenter_that_says_nothing_of_its_images_sees_them_whole(tmp_path):
    (tmp_path / "mine.py").write_text(f"import sys; sys.path.insert(0, {str(Path(TINY).parent)!r})\n"
                                      "import tiny\ndef make(): return tiny.net(maps=True)\n")  # fmt: skip
    rng = np.random.default_rng(0)
    for name, shape in (("images", (16, 24, 3)), ("masks", (16, 24))):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.fromarray(rng.integers(0, 6, shape).astype(np.uint8)).save(tmp_path / "set" / name / "0.png")
    shown = run("mine.py:make", "--data", f"masks:{tmp_path / 'set'}", "--budget", "1,4", "--json").stdout
    row = json.loads(shown)["rows"][0]
    assert (row["images"], row["errors"]) == (1, 0)
    loaded = models.load("mine.py:make")
    assert loaded.for_task("segmentation").preprocess.size is None
    assert loaded.for_task("classification").preprocess == models.Preprocess()


def test_errors_are_explained_and_end_in_1(tmp_path):
    data = tiny.npz(tmp_path, 4)
    for arguments, word in (
        (["timm:resnat18", "--data", data], "resnat18"),
        ([f"{TINY}:build", "--data", "npz:nowhere.npz"], "nowhere.npz"),
        ([f"{TINY}:build", "--data", data, "--criterion", "entropie"], "entropie"),
        ([f"{TINY}:build", "--data", data, "--task", "segmentation"], "labelled for classification"),
        ([f"{TINY}:build", "--data", data, "--tta", "flip"], "POLICY:VIEWS"),
    ):
        result = run(*arguments, code=1)
        assert result.stderr.startswith("unstride: ")
        assert word in result.stderr
        assert "Traceback" not in result.output


def test_wrong_usage_ends_in_2(tmp_path):
    data = tiny.npz(tmp_path, 4)
    for more in (["--budget", "many"], ["--layers", "2..4"], ["--flip", "--tta", "flip"], ["--align", "maybe"]):
        run(f"{TINY}:build", "--data", data, *more, code=2)
    run(f"{TINY}:build", code=2)


def test_the_embedded_sample():
    rows = json.loads(run("sample", "--data", "sample", "--limit", 40, "--budget", "1,4", "--json").stdout)["rows"]
    assert rows[0]["images"] == 40
    assert rows[0]["metrics"]["top1"] > 0.8
    assert rows[1]["macs"] > 1.5


def test_small_gains_of_numbers_keep_their_digits(tmp_path):
    """An error of half a centimetre is no 0.00, and nothing is corrected or corrupted where there are no classes."""
    random = np.random.default_rng(0)
    for name in ("images", "depth"):
        (tmp_path / name).mkdir()
    for i in range(3):
        Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"images/{i}.png")
        np.save(tmp_path / f"depth/{i}.npy", np.full((16, 16), 0.5, np.float32))
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom unstride import Preprocess\n\n\ndef make():\n"
        "    net = nn.Sequential(nn.Conv2d(3, 1, 3, 2, 1), nn.Upsample(scale_factor=2), nn.Sigmoid())\n"
        "    return net.eval(), Preprocess(None, None, (0.5,) * 3, (0.5,) * 3)\n"
    )
    torch.manual_seed(0)
    shown = run("net.py:make", "--data", "depth:.", "--recipe", "flip", "--out", "run").stdout
    gain = json.loads((tmp_path / "run/rows.jsonl").read_text().splitlines()[1])["gain"]
    cells = next(line for line in shown.splitlines() if "flip \u2502" in line).split("\u2502")
    assert f"{gain['gain']:+.4g} [{gain['low']:+.4g}, {gain['high']:+.4g}]" in shown
    assert [c.strip() for c in cells].count("") >= 2
    refused = run("net.py:make", "--data", "depth:.", "--tta", "flip", code=1)
    assert "recipe='flip'" in refused.stderr
