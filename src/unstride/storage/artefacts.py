"""Files that unstride writes: safetensors with a JSON header, written all or nothing, checked when read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unstride.errors import ArtefactError
from unstride.storage import strict
from unstride.storage.fingerprint import digest
from unstride.storage.outputs import write_whole

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
    """A file that is there whole or not at all, whenever the machine stops; an ArtefactError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise ArtefactError(
            f"cannot write {path}: {error.strerror or error}. Give a path in a folder you may write to."
        ) from error
    return path


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
        header = strict.loads(raw)
        version, sha, meta = int(header["version"]), header["sha256"], dict(header["meta"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} has an unreadable unstride header ({error}). Save it again.") from error
    if version > VERSION:
        raise ArtefactError(f"{path} has format {version}, this unstride reads up to {VERSION}. Upgrade unstride.")
    if meta.get("kind") != kind:
        raise ArtefactError(f"{path} holds {meta.get('kind')!r}, wanted {kind!r}. Give a saved {kind} file.")
    if sha != digest(tensors):
        raise ArtefactError(f"{path} is damaged: its tensors are not those that were saved. Save it again.")
    return tensors, meta


def check_finite(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """An ArtefactError where learned values are NaN or infinite: whatever they touch would be, too."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ArtefactError(f"{path}: {name} holds values that are not finite. Fit it again with a lower lr.")
