"""Memory that the kernel watches: every write is told, to everyone who asks, and what is not watched is read."""

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import unstride
from unstride.graph import watch
from unstride.graph.snapshot import Snapshot
from unstride.graph.watch import LEAST, PAGE, Span, Watch, inner_pages

MANY = 64 * PAGE // 4  # floats
TOLD = "this kernel does not watch memory for writes"
watches = pytest.mark.skipif(not watch.available(), reason=TOLD)


def _span(array: np.ndarray) -> Span:
    span = inner_pages(array.ctypes.data, array.ctypes.data + array.nbytes)
    assert span is not None
    return span


@pytest.fixture(params=["watched", "read"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a kernel that watches, and with one that does not."""
    if request.param == "read":
        monkeypatch.setattr(watch, "_kernel", lambda: None)
    elif not watch.available():
        pytest.skip(TOLD)
    return str(request.param)


def test_whole_pages_only() -> None:
    assert inner_pages(0, LEAST * PAGE) == (0, LEAST * PAGE)
    assert inner_pages(1, LEAST * PAGE) is None
    assert inner_pages(1, (LEAST + 2) * PAGE - 1) == (PAGE, (LEAST + 1) * PAGE)


@watches
def test_writes_are_told_and_reads_are_not() -> None:
    array = np.zeros(MANY, dtype=np.float32)
    seen = Watch([_span(array)])
    assert seen.spans == [_span(array)]
    before = seen.writes()
    assert array.sum() == 0 and torch.from_numpy(array).sum() == 0
    assert seen.writes() == before

    def by_torch() -> None:
        torch.from_numpy(array).data[MANY // 2] = 1.0

    def by_c() -> None:
        ctypes.memset(_span(array)[0] + 5 * PAGE, 1, 1)

    def by_the_kernel() -> None:
        start = _span(array)[0]
        with open("/dev/zero", "rb", buffering=0) as file:
            file.readinto((ctypes.c_char * PAGE).from_address(start + 7 * PAGE))

    def by_another_thread() -> None:
        thread = threading.Thread(target=array.__setitem__, args=(slice(None, None, PAGE // 2), 3.0))
        thread.start()
        thread.join()

    for write in (by_torch, by_c, by_the_kernel, by_another_thread):
        write()
        after = seen.writes()
        assert after != before, write.__name__
        assert seen.writes() == after
        before = after


@watches
def test_everyone_who_watches_the_same_memory_is_told() -> None:
    """Asking clears the kernel's marks: the second who asks must hear of the write, too."""
    array = np.zeros(MANY, dtype=np.float32)
    first, second = Watch([_span(array)]), Watch([_span(array)])
    old = first.writes(), second.writes()
    array[MANY // 2] = 1
    assert first.writes() != old[0]
    assert second.writes() != old[1]


@watches
def test_what_lies_across_something_watched_is_left_to_read() -> None:
    array = np.zeros(MANY, dtype=np.float32)
    one, other = _span(array), _span(array[PAGE:])
    first = Watch([one])
    assert first.spans == [one]
    assert Watch([other]).spans == []


@watches
def test_files_and_shared_memory_are_left_to_read(tmp_path: Path) -> None:
    shared = torch.zeros(MANY).share_memory_()
    path = tmp_path / "weights"
    np.zeros(MANY, dtype=np.float32).tofile(path)
    private = np.memmap(path, dtype=np.float32, mode="c")
    for array in (shared.numpy(), private):
        assert Watch([_span(array)]).spans == []


@watches
def test_other_memory_at_the_same_place_is_not_vouched_for() -> None:
    size, how = 64 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = mmap.mmap(-1, size, flags=how)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    seen = Watch([(start, start + size)])
    assert len(seen.spans) == 1
    before, fixed = seen.writes(), 0x10
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
    assert libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, how | fixed, -1, 0) == start
    after = seen.writes()
    assert after != before
    assert seen.writes() != after  # whose it is nobody knows: it is read every time


@watches
def test_a_forked_process_reads() -> None:
    """Its memory is its own, and nobody watches it: it says so, and its parent is not told of its writes."""
    array = np.zeros(MANY, dtype=np.float32)
    seen = Watch([_span(array)])
    before = seen.writes()
    child = os.fork()
    if child == 0:
        array[:] = 1
        os._exit(0 if seen.writes() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert seen.writes() == before


@watches
def test_who_asks_while_asking_is_answered_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may call the model in the midst of a look: no deadlock, and both hear of the write."""
    array = np.zeros(MANY, dtype=np.float32)
    seen, inner = Watch([_span(array)]), list[object]()
    before, scan = seen.writes(), watch._Kernel._scan

    def interrupted(self: watch._Kernel, span: Span) -> bool:
        if not inner:
            inner.append(None)
            inner[0] = seen.writes()
        return scan(self, span)

    array[MANY // 2] = 1
    monkeypatch.setattr(watch._Kernel, "_scan", interrupted)
    assert seen.writes() != before and inner[0] != before


@watches
def test_files_of_a_kernel_that_refuses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_FEATURES", 1 << 63)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="Invalid"):
            watch._Kernel()
    assert len(os.listdir("/proc/self/fd")) == before


@watches
def test_only_so_many_spans_are_watched_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = np.zeros(MANY, dtype=np.float32), np.zeros(2 * MANY, dtype=np.float32)
    held = len(watch._kernel().pages)  # type: ignore[union-attr]
    monkeypatch.setattr(watch, "MOST", held + 1)
    assert Watch([_span(one), _span(other)]).spans == [_span(other)]


class _Large(nn.Module):
    """Weights of many pages, which begin and end within one."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.randn(2 * MANY)
        self.weight = nn.Parameter(self.memory[3 : 3 + MANY])


def test_every_number_counts_at_edges_and_within(either: str) -> None:
    model = _Large()
    seen = Snapshot(model)
    for i in (0, 1, PAGE // 4, MANY // 2, MANY - PAGE // 4, MANY - 1):
        old = float(model.weight.data[i])
        model.weight.data[i] = old + 1
        assert seen.changed() is not None, i
        model.weight.data[i] = old
        assert seen.changed() is None, i


def test_a_large_model_answers_as_it_is_for_all_who_hold_it(either: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 256, 3, 2, 1), nn.ReLU(), nn.Conv2d(256, 256, 3, 2, 1), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(256, 4)).eval()
    x = torch.randn(2, 3, 16, 16)
    first, second = (unstride.enhance(model, x[:1], recipe="flip") for _ in range(2))
    old = first(x), second(x)
    model[0][2].weight.data[100, 100, 1, 1] += 5.0
    fresh = unstride.enhance(model, x[:1], recipe="flip")(x)
    assert not torch.equal(old[0], fresh)
    assert torch.equal(first(x), fresh) and torch.equal(second(x), fresh)


def test_weights_that_move_to_shared_memory_are_not_read_where_they_were(either: str) -> None:
    """What was given back to the system may not be touched: whoever sends a model to another process does that."""
    model = nn.Sequential(nn.Conv2d(3, 512, 3, 2, 1), nn.ReLU(), nn.Conv2d(512, 512, 3), nn.AdaptiveAvgPool2d(1))
    x = torch.randn(1, 3, 16, 16)
    better = unstride.enhance(nn.Sequential(model, nn.Flatten()).eval(), x, recipe="flip")
    old = better(x)
    model.share_memory()
    assert torch.allclose(better(x), old, atol=1e-5)
    model[2].weight.data.zero_()
    assert not torch.allclose(better(x), old, atol=1e-5)


def test_rows_that_change_places_are_found() -> None:
    """Rows as long as a column's stride have the same sums in any order; what was written is read more closely."""
    if not watch.available():
        pytest.skip(TOLD)
    model = nn.Linear(1018, 300)
    seen = Snapshot(model)
    model.weight.data.copy_(model.weight.data.flip(0).clone())
    assert seen.changed() == "weight"
