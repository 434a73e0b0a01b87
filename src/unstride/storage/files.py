"""Files on disk: checked before long work, written whole or not at all, and archives checked before unpacking.

check_file(Path("report.html"), "report", (".html",))
write_atomic(Path("report.html"), page.encode())
"""

import glob
import os
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from unstride.errors import OptionError
from unstride.storage import locks

ABANDONED = 60.0  # seconds after which an unlocked temporary file counts as left behind by a killed process
_NAME = 100  # characters of a file's name that are in that of its temporary file
_ZIP = b"PK\x03\x04"


def as_path(value: Any, name: str) -> Path:
    """The path that an argument names; an OptionError for anything else."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise OptionError(f"{name}: got {value!r:.60}, expected a path.")
    return Path(value)


def check_file(path: str | Path, name: str, suffixes: Sequence[str] = ()) -> None:
    """Raise an OptionError if `path` cannot be written. `name` is what the user called it, such as --plot.

    What a killed run left of the file is removed.
    """
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise OptionError(f"{name} {path}: expected a name that ends in {' '.join(suffixes)}")
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
    remove_abandoned(path.parent, path.name)


def check_folder(path: str | Path, name: str) -> None:
    """Raise an OptionError if the folder, or files in it, cannot be created. Creates nothing."""
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


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash at any time leaves the old file or the new one, never a part of one."""
    with open_atomic(path) as file:
        file.write(data)


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """`write_atomic` for content written piece by piece; the file appears when the block ends well."""
    path = Path(os.path.realpath(path))  # the target of a link, not the link
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:_NAME]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file, locks.locked(file):
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file it could not take
        raise
    _sync_folder(path.parent)


def remove_abandoned(folder: Path, name: str = "") -> None:
    """Remove the temporary files of killed processes, never those of a process that is alive.

    Args:
        name: only those of this file.
    """
    for path in folder.glob(f".{glob.escape(name[:_NAME])}*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED and not locks.is_locked(path):
                path.unlink()
        except OSError:  # another process renamed or removed it
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


def check_inflation(path: Path, factor: float, spare: int = 1 << 20) -> None:
    """Raise a ValueError if a zip archive (.pt, .npz) would unpack to more than `factor` times its size plus `spare`.

    Entries that share their bytes are counted each time. Files that are not zip archives pass.
    """
    with path.open("rb") as file:
        if file.read(4) != _ZIP:
            return
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"its list of contents is damaged: {error}") from error
    if claimed > factor * size + spare:
        raise ValueError(f"its {size:,} bytes would become {claimed:,}, so it was made to fill the memory")
