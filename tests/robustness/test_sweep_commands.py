"""Every option and argument of every command with 15 kinds of bad text: an explained error, no traceback, no exit 0.

Options are read from the commands themselves, so that a new one is swept without being added here.
"""

from pathlib import Path
from typing import Any

import click
import pytest
import torch
from robustness.bad_values import BAD_TEXT, prepare_folder
from small_nets import SOURCE, photo
from typer.main import get_command
from typer.testing import CliRunner

from unstride.cli.main import COMMANDS, app
from unstride.errors import OptionError

NET, DATA = "nets.py:net", "folder:photos"
# What each command needs beside the option that is swept: little work, so that a value that is fine costs little.
USUAL: dict[str, list[str]] = {
    "inspect": [NET],
    "tune": [NET, "--data", DATA, "--out", "t.toml"],
    "evaluate": [NET, "--data", DATA, "--recipe", "flip"],
    "compare": ["plain", "flip", NET, "a.png", "--out", "c.csv"],
    "predict": [NET, "a.png", "--out", "p.csv", "--recipe", "flip"],
    "fit": [NET, "--data", DATA, "--out", "f.toml"],
    "export": [NET, "--out", "n.onnx", "--recipe", "plain"],
    "bench": [NET],
    "reproduce": ["table-x"],
    "studio": [NET, "--port", "99999"],
    "recipe": ["flip"],
    "demo": ["--only", "x"],
}
# Texts that have a meaning: by option, of any command. A path that can be written is no error.
WRITABLE = {"word", "zero", "negative", "fraction", "nan", "inf", "unicode", "missing path", "long", "space"}
FINE: dict[str, set[str]] = {
    "--out": WRITABLE, "--report": WRITABLE, "--plot": WRITABLE, "--cache": WRITABLE, "--save": WRITABLE,
    "--seed": {"zero"}, "--top": set(), "--title": set(BAD_TEXT), "--margin": {"zero"}, "--context": {"zero"},
    "--task": set(), "--cost": {"fraction"}, "--temperature": {"fraction"}, "--max-time-ratio": {"fraction"},
}  # fmt: skip


def parameters() -> list[Any]:
    group: Any = get_command(app)
    context = click.Context(group)
    found = []
    for name in COMMANDS:
        for parameter in group.get_command(context, name).params:
            flag = isinstance(parameter, click.Option) and (parameter.is_flag or parameter.count)
            if not flag and parameter.name not in ("help", "version"):
                found.append(pytest.param(name, parameter, id=f"{name} {parameter.opts[0]}"))
    return found


def arguments(name: str, parameter: click.Parameter, text: str) -> list[str]:
    usual = list(USUAL[name])
    if isinstance(parameter, click.Option):
        option = max(parameter.opts, key=len)
        if option in usual:
            del usual[usual.index(option) : usual.index(option) + 2]
        return [name, *usual, option, text]
    rest = usual[1:] if usual and not usual[0].startswith("-") else usual
    return [name, text, *rest]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    prepare_folder(folder)
    (folder / "nets.py").write_text(SOURCE.replace("<b>[odd]</b> name", "odd"))
    photo(0, (32, 32)).save(folder / "a.png")
    for k in range(8):
        name = ("red", "green", "blue", "odd")[k % 4]
        (folder / "photos" / name).mkdir(parents=True, exist_ok=True)
        photo(k, (32, 32)).save(folder / "photos" / name / f"{k}.png")
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "parameter"), parameters())
def test_bad_text(here: Path, monkeypatch: pytest.MonkeyPatch, name: str, parameter: click.Parameter) -> None:
    monkeypatch.chdir(here)
    torch.set_num_threads(1)
    problems = []
    for kind, text in BAD_TEXT.items():
        given = arguments(name, parameter, text)
        result = CliRunner().invoke(app, given)
        what = f"{kind}: unstride {' '.join(given)[:150]}"
        if not isinstance(result.exception, SystemExit | None) or "Traceback" in result.output:
            problems.append(f"{what}: {result.exception!r}"[:400])
        elif result.exit_code == 0 and kind not in FINE.get(max(parameter.opts, key=len), set()):
            problems.append(f"{what}: exit code 0")
        elif result.exit_code not in (0, 1, 2, 3) or not 0 < len(result.output) < 20_000:
            problems.append(f"{what}: exit code {result.exit_code}, {len(result.output)} characters")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", [name for name in USUAL if name not in ("reproduce", "studio", "demo", "recipe")])
def test_the_usual_arguments_reach_the_work(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """So that it is the swept value that is refused."""

    def works(*_: Any, **__: Any) -> Any:
        raise OptionError("it worked")

    monkeypatch.chdir(here)
    monkeypatch.setattr(torch.nn.Conv2d, "forward", works)
    output = CliRunner().invoke(app, [name, *USUAL[name]]).output
    assert "it worked" in output or "1 of them could not be read or run" in output or "c.csv.runs" in output


def test_every_command_is_swept() -> None:
    assert set(USUAL) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_at_most_12_options_of_its_own(name: str) -> None:
    group: Any = get_command(app)
    shared = {"--recipe", "--set", "--weights", "--task", "--device", "--json", "--limit", "--seed", "--help"}
    options = [p for p in group.get_command(click.Context(group), name).params if isinstance(p, click.Option)]
    own = [option.opts for option in options if not shared & set(option.opts)]
    assert len(own) <= 12, own


def test_without_a_command() -> None:
    for given in (["nope"], ["--nope"], ["predict"], ["evaluate", NET], [""], ["a\0b"]):
        result = CliRunner().invoke(app, given)
        assert result.exit_code in (1, 2) and "Traceback" not in result.output and result.output
