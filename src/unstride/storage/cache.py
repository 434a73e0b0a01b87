"""One resumable store for everything that a long run computes image by image.

    cache = Cache.open(folder, RunKey("evaluation", {"model": computation_key(model), "recipe": recipe}))
    for batch in batches(image for image in images if image.key not in cache):
        cache.put(dict(zip(batch.keys, results)))
    cache.get(key)

A run key says what is computed, an item key of which image; both are digests of contents. Each `put` writes one file,
whole or not at all, so that a process that is killed loses at most the batch that it was working on. Several processes
may write at once. A file that is damaged does not count, and what it held is computed again.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from unstride.errors import ArtefactError
from unstride.storage import files, locks, strict_json
from unstride.storage.artefacts import read_artefact, write_artefact, write_file
from unstride.storage.fingerprint import text_digest

KIND = "cache"
Values = dict[str, Any]  # tensors, and plain values as JSON has them
_RECORD = "record"  # the tensor of a part that holds its items and plain values, as JSON
_OPEN = 256  # parts kept open for reading


@dataclass(frozen=True)
class RunKey:
    """What is computed: `kind` names it, `settings` holds everything that the results depend on but the images."""

    kind: str
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        return text_digest([self.kind, self.settings])[:24]


class Cache:
    """Values by item key, in files of a folder (`Cache.open(folder, key)`) or in memory (`Cache.open(None, key)`)."""

    def __init__(self, folder: Path | None, key: RunKey) -> None:
        self.folder, self.key = folder, key
        self.bytes = 0  # of all values
        self._where: dict[str, tuple[Path, int]] = {}
        self._memory: dict[str, Values] = {}
        self._parts: set[Path] = set()
        self._open: OrderedDict[Path, _Part] = OrderedDict()

    @classmethod
    def open(cls, folder: Path | None, key: RunKey) -> Cache:
        """The cache of this run below `folder`, with what earlier runs and other processes have finished."""
        if folder is None:
            return cls(None, key)
        cache = cls(folder / f"{key.kind}-{key.digest}", key)
        if cache.folder is not None and cache.folder.is_dir():
            files.remove_abandoned(cache.folder)
        cache.reload()
        return cache

    def __contains__(self, item: str) -> bool:
        return item in self._where or item in self._memory

    def __len__(self) -> int:
        return len(self._where) + len(self._memory)

    def __iter__(self) -> Iterator[str]:
        yield from (*self._where, *self._memory)

    def get(self, item: str) -> Values | None:
        """The values of an item, or None if they are not there."""
        if item in self._memory:
            return dict(self._memory[item])
        if item not in self._where:
            return None
        path, row = self._where[item]
        return self._part(path).values(row)

    def put(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the values of some items, all or none of them; an ArtefactError where the disk does not take them."""
        fresh = {item: dict(own) for item, own in values.items() if item not in self}
        if not fresh:
            return
        if self.folder is None:
            self._memory |= {item: _detached(own) for item, own in fresh.items()}
            self.bytes += sum(v.nbytes for own in fresh.values() for v in own.values() if isinstance(v, Tensor))
            return
        tensors = _packed(fresh)
        path = self.folder / f"{text_digest(list(fresh))[:24]}-{os.getpid():x}.safetensors"
        self._describe()
        with locks.locked_folder(self.folder):
            write_artefact(path, tensors, {"kind": KIND, "run": self.key.digest})
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        self._parts.add(path)
        self._where |= {item: (path, row) for row, item in enumerate(fresh)}

    def reload(self) -> None:
        """Take in what other processes have written since; damaged files are removed."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._parts:
                self._take_in(path)

    def clear(self) -> None:
        """Remove all values of this run."""
        for path in self._parts:
            path.unlink(missing_ok=True)
        self.close()
        self._where, self._memory, self._parts, self.bytes = {}, {}, set(), 0

    def close(self) -> None:
        """Let go of open files."""
        self._open.clear()

    def _take_in(self, path: Path) -> None:
        part = _Part.read(path, self.key)
        if part is None:
            with locks.locked_folder(path.parent):  # a writer may have replaced it meanwhile
                if (part := _Part.read(path, self.key)) is None:
                    path.unlink(missing_ok=True)
                    return
        self._parts.add(path)
        for row, item in enumerate(part.items):
            self._where.setdefault(item, (path, row))
        self.bytes += part.bytes

    def _part(self, path: Path) -> _Part:
        if path not in self._open:
            part = _Part.open(path)
            self._open[path] = part
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        return self._open[path]

    def _describe(self) -> None:
        """What this folder holds, for people: `run.json`."""
        assert self.folder is not None
        file = self.folder / "run.json"
        if not file.exists():
            write_file(file, (json.dumps({"kind": self.key.kind, **self.key.settings}) + "\n").encode())


class _Part:
    """One file of a cache, opened for reading."""

    def __init__(self, file: Any, record: Mapping[str, Any]) -> None:
        self.file, self.names = file, set(file.keys())
        self.items: list[str] = record["items"]
        self.plain: list[Values] = record["plain"]
        self.bytes = 0

    @classmethod
    def open(cls, path: Path) -> _Part:
        try:
            file = safe_open(path, framework="pt")
            return cls(file, _record(file.get_tensor(_RECORD)))
        except Exception as error:  # it was there a moment ago
            raise ArtefactError(f"{path} cannot be read any more ({error}). Start again to compute it anew.") from error

    @classmethod
    def read(cls, path: Path, key: RunKey) -> _Part | None:
        """Checked to the last byte; None if the file is damaged or belongs to another run."""
        try:
            tensors, meta = read_artefact(path, KIND)
            record = _record(tensors[_RECORD])
            if meta["run"] != key.digest or len(record["items"]) != len(record["plain"]):
                return None
            part = cls(tensors, record)
        except (ArtefactError, KeyError, TypeError, ValueError):
            return None
        part.bytes = sum(tensor.nbytes for tensor in tensors.values())
        return part

    def values(self, row: int) -> Values:
        tensors = {}
        for name in self.names - {_RECORD}:
            number, _, own = name.partition("/")
            if number == "all":
                tensors[own] = self.file.get_slice(name)[row : row + 1][0]
            elif int(number) == row:
                tensors[own] = self.file.get_tensor(name)
        return {**tensors, **self.plain[row]}


def _record(tensor: Tensor) -> dict[str, Any]:
    return dict(strict_json.loads(tensor.numpy().tobytes()))


def _packed(values: Mapping[str, Values]) -> dict[str, Tensor]:
    """The tensors of a part: "all/NAME" is stacked where it is alike in all items, otherwise "ROW/NAME" is of one."""
    rows = [{name: v.detach().cpu() for name, v in own.items() if isinstance(v, Tensor)} for own in values.values()]
    plain = [{name: v for name, v in own.items() if not isinstance(v, Tensor)} for own in values.values()]
    packed: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        own = [row[name] for row in rows if name in row]
        if len(own) == len(rows) and len({(tensor.shape, tensor.dtype) for tensor in own}) == 1:
            packed[f"all/{name}"] = torch.stack(own)
        else:
            packed |= {f"{number}/{name}": row[name].clone() for number, row in enumerate(rows) if name in row}
    text = strict_json.dumps({"items": list(values), "plain": plain}).encode()
    packed[_RECORD] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return packed


def _detached(values: Values) -> Values:
    return {name: v.detach().cpu().clone() if isinstance(v, Tensor) else v for name, v in values.items()}


def tell_reused(count: int, total: int, where: object, noun: str = "images") -> None:
    """Say on stderr that results of an earlier run are used; silent if there are none."""
    if count:
        print(f"{count:,} of {total:,} {noun} are taken from an earlier run, kept in {where}", file=sys.stderr)
