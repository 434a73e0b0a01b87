"""The walls of the house, beside import-linter's layers: a small root, no private name crosses, files of a size."""

import ast
from pathlib import Path

import pytest

import unstride

SOURCE = Path(unstride.__file__).parent
TESTS = Path(__file__).parents[1]
BESIDE = {"laws", "zoo", "hostile", "browser", "docs", "house"}
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 400
MOST_IN_A_FUNCTION = 45  # a screen; signature and docstring do not count


def test_the_root_is_small_and_every_room_says_what_it_is():
    assert len(list(SOURCE.glob("*.py"))) <= 8
    for room in SOURCE.iterdir():
        if room.is_dir() and any(room.glob("*.py")):
            doc = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
            assert doc, f"{room.name}/__init__.py: say what comes in, what goes out and what one may touch"


def test_tests_mirror_the_rooms():
    """Who changes src/unstride/X/y.py opens tests/X; what holds for the whole lies in folders beside the rooms."""
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    rooms = {room.name for room in SOURCE.iterdir() if room.is_dir()}
    assert folders - rooms <= BESIDE, f"{sorted(folders - rooms - BESIDE)}: no room of that name"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_private_name_crosses_a_module(path):
    tree = ast.parse(path.read_text())
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {t.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) for t in [n] if isinstance(n.ctx, ast.Store)}
    own |= {t.id for n in ast.walk(tree) for t in [n] if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unstride"):
            private = [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
            assert not private, f"{path.name}:{node.lineno} imports {private}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            foreign = _root(node) in ("torch", "aten", "ops", "pytree")  # another library's business
            assert of_self or foreign or node.attr in own or node.attr in FOREIGN, (
                f"{path.name}:{node.lineno} uses {ast.unparse(node)}"
            )


FOREIGN = {
    "_schema",
    "_overloadname",
    "_version",
    "_fields",
    "_asdict",
    "_replace",
    "_fingerprint",
}  # other libraries' own


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_one_thing(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{path.name} has {lines} lines: is it two things?"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_function_fits_on_a_screen(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= MOST_IN_A_FUNCTION, f"{path.name}:{node.lineno} {node.name} has {lines}: is it two things?"
