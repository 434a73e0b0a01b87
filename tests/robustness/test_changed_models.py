"""A model that is changed after `enhance` answers as it is now: never as it was."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from procedure_nets import SmallNet, seeded
from torch import Tensor, nn

import unstride
from unstride.graph.snapshot import COLUMNS, Snapshot


class Plastic(nn.Module):
    """A little of everything that a network may hold: attributes, a config, a list, a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 64, 3, 2, 1)
        self.head = nn.Linear(64, 5)
        self.scale, self.act, self.gains = 1.0, "relu", [1.0, 2.0]
        self.offset = torch.full((1,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        x = torch.relu(x) if self.act == "relu" else torch.tanh(x)
        x = torch.relu(self.b(x)) * self.scale * self.gains[1] + self.offset
        return self.head(x.mean((2, 3)))


def _statistics(m: Plastic) -> None:
    m.norm.running_mean.mul_(0.0).add_(0.7)  # type: ignore[union-attr]


def _data(m: Plastic) -> None:
    m.b.weight.data.mul_(1.5)


def _flipped(m: Plastic) -> None:
    """The same numbers at other places, without a trace."""
    m.b.weight.data.copy_(m.b.weight.data.flip(-1))


def _one_number(m: Plastic) -> None:
    m.b.weight.detach().numpy()[7, 3, 1, 1] += 3.0


def _assigned(m: Plastic) -> None:
    m.load_state_dict({k: v * 1.3 if v.is_floating_point() else v for k, v in m.state_dict().items()}, assign=True)


def _vector(m: Plastic) -> None:
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(vector * 0.8, m.parameters())


def _module(m: Plastic) -> None:
    m.head = nn.Linear(64, 5)


def _attribute(m: Plastic) -> None:
    m.act = "tanh"


def _item(m: Plastic) -> None:
    m.gains[1] = 5.0


def _plain_tensor(m: Plastic) -> None:
    m.offset.numpy()[0] = 4.0


def _hook(m: Plastic) -> None:
    m.b.register_forward_hook(lambda module, args, out: out * 2)


def _patched(m: Plastic) -> None:
    m.forward = lambda x: Plastic.forward(m, x) + 1  # type: ignore[method-assign]


def _pruned(m: Plastic) -> None:
    nn.utils.parametrizations.weight_norm(m.b)
    m.b.parametrizations.weight.original0.data.mul_(2)  # type: ignore[union-attr]


CHANGES: list[Callable[[Plastic], Any]] = [
    _statistics,
    _data,
    _flipped,
    _one_number,
    _assigned,
    _vector,
    _module,
    _attribute,
    _item,
    _plain_tensor,
    _hook,
    _patched,
    _pruned,
]
IMAGES = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def made() -> Plastic:
    torch.manual_seed(0)
    return Plastic().eval()


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_the_answer_is_that_of_the_changed_model(change: Callable[[Plastic], Any]) -> None:
    model = made()
    better = unstride.enhance(model, IMAGES[:1], budget=4)
    other = better.with_options(budget=3)
    before = better(IMAGES)
    torch.manual_seed(1)
    change(model)
    anew = unstride.enhance(model, IMAGES[:1], budget=4)
    torch.testing.assert_close(better(IMAGES), anew(IMAGES))
    torch.testing.assert_close(other(IMAGES), anew.with_options(budget=3)(IMAGES))
    assert not torch.allclose(better(IMAGES), before, atol=1e-4)


def test_what_did_not_change_is_not_captured_again() -> None:
    model = made()
    better = unstride.enhance(model, IMAGES[:1], budget=4)
    plan = better.prepare(IMAGES)
    model.train()
    model.load_state_dict(model.state_dict())  # writes the same numbers, which torch counts as a change
    again = better.prepare(IMAGES)
    model.eval()
    better(IMAGES), model(IMAGES), better.with_options(budget=1)(IMAGES)
    model.scale = 1.0
    assert better.prepare(IMAGES) is again
    assert plan is not again


class Remembers(SmallNet):
    """Keeps what it saw last, a counter, and a table that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.sizes = 0, None, {}  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes[self.calls] = x.shape[-1]
        self.seen = x
        return super().forward(x)


def test_what_a_model_writes_itself_is_no_change() -> None:
    model, images = seeded(Remembers()), torch.randn(2, 3, 64, 64)
    better = unstride.enhance(model, images[:1], budget=3)
    plan = better.prepare(images)
    model(images)
    better.with_options(budget=1)(images)
    assert better.prepare(images) is plan
    assert model.calls == 2  # the capture ran another one


def test_another_model_put_in_its_place() -> None:
    first, second = made(), made()
    second.head.weight.data.mul_(2)
    better = unstride.enhance(first, IMAGES[:1], budget=4)
    better.model = second
    torch.testing.assert_close(better(IMAGES), unstride.enhance(second, IMAGES[:1], budget=4)(IMAGES))


def test_changes_have_names() -> None:
    model = made()
    seen = Snapshot(model)
    assert seen.changed() is None
    model.b.weight.data[3, 2, 1, 0] += 1e-6
    assert seen.changed() == "b.weight"
    assert seen.changed(["b.weight"]) is None
    model.gains.append(3.0)
    model.act = "tanh"
    assert {*seen.changes()} == {"b.weight", "gains", "act"}


@pytest.mark.parametrize("count", [1, 8 * COLUMNS // 4, 3 * 8 * COLUMNS // 4 + 5])
def test_no_number_can_change_unseen(count: int) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(count))

    model = Holds()
    seen = Snapshot(model)
    for i in {0, count // 2, count - 1}:
        old = model.p.data[i].clone()
        model.p.data[i] = torch.nextafter(old, old + 1)
        assert seen.changed() == "p"
        model.p.data[i] = old
        assert seen.changed() is None


def test_memory_that_is_elsewhere_is_summed_there() -> None:
    from unstride.graph import snapshot

    flat = torch.arange(5 * COLUMNS + 3, dtype=torch.uint8)
    parts = [flat[: 5 * COLUMNS].view(-1, COLUMNS), flat[5 * COLUMNS :][None]]
    before = list(map(snapshot._sum, parts))
    flat[2 * COLUMNS + 1] += 1
    middle = list(map(snapshot._sum, parts))
    flat[-1] += 1
    assert before != middle != list(map(snapshot._sum, parts))


@pytest.mark.parametrize("recipe", ["default", "multiscale-flip", "paper"])
def test_whether_it_was_changed_is_asked_once_a_call(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads every byte of the weights: once is what an answer may cost."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(2, 3, 16, 16)
    better = unstride.enhance(model.eval(), x[:1], recipe=recipe)
    before = better(x)
    asked = []
    changed = Snapshot.changed
    monkeypatch.setattr(Snapshot, "changed", lambda self, *known: asked.append(1) or changed(self, *known))
    assert torch.equal(better(x), before)
    assert len(asked) == 1
    model[0].weight.data[0, 0, 0, 0] += 1.0  # one number, without a trace
    assert not torch.equal(better(x), before)


def test_a_promise_that_the_model_stays_is_checked_at_its_end() -> None:
    model, x = seeded(Plastic()), torch.randn(2, 3, 16, 16)
    better = unstride.enhance(model, x[:1], recipe="flip")
    with better.unchanged():
        before = better(x)
    promise = better.unchanged()
    promise.__enter__()
    _data(model)
    assert torch.equal(better(x), before)  # what was promised; the end of the block tells that it was not kept
    with pytest.raises(unstride.errors.ModelChanged, match=r"b\.weight.*unchanged"):
        promise.__exit__(None, None, None)
    assert torch.equal(better(x), unstride.enhance(model, x[:1], recipe="flip")(x))


def test_a_promise_holds_for_who_gave_it_and_for_no_longer() -> None:
    """Another thread, which promised nothing, gets the model as it is now."""
    model, x = seeded(Plastic()), torch.randn(2, 3, 16, 16)
    better = unstride.enhance(model, x[:1], recipe="flip")
    with contextlib.suppress(unstride.errors.ModelChanged), better.unchanged():
        old = better(x)
        _data(model)
        with ThreadPoolExecutor(1) as pool:
            now = pool.submit(better, x).result()
    assert not torch.equal(now, old)
    assert torch.equal(now, better(x))
