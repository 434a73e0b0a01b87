"""One recipe through every command: what one proves, the others run."""

import gzip
import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import unstride
from unstride import models, sample
from unstride.cli import app
from unstride.cli.main import COMMANDS
from unstride.cli.recipes import READ
from unstride.exporting import Stages
from unstride.exporting.driver import open_graph
from unstride.procedure.gates import Gate, Stage
from unstride.procedure.search import CRITERIA, ORDERS
from unstride.recipe import PRESETS, Recipe, words, write
from unstride.recipe.recipe import AGGREGATES, MERGES
from unstride.recipe.view import parse_view
from unstride.studio import Studio
from unstride.views.images import open_image


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module", params=["tuned", "gated"])
def tuned(request, tmp_path_factory):
    """What `tune` found for the embedded network, and one that surely has a gate and views of other sizes."""
    path = tmp_path_factory.mktemp("recipes") / "recipe.toml"
    if request.param == "tuned":
        ask = ["--limit", 200, "--pool", "small", "--no-paper", "--cost", 1.5]
        run("tune", "sample", "--data", "sample", *ask, "--out", path)
        return path
    loaded = models.load("sample")
    again = Stage((parse_view("flip"), parse_view("1.25x")), gate=Gate("margin", below=0.9))
    return write(path, Recipe("gated", stages=(Stage(), again)), loaded.model, loaded.preprocess)


@pytest.fixture
def photo(tmp_path):
    images, _ = sample.classification_sample()
    Image.fromarray(images[192]).save(tmp_path / "garment.png")
    return tmp_path / "garment.png"


def test_a_tuned_recipe_walks_through_all_commands(tuned, photo, tmp_path):
    loaded = models.load("sample")
    image = open_image(photo)
    x = loaded.seen(image)[None]
    better = unstride.enhance(loaded.model, x, recipe=tuned, preprocess=loaded.preprocess)
    p = better.explain([image])[0]
    wanted = p.logits.softmax(0)

    told = json.loads(run("inspect", "sample", "--recipe", tuned, "--json").stdout)["recipe"]
    assert told["text"] == str(better.recipe)
    assert told["costs"][0] == pytest.approx(1, abs=0.01)

    shown = json.loads(run("predict", "sample", photo, "--recipe", tuned, "--json").stdout)
    assert shown["recipe"] == str(better.recipe)
    assert shown["images"][0]["enhanced"][0]["probability"] == pytest.approx(float(wanted.max()), abs=1e-4)

    run("predict", "sample", photo, "--recipe", tuned, "--out", tmp_path / "p.jsonl")
    row = json.loads((tmp_path / "p.jsonl").read_text())
    assert row["classes"][0] == int(wanted.argmax())
    assert row["probabilities"][0] == pytest.approx(float(wanted.max()), abs=1e-4)
    assert row["cost"] == pytest.approx(p.cost, abs=1e-4)

    ask = ["--data", "sample", "--limit", 40, "--recipe", tuned, "--out", tmp_path / "runs", "--json"]
    rows = json.loads(run("evaluate", "sample", *ask).stdout)["rows"]
    assert len(rows) == (2 if better.recipe.stages else 1)  # what asks for nothing more is measured, too

    measured = json.loads(run("bench", "sample", "--recipe", tuned, "--batch", 1, "--repeats", 1, "--json").stdout)
    assert measured["rows"][-1]["macs"] == pytest.approx(told["costs"][-1], abs=0.01)

    ask = ["--data", "sample", "--limit", 40, "--epochs", 1, "--budget", 2, "--recipe", tuned]
    fitted = run("fit", "sample", *ask, "--out", tmp_path / "fitted.safetensors", code=1 if better.recipe.stages else 0)
    assert "stages of looks" in fitted.stderr or not better.recipe.stages

    ask = ["--data", "sample", "--limit", 40, "--pool", "small", "--no-paper", "--recipe", tuned, "--json"]
    lines = {r["name"]: r for r in json.loads(run("tune", "sample", *ask).stdout)["rows"]}
    assert lines["yours"]["accuracy"] == pytest.approx(rows[-1]["metrics"]["top1"], abs=1e-6)
    assert lines["yours"]["cost"] == pytest.approx(rows[-1]["macs"], abs=0.01)
    assert lines["plain"]["gain"] is None and lines["yours"]["low"] <= lines["yours"]["gain"] <= lines["yours"]["high"]

    files = json.loads(run("export", "sample", tmp_path / "net.pt2", "--recipe", tuned, "--json").stdout)["files"]
    call = Stages(files[-1]) if len(files) > 1 else open_graph(tmp_path / "net.pt2")
    assert torch.allclose(call(x), better(x), atol=1e-3)

    page = json.loads(gzip.decompress(Studio("sample", recipe=str(tuned)).look("0", "0")))
    seen = better.explain([Image.fromarray(sample.classification_sample()[0][192])])[0]
    best = int(seen.logits.argmax())
    place = [c["name"] for c in page["classes"]].index(loaded.classes[best])
    assert page["enhanced"][-1][place] == pytest.approx(float(seen.logits.softmax(0)[best]), abs=1e-3)


