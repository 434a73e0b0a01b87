"""Saved files: whole or not at all, checked when read."""

import os

import pytest
import torch
from safetensors.torch import save_file

from unstride.errors import ArtefactError
from unstride.storage import artefacts
from unstride.storage.artefacts import read_artefact, write_artefact


def test_round_trip_keeps_types_and_meta(tmp_path) -> None:
    tensors = {
        "a": torch.rand(3, 4).T,
        "b": torch.arange(5),
        "c": torch.tensor(1.5, dtype=torch.bfloat16),
        "d": torch.empty(0, 3),
    }
    meta = {"kind": "thing", "n": 3, "list": [1.5, None, "x"], "views": {"é": True}}
    path = write_artefact(tmp_path / "new" / "a.safetensors", tensors, meta)
    read, got = read_artefact(path, "thing")
    assert got == meta
    assert all(torch.equal(read[k], v) and read[k].dtype == v.dtype for k, v in tensors.items())
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


def test_every_truncation_and_every_flipped_byte_is_noticed(tmp_path) -> None:
    path = write_artefact(tmp_path / "a.safetensors", {"w": torch.rand(4, 4)}, {"kind": "thing"})
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArtefactError):
            read_artefact(path, "thing")
    for at in range(len(whole) - 64, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ArtefactError, match="damaged"):
            read_artefact(path, "thing")
    path.write_bytes(whole)
    read_artefact(path, "thing")


def test_foreign_files_are_refused(tmp_path, monkeypatch) -> None:
    save_file({"w": torch.rand(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ArtefactError, match="not one that unstride saved"):
        read_artefact(tmp_path / "foreign.safetensors", "thing")
    torch.save({"w": torch.rand(2)}, tmp_path / "pickle.pt")
    with pytest.raises(ArtefactError, match="not a safetensors file"):
        read_artefact(tmp_path / "pickle.pt", "thing")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArtefactError, match="not a file"):
            read_artefact(path, "thing")
    path = write_artefact(tmp_path / "a.safetensors", {}, {"kind": "other"})
    with pytest.raises(ArtefactError, match="holds 'other', expected 'thing'"):
        read_artefact(path, "thing")
    monkeypatch.setattr(artefacts, "VERSION", 0)
    with pytest.raises(ArtefactError, match="Upgrade"):
        read_artefact(path, "other")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = write_artefact(tmp_path / "a.safetensors", {"w": torch.zeros(2)}, {"kind": "thing"})

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtefactError, match="No space left"):
        write_artefact(path, {"w": torch.ones(2)}, {"kind": "thing"})
    monkeypatch.undo()
    assert torch.equal(read_artefact(path, "thing")[0]["w"], torch.zeros(2))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    with pytest.raises(ArtefactError, match="cannot write"):
        write_artefact(path / "below" / "b.safetensors", {}, {"kind": "thing"})
