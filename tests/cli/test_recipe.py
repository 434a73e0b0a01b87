"""`unstride recipe`: what a recipe does, a file to edit, and the fields."""

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from unstride.cli import app
from unstride.recipe import policies
from unstride.recipe.files import read
from unstride.recipe.presets import PRESETS, get
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Search


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["recipe", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def test_without_a_name_all_recipes_and_fields_are_listed():
    shown = run().stdout
    assert all(str(get(name)) in shown for name in PRESETS)
    found = json.loads(run("--json").stdout)["fields"]
    assert set(found["Search"]) == {f.name for f in fields(Search)}
    assert set(found["Recipe"]) == {f.name for f in fields(Recipe)} - {"stages"}


def test_a_recipe_is_described_changed_and_written(tmp_path):
    out = tmp_path / "mine.toml"
    shown = run("paper", "--set", "budget=4", "--set", "layers=2-3", "--out", out).stdout
    assert read(out).recipe == get("paper").changed(budget=4, layers=(2, 3))
    assert str(read(out).recipe) in shown
    assert run(out).stdout.strip() == str(read(out).recipe)
    assert json.loads(run(out, "--json").stdout)["recipe"]["stage"][0]["states"]["search"]["budget"] == 4


def test_a_policy_replaces_the_views(tmp_path):
    out = tmp_path / "tta.json"
    run("paper", "--policy", "standard", "--views", 15, "--set", "budget=5", "--out", out)
    stage = read(out).recipe.stages[0]
    assert stage.views == policies.get("standard").first(15)
    assert stage.states.budget == 5


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("papr",), 1, "Did you mean 'paper'?"),
        (("nowhere.toml",), 1, "nowhere.toml"),
        (("paper", "--set", "bugdet=4"), 1, "Did you mean 'budget'?"),
        (("paper", "--set", "budget"), 2, "expected KEY=VALUE"),
        (("paper", "--views", 3), 2, "--policy"),
        (("default", "--policy", "standard"), 1, "one stage"),
        (("plain", "--policy", "standard", "--views", 500), 1, "190 views"),
        (("--set", "budget=4"), 2, "NAME is missing"),
        (("paper", "--out", "x.txt"), 1, ".toml or .json"),
    ],
)
def test_bad_usage(arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments, code=code)
    assert words in " ".join(done.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_figures_of_a_file_are_shown_until_the_recipe_changes(tmp_path):
    from unstride.recipe.files import write

    path = write(tmp_path / "tuned.toml", get("flip"), None, {"verdict": "Use this recipe: +1 point", "gain": 0.01})
    assert "Use this recipe" in run(path).stdout
    changed = run(path, "--set", "temperature=2", "--out", tmp_path / "other.toml").stdout
    assert "Use this recipe" not in changed
    assert read(tmp_path / "other.toml").figures == {}
