"""`unstride studio [SPEC]`: a local page to look inside."""

import os
import sys
from typing import Annotated

import typer

from unstride.cli.options import Task, Weights
from unstride.cli.recipes import Asked, takes_recipe


def register(app: typer.Typer) -> None:
    app.command()(studio)


@takes_recipe("budget")
def studio(
    asked: Asked,
    spec: Annotated[
        str | None, typer.Argument(help="A model, as for inspect; the embedded ones are always offered.")
    ] = None,
    weights: Weights = "default",
    task: Task = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 7860,
    host: Annotated[str, typer.Option(help="Where to listen; by default only this machine can ask.")] = "127.0.0.1",
) -> None:
    """Open a page: pick a model, a recipe and a photograph, watch the looks, the gates, the answer and its cost."""
    from unstride.studio import Studio, make_server
    from unstride.studio.server import is_loopback

    with make_server(Studio(spec, weights, task, **asked.options()), host, port) as server:
        typer.echo(f"unstride studio: {server.url} (Ctrl-C ends it)")
        if not is_loopback(host):
            typer.echo("unstride: everybody who reaches this port can use the page; there is no password", err=True)
        _show(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


def _show(url: str) -> None:
    """In a browser window where there is one: not in pipes, and no text browser in the terminal."""
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(url)
