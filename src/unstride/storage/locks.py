"""Locks on open files. The operating system releases them when the process ends, even after a kill.

with path.open("a+b") as file, locked(file):
    ...  # no other process is in this block
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from unstride.errors import OptionError

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[Any], wait: bool) -> None:
        at = file.tell()
        file.seek(2**31 - 2)  # beyond the content: other processes cannot read locked bytes on Windows
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        file.seek(at)

else:
    import fcntl

    def _lock(file: IO[Any], wait: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def locked(file: IO[Any]) -> Iterator[None]:
    """Lock an open file until it is closed. On a file system without locks, nothing is locked."""
    with contextlib.suppress(OSError):
        _lock(file, wait=True)
    yield


def is_locked(path: Path) -> bool:
    """Return True if a live process holds the lock, or if that cannot be determined."""
    try:
        with path.open("r+b") as file:
            _lock(file, wait=False)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def exclusive(folder: Path, leads: bool = True) -> Iterator[None]:
    """Lock a folder for one run, creating it if needed. Raises an OptionError if another run uses it.

    After an error, a folder that was created here is removed again, unless something was finished in it.
    Of several processes of one run, only the one with `leads` takes the lock.
    """
    if not leads:
        yield
        return
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+b") as file:
        try:
            _lock(file, wait=False)
        except BlockingIOError as error:
            raise OptionError(f"{folder}: another run uses this folder; wait for it, or choose another name") from error
        except OSError as error:
            if os.name == "nt":
                raise OptionError(f"{folder}: another run uses this folder ({error})") from error
        try:
            yield
        except BaseException:
            if created and not any(folder.rglob("*.safetensors")):
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, creating it if needed; other processes wait."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # whoever writes in the folder reports why that is impossible
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(stack.enter_context((folder / ".lock").open("a+b"))))
        yield
