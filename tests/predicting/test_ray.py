"""Predictions on a local Ray cluster: every image exactly once, also when a worker is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_nets import photo, png, write_nets

import unstride
from unstride.errors import InputError, OptionError
from unstride.predicting import RayPredictor

HERE = Path(__file__).parents[1]


@pytest.fixture
def nets(tmp_path):
    return write_nets(tmp_path)


def photos(folder, count):
    folder.mkdir(exist_ok=True)
    for k in range(count):
        photo(k, (40, 48)).save(folder / f"{k:04d}.png")
    return folder


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_batch_of_ray_data_has_the_rows_of_predict(nets, tmp_path):
    folder = photos(tmp_path / "photos", 5)
    unstride.predict(f"{nets}:net", folder, tmp_path / "p.jsonl", recipe="flip", top=2)
    wanted = rows(tmp_path / "p.jsonl")
    paths = np.array([row["image"] for row in wanted], dtype=object)
    run = RayPredictor(f"{nets}:net", recipe="flip", top=2)
    data = [Path(path).read_bytes() for path in paths]
    decoded = np.stack([np.asarray(photo(k, (40, 48))) for k in range(5)])
    for batch in ({"bytes": np.array(data, dtype=object)}, {"image": decoded}):
        got = run({**batch, "path": paths, "label": np.arange(5)})
        assert got["image"].tolist() == paths.tolist() and got["label"].tolist() == [0, 1, 2, 3, 4]
        assert got["class_1"].tolist() == [row["classes"][0] for row in wanted]
        assert got["probability_1"].tolist() == [row["probabilities"][0] for row in wanted]
    damaged = run({"bytes": np.array([png(photo())[:300], data[0]], dtype=object)})
    assert damaged["class_1"][0] is None and "damaged" in damaged["error"][0]
    assert damaged["class_1"][1] == wanted[0]["classes"][0]
    with pytest.raises(InputError, match="expected one called image or bytes"):
        run({"pixels": decoded})
    with pytest.raises(OptionError, match="--ray"):
        RayPredictor(f"{nets}:segmenter")


def test_a_missing_library_is_named_with_the_line_that_installs_it(nets, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'unstride\[ray\]'"):
        unstride.predict(f"{nets}:net", photos(tmp_path / "photos", 1), tmp_path / "p.jsonl", ray="local")


ONCE = """
def once():
    from pathlib import Path
    flag = Path(__file__).with_suffix(".loaded")
    if flag.exists():
        raise RuntimeError("it loads only once")
    flag.touch()
    return net()
"""


@pytest.mark.slow
def test_models_travel_to_the_workers_and_a_worker_that_cannot_start_is_one_error(nets, tmp_path):
    pytest.importorskip("ray")
    folder, loaded = photos(tmp_path / "photos", 5), unstride.models.load(f"{nets}:net")

    class Own(type(loaded.model)):
        """A class that no other process can import."""

    own = Own(*loaded.model)
    better = unstride.enhance(own, recipe="flip", task="classification", preprocess=loaded.preprocess)
    unstride.predict(better, folder, tmp_path / "one.jsonl")
    done = unstride.predict(better, folder, tmp_path / "ray.jsonl", ray="local")
    assert rows(tmp_path / "ray.jsonl") == rows(tmp_path / "one.jsonl")
    assert 0 < done.waiting < 1
    Path(nets).write_text(Path(nets).read_text() + ONCE)
    with pytest.raises(OptionError, match=r"a worker cannot start \(.*it loads only once"):
        unstride.predict(f"{nets}:once", folder, tmp_path / "other.jsonl", ray="local")


CLUSTER = """
import os, signal, sys, threading, time
import ray, torch
torch.set_num_threads(1)
import unstride
from unstride.predicting import run, summary

run.PART = summary.PART = 8
spec, folder, out = sys.argv[1:]
ray.init(address="local", num_cpus=2, logging_level="ERROR", log_to_driver=False)
killed = []

def ours(pid):
    # whether a process descends from this one
    while pid > 1 and pid != os.getpid():
        pid = int(run.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])
    return pid == os.getpid()

def workers():
    for folder in run.Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::PartWorker") and ours(int(folder.name)):
                yield int(folder.name)
        except OSError:
            continue

def kill_one():
    while len(list(run.Path(out + ".parts").rglob("*.safetensors"))) < 3:
        time.sleep(0.01)
    while not killed:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            break

thread = threading.Thread(target=kill_one, daemon=True)
thread.start()
done = unstride.predict(spec, folder, out, recipe="default", batch_size=4, ray="local")
thread.join(30)
print(f"{done.images} images, {len(killed)} killed", flush=True)
ray.shutdown()
"""


@pytest.mark.slow
def test_a_killed_worker_loses_no_image_and_doubles_none(nets, tmp_path):
    pytest.importorskip("ray")
    folder = photos(tmp_path / "photos", 400)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, f"{nets}:net", str(folder), str(tmp_path / "ray.jsonl")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "400 images, 1 killed\n" in done.stdout  # Ray's own lines are there, too
    single = (
        "import sys, torch, unstride; from unstride.predicting import run, summary; torch.set_num_threads(1); "
        "run.PART = summary.PART = 8; unstride.predict(*sys.argv[1:], recipe='default', batch_size=4)"
    )
    alone = [sys.executable, "-c", single, f"{nets}:net", str(folder), str(tmp_path / "one.jsonl")]
    subprocess.run(alone, env=environment, check=True, timeout=300)
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
