"""`kill -9` at any moment: nothing is lost, nothing is counted twice."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

# One process pays for the imports; each child that it forks is a run of its own, and is killed for real.
SCRIPT = """
import os, random, signal, sys, time, warnings
import torch
torch.set_num_threads(1)
import tiny
from unstride import data, evaluate
from unstride.storage import files
from unstride.evaluation import measuring

warnings.simplefilter("ignore")
measuring.CHUNK = 8
files.ABANDONED = 0.0  # what a kill leaves is removed at once
name, whole, killed, seed = sys.argv[1:]
rng = random.Random(seed)
dataset = data.load(name, tiny.PREPROCESS)
model = tiny.net()
read = dataset.listing.make

def slow(entry):  # so that a kill lands between images, batches and chunks
    time.sleep(0.004)
    return read(entry)

object.__setattr__(dataset.listing, "make", slow)

def start(out):
    pid = os.fork()
    if not pid:
        try:
            evaluate(model, dataset, recipe=["paper", "flip"], out=out, batch_size=4, progress=False)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid

def ended(pid):
    done, status = os.waitpid(pid, os.WNOHANG)
    if done and os.waitstatus_to_exitcode(status):
        sys.exit("a run failed")
    return done

def parts():
    return sum(f.endswith(".safetensors") for _, _, files in os.walk(killed) for f in files)

pid = start(whole)
while not ended(pid):
    time.sleep(0.01)
kills, finished = 0, False
while not finished:
    pid, before = start(killed), parts()
    patience = rng.choice((1, 2, 5)) if kills < 5 else 10**9  # die after so many more parts, and a little
    while not (finished := ended(pid)) and parts() < before + patience:
        time.sleep(0.001)
    if not finished:
        time.sleep(rng.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        kills += os.WIFSIGNALED(status)
        finished = not os.WIFSIGNALED(status)
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_run_killed_again_and_again_ends_with_the_rows_of_one_that_was_not(tmp_path):
    seed = str(random.SystemRandom().randrange(10**9))
    arguments = [tiny.npz(tmp_path, 41), str(tmp_path / "whole"), str(tmp_path / "killed"), seed]
    path = os.pathsep.join([str(Path(tiny.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, (seed, done.stderr)
    assert int(done.stdout) >= 3, seed
    wanted, found = (
        [tiny.numbers(json.loads(line)) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert found == wanted, seed
    assert found[0]["images"] == 41
    assert not list((tmp_path / "killed").rglob(".*.tmp"))
