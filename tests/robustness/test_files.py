"""Files that are damaged, foreign, shared or where none should be: a clear error, and nothing lost or doubled."""

import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from unstride.evaluation.shards import KIND as SHARD
from unstride.evaluation.shards import Shard
from unstride.tta import TTA

import unstride
from unstride.errors import ArtefactError, OptionError
from unstride.evaluation import Row, append_rows, read_rows
from unstride.recipe import policies
from unstride.storage import locks, strict_json
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.fingerprint import digest

DEEP = 200_000
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that start at once")


def row(budget: int, run: str = "a") -> Row:
    kinds = {"str": "", "int": 1, "bool": False, "float": 1.0, "float | None": None, "tuple[str, ...]": ()}
    values = {field.name: kinds.get(str(field.type), {}) for field in dataclasses.fields(Row)}
    return Row(**{**values, "run": run, "budget": budget})


# ------------------------------------------------------------------------------------------------------ rows


def _append(path: Path, start: Any) -> None:
    rows = [row(budget) for budget in (1, 4, 10, 15)]
    start.wait()
    append_rows(path, rows)


@forks
def test_rows_appended_by_several_processes_at_once_are_there_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for k in range(20):
        path, start = tmp_path / str(k) / "rows.jsonl", context.Barrier(4)
        workers = [context.Process(target=_append, args=(path, start)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0] * 4
        assert [r.budget for r in read_rows(path)] == [1, 4, 10, 15]


def test_rows_that_are_a_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    for use in (lambda p: read_rows(p), lambda p: append_rows(p, [row(1)])):
        with pytest.raises(ArtefactError, match=r"rows\.jsonl"):
            use(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        "[" * DEEP,
        '{"run": ' + "[" * DEEP + "]" * DEEP + "}",
        "9" * 5000,
        json.dumps({**row(1).to_json(), "macs": "many"}),
        json.dumps({**row(1).to_json(), "budget": True}),
        json.dumps({**row(1).to_json(), "metrics": [1]}),
        json.dumps({**row(1).to_json(), "macs": float("nan")}),
        json.dumps(row(1).to_json()).replace('"budget": 1', '"budget": 1e400'),
    ],
    ids=["deep", "deep inside", "digits", "text", "bool", "list", "nan", "1e400"],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ArtefactError, match="line 1"):
        read_rows(path)


def test_a_row_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="not finite"):
        append_rows(tmp_path / "rows.jsonl", [dataclasses.replace(row(1), macs=float("nan"))])
    assert read_rows(tmp_path / "rows.jsonl") == []


# ------------------------------------------------------------------------------------------------------ other runs


def test_only_what_nobody_writes_any_more_is_swept(tmp_path: Path) -> None:
    old, held, fresh = (tmp_path / f".{name}.tmp" for name in ("old", "held", "fresh"))
    for path in (old, held, fresh):
        path.write_bytes(b"half")
    for path in (old, held):
        os.utime(path, (time.time() - 1000,) * 2)
    with held.open("r+b") as file, locks.held(file):
        outputs.sweep(tmp_path)
    assert [path.exists() for path in (old, held, fresh)] == [False, True, True]


def test_an_evaluation_leaves_the_temporary_files_of_another_alone(tmp_path: Path) -> None:
    from unstride import data

    images = data.load("sample", unstride.models.load("sample").preprocess, limit=8)
    unstride.evaluate(unstride.models.load("sample"), images, (1,), out=tmp_path)
    (shards,) = (tmp_path / "shards").iterdir()
    live = shards / ".000000.safetensors.abc.tmp"
    live.write_bytes(b"half a shard")
    unstride.evaluate(unstride.models.load("sample"), images, (1,), out=tmp_path)
    assert live.exists()


