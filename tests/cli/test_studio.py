"""`unstride studio`: it says where the page is."""

import re

import pytest
from typer.testing import CliRunner

from unstride.cli import app
from unstride.studio.choices import named
from unstride.studio.server import StudioServer


def test_the_command_tells_where_the_page_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: StudioServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StudioServer, "serve_forever", interrupted)
    done = CliRunner().invoke(app, ["studio", "--port", "0"])
    assert done.exit_code == 0
    assert re.search(r"http://127\.0\.0\.1:\d+/", done.stdout)
    assert "password" not in done.stderr
    done = CliRunner().invoke(app, ["studio", "--port", "0", "--host", "0.0.0.0"])
    assert "no password" in done.stderr
    wrong = CliRunner().invoke(app, ["studio", "timm:no_such_net", "--weights", "none"])
    assert wrong.exit_code == 1
    assert "no_such_net" in wrong.stderr


def test_a_recipe_that_cannot_be_run_is_said_before_the_page_is_there() -> None:
    for ask, words in (
        (["--recipe", "nowhere.toml"], "nowhere.toml"),
        (["--recipe", "flip", "--align", "off"], "align"),
    ):
        done = CliRunner().invoke(app, ["studio", "sample", "--port", "0", *ask])
        assert done.exit_code == 1 and words in done.stderr, done.output
    assert named({"temperature": 2.0}) == "given: default, temperature 2.0"
    assert named({"order": "cost"}) == "given: paper, order cost"
