"""What identifies files and images: their contents. Contents that were read before are known by size and time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unstride.storage.cache import Cache, RunKey
from unstride.storage.fingerprint import text_digest
from unstride.storage.progress import progress as show_progress

_CHUNK = 1 << 20
_RECENT = 2.0  # seconds: a file written so shortly before it was read may change again with the same time stamp
_READERS = 4
_TOGETHER = 4096  # files whose digests are kept at once


def file_stamp(path: Path) -> str:
    """Size and modification time of a file; empty if it cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def file_digest(path: Path) -> str:
    """The sha256 of a file's content; empty if it cannot be read."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                sha.update(chunk)
    except OSError:
        return ""
    return sha.hexdigest()


class FileDigests:
    """Content digests of files. With a folder, files that did not change since the last run are not read again.

    digests = FileDigests(folder); digests.read(paths); digests.of(paths[0])
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.cache = Cache.open(folder, RunKey("files", {"digest": "sha256"}))
        self.found: dict[str, str] = {}

    def of(self, path: Path) -> str:
        """The digest of one file."""
        name = _name(path)
        if name not in self.found:
            self.found[name] = (self.cache.get(name) or {}).get("sha256") or file_digest(path)
        return self.found[name]

    def read(self, paths: Iterable[Path], show: bool = False) -> None:
        """Read many files at once, and remember their digests for the next run."""
        paths = list(dict.fromkeys(paths))
        fresh = [path for path in paths if _name(path) not in self.cache]
        with (
            show_progress("reading files", len(fresh), show and len(fresh) > _TOGETHER) as advance,
            ThreadPoolExecutor(_READERS) as pool,
        ):
            for start in range(0, len(fresh), _TOGETHER):
                group = fresh[start : start + _TOGETHER]
                digests = zip(group, pool.map(self.of, group), strict=True)
                self.cache.put({_name(path): {"sha256": sha} for path, sha in digests if sha and _settled(path)})
                advance(len(group), "")


def _name(path: Path) -> str:
    return f"{path.absolute()}|{file_stamp(path)}"


def _settled(path: Path) -> bool:
    """Whether a later change of the file would show in its modification time."""
    try:
        return time.time() - path.stat().st_mtime > _RECENT
    except OSError:
        return False


def image_key(files: Iterable[Path], digests: FileDigests, *more: Any) -> str:
    """What identifies a labelled image: the contents of its files, and `more` plain values such as its label."""
    return text_digest([[digests.of(path) for path in files], *more])[:32]
