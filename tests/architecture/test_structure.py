"""The structure of the package: layers, a small root, names that exist once, files and functions of a readable size."""

import ast
import collections
import subprocess
import sys
from pathlib import Path

import pytest

import unstride

SOURCE = Path(unstride.__file__).parent
TESTS = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
# Folders of tests beside those of the packages.
BESIDE = {"architecture", "benchmarks", "browser", "docs", "golden", "invariants", "reference", "robustness", "zoo"}
ROOT_NAMES = 18
MOST_MEMBERS = 12  # of Enhanced, its own
MOST_LINES = 400
MOST_IN_A_FUNCTION = 45  # without signature and docstring
# Private names of other libraries.
FOREIGN = {"_schema", "_overloadname", "_version", "_fields", "_asdict", "_replace", "_fingerprint", "_MEIPASS"}


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_a_package_imports_only_from_lower_ones() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([lint], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_root_has_18_names_that_are_there() -> None:
    assert len(unstride.__all__) == len(set(unstride.__all__)) == ROOT_NAMES
    assert unstride.__all__ == sorted(unstride.__all__)
    for name in unstride.__all__:
        assert getattr(unstride, name) is not None


def test_no_module_hides_a_root_function() -> None:
    """Importing `unstride.tune.x` would rebind `unstride.tune`; so every submodule is imported in a fresh interpreter,
    and then every root function is called, without arguments, which only a function takes as a TypeError of its own.
    """
    code = f"""
import importlib, inspect, pkgutil, unstride
for module in pkgutil.walk_packages(unstride.__path__, "unstride."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in {unstride.__all__!r}:
    value = getattr(unstride, name)
    if inspect.ismodule(value):
        assert name in ("data", "models"), name
    elif inspect.isfunction(value):
        try:
            value()
        except TypeError as error:
            assert name in str(error), error
        else:
            raise AssertionError(name)
    else:
        assert inspect.isclass(value), name
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_root_package_is_small_and_every_package_says_what_it_is() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 8
    for package in SOURCE.iterdir():
        if package.is_dir() and any(package.glob("*.py")):
            assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), f"{package.name}: no docstring"


def test_enhanced_has_few_public_members() -> None:
    inherited = set(dir(unstride.Enhanced.__mro__[1]))
    own = {name for name in vars(unstride.Enhanced) if not name.startswith("_")} - {"forward", "train", "is_enhanced"}
    assert len(own - inherited) <= MOST_MEMBERS, sorted(own)


def test_every_package_has_its_folder_of_tests() -> None:
    """`tests/X` tests `src/unstride/X`. Tests of the whole are in other folders."""
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    packages = {package.name for package in SOURCE.iterdir() if package.is_dir()}
    assert folders - packages <= BESIDE


def test_no_public_class_name_exists_twice() -> None:
    places = collections.defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(named(path))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_private_name_crosses_a_module(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unstride"):
            private = [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
            assert not private, f"{path.name}:{node.lineno} imports {private}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            foreign = first_name(node) in ("torch", "aten", "ops", "pytree")  # another library's business
            known = of_self or foreign or node.attr in own or node.attr in FOREIGN
            assert known, f"{path.name}:{node.lineno} uses {ast.unparse(node)}"


def first_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_and_functions_are_of_a_readable_size(path: Path) -> None:
    text = path.read_text()
    lines = len(text.splitlines())
    assert lines <= MOST_LINES, f"{path.name} has {lines} lines: is it two things?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= MOST_IN_A_FUNCTION, (
                f"{path.name}:{node.lineno} {node.name} has {length}: is it two things?"
            )


def test_no_module_has_the_name_of_a_root_function() -> None:
    functions = set(unstride.__all__) - {"data", "models"}
    assert not functions & {path.stem for path in SOURCE.glob("*.py")}
    assert not functions & {path.name for path in SOURCE.iterdir() if path.is_dir()}
