"""Files that unstride writes: safetensors with a JSON header, written all or nothing, checked when read."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unstride.errors import ArtefactError
from unstride.storage import strict_json
from unstride.storage.files import write_atomic
from unstride.storage.fingerprint import digest

VERSION = 1
_HEADER = "unstride"


def write_artefact(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """`write_artefact("a.safetensors", {"w": w}, {"kind": "attention", ...})`.

    `meta["kind"]` says what the file is. A crash at any time leaves the old file or the new one, never a part of one.
    """
    path = Path(path)
    if "kind" not in meta:
        raise ValueError('meta must have a "kind"')
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"version": VERSION, "sha256": digest(kept), "meta": dict(meta)}
    return write_file(path, save(kept, metadata={_HEADER: json.dumps(header)}))


def write_file(path: Path, data: bytes) -> Path:
    """Write a file whole or not at all, also if the machine stops; raises an ArtefactError if that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def cannot_write(path: Path, error: OSError) -> ArtefactError:
    """The error that says why a file cannot be written, and what to do."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "Free some space, then start again" if full else "Give a path in a folder you may write to"
    return ArtefactError(f"cannot write {path}: {error.strerror or error}. {hint}.")


def read_artefact(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`tensors, meta = read_artefact("a.safetensors", "attention")`; an ArtefactError for any other file."""
    path = Path(path)
    if not path.is_file():
        raise ArtefactError(f"{path} is not a file. Give the path of a file that unstride saved.")
    try:
        with safe_open(path, framework="pt") as file:
            raw = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtefactError(f"{path} is damaged or not a safetensors file ({error}). Save it again.") from error
    if raw is None:
        raise ArtefactError(f"{path} is a safetensors file, but not one that unstride saved. Give a saved {kind} file.")
    try:
        header = strict_json.loads(raw)
        version, sha, meta = int(header["version"]), header["sha256"], dict(header["meta"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} has an unreadable unstride header ({error}). Save it again.") from error
    if version > VERSION:
        raise ArtefactError(f"{path} has format {version}, this unstride reads up to {VERSION}. Upgrade unstride.")
    if meta.get("kind") != kind:
        raise ArtefactError(f"{path} holds {meta.get('kind')!r}, expected {kind!r}. Give a saved {kind} file.")
    if sha != digest(tensors):
        raise ArtefactError(f"{path} is damaged: its tensors are not those that were saved. Save it again.")
    return tensors, meta


def check_finite(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """An ArtefactError where learned values are NaN or infinite: whatever they touch would be, too."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ArtefactError(f"{path}: {name} holds values that are not finite. Fit it again with a lower lr.")
