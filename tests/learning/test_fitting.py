"""`fit` as a whole: options, files, seeds, and that a killed run ends as a whole one."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import fitting_nets
import pytest
import torch

import unstride
from unstride.errors import ArtefactError, DataError, OptionError
from unstride.learning.fitting import fit_seeds
from unstride.method.training import AttentionTraining, Schedule
from unstride.recipe.files import read

FAST = Schedule("fast", lr=5e-2, epochs=3, budget=8, batch_size=16)
OPTIONS = {"schedule": FAST, "progress": False}


def weights(fitted) -> dict[str, torch.Tensor]:
    return fitted.better.attention.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def test_a_fitted_recipe_is_saved_whole_and_says_how_it_was_made(net, train, held, tmp_path: Path) -> None:
    fitted = unstride.fit(net, train, validation=held, out=tmp_path / "a.toml", heads=2, **OPTIONS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "a.toml"]
    stored = read(tmp_path / "a.toml")
    assert stored.recipe.tensors == "a.safetensors"
    assert stored.figures["kept"] == fitted.report.kept
    assert stored.figures["fitted"] == fitted.report.fitted
    assert {"command", "versions", "threads", "cpu"} <= set(tomllib.loads(stored.path.read_text())["made"])
    x = held[0][0]
    opened = unstride.enhance(net, recipe=tmp_path / "a.toml")
    torch.testing.assert_close(opened(x), fitted.better(x), atol=1e-5, rtol=1e-5)
    assert same(opened.attention.state_dict(), weights(fitted))
    again = unstride.enhance(net, recipe=fitted.save(tmp_path / "b.json"))
    assert torch.equal(again(x), opened(x))
    other = fitting_nets.small_net(1)
    with pytest.raises(ArtefactError, match="fingerprint"):
        unstride.enhance(other, recipe=tmp_path / "a.toml")


def test_the_report_prints_what_happened(net, train, held) -> None:
    fitted = unstride.fit(net, train, validation=held, **OPTIONS)
    text = str(fitted)
    report = fitted.report
    assert "attention, schedule 'fast' (lr 0.05, 3 epochs, batches of 16, 8 states), seed 0" in text
    assert f"base model {report.base:.2%}, mean {report.mean:.2%}, fitted {report.fitted:.2%}" in text
    assert f"epoch {report.kept} of 3 kept, trained on 40 images" in text
    assert len(fitted.epochs) == 4


def test_a_seed_decides_everything_but_the_order_of_the_loader_nothing(net, train, held) -> None:
    first = unstride.fit(net, train, validation=held, seed=1, **OPTIONS)
    again = unstride.fit(net, train, validation=held, seed=1, **OPTIONS)
    assert same(weights(first), weights(again)) and first.report == again.report
    other = unstride.fit(net, train, validation=held, seed=2, **OPTIONS)
    assert not same(weights(first), weights(other))


def test_every_seed_draws_its_own_images_and_module(net, train) -> None:
    results = list(fit_seeds(net, train, seeds=3, limit=20, **OPTIONS))
    assert [f.report.seed for f in results] == [0, 1, 2]
    assert {(f.report.train_images, f.report.validation_images) for f in results} == {(16, 4)}
    starts = [f.epochs[0].nll for f in results]  # of the mean: only the images differ
    assert len(set(starts)) == 3
    with pytest.raises(OptionError, match="fit_seeds decides it"):
        next(fit_seeds(net, train, seed=1))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"method": "luck"}, "method: got 'luck'"),
        ({"schedule": "slow"}, "schedule: got 'slow'"),
        ({"method": "gps", "schedule": "fast"}, "schedule: gps has one schedule"),
        ({"epochs": 0}, "epochs: got 0"),
        ({"budget": 1}, "budget: got 1"),
        ({"heads": 5}, "divisor of the 12 channels"),
        ({"heads": True}, "heads: got True"),
        ({"seed": -1}, "seed: got -1"),
        ({"batch_size": 0.5}, "batch_size: got 0.5"),
        ({"limit": 0}, "limit"),
        ({"out": "a.safetensors"}, r"\.toml or \.json"),
        ({"recipe": "paper"}, "no Search with aggregate='learned'"),
        ({"recipe": "default", "method": "augtta"}, "several stages"),
        ({"method": "augtta", "policy": "standard:0"}, "budget 0"),
        ({"method": "augtta", "policy": 3}, "policy: got 3"),
        ({"method": "augtta", "budget": 4, "policy": "standard:2"}, "no 'budget'"),
        ({"task": "segmentation"}, "segmentation"),
        ({"bugdet": 3}, "bugdet"),
    ],
)
def test_bad_options_are_errors_by_name(net, train, change: dict, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        unstride.fit(net, train, **{"progress": False, **change})


def test_a_finished_run_is_not_trained_again(net, train, held, tmp_path: Path, monkeypatch, capsys) -> None:
    first = unstride.fit(net, train, validation=held, cache=tmp_path, **OPTIONS)
    monkeypatch.setattr(AttentionTraining, "_optimise", None)  # it would be called
    again = unstride.fit(net, train, validation=held, cache=tmp_path, **OPTIONS)
    assert first.report == again.report and same(weights(first), weights(again))
    assert "3 of 3 epochs are taken from an earlier run" in capsys.readouterr().err


def test_an_interrupted_epoch_is_repeated_exactly(net, train, held, tmp_path: Path, monkeypatch) -> None:
    whole = unstride.fit(net, train, validation=held, **OPTIONS)
    go = AttentionTraining._optimise

    def stop(self: AttentionTraining, number: int) -> tuple[float, float]:
        if number == 2:
            raise KeyboardInterrupt
        return go(self, number)

    monkeypatch.setattr(AttentionTraining, "_optimise", stop)
    with pytest.raises(KeyboardInterrupt):
        unstride.fit(net, train, validation=held, cache=tmp_path, **OPTIONS)
    monkeypatch.undo()
    resumed = unstride.fit(net, train, validation=held, cache=tmp_path, **OPTIONS)
    assert resumed.report == whole.report and same(weights(whole), weights(resumed))


def test_damaged_work_files_are_computed_again(net, train, held, tmp_path: Path) -> None:
    first = unstride.fit(net, train, validation=held, cache=tmp_path, **OPTIONS)
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 255
        path.write_bytes(bytes(data))
    again = unstride.fit(net, train, validation=held, cache=tmp_path, **OPTIONS)
    assert first.report == again.report and same(weights(first), weights(again))


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[2])
import unstride
from fitting_nets import labelled, small_net
from unstride.method.training import Schedule
torch.set_num_threads(1)
(x, y), held = labelled(32, 1), labelled(16, 2)
train = [(x[:16], y[:16]), (x[16:], y[16:])]
print("ready", flush=True)
options = {"schedule": Schedule("fast", 5e-2, budget=8)} if sys.argv[4] == "attention" else {"policy": "standard:25"}
unstride.fit(small_net(), train, validation=[held], method=sys.argv[4], epochs=int(sys.argv[3]), progress=False,
             out=sys.argv[1] + "/out.toml", batch_size=8, **options)
print("done", flush=True)
"""


