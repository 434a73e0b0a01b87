"""`unstride COMMAND`: commands are registered here.

Exit codes: 0 fine, 1 an error that is explained, 2 bad usage, 3 finished, but with counted errors (or without a
image or page that could not be written).
"""

import contextlib
import importlib
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from unstride.errors import LeftOut, NotWritten, TaskAssumed, UnstrideError, UnstrideWarning

PARTLY = 3
_MEMORY = "not enough memory for this; ask for smaller images, smaller batches or fewer states"
COMMANDS = (
    *("inspect", "tune", "evaluate", "predict", "fit", "export", "bench", "reproduce", "studio", "recipe", "demo"),
)


class _Group(typer.core.TyperGroup):
    """Known errors end in one line and exit code 1, never in a stack trace; warnings are such lines, too."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # of a file that vanished, or of the screen, which may be a full disk
            _end(f"{error.filename or 'standard output'}: {error.strerror or error}")
        except MemoryError:
            _end(_MEMORY)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):  # as torch says it
                raise
            _end(_MEMORY)

    def invoke(self, ctx: Any) -> Any:
        missing: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("always", UnstrideWarning)
            usual = warnings.showwarning

            def show(message: Any, category: Any, *rest: Any, **more: Any) -> None:
                if not issubclass(category, UnstrideWarning):
                    return usual(message, category, *rest, **more)
                missing.extend([str(message)] * issubclass(category, (LeftOut, NotWritten)))
                return typer.echo(f"unstride: {_worded(message, self.commands.get(ctx.invoked_subcommand))}", err=True)

            warnings.showwarning = show
            try:
                result = super().invoke(ctx)
                _flush()
            except UnstrideError as error:
                typer.echo(f"unstride: {error}", err=True)
                sys.exit(1)
            except typer.Exit as end:
                _flush()
                raise typer.Exit(_code(end.exit_code, missing)) from None
        if _code(0, missing):
            raise typer.Exit(PARTLY)
        return result


def _worded(message: Any, command: Any) -> str:
    """As it is, but for what Python users are told to write."""
    if not isinstance(message, TaskAssumed):
        return str(message)
    takes = command is not None and any("--task" in option.opts for option in command.params)
    return message.assumption + "; --task says otherwise" * takes


def _flush() -> None:
    if sys.stdout is not None:  # a process may be started without
        sys.stdout.flush()


def _code(code: int, missing: list[str]) -> int:
    """torchrun would take any other code than 0 for a crash, and start the finished run again."""
    return PARTLY if not code and missing and "TORCHELASTIC_RUN_ID" not in os.environ else code


def _end(why: str) -> None:
    """What Python would still write to a screen that takes nothing goes nowhere, or it would complain once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.echo(f"unstride: {why}", err=True)
    sys.exit(1)


app = typer.Typer(
    name="unstride",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Make a frozen PyTorch vision model more accurate at test time: test-time augmentation, cascades of networks, "
    "and the states of its strided layers, chosen on your data.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from unstride import __version__

        typer.echo(f"unstride {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The group of all commands."""


for _name in COMMANDS:
    importlib.import_module(f"unstride.cli.{_name}").register(app)
