"""Tuning on the embedded sample while the page goes on: begun once, asked how far it is, then what it found."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from unstride.errors import UnstrideError
from unstride.models import LoadedModel
from unstride.recipe.recipe import Recipe
from unstride.tuning.parts import SHARD
from unstride.tuning.tune import tune
from unstride.tuning.tuned import Tuned

IMAGES = 2000  # of the sample: with a few hundred nothing can be said; some twenty seconds on one core
COST = 2.0  # plain forwards that an image may cost


class Tuner:
    """`tuner.start(loaded)`, then `tuner.told()` until its `state` is "done"; then there is a `tuner.recipe`.

    In a thread of its own, so that images need not wait for it. A daemon, so that Ctrl-C need not, either.
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self._lock = threading.Lock()
        self._folder: Path | None = None  # shards of what the network said: how many there are tells how far it is
        self._begun = 0.0
        self._told: dict[str, Any] = {"state": "idle"}

    def start(self, loaded: LoadedModel) -> None:
        """Begin, unless it has begun; after a failure, once more."""
        with self._lock:
            if self._told["state"] in ("running", "done"):
                return
            self._told, self._begun = {"state": "running"}, time.monotonic()
        threading.Thread(target=self._run, args=(loaded,), daemon=True).start()

    def told(self) -> dict[str, Any]:
        with self._lock:
            told, folder = dict(self._told), self._folder
        if told["state"] == "running":
            told |= {
                "seen": min(IMAGES, SHARD * _shards(folder)),
                "seconds": round(time.monotonic() - self._begun, 1),
            }
        return {"images": IMAGES, "cost": COST, **told}

    def _run(self, loaded: LoadedModel) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._folder = Path(folder)
                found = tune(loaded, "sample", COST, pool="small", paper=False, limit=IMAGES, cache_dir=folder)
            self.recipe, told = found.recipe, _found(found)
        except UnstrideError as error:
            told = {"state": "failed", "error": str(error)}
        except Exception as error:
            traceback.print_exc(file=sys.stderr)  # for whoever runs the server, not for the page
            told = {"state": "failed", "error": f"that went wrong ({type(error).__name__}); the terminal says more"}
        with self._lock:
            self._folder, self._told = None, told


def _shards(folder: Path | None) -> int:
    try:
        return 0 if folder is None else sum(1 for _ in folder.glob("*.safetensors"))
    except OSError:  # it is done, and the folder is gone
        return 0


def _found(found: Tuned) -> dict[str, Any]:
    """The frontier as a table without its empty columns, the verdict, and the recipe in words."""
    head, *rows = found.table()
    used = [k for k in range(len(head)) if any(row[k] for row in rows)]
    table = [[row[k] for k in used] for row in (head, *rows)]
    return {"state": "done", "table": table, "verdict": found.verdict, "recipe": str(found.recipe)}
