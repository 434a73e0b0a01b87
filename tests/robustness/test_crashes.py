"""Everything that is written: killed at random moments and on a full disk, then resumed, as if nothing had happened."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

# One process pays for the imports. Each child that it forks is a run of its own; some are killed, some find a full
# disk.
SCRIPT = """
import os, random, signal, sys, time, traceback, warnings
import torch
torch.set_num_threads(1)
import tiny, unstride
from unstride import cli, data
from unstride.errors import ArtefactError, NotWritten
from unstride.evaluation import measuring
from unstride.predicting import compare, run, summary
from unstride.storage import files

warnings.simplefilter("ignore")
warnings.simplefilter("error", NotWritten)
name, folder, seed = sys.argv[1:]
rng, loaded = random.Random(seed), unstride.models.LoadedModel("net", *tiny.build(), "classification")
files.ABANDONED, measuring.CHUNK, summary.PART, run.PART = 0.0, 8, 16, 16
labelled = f"npz:{folder}/data.npz"
RUNS = {
    "predict": lambda: unstride.predict(loaded, f"{folder}/photos", "p.csv", recipe="paper", batch_size=4, budget=3),
    "evaluate": lambda: unstride.evaluate(
        loaded, labelled, recipe=["paper", "flip"], out="e", report="e.html", batch_size=4, progress=False
    ),
    "tune": lambda: unstride.tune(loaded, labelled, cost=1.5, cache="cache", batch_size=8, progress=False).save(
        "t.toml", anyway=True
    ),
    "fit": lambda: unstride.fit(
        loaded, labelled, out="f.toml", method="classtta", policy="standard:6", epochs=4, batch_size=8, progress=False
    ),
    "export": lambda: unstride.export(loaded, "n.onnx", recipe="flip", example=16),
    "compare": lambda: compare.compare(
        "plain", "flip", f"{folder}/photos", "c.csv", model=loaded, batch_size=4, progress=False
    ),
}

def start(where, space=10**9):
    \"\"\"A run of its own. `space`: so many files can be written, then the disk is full.\"\"\"
    pid = os.fork()
    if pid:
        return pid
    try:
        os.makedirs(where, exist_ok=True)
        os.chdir(where)
        fsync, count = os.fsync, 0

        def full(handle):
            nonlocal count
            count += 1
            if count > space:
                raise OSError(28, "No space left on device")
            fsync(handle)

        os.fsync = full
        RUNS[name]()
        open(f"{folder}/written", "w").write(str(count))
        os._exit(0)
    except (ArtefactError, NotWritten) as error:
        os._exit(3 if "No space left on device" in str(error) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)

def ended(pid):
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, 3, -signal.SIGKILL):
        sys.exit(f"a run ended with {status}")
    return status

began = time.monotonic()
assert ended(start(f"{folder}/whole")) == 0
took, count = time.monotonic() - began, int(open(f"{folder}/written").read())
interrupted = 0
for attempt in range(int(os.environ["UNSTRIDE_TEST_CRASHES"])):
    if rng.random() < 0.5:
        pid = start(f"{folder}/crashed")
        time.sleep(rng.random() * took)
        os.kill(pid, signal.SIGKILL)
        interrupted += ended(pid) != 0
    else:
        interrupted += ended(start(f"{folder}/crashed", rng.randrange(count))) == 3
assert ended(start(f"{folder}/crashed")) == 0
print(interrupted)
"""
# Measured times, which differ from run to run.
TIMES = re.compile(r'("?\w*(?:seconds|latency|time_ratio|time|plain_ms)"?\s*[:=]\s*)(\[[^]]*\]|\{[^}]*\}|[-\d.e]+)')


def results(folder: Path) -> dict[str, bytes]:
    """All files but caches and locks, without measured times; a page is the same but for them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith("cache") and "/cache/" not in f"/{name}" and path.name != ".lock":
            found[name] = path.read_bytes()
            if path.suffix in (".json", ".jsonl", ".toml"):
                found[name] = TIMES.sub(r"\1 0", path.read_text()).encode()
            elif path.suffix == ".html":
                found[name] = re.sub(r"\d", "", path.read_text()).encode()[:200]
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("name", ["predict", "evaluate", "tune", "fit", "export", "compare"])
def test_a_run_that_crashes_again_and_again_ends_as_one_that_did_not(tmp_path: Path, name: str) -> None:
    import numpy as np
    import tiny
    from PIL import Image

    x, y = tiny.images(40)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    (tmp_path / "photos").mkdir()
    for k, image in enumerate(x):
        Image.fromarray(image).save(tmp_path / "photos" / f"{k:02}.png")
    seed = str(random.SystemRandom().randrange(10**9))
    path = os.pathsep.join([str(Path(tiny.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(tmp_path), seed],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "UNSTRIDE_TEST_CRASHES": "6"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, (seed, done.stderr[-3000:])
    whole, crashed = results(tmp_path / "whole"), results(tmp_path / "crashed")
    assert sorted(whole) == sorted(crashed), seed
    different = [name for name in whole if whole[name] != crashed[name]]
    assert not different, (seed, different)
    assert whole and int(done.stdout) >= 1, seed
