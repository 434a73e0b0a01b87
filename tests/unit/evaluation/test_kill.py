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
from unstride import data
from unstride.evaluation import evaluate, work

work.SHARD["classification"] = 8
out, name, seed = sys.argv[1:4]
rng = random.Random(seed)
dataset = data.load(name, tiny.PREPROCESS)
model = tiny.net()
warnings.simplefilter("ignore")

def child():
    pid = os.fork()
    if pid:
        return pid
    try:
        if len(sys.argv) > 4:  # slow enough for a kill to land between and inside shards
            read = dataset.listing.make
            object.__setattr__(dataset.listing, "make", lambda entry: time.sleep(0.004) or read(entry))
        evaluate(model, dataset, (1, 3, 6), out=out, batch_size=4)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

def shards():
    return sum(f.endswith(".safetensors") for _, _, files in os.walk(out) for f in files)

killed = 0
while True:
    pid = child()
    before = shards()
    patience = rng.choice((0, 1, 2, 3))  # die after so many more shards, and a little
    deadline = time.monotonic() + 60
    status = 0
    while len(sys.argv) <= 4 or shards() < before + patience:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            print(killed, os.waitstatus_to_exitcode(status), flush=True)
            sys.exit(os.waitstatus_to_exitcode(status))
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(rng.random() * (0.5 if patience == 0 else 0.05))
    os.kill(pid, signal.SIGKILL)
    killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    if killed >= 12:
        del sys.argv[4:]  # the last one may finish
"""


def run(folder: Path, name: str, seed: int, *more: str) -> tuple[int, list[dict]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), name, str(seed), *more],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    killed, _ = map(int, done.stdout.split())
    return killed, [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_run_killed_again_and_again_ends_with_the_rows_of_one_that_was_not(tmp_path):
    name = tiny.npz(tmp_path, 61)
    _, wanted = run(tmp_path / "whole", name, 0)
    seed = random.SystemRandom().randrange(10**9)
    killed, found = run(tmp_path / "killed", name, seed, "killing")
    assert killed >= 3, seed
    assert [tiny.numbers(row) for row in found] == [tiny.numbers(row) for row in wanted], seed
    assert found[0]["images"] == 61
    assert not list((tmp_path / "killed").rglob(".*.tmp"))
