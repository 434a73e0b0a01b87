"""`unstride tta list`: the views that a budget takes."""

import json

from typer.testing import CliRunner

from unstride.cli import app
from unstride.recipe.policies import expanded
from unstride.recipe.view import parse_view


def test_lists_what_a_budget_takes() -> None:
    result = CliRunner().invoke(app, ["tta", "list", "expanded", "--budget", "30", "--json"])
    got = json.loads(result.stdout)
    assert got["size"] == 8778
    assert tuple(parse_view(v["view"]) for v in got["views"]) == expanded().first(30)
    text = CliRunner().invoke(app, ["tta", "list", "standard", "--budget", "3"]).stdout.splitlines()
    assert text[0] == "standard: 3 of 190 views"
    assert len(text) == 4


def test_unknown_policy_and_too_large_a_budget_are_explained() -> None:
    wrong = CliRunner().invoke(app, ["tta", "list", "luck"])
    assert wrong.exit_code == 1
    assert "unknown policy 'luck'" in wrong.stderr
    assert "at most 190" in CliRunner().invoke(app, ["tta", "list", "standard", "--budget", "191"]).stderr
