"""What the engine forgets is never needed again, and what it holds does not grow with the budget."""

from typing import Any

import pytest
import torch
from captures import capture_of, split_of
from torch import Tensor, nn

import unstride
from unstride.engine.engine import EngineRun
from unstride.evaluation.timing import peak_bytes


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


def test_forgetting_never_costs_a_second_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Three().eval(), torch.randn(2, 3, 33, 40)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=64, layers=range(1, 4))
    engine, runs = split_of(better, images).engine, []
    start = EngineRun.__post_init__
    monkeypatch.setattr(EngineRun, "__post_init__", lambda run: (runs.append(run), start(run)))
    predictions = better.explain(images)
    for p in predictions:
        states = [v.state for v in p.passes]
        assert len(set(states)) == 64
        heads = 64 * split_of(better, images).head_macs
        assert p.cost * split_of(better, images).macs == pytest.approx(engine.trie_macs(states) + heads)
    # Every prefix of the first level has had its four children.
    assert runs and all(not run.store.levels[1] for run in runs)


def test_memory_stays_near_that_of_the_base_model() -> None:
    net, images = Three().eval(), torch.randn(4, 3, 256, 256)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=4, layers=range(1, 4), execution="frozen")
    with torch.no_grad():
        plain = peak_bytes(lambda: net(images))
        few, many = (peak_bytes(lambda b=b: better.replace(budget=b)(images)) for b in (4, 40))  # type: ignore[misc]
    assert many <= 2 * plain
    assert many <= 1.5 * few


def test_a_live_graph_copies_no_weights_and_a_frozen_one_those_that_it_reads() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1)).eval()
    net = nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    theirs = {id(t) for t in [*net.parameters(), *net.buffers()]}
    x = torch.zeros(1, 3, 33, 33)
    live = capture_of(unstride.enhance(net, x), x).graph
    assert {id(t) for t in live.constants.values()} <= theirs
    frozen = capture_of(unstride.enhance(net, x, execution="frozen"), x).graph
    assert len(frozen.constants) == 4  # two folded convolutions
    addresses = {t.data_ptr() for t in [*net.parameters(), *net.buffers()]}
    assert not addresses & {t.data_ptr() for t in frozen.constants.values()}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of stored prefixes after every step of every run."""
    sizes: list[int] = []
    add = EngineRun.add

    def watch(run: EngineRun, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        out = add(run, *args, **kwargs)
        blocks = {id(block): block for level in run.store.levels for block in level.values()}.values()
        sizes.append(sum(value.nbytes for block in blocks for value in block.values.values()))
        return out

    monkeypatch.setattr(EngineRun, "add", watch)
    return sizes


def test_what_one_image_stores_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Three().eval(), torch.randn(1, 3, 128, 128)
    sizes = watched(monkeypatch)
    for budget in (10, 30, 64):
        better = unstride.enhance(net, images, recipe="paper", budget=budget, layers=range(1, 4))
        sizes.clear()
        better(images)
        most = split_of(better, images).engine.prefix_bytes(range(1, 4), budget)
        assert 0.5 * most <= max(sizes) <= 1.1 * most, budget


def test_what_a_level_does_not_move_runs_as_trained_and_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Three().eval(), torch.randn(2, 3, 33, 40)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=4, layers=(1,))
    engine, seen = split_of(better, images).engine, []
    chunk = EngineRun._chunk
    monkeypatch.setattr(EngineRun, "_rows_at_once", lambda run, variants: 6)

    def watch(run: EngineRun, requests: Any, rows: Any, segment: Any) -> Any:
        seen.append(segment)
        return chunk(run, requests, rows, segment)

    monkeypatch.setattr(EngineRun, "_chunk", watch)
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
    a, b = (
        unstride.enhance(net, images[:1], recipe="paper", budget=5, layers=range(1, 4))(images)
        for net in (numbers, words)
    )
    torch.testing.assert_close(a, b)
