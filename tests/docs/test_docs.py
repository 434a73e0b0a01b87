"""What the docs say must run: every Python block, every command line, every link of the built pages."""

import json
import linecache
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer
from docs_nets import namespace
from typer.testing import CliRunner

from unstride import data, models
from unstride.geometry.rules import RULES
from unstride.recipe.view import RULES as OPS
from unstride.views import transforms

ROOT = Path(__file__).parents[2]
EXTENDED = (RULES, data.KINDS, data.TASKS, models.libraries.LIBRARIES, OPS, transforms.TRANSFORMS)

DOCS = ROOT / "docs"
PAGES = sorted(p.name for p in DOCS.glob("*.md"))  # written by hand
RESULTS = sorted(p.name for p in (DOCS / "results").glob("*.md"))  # written by commands
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>.*?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int
    why_not: str | None


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        Block(m["kind"], m["text"], text.count("\n", 0, m.start("text")) + 1, m["why"]) for m in FENCE.finditer(text)
    ]


def python(page: str) -> list[Block]:
    return [b for b in blocks(page) if b.kind == "python"]


@pytest.mark.parametrize("page", [p for p in PAGES if python(p)])
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after another, as a reader would type them; line numbers are those of the page."""
    monkeypatch.chdir(tmp_path)
    threads, tables = torch.get_num_threads(), [(table, dict(table)) for table in EXTENDED]
    torch.set_num_threads(1)
    names = namespace()
    try:
        for block in python(page):
            if block.why_not is not None:
                assert block.why_not.strip(), f"{page}:{block.line}: say why it is not run"
                compile(block.text, f"{page}:{block.line}", "exec")
                continue
            source = "\n" * (block.line - 1) + block.text
            path = str(DOCS / page)
            linecache.cache.pop(path, None)
            exec(compile(source, path, "exec"), names)
    finally:
        torch.set_num_threads(threads)
        for table, before in tables:  # what the page registered
            table.clear()
            table.update(before)


def test_most_blocks_are_run() -> None:
    found = [b for page in PAGES for b in python(page)]
    assert len([b for b in found if b.why_not is not None]) <= 2 < len(found) // 10


def commands(page: str) -> list[str]:
    lines = [line for b in blocks(page) if b.kind == "bash" for line in b.text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.search(r"(^|-m )unstride ", line)]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)])
def test_command_lines_are_understood(page: str) -> None:
    """Commands and options exist, and what must be given is given; nothing is run."""
    from unstride.cli import app

    for line in commands(page):
        words = shlex.split(line, comments=True)
        understood(app, words[words.index("unstride") + 1 :], f"{page}: {line}")


def understood(app: typer.Typer, words: list[str], where: str) -> None:
    """A command line parses: the command and its options exist, and what must be given is given."""
    group = typer.main.get_command(app)
    with group.make_context("unstride", [], resilient_parsing=True) as context:
        command = group.get_command(context, words[0])
        assert command is not None, where
        command.make_context(words[0], words[1:])  # raises on an unknown or missing option


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if "monai" in name:
        pytest.importorskip("monai", reason="pip install monai runs it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.strip()


def without_figures(text: str) -> str:
    return re.sub(r"[-+]?\d[\d.,]*", "0", text)


def kept(output: dict) -> tuple[str, str]:
    """The kind of a cell's output, and its first line without figures."""
    lines = output.get("text") or output["data"]["text/plain"]
    return output["output_type"], without_figures(lines[0])


def test_the_notebook_runs_and_keeps_its_outputs() -> None:
    path = ROOT / "examples" / "tour.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    made = runpy.run_path(str(DOCS / "_tools" / "notebook.py"))["run"](notebook)
    assert [list(map(kept, outputs)) for outputs in made] == [list(map(kept, outputs)) for outputs in cells]
    assert all(cells) and path.stat().st_size < 300_000


def test_the_figures_of_why_are_those_of_the_rows() -> None:
    from benchmarks import why

    assert why.page() == why.PAGE.read_text(encoding="utf-8")


