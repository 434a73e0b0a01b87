"""The files around the code: one version everywhere, a citation, workflows that run README's commands."""

import re
import tomllib
from pathlib import Path

import pytest

import unstride

yaml = pytest.importorskip("yaml", reason="pip install 'unstride[docs]' brings it")
ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def workflow(name: str) -> tuple[dict, list[str]]:
    """What starts it (YAML reads the key `on` as true), and the commands it runs."""
    found = yaml.safe_load(read(f".github/workflows/{name}"))
    return found[True], [step["run"] for job in found["jobs"].values() for step in job["steps"] if "run" in step]


def test_one_version_everywhere():
    citation = yaml.safe_load(read("CITATION.cff"))
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert unstride.__version__ == version == citation["version"]
    assert f"## {version}" in read("CHANGELOG.md")


def test_the_paper_is_cited():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format wants
    paper = citation["preferred-citation"]
    assert paper["title"] in " ".join(read("README.md").split())
    for author in paper["authors"]:
        assert f"{author['given-names']} {author['family-names']}" in read("README.md")
    assert paper["year"] == 2024 and "ECCV" in paper["collection-title"]


def test_the_workflow_runs_the_two_commands_of_the_readme():
    commands = re.findall(r"^(make \w+) ", read("README.md").partition("## Two commands")[2], re.MULTILINE)
    started, runs = workflow("test.yml")
    assert commands == ["make demo", "make test"] == runs
    assert {"push", "pull_request"} <= set(started)


def test_another_tries_the_newest_torch_every_week():
    started, runs = workflow("newest.yml")
    (when,) = started["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \d", when["cron"])  # a minute and an hour of one day of the week
    assert "make test PINS=" in runs
    makefile = read("Makefile")
    assert makefile.count("@$(PIP)") == 2 and "PINS ?= -c constraints.txt" in makefile
    assert re.search(r"^PIP := .* \$\(PINS\)", makefile, re.MULTILINE)


def test_the_set_up_says_what_it_does_and_prints_no_commands():
    recipe = read("Makefile").partition("$(STAMP): ")[2].partition("\n\n")[0]
    lines = recipe.splitlines()[1:]
    assert all(line.startswith("\t@") for line in lines)
    assert re.search(r'@echo ".*\d GB.*minutes"', recipe)
    assert [line for line in lines if "@echo" in line][1:] == [line for line in lines if "of 3:" in line]
