"""docs/paper.md: what its tables name is there, and every exhibit has its command."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from unstride.paper import catalogue

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py): ([\w.]+)`")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def defined(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a file: `align`, `Split.offset`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("row", rows(section("Where each section is")), ids=lambda row: row[0])
def test_a_section_names_code_and_tests_that_exist(row: list[str]) -> None:
    _, code, tests, printed = row
    assert printed
    for cell, folder in ((code, ROOT / "src/unstride"), (tests, ROOT)):
        assert re.sub(NAMED, "", cell).strip(" ,") == "", f"{cell}: only `path.py: name`"
        for path, name in NAMED.findall(cell):
            assert name in defined(folder / path), f"{path}: {name}"
    assert all(name.startswith("test_") for _, name in NAMED.findall(tests))


def test_every_equation_and_exhibit_is_on_the_page() -> None:
    table = section("Where each section is")
    numbers = {int(n) for part in re.findall(r"Eq\. ([\d, ]+)", table) for n in re.findall(r"\d+", part)}
    assert numbers == set(range(1, 13)) - {2}  # Eq. 2 is the loss that the networks were trained with
    commands = [
        shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith("unstride reproduce ")
    ]
    asked = {words[2] for words in commands} - {"list", catalogue.FINETUNE}
    assert {catalogue.get(name).name for name in asked} == set(catalogue.EXHIBITS)


def test_a_deviation_has_what_runs_and_why() -> None:
    found = rows(section("All deviations").partition("**Not printed")[0])
    assert len(found) >= 10
    assert all(all(row[:3]) for row in found)
