"""`unstride studio`: it says where the page is, and what is wrong before the page is there."""

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from unstride.cli import app
from unstride.studio.server import StudioServer


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[StudioServer]:
    servers: list[StudioServer] = []

    def interrupted(self: StudioServer) -> None:
        servers.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(StudioServer, "serve_forever", interrupted)
    return servers


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["studio", "--port", "0", *arguments])


def test_the_command_prints_where_the_page_is(served: list[StudioServer]) -> None:
    done = run()
    assert done.exit_code == 0, done.output
    assert re.search(r"http://127\.0\.0\.1:\d+/", done.stdout)
    assert "password" not in done.stderr
    assert "no password" in run("--host", "0.0.0.0").stderr
    assert served[0].studio.choices["0"].title == "sample + sample-large"


def test_models_and_a_recipe_come_first(served: list[StudioServer], tmp_path: Any) -> None:
    assert run("sample", "--recipe", "paper", "--set", "budget=4").exit_code == 0
    first = served[-1].studio.choices["0"]
    assert first.title == "sample" and "4 states" in str(first.open().better.recipe)
    file = first.open().better.save(tmp_path / "own.toml")
    assert run("sample", "--recipe", str(file)).exit_code == 0
    assert run("--recipe", "flip").exit_code == 0  # of the embedded networks
    assert served[-1].studio.choices["0"].open().better.recipe.name == "flip"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["timm:no_such_net", "--weights", "random"], "no_such_net"),
        (["sample", "--recipe", "nowhere.toml"], "nowhere.toml"),
        (["sample", "--recipe", "flip", "--set", "budget=4"], "budget"),
    ],
)
def test_what_cannot_be_run_is_said_before_the_page_is_there(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1 and words in done.stderr, done.output
