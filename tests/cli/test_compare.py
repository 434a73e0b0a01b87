"""`unstride compare`: disagreements into a file, labels from it, one verdict."""

import csv
import json
from pathlib import Path
from typing import Any

from PIL import Image
from small_nets import photo
from typer.testing import CliRunner

from unstride import Recipe, Stage
from unstride.cli import app
from unstride.pipeline import open_pipeline
from unstride.recipe.files import write
from unstride.sample import classification_sample


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_from_recipe_files_to_a_verdict(tmp_path: Path) -> None:
    folder, out = tmp_path / "photos", tmp_path / "to_label.csv"
    folder.mkdir()
    for k, pixels in enumerate(classification_sample()[0][:40]):
        Image.fromarray(pixels).save(folder / f"{k}.png")
    recipes = []
    for name, recipe in (("base", Recipe()), ("new", Recipe((Stage(("Rotate=90",)),)))):
        recipes.append(write(tmp_path / f"{name}.toml", recipe, open_pipeline("sample").stored_networks()))
    first = run(*recipes, folder, "--out", out, "--json")
    assert first.exit_code == 0, first.output
    got = json.loads(first.stdout.splitlines()[-1])
    assert got["images"] == 40 and got["disagreements"] > 0 and got["verdict"] is None
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    with out.open("w", newline="") as stream:
        table = csv.DictWriter(stream, list(rows[0]))
        table.writeheader()
        table.writerows({**row, "label": "neither"} for row in rows)
    second = run(*recipes, folder, "--labels", out)
    assert second.exit_code == 0, second.output
    assert f"{len(rows)} labelled: 0 corrected, 0 broken" in second.stdout
    assert "Keep the base recipe: +0.0" in second.stdout.replace("0.00", "0.0")
    named = run("plain", "flip", "sample", folder, "--out", tmp_path / "b.csv")
    assert named.exit_code == 0 and "disagree on" in named.stdout


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    assert "--out FILE" in run("plain", "flip", "sample", tmp_path / "a.png").stderr
    assert run("plain", "flip", "sample", "--out", tmp_path / "a.csv").exit_code == 2
    assert "Name a model" in run("plain", "flip", tmp_path / "a.png", "--out", tmp_path / "a.csv").stderr