def start(folder: Path, epochs: int, method: str = "attention") -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), str(Path(fitting_nets.__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, str(epochs), method], stdout=subprocess.PIPE, text=True, env=environment)


def written(folder: Path) -> dict[str, bytes]:
    """The files, without the command in them, which names the folder."""
    lines = (folder / "out.toml").read_bytes().replace(str(folder).encode(), b"")
    fitted = folder / "out.safetensors"
    return {"toml": lines, "tensors": fitted.read_bytes() if fitted.exists() else b""}


@pytest.mark.parametrize(("method", "epochs", "kind"), [("attention", 12, "attention-*"), ("classtta", 5, "view-*")])
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path: Path, method: str, epochs: int, kind: str) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed, epochs, method)
    deadline = time.monotonic() + 120
    work = killed / "out.toml.partial"
    while not list(work.glob(f"{kind}/*.safetensors")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "out.toml").exists(), "the run ended before it was killed"
    again, other = start(killed, epochs, method), start(whole, epochs, method)
    assert "done" in again.communicate()[0] and "done" in other.communicate()[0]
    assert written(killed) == written(whole)
    assert not work.exists()


@pytest.mark.parametrize("method", ["attention", "augtta"])
def test_processes_share_the_work_and_agree(tmp_path: Path, method: str) -> None:
    """Two processes under torchrun end with what one process learns."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    shared.mkdir()
    one = start(alone, 3, method)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(script), str(shared), str(Path(fitting_nets.__file__).parent), "3", method]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments], check=True, env=environment, timeout=600)
    assert "done" in one.communicate()[0]
    first, second = written(alone), written(shared)
    assert first["tensors"] == second["tensors"]
    figures = [read(f / "out.toml").figures for f in (alone, shared)]
    assert figures[0] == figures[1]
    assert read(alone / "out.toml").recipe == read(shared / "out.toml").recipe


def test_an_empty_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no folder"):
        unstride.fit("sample", f"folder:{tmp_path / 'none'}", out=tmp_path / "a.toml", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["none"]