def test_a_recipe_for_another_model_is_refused_by_every_command(tmp_path, photo):
    other = models.load("sample-segmentation")
    path = write(tmp_path / "other.toml", unstride.recipe.get("flip"), model=other.model)
    ask = ["--recipe", path]
    for words_of in (
        ["inspect", "sample"],
        ["predict", "sample", photo],
        ["predict", "sample", photo, "--out", tmp_path / "p.jsonl"],
        ["evaluate", "sample", "--data", "sample", "--limit", 4, "--out", tmp_path / "runs"],
        ["bench", "sample"],
        ["fit", "sample", "--data", "sample", "--limit", 4, "--out", tmp_path / "f.safetensors"],
        ["export", "sample", tmp_path / "net.pt2"],
        ["tune", "sample", "--data", "sample", "--limit", 40, "--pool", "small", "--no-paper"],
    ):
        assert "fingerprint" in run(*words_of, *ask, code=1).stderr, words_of


def test_the_same_options_everywhere_and_their_words_are_the_fields_own():
    own = {name: {"budget"} for name in ("evaluate", "bench", "studio")}
    own["fit"] = {"budget", "criterion", "aggregate"}
    for command in ("inspect", "predict", "evaluate", "bench", "fit", "tune", "export", "studio"):
        assert command in COMMANDS
        text = " ".join(run(command, "--help").stdout.replace("│", " ").split())
        for name in {"recipe", *READ} - own.get(command, set()):
            assert f"--{name}" in text, (command, name)
    assert set(words.DOCS) == set(Recipe.__dataclass_fields__)
    assert tuple(PRESETS) == words.PRESETS
    for field, values in {"criterion": CRITERIA, "order": ORDERS, "aggregate": AGGREGATES, "merge": MERGES}.items():
        assert all(value in words.DOCS[field] for value in values), field


def test_what_fit_saved_is_a_recipe(tmp_path, photo):
    out = tmp_path / "fitted.safetensors"
    run("fit", "sample", "--data", "sample", "--limit", 40, "--epochs", 1, "--budget", 3, "--out", out)
    shown = json.loads(run("predict", "sample", photo, "--recipe", out, "--budget", 4, "--json").stdout)
    loaded = models.load("sample")
    x = loaded.seen(open_image(photo))[None]
    wanted = unstride.load(out, loaded.model).with_options(budget=4)(x)[0].softmax(0)
    assert shown["images"][0]["enhanced"][0]["probability"] == pytest.approx(float(wanted.max()), abs=1e-4)
    assert len(shown["images"][0]["states"]) == 4
    refused = run("fit", "sample", "--data", "sample", "--limit", 4, "--recipe", "flip", "--out", out, code=1)
    assert "stages of looks" in refused.stderr


def test_gates_set_without_labels_are_told_as_json_too(photo, tmp_path):
    ask = ["tune", "sample", "--images", photo, "--cost", 1.2]
    told = json.loads(run(*ask, "--json", "--out", tmp_path / "set.toml").stdout)
    assert (told["images"], told["proved"], told["out"]) == (1, False, str(tmp_path / "set.toml"))
    assert "--report is for labelled images" in run(*ask, "--report", tmp_path / "r.html", code=2).output
