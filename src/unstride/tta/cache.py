"""Logits of views: files named after what they hold, written all or nothing, so that a fit can be resumed."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from unstride.errors import ArtefactError
from unstride.recipe.view import View
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.fingerprint import digest, fingerprint

KIND = "tta-logits"
FLUSH_SECONDS = 20.0  # no more work than this is lost to a kill
MEMORY_BYTES = 1 << 30  # blocks kept in memory beside their files; the rest is read again when needed


def model_key(model: nn.Module, *settings: object) -> str:
    """What the logits depend on besides images and view: weights, structure (the model's repr) and settings.

    A wrapper with settings that are neither in its state dict nor in its repr can give them as `signature`, a string.
    """
    structure = re.sub(r"0x[0-9a-fA-F]+", "", repr(model))
    text = "\n".join([fingerprint(model), structure, str(getattr(model, "signature", "")), *map(repr, settings)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def view_key(view: View) -> str:
    return hashlib.sha256(str(view).encode()).hexdigest()[:24]


class LogitCache:
    """Logits by (model, images, view), in `folder` or, without one, in memory."""

    def __init__(self, folder: str | Path | None, key: str) -> None:
        self.folder = None if folder is None else Path(folder) / key
        self.computed = 0
        self.found = 0
        self.kept = 0

    def block(
        self,
        images: Tensor,
        labels: Tensor,
        views: Sequence[View],
        compute: Callable[[View], Tensor],
        tick: Callable[[], None],
    ) -> "Block":
        """The logits of the views of one batch: from disk where they are, computed and written where they are not."""
        batch = digest({"images": images, "labels": labels})[:24]
        keys = [view_key(view) for view in views]
        where = self._find(batch)
        fresh: dict[str, Tensor] = {}
        written = time.monotonic()
        memory: dict[str, Tensor] = {}
        for key, view in zip(keys, views, strict=True):
            if key in where or key in fresh or key in memory:
                self.found += 1
            else:
                fresh[key] = compute(view).detach().float().cpu()
                self.computed += 1
                if time.monotonic() - written > FLUSH_SECONDS:
                    self._write(batch, fresh, where, memory)
                    written = time.monotonic()
            tick()
        self._write(batch, fresh, where, memory)
        return Block(labels.detach().cpu().long(), keys, where, memory, self)

    def _find(self, batch: str) -> dict[str, Path]:
        where: dict[str, Path] = {}
        for path in sorted(self.folder.glob(f"{batch}-*.safetensors")) if self.folder else ():
            try:
                tensors, _ = read_artefact(path, KIND)
            except ArtefactError:  # damaged by the disk, not by a kill: computed again
                path.unlink(missing_ok=True)
                continue
            where.update(dict.fromkeys(tensors, path))
        return where

    def _write(self, batch: str, fresh: dict[str, Tensor], where: dict[str, Path], memory: dict[str, Tensor]) -> None:
        if self.folder is None:
            memory.update(fresh)
        elif fresh:
            name = hashlib.sha256(" ".join(fresh).encode()).hexdigest()[:12]
            path = write_artefact(self.folder / f"{batch}-{name}.safetensors", fresh, {"kind": KIND})
            where.update(dict.fromkeys(fresh, path))
        fresh.clear()


class Block:
    """The logits (V, n, K) and labels (n,) of one batch; read from disk when asked for, kept while memory allows."""

    def __init__(
        self, labels: Tensor, keys: list[str], where: dict[str, Path], memory: dict[str, Tensor], cache: LogitCache
    ) -> None:
        self.labels = labels
        self._keys, self._where, self._memory, self._cache = keys, where, memory, cache
        self._stacked: Tensor | None = None

    def load(self) -> Tensor:
        if self._stacked is not None:
            return self._stacked
        parts = dict(self._memory)
        for path in sorted({self._where[key] for key in self._keys if key in self._where}):
            with safe_open(path, framework="pt") as file:
                parts.update({key: file.get_tensor(key) for key in self._keys if self._where.get(key) == path})
        stacked = torch.stack([parts[key] for key in self._keys])
        size = stacked.numel() * stacked.element_size()
        if self._memory or self._cache.kept + size <= MEMORY_BYTES:
            self._stacked = stacked
            self._memory = {}
            self._cache.kept += size
        return stacked


class Rows(Sequence[tuple[Tensor, Tensor]]):
    """Some rows of some blocks, and the first `views` of their views: what a method is fitted or judged on."""

    def __init__(self, blocks: Sequence[Block], rows: Sequence[Tensor | None], views: int) -> None:
        pairs = [(b, r) for b, r in zip(blocks, rows, strict=True) if (len(b.labels) if r is None else len(r))]
        self.blocks, self.rows, self.views = [b for b, _ in pairs], [r for _, r in pairs], views

    @property
    def images(self) -> int:
        return sum(len(b.labels) if r is None else len(r) for b, r in zip(self.blocks, self.rows, strict=True))

    def first(self, views: int) -> "Rows":
        return Rows(self.blocks, self.rows, views)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        block, rows = self.blocks[index], self.rows[index]
        logits, labels = block.load()[: self.views], block.labels
        return (logits, labels) if rows is None else (logits[:, rows], labels[rows])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[i] for i in range(len(self)))
