"""`unstride COMMAND`: commands are registered here.

Exit codes: 0 fine, 1 an error that is explained, 2 bad usage, 3 finished, but with counted errors.
"""

import importlib
import sys
from typing import Any

import typer

from unstride.errors import UnstrideError

COMMANDS = ("inspect", "evaluate", "predict", "fit", "tta", "export", "bench", "reproduce", "demo", "studio")


class _Group(typer.core.TyperGroup):
    """Known errors end in one line and exit code 1, never in a stack trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnstrideError as error:
            typer.echo(f"unstride: {error}", err=True)
            sys.exit(1)


app = typer.Typer(
    name="unstride",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Better predictions from a pretrained vision model, with the activations its strided layers throw away.",
)


@app.callback()
def _root() -> None:
    """A group even while it has one command."""


for _name in COMMANDS:
    importlib.import_module(f"unstride.cli.{_name}").register(app)
