"""What the engine forgets is never needed again, and what it holds does not grow with the budget."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unstride
from unstride.engine.engine import Run
from unstride.evaluation.benching import peak_bytes


class Three(nn.Module):
    """Three strided layers, the early maps much larger than the late ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.c, self.d = nn.Conv2d(8, 8, 3, 2, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(self.b(self.a(x).relu()).relu()).relu()
        return self.d(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, 1, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))) + x)


@pytest.mark.parametrize("order", ["paper", "cost"])
def test_forgetting_never_costs_a_second_computation(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Three().eval(), torch.randn(2, 3, 33, 40)
    better = unstride.enhance(net, images[:1], budget=64, layers=range(1, 4), order=order)
    engine, runs = better.prepare(images).engine, []
    start = Run.__post_init__
    monkeypatch.setattr(Run, "__post_init__", lambda run: (runs.append(run), start(run)))
    predictions = better.explain(images)
    for p in predictions:
        states = [v.state for v in p.states]
        assert len(set(states)) == 64
        heads = 64 * better.prepare(images).targets[0].head.macs  # type: ignore[union-attr]
        assert p.macs == engine.trie_macs(states) + heads
    # Every prefix of the first level has had its four children.
    assert runs and all(not run.store.levels[1] for run in runs)


def test_memory_stays_near_that_of_the_plain_network() -> None:
    net, images = Three().eval(), torch.randn(4, 3, 256, 256)
    better = unstride.enhance(net, images[:1], budget=4, layers=range(1, 4))
    with torch.no_grad():
        plain = peak_bytes(lambda: net(images))
        few, many = (peak_bytes(lambda b=b: better.with_options(budget=b)(images)) for b in (4, 40))  # type: ignore[misc]
    assert many <= 2 * plain
    assert many <= 1.5 * few


def test_only_weights_that_are_read_are_copied() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1)).eval()
    graph = unstride.enhance(
        nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.zeros(1, 3, 33, 33)
    ).plan.graph
    read = {n.name for n in graph.fx.nodes if n.op == "placeholder" and n.users}
    theirs = {t.data_ptr() for t in [*net.parameters(), *net.buffers()]}
    unread = [t for name, t in graph.constants.items() if name not in read]
    assert unread and all(t.data_ptr() in theirs for t in unread)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of stored prefixes after every step of every run."""
    held: list[int] = []
    add = Run.add

    def watch(run: Run, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        out = add(run, *args, **kwargs)
        held.append(run.store.bytes)
        return out

    monkeypatch.setattr(Run, "add", watch)
    return held


@pytest.mark.parametrize("aggregate", ["entropy", "mean"])
def test_a_memory_bound_is_kept_by_computing_prefixes_again(aggregate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide late maps: the prefixes of one image are many times what the plain network has alive."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 128, 3, 2, 1),
        nn.ReLU(), nn.Conv2d(128, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).eval()  # fmt: skip
    images = torch.randn(2, 3, 256, 256)
    free = unstride.enhance(net, images[:1], 30, layers=range(2, 5), aggregate=aggregate)
    engine = free.plan.engine
    tight = unstride.enhance(net, images[:1], 30, layers=range(2, 5), aggregate=aggregate, max_bytes=engine.plain_bytes)
    with torch.no_grad():
        plain = peak_bytes(lambda: net(images[:1]))
    assert peak_bytes(lambda: free(images[:1])) > 2 * plain >= peak_bytes(lambda: tight(images[:1]))
    held = watched(monkeypatch)
    theirs = free.explain(images)
    assert max(held) > 2 * engine.plain_bytes
    held.clear()
    ours = tight.explain(images)
    assert max(held) <= 2 * engine.plain_bytes
    for a, b in zip(theirs, ours, strict=True):
        assert [v.state for v in a.states] == [v.state for v in b.states]
        torch.testing.assert_close(a.logits, b.logits)
        assert a.macs < b.macs < 30 * a.plain_macs  # what was forgotten was made again, and is counted


def test_what_one_image_stores_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Three().eval(), torch.randn(1, 3, 128, 128)
    held = watched(monkeypatch)
    for budget in (10, 30, 64):
        better = unstride.enhance(net, images, budget=budget, layers=range(1, 4))
        held.clear()
        better(images)
        most = better.plan.engine.prefix_bytes(range(1, 4), budget)
        assert 0.5 * most <= max(held) <= 1.1 * most, budget


def test_what_a_chunk_takes_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums in place, views and the indices of a pooling; from level 2 on, because before it a convolution turns
    the image into its own layout, which no estimate sees.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Block(16), Block(16),
        nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), Block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).eval()  # fmt: skip
    images = torch.randn(1, 3, 256, 256)
    better = unstride.enhance(net, images, 16, layers=(1, 2, 3), max_bytes=1)
    better(images)  # weights are packed at first use
    level, measured = Run._level, []

    def watch(run: Run, k: int, keys: Any, states: Any, plain: bool = False) -> None:
        real = peak_bytes(lambda: level(run, k, keys, states, plain))
        if k > 1 and not plain:
            moved = run.engine.variant(k, states) is run.engine.moved[k]
            measured.append((real, run._chunk_bytes(k, len(keys)), moved))

    monkeypatch.setattr(Run, "_level", watch)
    better(images)
    assert sum(moved for *_, moved in measured) > 5
    for real, estimate, moved in measured:
        assert real <= 1.1 * estimate
        assert real >= 0.9 * estimate or not moved  # what is not moved may be read where it lies


def test_what_a_level_does_not_move_runs_as_trained_and_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Three().eval(), torch.randn(2, 3, 33, 40)
    better = unstride.enhance(net, images[:1], budget=4, layers=(1,))
    engine, seen = better.prepare(images).engine, []
    chunk = Run._chunk
    monkeypatch.setattr(Run, "_rows_at_once", lambda run, variants: 6)

    def watch(run: Run, requests: Any, rows: Any, segment: Any) -> Any:
        seen.append(segment)
        return chunk(run, requests, rows, segment)

    monkeypatch.setattr(Run, "_chunk", watch)
    better(images)
    plain, later = seen[: engine.depth + 1], seen[engine.depth + 1 :]
    assert plain == engine.as_trained
    assert {s.level: s for s in later} == {1: engine.moved[1], 2: engine.as_trained[2], 3: engine.as_trained[3]}
    zero, moved = engine.found.space.zero, engine.found.space.parse([(0, 0), (0, 1), (0, 0)])
    assert engine.variant(2, [zero, moved]) is engine.moved[2]
    assert engine.variant(3, [zero, moved]) is engine.as_trained[3]


def test_padding_in_words_is_padding_in_numbers() -> None:
    """`padding="valid"` is another op to torch than `padding=0` (SigLIP's patches have it)."""
    torch.manual_seed(0)
    numbers, images = Three().eval(), torch.randn(2, 3, 33, 40)
    numbers.a = nn.Conv2d(3, 8, 3, 2, 0)
    words = Three().eval()
    words.a = nn.Conv2d(3, 8, 3, 2, "valid")
    words.load_state_dict(numbers.state_dict())
    a, b = (unstride.enhance(net, images[:1], budget=5, layers=range(1, 4))(images) for net in (numbers, words))
    torch.testing.assert_close(a, b)
