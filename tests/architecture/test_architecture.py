"""ARCHITECTURE.md and CONTRIBUTING.md match the tree: packages and their order, paths, commands and links."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "unstride"
NO_PACKAGES = {"__init__", "__main__"}


def packages_of_the_page() -> list[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("## The packages")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_the_packages_are_those_of_the_tree():
    tree = {p.parent.name for p in SOURCE.glob("*/__init__.py")} | {p.stem for p in SOURCE.glob("*.py")}
    assert sorted(packages_of_the_page()) == sorted(tree - NO_PACKAGES)


def test_the_packages_stand_in_the_order_of_the_layers():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [c for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    layers = [layer.split(" | ") for layer in reversed(contract["layers"])]
    assert packages_of_the_page() == [package for layer in layers for package in layer]


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_the_pages_name_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*|tests|benchmarks)`", text):
        assert (ROOT / path).exists() or (SOURCE / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake (\w[\w-]*)", "".join(re.findall(r"```sh\n.*?```|`[^`\n]+`", text, re.DOTALL))):
        assert f"\n{target}:" in makefile, target
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
