"""Files that hold several images, and object stores: tar shards, Parquet, Hugging Face data sets, s3:// and gs://."""

from __future__ import annotations

import hashlib
import importlib
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from unstride.errors import DataError
from unstride.storage.contents import file_stamp
from unstride.views.images import is_image_name

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MEMBER_BYTES = 1 << 28  # of one image in a tar: it is read whole
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error)
_ROWS = 64  # of a Parquet file, read at once
_COLUMNS = ("image", "bytes", "jpg", "png", "jpeg")
_hf_lock = threading.Lock()


@dataclass(frozen=True)
class Entry:
    """An image that is listed, not read.

    Args:
        fetch: its file, or its bytes. It can be called in any thread, or in another process.
        identity: the same for two names of one image.
        stamp: changes when the image does: size and time of its file.
    """

    name: str
    fetch: Callable[[], Path | bytes]
    identity: str
    stamp: str = ""


@dataclass
class InputWalk:
    """One pass over all inputs. Without `reading`, images that lie in a stream are not read."""

    reading: bool = True
    links: list[str] = field(default_factory=list)  # in tars
    lists: list[str] = field(default_factory=list)  # that are open, each named by the one before
    uncounted: list[str] = field(default_factory=list)  # streams that were not read, with their stamps


def is_container(name: str) -> bool:
    return name.lower().endswith((*TARS, ".parquet"))


def contained(
    name: str, opened: Callable[[], IO[bytes]], stamp: str, walk: InputWalk, path: Path | None = None
) -> Iterator[Entry]:
    """The images in a tar or a Parquet file. `path`: where it lies on disk."""
    if name.lower().endswith(".parquet"):
        yield from _parquet(name, opened, stamp, walk)
    elif path is not None and name.lower().endswith(".tar"):
        yield from _tar(path, stamp, walk)
    elif walk.reading:
        yield from _tar_stream(name, opened, stamp, walk)
    else:
        walk.uncounted.append(f"{name}|{stamp}")


# ------------------------------------------------------------------------------------------------------------ tar


def _tar(path: Path, stamp: str, walk: InputWalk) -> Iterator[Entry]:
    """The images of an uncompressed shard; other members of a sample (.json, .cls) are passed over."""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in _images(tar, str(path), walk):
                data = member.offset_data, member.size
                yield _member(str(path), member, stamp, partial(_read_range, path, member.name, *data))
    except _BROKEN as error:
        yield _damaged(str(path), error)


def _tar_stream(name: str, opened: Callable[[], IO[bytes]], stamp: str, walk: InputWalk) -> Iterator[Entry]:
    """The same of a stream that can be read only once, from its beginning to its end."""
    try:
        with opened() as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in _images(tar, name, walk):
                fetch = partial(_same, _read_member(tar, member)) if member.size <= MEMBER_BYTES else _too_large(member)
                yield _member(name, member, stamp, fetch)
    except _BROKEN as error:
        yield _damaged(name, error)


def _images(tar: tarfile.TarFile, name: str, walk: InputWalk) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        if is_image_name(Path(member.name)):
            if member.isreg():
                yield member
            elif member.issym() or member.islnk():
                walk.links.append(f"{name}/{member.name} -> {member.linkname}")
        tar.members = []  # type: ignore[attr-defined]  # it would remember every one


def _member(name: str, member: tarfile.TarInfo, stamp: str, fetch: Callable[[], Path | bytes]) -> Entry:
    full = f"{name}/{member.name}"
    return Entry(full, fetch, full, f"{stamp}:{member.size}:{member.mtime}")


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | str:
    """Its bytes, or why there are none."""
    try:
        file = tar.extractfile(member)
        data = b"" if file is None else file.read()
    except _BROKEN as error:
        return f"{member.name}: cannot be read ({error})"
    return data if len(data) == member.size else f"{member.name}: {len(data):,} of {member.size:,} bytes are there"


def _same(data: bytes | str) -> bytes:
    if isinstance(data, str):
        raise DataError(data)
    return data


def _too_large(member: tarfile.TarInfo) -> Callable[[], bytes]:
    return partial(_same, f"{member.name}: {member.size:,} bytes are too many for an image")


def _read_range(path: Path, name: str, start: int, size: int) -> bytes:
    if size > MEMBER_BYTES:
        raise DataError(f"{name}: {size:,} bytes are too many for an image")
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(size)
    if len(data) != size:
        raise DataError(f"{name}: {len(data):,} of {size:,} bytes are there")
    return data


def _damaged(name: str, error: Exception) -> Entry:
    text = f"{name}: the shard is damaged ({error}); the images before the damage are done, the rest cannot be read"
    return Entry(name, partial(_same, text), name)


# -------------------------------------------------------------------------------------------------------- Parquet


