"""Where images are: files, folders, globs, lists, tar shards, Parquet, Hugging Face data sets, object stores.

    for entry in ImageInputs(["photos/", "@more.txt", "shard-000.tar", "s3://bucket/cats/*.jpg"]):
        open_image(entry.fetch())

The order is fixed. Images are listed one by one: a million need little more memory than a thousand.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from unstride.errors import DataError, OptionError
from unstride.predicting import containers
from unstride.predicting.containers import Entry, InputWalk
from unstride.storage.contents import file_stamp
from unstride.views.images import is_image_name

FORMS = "images, folders, globs, @LIST, tar shards, Parquet files, hf:FOLDER, s3:// or gs:// addresses"
_IDENTITY = 12  # bytes kept of each image, to see that it is given again


@dataclass(frozen=True)
class Survey:
    """How many images there are (None: only reading everything would tell), and a digest of names, sizes and times."""

    count: int | None
    digest: str


@dataclass
class ImageInputs:
    """Iterates over all images of all inputs, each image once.

    Attributes:
        repeated: after an iteration, how many images were given more than once, and the first of them.
        links: after an iteration, how many links in tar files were left out, and the first of them.
    """

    inputs: str | Path | Sequence[str | Path]
    repeated: tuple[int, str] = (0, "")
    links: tuple[int, str] = (0, "")
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        several = [self.inputs] if isinstance(self.inputs, str | Path) else self.inputs
        if (
            not isinstance(several, Sequence)
            or not all(isinstance(i, str | Path) for i in several)
            or not several
            or "" in several
        ):
            raise OptionError(f"images: got {self.inputs!r:.60}, expected {FORMS}.")
        self.texts = [_checked(str(text)) for text in several]

    def __iter__(self) -> Iterator[Entry]:
        return self._entries(InputWalk())

    def survey(self) -> Survey:
        """One pass over the names, with the size and time of each file. Compressed tars are not unpacked for it."""
        walk, digest, count = InputWalk(reading=False), hashlib.sha256(), 0
        for entry in self._entries(walk):
            digest.update(f"{entry.name}|{entry.stamp}\n".encode(errors="surrogateescape"))
            count += 1
        digest.update("\n".join(walk.uncounted).encode(errors="surrogateescape"))
        return Survey(None if walk.uncounted else count, digest.hexdigest()[:16])

    def _entries(self, walk: InputWalk) -> Iterator[Entry]:
        seen: set[bytes] = set()
        count, first = 0, ""
        for text in self.texts:
            for entry in _entries(text, walk):
                identity = hashlib.blake2b(entry.identity.encode(errors="surrogateescape"), digest_size=_IDENTITY)
                if identity.digest() in seen:
                    count, first = count + 1, first or entry.name
                    continue
                seen.add(identity.digest())
                yield entry
        self.repeated, self.links = (count, first), (len(walk.links), walk.links[0] if walk.links else "")


def _checked(text: str) -> str:
    """The input, or a DataError where there is nothing of that name: before anything is read."""
    if "://" in text:
        return text
    path = Path(text.removeprefix("@").removeprefix("hf:"))
    try:
        there = path.exists()
    except (OSError, ValueError) as error:
        raise DataError(f"images: {text[:60]!r} cannot be a path ({error}). Expected {FORMS}.") from error
    if not there and not (_is_glob(text) and glob.glob(text, recursive=True)):
        what = "no file matches it" if _is_glob(text) else "no such file or folder"
        raise DataError(f"{path}: {what}. Expected {FORMS}.")
    if text.startswith("@") and not path.is_file():
        raise DataError(f"{path} is a folder. '@' is for a text file with a path on each line: remove the '@'.")
    return text


def _is_glob(text: str) -> bool:
    return not text.startswith(("@", "hf:")) and glob.has_magic(text)


def _entries(text: str, walk: InputWalk) -> Iterator[Entry]:
    path = Path(text)
    if "://" in text:
        yield from containers.remote(text, walk)
    elif text.startswith("@"):
        yield from _list(Path(text[1:]), walk)
    elif text.startswith("hf:") or containers.is_hf(path):
        yield from containers.hf(Path(text.removeprefix("hf:")))
    elif path.is_dir():
        yield from _folder(path, set(), [])
    elif _is_glob(text) and not path.exists():
        for name in sorted(glob.glob(text, recursive=True)):
            if os.path.isdir(name) or is_image_name(Path(name)) or containers.is_container(name):
                yield from _entries(name, walk)
    elif containers.is_container(text):
        yield from containers.contained(text, partial(_opened, path), file_stamp(path), walk, path)
    else:
        yield _file(path, os.path.realpath(path))


def _file(path: Path, identity: str) -> Entry:
    return Entry(str(path), partial(_itself, path), identity, file_stamp(path))


def _itself(path: Path) -> Path:
    return path


def _opened(path: Path) -> IO[bytes]:
    return path.open("rb")


def _list(path: Path, walk: InputWalk) -> Iterator[Entry]:
    """A line for each input, relative to the list itself. A line with nothing there is an error of its row."""
    real = os.path.realpath(path)
    if real in walk.lists:
        raise DataError(f"{path}: the list names itself. Remove that line.")
    walk.lists.append(real)
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:  # as the file system names its files
        for line in lines:
            name = line.strip()
            if "\0" in name:
                raise DataError(f"{path}: it is not a text file in UTF-8. Save it as UTF-8, with a path on each line.")
            if name and not name.startswith("#"):
                yield from _entries(_relative(name, path.parent), walk)
    walk.lists.pop()


def _relative(name: str, folder: Path) -> str:
    if "://" in name:
        return name
    prefix = "@" if name.startswith("@") else "hf:" if name.startswith("hf:") else ""
    return prefix + str(folder / name.removeprefix(prefix))


def _folder(root: Path, seen: set[str], above: list[str]) -> Iterator[Entry]:
    """Sorted, to the bottom; links to folders are followed once, and never to a folder that contains them."""
    here = os.path.realpath(root)
    if here in seen:
        return
    seen.add(here)
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise DataError(f"{root}: cannot be read ({error.strerror or error}).") from error
    for name in names:
        path = root / name
        if path.is_dir():
            yield from _folder(path, seen, [*above, here])
        elif is_image_name(path) and not _found_elsewhere(path, [*above, here]):
            yield _file(path, os.path.realpath(path) if path.is_symlink() else os.path.join(here, name))


def _found_elsewhere(path: Path, above: Sequence[str]) -> bool:
    """True for a link to an image that has its own name below the same folder."""
    return path.is_symlink() and Path(os.path.realpath(path)).is_relative_to(above[0])


__all__ = ["Entry", "ImageInputs", "Survey"]
