"""Files that a command will write: whether it can, asked before hours of work, and then all or nothing.

check_file(Path("report.html"), "report", (".html",))
write_whole(Path("report.html"), page.encode())
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from unstride.errors import OptionError
from unstride.storage import locks

ABANDONED = 60.0  # seconds after which a temporary file that nobody holds has lost its writer


def check_file(path: str | Path, name: str, suffixes: Sequence[str] = ()) -> None:
    """An OptionError where a file cannot be written there; `name` is what the user called it, such as --plot."""
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise OptionError(f"{name} {path}: wanted a name that ends in {' '.join(suffixes)}")
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a plain file"
            raise OptionError(f"{name} {path}: that is {kind}; give the name of a file")
        if not path.parent.is_dir():
            raise OptionError(f"{name} {path}: there is no folder {path.parent}; make it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise OptionError(f"{name} {path}: the file is there and may not be written; give another name")
    except OSError as error:
        raise OptionError(f"{name} {path}: cannot write there ({error.strerror or error})") from error
    _probe(path.parent, path, name)


def check_folder(path: str | Path, name: str) -> None:
    """An OptionError where a folder cannot be made there, or files in it. Nothing is made."""
    path = Path(path)
    try:
        there = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise OptionError(f"{name} {path}: cannot write there, {there} is a file; give the name of a folder")
    except OSError as error:
        raise OptionError(f"{name} {path}: cannot write there ({error.strerror or error})") from error
    _probe(there, path, name)


def _probe(folder: Path, path: Path, name: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"{name} {path}: cannot write in {folder} ({error.strerror or error})") from error


def write_whole(path: Path, data: bytes) -> None:
    """A crash at any time leaves the old file or the new one, never a part of one; an OSError where it cannot be."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """`write_whole` for what is too long to be held at once: the file is there when the block ends without an error."""
    path = Path(os.path.realpath(path))  # what a link stands for, not the link
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file, locks.held(file):
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Removes the temporary files of writers that were killed, never those of one that is alive."""
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED and not locks.is_held(path):
                path.unlink()
        except OSError:  # it was renamed, or removed by another who sweeps
            continue


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """The rename itself survives a power cut only once the folder is on disk; not every system can do that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
