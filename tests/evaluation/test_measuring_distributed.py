"""Two processes under torchrun give the rows of one, also when one of them dies on the way."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist

import unstride
from unstride.storage.distributed import fresh_store

HERE = Path(tiny.__file__).parent


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # as each of torchrun's processes has


def torchrun(out: Path, spec: str, data: str, *options: str) -> list[dict]:
    """-m unstride evaluate, in two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "--max-restarts", "1", "-m", "unstride", "evaluate", spec, "--data", data, "--out", str(out)]
    path = os.pathsep.join([str(HERE), *sys.path])  # the unstride that is tested here
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "UNSTRIDE_TEST_OUT": str(out)}
    done = subprocess.run(
        [*command, "--json", *options], env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.strip().splitlines()[-1])["rows"]
    assert done.stdout.count('"rows"') == 1  # rank 0 alone prints
    assert printed == [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return [tiny.numbers(row) for row in printed]


def alone(spec, data, **options) -> list[dict]:
    rows = unstride.evaluate(spec, data, progress=False, **options)
    return [tiny.numbers(json.loads(json.dumps(row.to_json()))) for row in rows]


def test_what_a_dead_attempt_left_in_the_store_is_not_seen():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(3):
        clients = [dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60)) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            started = []
            for rank in (0, 2, 1):  # rank 0 finds what the attempt before has left, the others come late
                started.append((rank, pool.submit(fresh_store, clients[rank], rank, 3)))
                time.sleep(0.2)
            stores = {rank: future.result(30) for rank, future in started}
        assert not stores[0].check(["address"])
        stores[1].set("address", str(attempt))
        assert {store.get("address") for store in stores.values()} == {str(attempt).encode()}


def test_a_process_that_dies_is_started_again_and_nothing_is_lost(tmp_path):
    data, out = tiny.npz(tmp_path, 64 * 4 + 7), tmp_path / "two"
    rows = torchrun(out, f"{HERE / 'tiny.py'}:build_dying", data, "--recipe", "flip", "--batch-size", "8")
    assert (out / "died").read_text() == "once"
    wanted = alone(f"{HERE / 'tiny.py'}:build", data, recipe="flip", batch_size=8)
    assert [row["metrics"] for row in rows] == [row["metrics"] for row in wanted]
    assert [row["gain"] for row in rows] == [row["gain"] for row in wanted]
    assert [(row["images"], row["cost"], row["macs"]) for row in rows] == [
        (64 * 4 + 7, row["cost"], row["macs"]) for row in wanted
    ]
