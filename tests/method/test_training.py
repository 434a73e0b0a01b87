"""Training on a toy: some states carry the class, others, marked by a channel of their own, a wrong one."""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from unstride.errors import DataError
from unstride.geometry.states import State, StateSpace
from unstride.method.attention import Attention, learned_criterion
from unstride.method.criteria import training_draw
from unstride.method.search import lowest
from unstride.method.training import (
    SCHEDULES,
    AttentionTraining,
    Schedule,
    TrainingResult,
    cosine_annealed,
    search_maps,
)

CLASSES = 4
SPACE = StateSpace(((2, 2), (2, 2), (1, 2)), ((1, 1), (2, 2), (4, 4)))


def misleading(state: State) -> bool:
    """Half of the states: those with s_y = 1 at layer 1."""
    return state.selections[0][0] == 1


@dataclass
class ToyBatch:
    names: Sequence[str]
    labels: Tensor
    requests: list[tuple[str, State]]

    def maps(self, requests: Sequence[tuple[int, State]]) -> Tensor:
        return torch.stack([self.one(self.names[i], int(self.labels[i]), state) for i, state in requests])

    def one(self, name: str, label: int, state: State) -> Tensor:
        """(CLASSES + 1, 2, 2): evidence for a class, and in the last channel whether it is a wrong one."""
        self.requests.append((name, state))
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {state}".encode()))
        f = torch.randn(CLASSES + 1, 2, 2, generator=generator) * 0.5
        wrong = (label + 1) % CLASSES  # always the same confusion
        f[wrong if misleading(state) else label] += 1.05 if misleading(state) else 1.0
        f[-1] = 1.0 if misleading(state) else 0.0
        return f

    def logits(self, maps: Tensor) -> Tensor:
        return maps[:, :CLASSES].mean((2, 3)) * 3


@dataclass
class Toy:
    name: str
    count: int
    requests: list[tuple[str, State]] = field(default_factory=list)
    space: StateSpace = SPACE
    layers: tuple[int, ...] = (1, 2, 3)
    channels: int = CLASSES + 1
    device: torch.device = torch.device("cpu")

    @property
    def keys(self) -> list[str]:
        return [f"{self.name}{i}" for i in range(self.count)]

    def batch(self, keys: Sequence[str]) -> ToyBatch:
        labels = [int(key.removeprefix(self.name)) % CLASSES for key in keys]
        return ToyBatch(keys, torch.tensor(labels), self.requests)


QUICK = Schedule("quick", lr=5e-2, epochs=6, budget=len(SPACE), batch_size=16)


@pytest.fixture(scope="module")
def trained() -> TrainingResult:
    return AttentionTraining(Toy("t", 160), Toy("v", 80), QUICK).run()


def module_of(result: TrainingResult) -> Attention:
    attention = Attention(CLASSES + 1)
    attention.load_state_dict(result.tensors)
    return attention


def test_the_attention_learns_which_states_to_trust(trained: TrainingResult) -> None:
    assert trained.best.accuracy >= trained.epochs[0].accuracy + 0.1
    assert trained.best.nll < trained.epochs[0].nll
    attention, space = module_of(trained), SPACE
    states = list(space.states())
    maps = Toy("v", 8).batch([f"v{i}" for i in range(8)]).maps([(i, s) for i in range(8) for s in states])
    with torch.no_grad():
        criterion = learned_criterion(attention.received(maps.unflatten(0, (8, -1)))).mean(0)
    bad = torch.tensor([misleading(s) for s in states])
    assert criterion[~bad].max() < criterion[bad].min()


def test_the_report_says_what_happened(trained: TrainingResult) -> None:
    assert [e.epoch for e in trained.epochs] == list(range(7))
    assert trained.kept >= 1
    assert trained.best.accuracy == max(e.accuracy for e in trained.epochs[1:])
    assert trained.states == len(SPACE)
    start = trained.epochs[0]
    assert (start.loss, start.moved, start.changed) == (None, 0.0, 0.0)  # the mean
    assert trained.best.moved > 0.1
    assert trained.best.changed > 0.05
    assert trained.warning is None
    assert "of 6 kept" in str(trained)
    plain = Toy("v", 80).batch([f"v{i}" for i in range(80)])
    own = plain.logits(plain.maps([(i, SPACE.zero) for i in range(80)])).argmax(1)
    assert trained.plain == pytest.approx(float((own == plain.labels).float().mean()))


def test_the_papers_rate_does_not_move_the_module_and_the_result_says_so() -> None:
    schedule = replace(SCHEDULES["paper"], epochs=2, budget=4)
    result = AttentionTraining(Toy("t", 8), Toy("v", 8), schedule).run()
    assert result.kept >= 1  # never the untrained module
    assert 0 < result.best.moved < 1e-3
    assert "did not move the attention" in result.warning
    assert result.warning in str(result)
    assert not torch.equal(result.tensors["out"], torch.zeros(CLASSES + 1))