def test_two_runs_cannot_share_a_folder_that_one_will_remove(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with locks.alone(work), pytest.raises(OptionError, match="another run is at work"), locks.alone(work):
        pytest.fail("both are at work")
    with locks.alone(tmp_path / "work"), locks.alone(tmp_path / "work", leads=False):
        pass


# ------------------------------------------------------------------------------------------------------ artefacts


def header(meta: str, tensors: dict[str, torch.Tensor], sha: str | None = None, version: str = "1") -> dict[str, str]:
    return {"unstride": f'{{"version": {version}, "sha256": "{sha or digest(tensors)}", "meta": {meta}}}'}


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
    save_file(tensors, tmp_path / "a.safetensors", header(meta, tensors, version=version))
    with pytest.raises(ArtefactError, match="unreadable unstride header"):
        read_artefact(tmp_path / "a.safetensors", "x")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


def saved(tmp_path: Path, model: nn.Module) -> Path:
    better = unstride.enhance(model, torch.zeros(1, 3, 16, 16), 4, aggregate="attention", criterion="learned")
    return better.save(tmp_path / "better.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_learned_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model = net()
    path = saved(tmp_path, model)
    tensors, meta = read_artefact(path, "enhanced")
    tensors["out"][0] = value
    write_artefact(path, tensors, meta)
    with pytest.raises(ArtefactError, match="out holds values that are not finite"):
        unstride.load(path, model)
    tta = TTA(model, "expanded", "augtta", 2, mean=[0.5] * 3, std=[0.2] * 3)
    tta.weights = torch.tensor([value, 1.0])
    tta.save(tmp_path / "tta.safetensors")
    with pytest.raises(ArtefactError, match="weights holds values that are not finite"):
        TTA.load(tmp_path / "tta.safetensors", model)


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 10**12},
        {"channels": -1},
        {"channels": "four"},
        {"recipe": None},
        {"recipe": {"budget": 0}},
        {"recipe": 5},
        {"recipe": {"task": ["classification"]}},
        {"recipe": {"task": "classification", "budget": "many"}},
        {"recipe": {"task": "classification", "sky": 1}},
        {"execution": "fast"},
        {"preprocess": {"std": [0, 0, 0]}},
        {"preprocess": {"resize": 10**18, "sky": 1}},
    ],
    ids=str,
)
def test_an_enhanced_file_with_impossible_contents_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    model = net()
    path = saved(tmp_path, model)
    tensors, meta = read_artefact(path, "enhanced")
    write_artefact(path, tensors, {**meta, **change})
    with pytest.raises(ArtefactError, match=r"better\.safetensors"):
        unstride.load(path, model)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": None},
        {"policy": {"name": "x", "views": [5], "seed": 0}},
        {"policy": {"name": "x", "views": ["Rotate=" + "9" * 400], "seed": 0}},
        {"method": 7},
        {"budget": "all"},
        {"budget": 10**15},
        {"crop": [0]},
        {"std": "wide"},
    ],
    ids=str,
)
def test_a_tta_file_with_impossible_contents_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    model = net()
    tta = TTA(model, "expanded", "augtta", 2, mean=[0.5] * 3, std=[0.2] * 3)
    tta.weights = torch.tensor([0.5, 0.5])
    path = tta.save(tmp_path / "tta.safetensors")
    tensors, meta = read_artefact(path, "tta")
    write_artefact(path, tensors, {**meta, **change})
    with pytest.raises(ArtefactError, match=r"tta\.safetensors"):
        TTA.load(path, model)


@pytest.mark.parametrize("change", [{"errors": 5}, {"errors": {"x": "y"}}, {"seconds": ["a"]}, {"run": None}], ids=str)
def test_a_shard_with_impossible_contents_does_not_count(tmp_path: Path, change: dict[str, Any]) -> None:
    meta = {"kind": SHARD, "run": "r", "errors": {}, "seconds": [], "timed_images": 0, "memory": 0, **change}
    write_artefact(tmp_path / "s.safetensors", {"index": torch.tensor([0])}, meta)
    assert Shard.load(tmp_path / "s.safetensors", "r", range(1)) is None


# ------------------------------------------------------------------------------------------------------ policies


@pytest.mark.parametrize(
    ("name", "text"),
    [
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
    ],
)
def test_a_policy_nobody_can_use_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OptionError) as caught:
        policies.get(tmp_path / name)
    assert len(str(caught.value)) < 400


# ------------------------------------------------------------------------------------------------------ strict JSON


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
    for path, said in (
        (tmp_path / "folder.png", "a folder"),
        (tmp_path / "nowhere" / "a.png", "there is no folder"),
        (tmp_path / "file" / "a.png", "there is no folder"),
        (tmp_path / ("a" * 300 + ".png"), "cannot write"),
        (tmp_path / "a.doc", "ends in"),
    ):
        with pytest.raises(OptionError, match=said):
            outputs.check_file(path, "--plot", (".png",))
    with pytest.raises(OptionError, match="is a file"):
        outputs.check_folder(tmp_path / "file" / "runs", "--out")
    outputs.check_file(tmp_path / "a.png", "--plot", (".png",))
    outputs.check_folder(tmp_path / "new" / "runs", "--out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that nobody may write to, not even root")
def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot write"):
        outputs.check_file("/proc/self/a.png", "--plot")
    with pytest.raises(OptionError, match="cannot write"):
        outputs.check_folder("/proc/self/runs", "--out")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    outputs.write_atomic(path, b"old")
    (tmp_path / "link").symlink_to(path)
    outputs.write_atomic(tmp_path / "link", b"newer")
    assert (path.read_bytes(), (tmp_path / "link").is_symlink()) == (b"newer", True)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        outputs.write_atomic(path, b"newest")
    assert path.read_bytes() == b"newer"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "link"]
