"""The command line: a skin over the library. Each command lives in a module of its own."""

from unstride.cli.main import app

__all__ = ["app"]
