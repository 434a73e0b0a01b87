"""The group of commands: quick, each option defined once, and errors in one line."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from unstride import __version__
from unstride.cli import app
from unstride.cli.main import COMMANDS, CommandGroup
from unstride.errors import LeftOut, OptionError, TaskAssumed

HEAVY = ("torch", "numpy", "PIL", "matplotlib", "timm", "torchvision")
SHARED = {
    *("--recipe", "--set", "--weights", "--task", "--device", "--json", "--limit", "--seed", "--batch-size", "--data"),
    *("--split", "--image-size", "--images", "--out", "--help"),
}
ONCE = SHARED - {"--images", "--out", "--help"}  # what these hold depends on the command
MOST_OWN = 12


def command(name: str) -> Any:
    return typer.main.get_command(app).get_command(None, name)


def options(name: str) -> dict[str, Any]:
    """Option -> parameter, of a command."""
    params = [p for p in command(name).params if p.param_type_name == "option"]
    return {flag: p for p in params for flag in p.opts if flag.startswith("--")}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_at_most_twelve_options_of_its_own(name: str) -> None:
    own = {id(p) for flag, p in options(name).items() if flag not in SHARED}
    assert len(own) <= MOST_OWN, sorted(set(options(name)) - SHARED)
    assert command(name).help


@pytest.mark.parametrize("flag", sorted(ONCE))
def test_a_shared_option_is_defined_once(flag: str) -> None:
    helps = {options(name)[flag].help for name in COMMANDS if flag in options(name)}
    assert len(helps) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_has_one_name_everywhere(name: str) -> None:
    wrong = {"--output", "--out-dir", "--batch", "--batchsize", "--input", "--model", "--size", "--dataset"}
    assert not wrong & set(options(name))


def fresh(code: str) -> Any:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    page = "import unstride.cli.main as m, sys, time, json; m.app(['--help'], standalone_mode=False); "
    seconds, loaded = fresh(
        f"{page}print(json.dumps([time.process_time(), [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    assert loaded == []
    assert seconds < 1.0  # about 0.3 on an idle machine


def test_help_lists_all_commands_with_a_sentence_each() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0, result.output
    rows = [line.strip("│ ").split() for line in result.output.splitlines()]
    assert [row[0] for row in rows if row and row[0] in COMMANDS and len(row) > 2] == list(COMMANDS)


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"unstride {__version__}\n"


def test_a_command_with_a_typing_error_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["evalute"])
    assert result.exit_code == 2
    assert "Did you mean 'evaluate'?" in result.output


# ------------------------------------------------------------------------------------------------ how errors are shown


def group(run: Any) -> typer.Typer:
    """A group as unstride's, whose command `recipe` does something else."""

    class OneCommand(CommandGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            own = typer.Typer()
            own.command(name="recipe")(run)
            self.commands[cmd_name] = typer.main.get_command(own)
            return self.commands[cmd_name]

    made = typer.Typer(cls=OneCommand, pretty_exceptions_enable=False)
    made.callback()(lambda: None)
    return made


def fails(error: BaseException) -> Any:
    def run() -> None:
        raise error

    return CliRunner().invoke(group(run), ["recipe"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OptionError("--cost: got 0, expected more than 0."), "unstride: --cost: got 0, expected more than 0.\n"),
        (OSError(28, "No space left on device", "r.csv"), "unstride: r.csv: No space left on device\n"),
        (MemoryError(), "unstride: not enough memory."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "unstride: not enough memory."),
        (OSError(28, "No space left on device"), "unstride: a file could not be read or written: No space left"),
    ],
)
def test_an_error_is_one_line(error: BaseException, words: str) -> None:
    result = fails(error)
    assert result.exit_code == 1
    assert result.stderr.startswith(words)
    assert result.stderr.count("\n") == 1


def test_standard_output_on_a_full_disk_is_named() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "unstride", "recipe", "paper"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "unstride: standard output: No space left on device\n"


def test_a_file_on_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, ["recipe", "paper", "--out", str(tmp_path / "mine.toml")])
    assert result.exit_code == 1
    assert "mine.toml: No space left on device. Free some space" in result.stderr
    assert "standard output" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_missing_images_give_exit_code_3_but_not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        warnings.warn(LeftOut("2 images could not be read."), stacklevel=1)

    result = CliRunner().invoke(group(run), ["recipe"])
    assert (result.exit_code, result.stderr) == (3, "unstride: 2 images could not be read.\n")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert CliRunner().invoke(group(run), ["recipe"]).exit_code == 0


@pytest.mark.parametrize("takes_task", [True, False])
def test_a_warning_names_the_option_and_not_the_argument(takes_task: bool) -> None:
    def with_task(task: str = "") -> None:
        warnings.warn(TaskAssumed("The output looks like classes"), stacklevel=1)

    def without() -> None:
        with_task()

    result = CliRunner().invoke(group(with_task if takes_task else without), ["recipe"])
    assert "task=" not in result.stderr
    assert ("--task" in result.stderr) == takes_task
