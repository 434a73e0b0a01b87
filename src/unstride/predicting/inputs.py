"""Where images lie: files, folders, lists, tar shards, Hugging Face data sets; one by one, in an order that is fixed.

    for entry in entries(["photos/", "@more.txt", "shard-000.tar", "hf:/data/flowers"]):
        open_image(entry.fetch())

Nothing is held but the names of one folder, so that a million images take no more memory than a thousand.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unstride.errors import DataError
from unstride.storage.contents import file_stamp
from unstride.views.images import is_image_name

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MEMBER_BYTES = 1 << 28  # of one image in a tar: it is read whole
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Entry:
    """An image that is listed, not read. `fetch` gives its file or its bytes, before the next entry is asked for."""

    name: str
    fetch: Callable[[], Path | bytes]
    file: Path | None = None  # where it lies in a file of its own, or in a tar named by a list


@dataclass(frozen=True)
class Survey:
    """How many images there are (None: only reading everything would tell), and what tells these from others."""

    count: int | None
    digest: str


def entries(inputs: Sequence[str | Path]) -> Iterator[Entry]:
    """All images of all inputs; what is not there at all is a DataError, before anything is read."""
    checked = [_checked(str(one)) for one in inputs]
    for one in checked:
        yield from _entries(one)


def survey(inputs: Sequence[str | Path]) -> Survey:
    """One pass over the names, with the size and time of each file. Compressed tars are not unpacked for it."""
    digest, count, known = hashlib.sha256(), 0, True
    for one in map(str, inputs):
        for file in _containers(_checked(one)):
            digest.update(f"{one}|{file_stamp(file)}\n".encode(errors="surrogateescape"))
        if _is_tar(one) and not one.lower().endswith(".tar"):
            known = False
            continue
        for entry in entries([one]):
            stamp = "" if entry.file is None else file_stamp(entry.file)
            digest.update(f"{entry.name}|{stamp}\n".encode(errors="surrogateescape"))
            count += 1
    return Survey(count if known else None, digest.hexdigest()[:16])


def _containers(given: str) -> list[Path]:
    """The files that hold several images, or their names."""
    path = Path(given.removeprefix("@").removeprefix("hf:"))
    if given.startswith("hf:") or (path.is_dir() and _is_hf(path)):
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path] if _is_tar(given) else []


def _checked(given: str) -> str:
    path = Path(given.removeprefix("@").removeprefix("hf:"))
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; wanted images, folders, @LIST, tar shards or hf:FOLDER")
    if given.startswith("@") and not path.is_file():
        raise DataError(f"{path}: is a folder; @ is for a text file with a path on each line, so leave it out")
    return given


def _entries(given: str) -> Iterator[Entry]:
    path = Path(given)
    if given.startswith("@"):
        yield from _list(Path(given[1:]))
    elif given.startswith("hf:") or (path.is_dir() and _is_hf(path)):
        yield from _hf(Path(given.removeprefix("hf:")))
    elif _is_tar(given):
        yield from _tar(path)
    elif path.is_dir():
        yield from _folder(path, set(), [])
    else:
        yield Entry(given, partial(_itself, path), path)


def _list(path: Path) -> Iterator[Entry]:
    """A line for each image, folder or shard; relative to the list itself. What is not there is a row's error."""
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:  # as the file system names its files
        for line in lines:
            name = line.strip()
            if name and not name.startswith("#"):
                yield from _entries(str(path.parent / name))


def _folder(root: Path, seen: set[str], above: list[str]) -> Iterator[Entry]:
    """Sorted, to the bottom; links to folders are followed once, and never back to where they lie."""
    here = os.path.realpath(root)
    if here in seen:
        return
    seen.add(here)
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise DataError(f"{root}: cannot be read ({error.strerror or error})") from error
    for name in names:
        path = root / name
        if path.is_dir():
            yield from _folder(path, seen, [*above, here])
        elif (is_image_name(path) or is_volume_name(path)) and not _elsewhere(path, [*above, here]):
            yield Entry(str(path), partial(_itself, path), path)


def _elsewhere(path: Path, above: Sequence[str]) -> bool:
    """Whether it is a link to an image that is found under its own name below the same folder."""
    return path.is_symlink() and Path(os.path.realpath(path)).is_relative_to(above[0])


def _is_tar(given: str) -> bool:
    return given.lower().endswith(TARS) and not given.startswith(("@", "hf:"))


def _tar(path: Path) -> Iterator[Entry]:
    """The images in a shard, as it comes; the rest of a sample (.json, .cls) is passed over."""
    plain = path.name.lower().endswith(".tar")
    try:
        with tarfile.open(path, "r:" if plain else "r|*") as tar:
            while (member := tar.next()) is not None:
                if member.isreg() and is_image_name(Path(member.name)):
                    yield Entry(f"{path}/{member.name}", partial(_member, tar, member), path)
                tar.members = []  # type: ignore[attr-defined]  # it would remember every one
    except _BROKEN as error:
        text = f"{path}: the shard is damaged ({error}); what came before is done, the rest cannot be read"
        yield Entry(str(path), partial(_refuse, text))


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > MEMBER_BYTES:
        raise DataError(f"{member.name}: {member.size:,} bytes are too many for an image")
    try:
        file = tar.extractfile(member)
        data = b"" if file is None else file.read()
    except _BROKEN as error:
        raise DataError(f"{member.name}: cannot be read ({error})") from error
    if len(data) != member.size:
        raise DataError(f"{member.name}: {len(data):,} of {member.size:,} bytes are there")
    return data


def _itself(path: Path) -> Path:
    return path


def _refuse(text: str) -> Path:
    raise DataError(text)


def _is_hf(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def _hf(path: Path) -> Iterator[Entry]:
    """What `save_to_disk` wrote; of several splits, all of them."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError("Hugging Face data needs the datasets library: pip install 'unstride[hf]'") from error
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path}: not a folder written by save_to_disk ({error})") from error
    splits = data if isinstance(data, datasets.DatasetDict) else {"": data}
    for split, rows in splits.items():
        columns = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
        if len(columns) != 1:
            raise DataError(f"{path}: columns {', '.join(rows.features)}; wanted one Image among them")
        raw = rows.cast_column(columns[0], datasets.Image(decode=False))
        for index in range(len(raw)):
            name = "/".join(filter(None, (str(path), split, f"{index:08d}")))
            yield Entry(name, partial(_hf_bytes, raw, columns[0], index))


def _hf_bytes(data: Any, column: str, index: int) -> Path | bytes:
    stored = data[index][column] or {}
    if not stored.get("bytes") and not stored.get("path"):
        raise DataError(f"row {index}: there is no image in {column}")
    return stored["bytes"] or Path(stored["path"])
