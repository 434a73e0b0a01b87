"""`unstride COMMAND`. A command's module is imported only when its command runs, or when its help is shown.

Exit codes: 0 done; 1 an error, explained; 2 wrong usage; 3 done, but some images, or a plot or a page, are missing.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info

from unstride.errors import LeftOut, NotWritten, TaskAssumed, UnstrideError, UnstrideWarning

PARTLY = 3
COMMANDS = (
    *("inspect", "tune", "evaluate", "compare", "predict", "fit"),
    *("export", "bench", "reproduce", "studio", "recipe", "demo"),
)
_MEMORY = "not enough memory. Use smaller images, smaller batches or fewer states."


class CommandGroup(TyperGroup):
    """The group of all commands. An error that unstride explains is one line on stderr and exit code 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = _command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0][:60]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            _end(_os_error(error))
        except MemoryError:
            _end(_MEMORY)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):  # torch's words
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
                return typer.echo(f"unstride: {self._worded(ctx, message)}", err=True)

            warnings.showwarning = show
            try:
                result = super().invoke(ctx)
                _flush()
            except UnstrideError as error:
                typer.echo(f"unstride: {error}", err=True)
                sys.exit(1)
            except typer.Exit as end:
                _flush()
                raise typer.Exit(_exit_code(end.exit_code, missing)) from None
        if _exit_code(0, missing):
            raise typer.Exit(PARTLY)
        return result

    def _worded(self, ctx: Any, message: Any) -> str:
        """The warning in the words of the command line: an option instead of a Python argument."""
        if not isinstance(message, TaskAssumed):
            return str(message)
        command = self.commands.get(ctx.invoked_subcommand)
        options = [name for param in command.params for name in param.opts] if command is not None else []
        return f"{message.assumption}. Pass --task to change that." if "--task" in options else message.assumption


def _command(name: str) -> Any:
    """The command that a module of this package registers; its help wraps at the width of the terminal."""
    own = typer.Typer()
    importlib.import_module(f"unstride.cli.{name}").register(own)
    info = own.registered_commands[0]
    paragraphs = inspect.cleandoc(info.callback.__doc__ or "").split("\n\n")
    info.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    return get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="rich")


def _os_error(error: OSError) -> str:
    """What failed, by name: a file, or standard output (which may be redirected to a full disk)."""
    reason = error.strerror or str(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    prints = module == __name__ or module.partition(".")[0] in ("typer", "rich")  # they write to the screen alone
    return f"{error.filename or ('standard output' if prints else 'a file could not be read or written')}: {reason}"


def _flush() -> None:
    if sys.stdout is not None:  # a process may be started without it
        sys.stdout.flush()


def _exit_code(code: int, missing: list[str]) -> int:
    """Torchrun takes any other code than 0 for a crash, and starts the finished run again."""
    return PARTLY if not code and missing and "TORCHELASTIC_RUN_ID" not in os.environ else code


def _end(why: str) -> NoReturn:
    """Exit with a message. Python flushes standard output at exit, which must not fail a second time."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.echo(f"unstride: {why}", err=True)
    sys.exit(1)


app = typer.Typer(
    name="unstride",
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
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