def _parquet(name: str, opened: Callable[[], IO[bytes]], stamp: str, walk: InputWalk) -> Iterator[Entry]:
    """The bytes of one column: binary, or as the `datasets` library stores images."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{name}: Parquet needs pyarrow: pip install 'unstride[parquet]'") from error
    try:
        with opened() as stream:
            file = parquet.ParquetFile(stream)
            column = _image_column(name, file.schema_arrow)
            batches = file.iter_batches(_ROWS, columns=[column]) if walk.reading else ()
            rows = (row for batch in batches for row in batch.column(0).to_pylist())
            for index in range(file.metadata.num_rows):
                row = f"{name}/{index:08d}"
                fetch = partial(_cell, row, next(rows)) if walk.reading else partial(_cell, row, None)
                yield Entry(row, fetch, row, stamp)
    except DataError:
        raise
    except Exception as error:  # pyarrow raises nearly anything on a damaged file
        raise DataError(f"{name}: cannot be read as Parquet ({error})") from error


def _image_column(name: str, schema: Any) -> str:
    binary = [f.name for f in schema if "binary" in str(f.type)]  # also struct<bytes: binary, path: string>
    named = [column for column in _COLUMNS if column in binary]
    if len(binary) != 1 and not named:
        raise DataError(f"{name}: columns {', '.join(schema.names)}; expected one of images as bytes, called image")
    return binary[0] if len(binary) == 1 else named[0]


def _cell(row: str, value: Any) -> Path | bytes:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not value:
        raise DataError(f"{row}: there is no image in this row")
    return Path(value) if isinstance(value, str) else bytes(value)


# ---------------------------------------------------------------------------------------------------- Hugging Face


def is_hf(path: Path) -> bool:
    """True for a folder that `save_to_disk` wrote."""
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def hf(path: Path) -> Iterator[Entry]:
    """What `save_to_disk` wrote; of several splits, all of them."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError("Hugging Face data needs the datasets library: pip install 'unstride[hf]'") from error
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path}: not a folder written by save_to_disk ({error})") from error
    stamps = [f"{file.name}|{file_stamp(file)}" for file in sorted(path.rglob("*")) if file.is_file()]
    stamp = hashlib.sha256("\n".join(stamps).encode(errors="surrogateescape")).hexdigest()[:16]
    splits = data if isinstance(data, datasets.DatasetDict) else {"": data}
    for split, rows in splits.items():
        columns = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
        if len(columns) != 1:
            raise DataError(f"{path}: columns {', '.join(rows.features)}; expected one Image among them")
        raw = rows.cast_column(columns[0], datasets.Image(decode=False))
        for index in range(len(raw)):
            name = "/".join(filter(None, (str(path), split, f"{index:08d}")))
            yield Entry(name, partial(_hf_cell, raw, columns[0], index), name, stamp)


def _hf_cell(data: Any, column: str, index: int) -> Path | bytes:
    with _hf_lock:
        value = data[index][column]
    return _cell(f"row {index}", value)


# -------------------------------------------------------------------------------------------------- object stores


def remote(url: str, walk: InputWalk) -> Iterator[Entry]:
    """A file, a folder or a glob behind an address that fsspec understands."""
    files, root = _file_system(url)
    try:
        if "*" in root or "?" in root:
            listed = files.glob(root, detail=True)
        elif files.isdir(root):
            listed = files.find(root, detail=True)
        elif files.exists(root):
            listed = {root: files.info(root)}
        else:
            raise DataError(f"{url}: there is nothing at this address")
    except DataError:
        raise
    except Exception as error:  # every store has errors of its own
        raise DataError(f"{url}: cannot be listed ({type(error).__name__}: {error})") from error
    alone = list(listed) == [root]
    for name, info in sorted(listed.items()):
        full, stamp = files.unstrip_protocol(name), _remote_stamp(info)
        if is_container(name):
            yield from contained(full, partial(files.open, name, "rb"), stamp, walk)
        elif info.get("type") == "file" and (alone or is_image_name(Path(name))):
            yield Entry(full, partial(_read_remote, full), full, stamp)


def _file_system(url: str) -> tuple[Any, str]:
    hint = "Object stores need fsspec with their own library: pip install 'unstride[remote]'"
    try:
        fsspec = importlib.import_module("fsspec.core")
        files, root = fsspec.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"{url}: {error}. {hint}") from error
    except ValueError as error:
        raise DataError(f"{url}: {error}") from error
    return files, str(root)


def _remote_stamp(info: dict[str, Any]) -> str:
    known = ("size", "ETag", "etag", "mtime", "LastModified", "updated", "created")
    return ":".join(str(info[name]) for name in known if name in info)


def _read_remote(url: str) -> bytes:
    files, root = _file_system(url)
    try:
        return bytes(files.cat_file(root))
    except Exception as error:
        raise DataError(f"{url}: cannot be read ({type(error).__name__}: {error})") from error
