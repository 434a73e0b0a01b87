"""Files that are damaged, foreign, shared or where none should be: a clear error, and nothing lost or doubled."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from procedure_nets import SmallNet, seeded
from safetensors.torch import save_file

import unstride
from unstride.errors import ArtefactError, OptionError
from unstride.evaluation.evaluate import evaluate
from unstride.method.attention import Attention
from unstride.recipe import policies
from unstride.recipe.files import read
from unstride.storage import files, locks, strict_json
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.fingerprint import digest

DEEP = 200_000


# ------------------------------------------------------------------------------------------------------ other runs


def test_only_temporary_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    old, held, fresh = (tmp_path / f".{name}.tmp" for name in ("old", "held", "fresh"))
    for path in (old, held, fresh):
        path.write_bytes(b"half")
    for path in (old, held):
        os.utime(path, (time.time() - 1000,) * 2)
    with held.open("r+b") as file, locks.locked(file):
        files.remove_abandoned(tmp_path)
    assert [path.exists() for path in (old, held, fresh)] == [False, True, True]


def test_what_a_killed_run_left_of_a_file_goes_with_the_next_run(tmp_path: Path) -> None:
    """Only of this file, and only if no process is writing it."""
    for name in (".r.toml.x.tmp", ".[r].toml.x.tmp", ".other.toml.x.tmp", "r.toml.x.tmp"):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, 0))
    files.check_file(tmp_path / "r.toml", "out")
    files.check_file(tmp_path / "[r].toml", "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.toml.x.tmp", "r.toml.x.tmp"]


def test_an_evaluation_leaves_the_temporary_files_of_another_alone(tmp_path: Path) -> None:
    evaluate("sample", "sample", recipe="plain", limit=8, out=tmp_path, progress=False)
    folders = {path.parent for path in tmp_path.rglob("*.safetensors")}
    for folder in folders:
        (folder / ".000000.safetensors.abc.tmp").write_bytes(b"half a part")
    evaluate("sample", "sample", recipe="plain", limit=8, out=tmp_path, progress=False)
    assert folders and all((folder / ".000000.safetensors.abc.tmp").exists() for folder in folders)


def test_two_runs_cannot_share_a_folder_that_one_will_remove(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with locks.exclusive(work), pytest.raises(OptionError, match="another run uses"), locks.exclusive(work):
        pytest.fail("both are at work")
    with locks.exclusive(work), locks.exclusive(work, leads=False):
        pass


# ------------------------------------------------------------------------------------------------------ artefacts


@pytest.mark.parametrize(
    ("meta", "version"),
    [
        ("[" * DEEP + "]" * DEEP, "1"),
        ('{"kind": "x", "a": ' + "[" * 900 + "]" * 900 + "}", "1"),
        ('{"kind": "x"}', "1e400"),
        ('{"kind": "x"}', "NaN"),
        ('{"kind": "x"}', "-Infinity"),
        ('{"kind": "x"}', "9" * 5000),
        ('{"kind": "x"}', "null"),
        ("3", "1"),
    ],
    ids=["deep", "rather deep", "1e400", "nan", "inf", "digits", "null", "number"],
)
def test_a_header_nobody_wrote_is_refused(tmp_path: Path, meta: str, version: str) -> None:
    tensors = {"w": torch.zeros(2)}
    header = f'{{"version": {version}, "sha256": "{digest(tensors)}", "meta": {meta}}}'
    save_file(tensors, tmp_path / "a.safetensors", {"unstride": header})
    with pytest.raises(ArtefactError, match="unreadable unstride header"):
        read_artefact(tmp_path / "a.safetensors", "x")


def fitted(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    """A network, and the file of a recipe with tensors beside it."""
    model = seeded(SmallNet())
    better = unstride.enhance(model, recipe="paper-learned", task="classification", budget=3)
    better.attention = Attention(16)
    return model, better.save(tmp_path / "better.toml")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_learned_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model, path = fitted(tmp_path)
    beside = tmp_path / "better.safetensors"
    tensors, meta = read_artefact(beside, "fitted")
    tensors["out"][0] = value
    write_artefact(beside, tensors, meta)
    with pytest.raises(ArtefactError, match="out holds values that are not finite"):
        unstride.enhance(model, recipe=path)


@pytest.mark.parametrize("change", [{"channels": 10**12}, {"channels": -1}, {"heads": 0}, {"heads": "four"}], ids=str)
def test_fitted_tensors_with_impossible_contents_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    model, path = fitted(tmp_path)
    beside = tmp_path / "better.safetensors"
    tensors, meta = read_artefact(beside, "fitted")
    write_artefact(beside, tensors, {**meta, **change})
    with pytest.raises(ArtefactError, match=r"better\.safetensors"):
        unstride.enhance(model, recipe=path)


# ------------------------------------------------------------------------------------------------------ text files

TEXTS = [
    ("deep.json", "[" * DEEP),
    ("deep.json", '{"views": ' + "[" * DEEP + "]" * DEEP + "}"),
    ("deep.toml", "views = " + "[" * DEEP + "]" * DEEP),
    ("keys.toml", ".".join("a" * 5000) + " = 1"),
    ("nan.json", '{"views": ["Identity"], "seed": NaN}'),
    ("inf.json", '{"views": ["Identity"], "seed": 1e999}'),
    ("long.json", '{"views": ["Identity"], "seed": ' + "9" * 5000 + "}"),
    ("long.json", '{"views": ["Rotate=' + "9" * 5000 + '"]}'),
    ("cut.json", '{"views": ["Cutout=' + "9" * 190 + '"]}'),
    ("cut.json", '{"views": ["Cutout=1e999"]}'),
    ("cut.json", '{"views": ["Cutout=8@nan,inf"]}'),
    ("huge.json", '{"views": ["Identity"' + ', "FlipLR"' * 1_000_000 + "]}"),
    ("bytes.toml", "\udcff"),
]


@pytest.mark.parametrize(("name", "text"), TEXTS, ids=[f"{k} {name}" for k, (name, _) in enumerate(TEXTS)])
def test_a_policy_or_recipe_nobody_can_use_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    for reader, kind in ((policies.get, OptionError), (read, ArtefactError)):
        with pytest.raises(kind) as caught:
            reader(tmp_path / name)
        assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_json_that_is_written_can_be_read_by_anybody() -> None:
    data = {"a": float("nan"), "b": [float("inf"), (-float("inf"), 1.5)], "c": {"d": float("nan")}}
    assert json.loads(strict_json.dumps(data), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, [None, 1.5]],
        "c": {"d": None},
    }


# ------------------------------------------------------------------------------------------------------ outputs


def test_a_file_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "folder.png", "a folder"),
        (tmp_path / "nowhere" / "a.png", "there is no folder"),
        (tmp_path / "file" / "a.png", "there is no folder"),
        (tmp_path / ("a" * 300 + ".png"), "cannot write"),
        (tmp_path / "a.doc", "ends in"),
    ):
        with pytest.raises(OptionError, match=message):
            files.check_file(path, "--plot", (".png",))
    with pytest.raises(OptionError, match="is a file"):
        files.check_folder(tmp_path / "file" / "runs", "--out")
    files.check_file(tmp_path / "a.png", "--plot", (".png",))
    files.check_folder(tmp_path / "new" / "runs", "--out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that nobody may write to, not even root")
def test_a_folder_that_takes_no_files() -> None:
    with pytest.raises(OptionError, match="cannot write"):
        files.check_file("/proc/self/a.png", "--plot")
    with pytest.raises(OptionError, match="cannot write"):
        files.check_folder("/proc/self/runs", "--out")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    files.write_atomic(path, b"old")
    (tmp_path / "link").symlink_to(path)
    files.write_atomic(tmp_path / "link", b"newer")
    assert (path.read_bytes(), (tmp_path / "link").is_symlink()) == (b"newer", True)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"newest")
    assert path.read_bytes() == b"newer"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "link"]
