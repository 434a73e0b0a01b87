"""`unstride studio [SPEC]...`: a local page that shows one image pass by pass."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from unstride.cli.options import Device, Specs, Task, Weights
from unstride.cli.recipes import RecipeOptions, takes_recipe


def register(app: typer.Typer) -> None:
    app.command()(studio)


@takes_recipe
def studio(
    recipe: RecipeOptions,
    specs: Specs = None,
    weights: Weights = "default",
    task: Task = None,
    device: Device = "auto",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes any free one.")] = 7860,
    host: Annotated[str, typer.Option(help="Address to listen at. By default only this machine can connect.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Open a local page: one image, what each pass saw, why the recipe stopped, and what it cost.

    Without models, it opens with a cascade of the two embedded classifiers.
    """
    from unstride.execution.opening import is_file
    from unstride.studio import Studio, make_server
    from unstride.studio.choices import CASCADE
    from unstride.studio.server import is_loopback

    if not specs and recipe and not is_file(recipe.recipe):
        specs = list(CASCADE)
    pipeline = recipe.pipeline(specs, weights, task, device) if specs or recipe else None
    with make_server(Studio(pipeline), host, port) as server:
        typer.echo(f"unstride studio: {server.url} (Ctrl-C ends it)")
        if not is_loopback(host):
            typer.echo("unstride: everybody who reaches this port can use the page; there is no password.", err=True)
        _open_browser(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


def _open_browser(url: str) -> None:
    """Only where there is a screen: not in pipes, and no text browser in the terminal."""
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(url)
