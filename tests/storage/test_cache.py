"""The cache: what was put is there after anything that may happen to a process, a disk or a file."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from unstride.errors import ArtefactError
from unstride.storage.cache import Cache, RunKey

KEY = RunKey("test", {"model": "abc", "recipe": {"views": ["flip"]}})


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def alike(one, other):
    return one is not None and one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_values_come_back_as_they_were(tmp_path: Path, where: str) -> None:
    values = {
        "a": {"x": torch.rand(2, 3), "n": torch.tensor(3), "name": "é", "cost": 1.1, "rows": [{"k": None}]},
        "b": {"x": torch.rand(4).half(), "n": torch.tensor(4), "only/here": torch.ones(1, dtype=torch.bool)},
        "c": {"x": torch.zeros(0, 5), "n": torch.tensor(5)},
    }
    cache = Cache.open(tmp_path if where == "disk" else None, KEY)
    cache.put(values)
    caches = [cache, Cache.open(tmp_path, KEY)] if where == "disk" else [cache]
    for one in caches:
        assert all(alike(one.get(item), own) for item, own in values.items())
        assert one.get("d") is None and "d" not in one
        assert len(one) == 3
    assert caches[-1].bytes > 0


def test_another_run_key_finds_nothing_and_an_equal_one_everything(tmp_path: Path) -> None:
    Cache.open(tmp_path, KEY).put({"a": {"n": 1}})
    assert "a" in Cache.open(tmp_path, RunKey("test", {"recipe": {"views": ["flip"]}, "model": "abc"}))
    others = [RunKey("other", KEY.settings), RunKey("test", {**KEY.settings, "model": "abd"})]
    assert not any("a" in Cache.open(tmp_path, other) for other in others)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["recipe"] == {"views": ["flip"]}


def test_a_cache_that_is_only_read_writes_nothing(tmp_path: Path) -> None:
    assert Cache.open(tmp_path / "new", KEY).get("a") is None
    assert not (tmp_path / "new").exists()


def test_damaged_files_do_not_count_and_their_items_can_be_put_again(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path, KEY)
    cache.put({"a": {"x": torch.rand(4), "cost": 1.5}})
    cache.put({"b": {"x": torch.rand(4)}})
    files = sorted(Path(cache.folder).glob("*.safetensors"))
    whole = files[0].read_bytes()
    for at in random.Random(0).sample(range(len(whole)), 60):
        files[0].write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        again = Cache.open(tmp_path, KEY)
        assert len(again) in (1, 2)
        for item in set(again):  # what still counts is right: the byte was not one that means anything
            assert alike(again.get(item), cache.get(item) or {})
        files[0].write_bytes(whole)
    files[0].write_bytes(whole[:-3])
    again = Cache.open(tmp_path, KEY)
    assert len(again) == 1 and not files[0].exists()
    (lost,) = {"a", "b"} - set(again)
    again.put({lost: {"x": torch.ones(1)}})
    assert alike(Cache.open(tmp_path, KEY).get(lost), {"x": torch.ones(1)})


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path, monkeypatch, where: str) -> None:
    cache = Cache.open(tmp_path, KEY)
    cache.put({"a": {"n": 1}})

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if where == "write":
            patched.setattr("unstride.storage.artefacts.write_atomic", full)
        else:
            patched.setattr(os, where, full)
        with pytest.raises(ArtefactError, match=r"No space left on device.*Free some space"):
            cache.put({"b": {"n": 2}})
    assert "b" not in cache and set(Cache.open(tmp_path, KEY)) == {"a"}
    assert not list(tmp_path.rglob("*.tmp"))
    cache.put({"b": {"n": 2}})
    assert set(Cache.open(tmp_path, KEY)) == {"a", "b"}


def test_a_file_size_limit_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    cache = Cache.open(tmp_path, KEY)
    cache.put({"a": {"n": 1}})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(ArtefactError, match="cannot write"):
            cache.put({"b": {"x": torch.rand(5000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert set(Cache.open(tmp_path, KEY)) == {"a"}


class Reopened(RuleBasedStateMachine):
    """Two processes' caches on one folder, closed and opened at will, agree with one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.caches = [Cache.open(Path(self.folder.name), KEY) for _ in range(2)]
        self.model: dict[str, dict] = {}

    @rule(which=st.integers(0, 1), items=st.sets(st.sampled_from("abcdefgh"), max_size=4), size=st.integers(0, 3))
    def put(self, which, items, size):
        new = {i: {"x": torch.full((size,), float(ord(i))), "n": ord(i)} for i in sorted(items) if i not in self.model}
        self.caches[which].put(new)
        self.model |= new

    @rule(which=st.integers(0, 1))
    def reopen(self, which):
        self.caches[which].close()
        self.caches[which] = Cache.open(Path(self.folder.name), KEY)

    @invariant()
    def agrees(self):
        for cache in self.caches:
            cache.reload()
            assert set(cache) == set(self.model)
            assert all(alike(cache.get(item), own) for item, own in self.model.items())

    def teardown(self):
        self.folder.cleanup()


TestReopened = Reopened.TestCase
TestReopened.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)

# One process pays for the imports; each child that it forks is a run of its own, and is killed for real.
KILLED = """
import os, random, signal, sys, time, torch
from pathlib import Path
from unstride.storage.cache import Cache, RunKey

torch.set_num_threads(1)
folder, rng = Path(sys.argv[1]), random.Random(sys.argv[3])

def write(folder, batch, first):
    pid = os.fork()
    if pid:
        return pid
    cache = Cache.open(folder, RunKey("test", {}))
    items = [f"{(first + k) % 200:04d}" for k in range(200)]
    todo = [item for item in items if item not in cache]
    for start in range(0, len(todo), batch):
        part = todo[start : start + batch]
        cache.put({i: {"x": torch.arange(int(i) % 7, dtype=torch.float64) / 3, "n": int(i) / 7} for i in part})
    os._exit(0)

def ended(pid, kill=False):
    if kill:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def written():
    return len(list(folder.rglob("*.safetensors")))

kills = 0
for _ in range(8):
    before, started = written(), [write(folder, rng.choice((1, 3, 8)), first) for first in (0, 100)]
    patience, enough = time.monotonic() + 1, before + rng.randrange(1, 6)
    while time.monotonic() < patience and written() < enough:
        time.sleep(0.001)
    kills += sum(ended(pid, kill=True) == -signal.SIGKILL for pid in started)
assert ended(write(folder, 5, 0)) == 0
assert ended(write(Path(sys.argv[2]), 16, 0)) == 0
print(kills)
"""


def content(folder: Path) -> list[str]:
    cache = Cache.open(folder, RunKey("test", {}))
    values = [cache.get(f"{k:04d}") for k in range(200)]
    assert None not in values
    return [repr((own["n"], own["x"].tolist())) for own in values]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_two_writers_killed_at_random_moments_leave_what_one_undisturbed_run_leaves(tmp_path: Path) -> None:
    seed = str(random.SystemRandom().randrange(10**9))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(tmp_path / "whole"), seed],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (seed, done.stderr)
    assert int(done.stdout) >= 2, seed
    assert content(tmp_path / "killed") == content(tmp_path / "whole"), seed