def test_own_models_in_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the quick start run, one after another, on models and images as its own program makes them."""
    from unstride.cli import app

    tool = runpy.run_path(str(DOCS / "_tools" / "first_models.py"))
    tool["prepare"](tmp_path, tool["Sizes"](training=40, scenes=6, epochs=1, labelled=60, labelled_scenes=12, new=2))
    monkeypatch.chdir(tmp_path)
    for line in commands("quick-start.md"):
        result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert result.exit_code == 0, (line, result.output)


def test_readme_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python runs as it stands, and its commands, make targets and links exist."""
    from unstride.cli import app

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names: dict[str, Any] = {"__name__": "readme"}
    try:
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            exec(compile(block, "README.md", "exec"), names)
    finally:
        torch.set_num_threads(threads)
    (printed,) = re.findall(r"^```text\n(.*)\n```$", text, re.MULTILINE)
    assert without_figures(printed) == without_figures(f"{names['tuned'].decision}")
    lines = [line.split("#")[0].strip() for line in text.splitlines() if re.match(r"unstride \w", line)]
    assert len(lines) >= 5
    for line in lines:
        understood(app, shlex.split(line, comments=True)[1:], line)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (ROOT / link).is_file(), link
    assert len(text.splitlines()) <= 150


def test_the_pages_are_few_and_short() -> None:
    words = sum(len((DOCS / page).read_text(encoding="utf-8").split()) for page in PAGES)
    assert len(PAGES) <= 15 and words <= 20_000, (len(PAGES), words)
    assert len(RESULTS) <= 10
    assert len((DOCS / "why.md").read_text(encoding="utf-8").split()) <= 600


def test_quick_start_names_every_command_and_extra() -> None:
    from unstride.cli.main import COMMANDS

    text = (DOCS / "quick-start.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(re.findall(r"^\| `unstride (\w+)", text, re.MULTILINE)) == set(COMMANDS)
    extras = text.partition("| Extra |")[2].partition("\n\n")[0]
    ours = {"dev", "docs"}  # of those who change unstride
    assert set(re.findall(r"^\| `(\w+)`", extras, re.MULTILINE)) == set(project["optional-dependencies"]) - ours


@pytest.mark.slow
def test_torchrun_example_in_two_processes(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "with_torchrun.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, str(tmp_path)]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("budget 4") == 1


def test_pages_are_in_the_navigation_and_name_no_machine() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (*PAGES, *(f"results/{name}" for name in RESULTS)):
        assert f": {page}\n" in config, f"{page} is not in mkdocs.yml"
    for path in [*DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.py"), ROOT / "mkdocs.yml"]:
        found = re.search(r"(?<![\w.])/(work|tmp|root|home)/", path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: {found}"


@pytest.mark.parametrize("path", sorted((DOCS / "img").glob("*.svg")), ids=lambda p: p.name)
def test_drawings_are_small_and_follow_the_colour_scheme(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme:dark" in text and "<script" not in text and len(text) < 8000
    assert any(f"img/{path.name}" in (DOCS / page).read_text(encoding="utf-8") for page in PAGES)


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'unstride[docs]' builds the pages")
    pytest.importorskip("mkdocstrings_handlers.python", reason="pip install 'unstride[docs]' builds the pages")
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("files", "__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "quick-start.html").read_text(encoding="utf-8")
    outside = re.findall(r'(?:src|rel="stylesheet" href)="(https?://[^"]+)"', page)
    assert not outside, outside
    for name in ("hljs-light", "hljs-dark"):  # the theme's switch between light and dark raises without them
        assert f'id="{name}"' in page
    assert 'id="unstride.Enhanced.explain"' in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")


def test_docstrings_are_laid_out() -> None:
    pytest.importorskip("griffe", reason="pip install 'unstride[docs]' builds the pages")
    layout = runpy.run_path(str(DOCS / "_tools" / "docstrings.py"))["layout"]
    assert (
        layout("A.\n\nExample:\n    f(x)\n    g(x)\n\nMore.") == "A.\n\nExample:\n\n```python\nf(x)\ng(x)\n```\n\nMore."
    )
    assert layout("A.\n\nname  text\n      goes on\nb, c  more").endswith("- `name`: text goes on\n- `b, c`: more")