def test_the_papers_schedule_is_the_papers() -> None:
    assert SCHEDULES["paper"] == Schedule("paper", lr=1e-6, epochs=5, budget=30, batch_size=32, weight_decay=0.01)
    training = AttentionTraining(Toy("t", 8), Toy("v", 8), replace(SCHEDULES["paper"], budget=3, epochs=1))
    training.run()
    (group,) = training.optimiser.param_groups  # one rate for everything that is trained
    assert isinstance(training.optimiser, torch.optim.AdamW)
    assert len(group["params"]) == len(list(training.attention.parameters()))


def test_the_rate_is_annealed_over_all_steps_as_torch_does() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimiser = torch.optim.AdamW([parameter], lr=0.5)
    torch_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 20)
    for step in range(20):
        assert cosine_annealed(0.5, step, 20) == pytest.approx(optimiser.param_groups[0]["lr"])
        optimiser.step()
        torch_schedule.step()
    schedule = replace(QUICK, epochs=2, budget=3)
    result = AttentionTraining(Toy("t", 48), Toy("v", 8), schedule).run()  # 3 steps an epoch
    expected = [0.0, cosine_annealed(5e-2, 2, 6), cosine_annealed(5e-2, 5, 6)]
    assert [e.lr for e in result.epochs] == pytest.approx(expected)


def test_states_are_drawn_anew_in_every_epoch_and_validation_takes_the_best() -> None:
    train, val = Toy("t", 6), Toy("v", 2)
    training = AttentionTraining(train, val, replace(QUICK, lr=1e-9, epochs=3, budget=6))
    visited: list[dict[str, list[State]]] = []
    for _ in range(4):
        train.requests.clear()
        training.epoch()
        visited.append({key: [s for k, s in train.requests if k == key] for key in train.keys})
    assert visited[0]["t0"] == []  # epoch 0 only validates
    for key in train.keys:
        for epoch in visited[1:]:
            assert len(epoch[key]) == len(set(epoch[key])) == 6
            assert epoch[key][0] == SPACE.zero
    assert any(visited[1][key] != visited[2][key] for key in train.keys)
    first, second = ([s for k, s in val.requests if k == "v0"][i * 6 : i * 6 + 6] for i in (0, 3))
    assert first == second


@torch.no_grad()
def test_the_states_of_an_image_do_not_depend_on_its_batch() -> None:
    toy, attention = Toy("t", 9), Attention(CLASSES + 1)
    torch.nn.init.normal_(attention.query.weight, generator=torch.Generator().manual_seed(0))
    for make in (training_draw, lambda seed: lowest):
        together = search_maps(toy, toy.batch(toy.keys), attention, 12, [make(key) for key in toy.keys])
        for i in (0, 4, 8):
            alone = search_maps(toy, toy.batch(toy.keys[i : i + 1]), attention, 12, [make(toy.keys[i])])
            assert torch.equal(together[i], alone[0])


def test_the_order_of_the_images_does_not_matter() -> None:
    class Reversed(Toy):
        @property
        def keys(self) -> list[str]:
            return super().keys[::-1]

    schedule = replace(QUICK, epochs=2, budget=4)
    one, other = (AttentionTraining(kind("t", 40), Toy("v", 8), schedule).run() for kind in (Toy, Reversed))
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name])


def test_another_seed_is_another_module_and_other_draws() -> None:
    schedule = replace(QUICK, epochs=1, budget=4)
    one, same, other = (AttentionTraining(Toy("t", 20), Toy("v", 8), schedule, seed).run() for seed in (0, 0, 1))
    assert torch.equal(one.tensors["key.weight"], same.tensors["key.weight"])
    assert one.epochs == same.epochs
    assert not torch.equal(one.tensors["key.weight"], other.tensors["key.weight"])


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_training_that_was_killed_continues_where_it_was(killed_after: int) -> None:
    schedule = replace(QUICK, epochs=3, budget=4)
    whole = AttentionTraining(Toy("t", 40), Toy("v", 20), schedule, heads=5).run()
    first = AttentionTraining(Toy("t", 40), Toy("v", 20), schedule, heads=5)
    for _ in range(killed_after):
        first.epoch()
    tensors, meta = first.checkpoint()
    second = AttentionTraining(Toy("t", 40), Toy("v", 20), schedule, heads=5)
    second.restore(tensors, json.loads(json.dumps(meta)))
    result = second.run()
    assert result.epochs == whole.epochs
    assert (result.kept, result.plain, result.states, result.heads) == (whole.kept, whole.plain, whole.states, 5)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, result.tensors[name])


def test_a_small_space_gives_fewer_states_than_the_budget() -> None:
    toy = Toy("t", 4, layers=(3,))
    result = AttentionTraining(toy, toy, replace(QUICK, epochs=1, budget=30)).run()
    assert result.states == 2


def test_no_images_and_infinite_losses_are_errors() -> None:
    with pytest.raises(DataError, match="validation images: got none"):
        AttentionTraining(Toy("t", 4), Toy("v", 0), QUICK)
    training = AttentionTraining(Toy("t", 4), Toy("v", 4), replace(QUICK, budget=2))
    training.epoch()
    with pytest.raises(DataError, match="run at least 1 epoch"):
        training.result()
    with torch.no_grad():
        training.attention.out.fill_(math.inf)
    with pytest.raises(DataError, match=r"epoch 1: the loss is nan; use a lower lr than 0\.05"):
        training.epoch()
