"""Values that hardly any argument takes, by kind; and what a sweep over them found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from unstride.errors import UnstrideError

BAD: dict[str, Any] = {
    "none": None,
    "object": object(),
    "function": len,
    "true": True,
    "zero": 0,
    "negative": -1,
    "number": 5,
    "fraction": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**400,
    "empty text": "",
    "text": "x",
    "unicode": "naïve\u2028图",
    "nul": "a\0b",
    "missing path": "nowhere/at/all.xyz",
    "directory": "folder",
    "unreadable": "noise",
    "bytes": b"x",
    "list": [object()],
    "empty list": [],
    "dict": {"a": object()},
}
# The same for a command line.
BAD_TEXT = {
    "empty": "",
    "space": " ",
    "word": "x",
    "zero": "0",
    "negative": "-1",
    "fraction": "1.5",
    "nan": "nan",
    "inf": "inf",
    "huge": "9" * 400,
    "unicode": "naïve\u2028图",
    "option": "--nope",
    "missing path": "nowhere/at/all.xyz",
    "directory": "folder",
    "unreadable": "noise",
    "long": "x" * 5000,
}


def prepare_folder(folder: Path) -> None:
    """What the paths among the values name."""
    (folder / "folder").mkdir()
    (folder / "noise").write_bytes(np.random.default_rng(0).bytes(5000))


class Tally:
    """How many values were tried, and which of them did not end in a clear error."""

    def __init__(self) -> None:
        self.tried, self.problems = 0, list[str]()

    def call(self, what: str, kind: str, function: Callable[[], Any], fine: bool = False) -> None:
        """`fine`: the value has a meaning there, so that a result is right, too."""
        self.tried += 1
        try:
            function()
        except UnstrideError as error:
            if not 0 < len(str(error)) < 5000:
                self.problems.append(f"{what}, {kind}: a message of {len(str(error))} characters")
        except BaseException as error:
            self.problems.append(f"{what}, {kind}: {type(error).__name__}: {error}"[:300])
        else:
            if not fine:
                self.problems.append(f"{what}, {kind}: no error")

    def check(self) -> None:
        assert self.tried
        assert not self.problems, "\n".join([f"{len(self.problems)} of {self.tried}:", *self.problems])
