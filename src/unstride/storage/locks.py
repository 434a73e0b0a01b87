"""Locks on open files: they end with the process that holds them, however it ends.

with path.open("a+b") as file, held(file):
    ...  # nobody else is here
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from unstride.errors import OptionError

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[Any], wait: bool) -> None:
        at = file.tell()
        file.seek(2**31 - 2)  # beyond what anybody reads: there, locked bytes cannot be read by others
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        file.seek(at)

else:
    import fcntl

    def _lock(file: IO[Any], wait: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def held(file: IO[Any]) -> Iterator[None]:
    """The file is ours until it is closed. On a file system that knows no locks, nothing is held."""
    with contextlib.suppress(OSError):
        _lock(file, wait=True)
    yield


def is_held(path: Path) -> bool:
    """Whether somebody alive holds it; also where that cannot be known."""
    try:
        with path.open("r+b") as file:
            _lock(file, wait=False)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def alone(folder: Path, leads: bool = True) -> Iterator[None]:
    """A folder for one run at a time, made if need be; an OptionError where another run is at work in it.

    Of several processes that share it, only the one that `leads` asks.
    """
    if not leads:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+b") as file:
        try:
            _lock(file, wait=False)
        except BlockingIOError as error:
            raise OptionError(f"{folder}: another run is at work there; wait for it, or choose another name") from error
        except OSError as error:
            if os.name == "nt":
                raise OptionError(f"{folder}: another run is at work there ({error})") from error
        yield
