"""A model that is changed after `enhance` answers as it is now: never as it was."""

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import capture_of
from procedure_nets import SmallNet, seeded
from torch import Tensor, nn

import unstride
from unstride.errors import ModelChanged


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


NUMBERS: list[Callable[[Plastic], Any]] = [_statistics, _data, _flipped, _one_number, _vector, _plain_tensor]
STRUCTURE: list[Callable[[Plastic], Any]] = [_assigned, _module, _attribute, _item, _hook, _patched, _pruned]
IMAGES = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def made() -> Plastic:
    torch.manual_seed(0)
    return Plastic().eval()


@pytest.mark.parametrize("change", NUMBERS + STRUCTURE, ids=lambda f: f.__name__)
def test_the_answer_is_that_of_the_changed_model(change: Callable[[Plastic], Any]) -> None:
    model = made()
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4)
    other = better.replace(budget=3)
    before = better(IMAGES)
    torch.manual_seed(1)
    change(model)
    anew = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4)
    torch.testing.assert_close(better(IMAGES), anew(IMAGES))
    torch.testing.assert_close(other(IMAGES), anew.replace(budget=3)(IMAGES))
    assert not torch.allclose(better(IMAGES), before, atol=1e-4)


@pytest.mark.parametrize("change", NUMBERS, ids=lambda f: f.__name__)
def test_new_numbers_need_no_new_capture(change: Callable[[Plastic], Any]) -> None:
    model = made()
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4)
    plan = capture_of(better, IMAGES)
    change(model)
    assert capture_of(better, IMAGES) is plan


def test_a_training_loop_needs_no_new_capture() -> None:
    model = made()
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4)
    plan, before = capture_of(better, IMAGES), better(IMAGES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        model(IMAGES).square().sum().backward()
        optimizer.step()
        model.eval()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    after = better(IMAGES)
    assert capture_of(better, IMAGES) is plan and not after.requires_grad
    assert not torch.allclose(after, before, atol=1e-4)
    torch.testing.assert_close(after, unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4)(IMAGES))


@pytest.mark.parametrize("change", [c for c in NUMBERS + STRUCTURE if c is not _one_number], ids=lambda f: f.__name__)
def test_a_frozen_form_refuses_a_changed_model(change: Callable[[Plastic], Any]) -> None:
    model = made()
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4, execution="frozen")
    before = better(IMAGES)
    torch.manual_seed(1)
    change(model)
    with pytest.raises(ModelChanged, match=r"better\.refresh\(\)"):
        better(IMAGES)
    with pytest.raises(ModelChanged):
        capture_of(better, IMAGES)
    better.refresh()
    after = better(IMAGES)
    torch.testing.assert_close(
        after, unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4)(IMAGES), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(after, before, atol=1e-4)


GAIN = 1.0


class Act(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


class Slots:
    __slots__ = ("act",)

    def __init__(self) -> None:
        self.act = Act.RELU


class Base(nn.Module):
    shift = 0.0

    def activation(self, x: Tensor) -> Tensor:
        return torch.relu(x) if self.config.act is Act.RELU else torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.a(x)) * GAIN + self.shift
        return self.b(self.scaled(x)).mean((2, 3))


class Configured(Base):
    """What it computes depends on a parent's methods, a class attribute, a config in slots, a closure and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 5, 3, 2, 1)
        self.config, factor = Slots(), 1.0
        self.scaled = lambda x: x * factor


def _global(m: Configured, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "GAIN", 3.0)


def _closure(m: Configured, patch: pytest.MonkeyPatch) -> None:
    m.scaled.__closure__[0].cell_contents = 3.0


def _slot(m: Configured, patch: pytest.MonkeyPatch) -> None:
    m.config.act = Act.TANH


def _class_attribute(m: Configured, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Base, "shift", 2.0)


def _method(m: Configured, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Base, "activation", lambda self, x: x.sigmoid())


def _parent_forward(m: Configured, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Base, "forward", lambda self, x: self.b(self.a(x)).mean((2, 3)))


@pytest.mark.parametrize("execution", ["auto", "frozen"])
@pytest.mark.parametrize("change", [_global, _closure, _slot, _class_attribute, _method, _parent_forward])
def test_changed_code_and_configuration(change: Any, execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Configured().eval()
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4, task="classification", execution=execution)
    before = better(IMAGES)
    change(model, monkeypatch)
    if execution == "frozen":
        with pytest.raises(ModelChanged):
            better(IMAGES)
        better.refresh()
    after = better(IMAGES)
    anew = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4, task="classification", execution=execution)
    torch.testing.assert_close(after, anew(IMAGES))
    assert not torch.allclose(after, before, atol=1e-4)


def test_what_did_not_change_is_not_captured_again() -> None:
    model = made()
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4)
    plan = capture_of(better, IMAGES)
    model.train()
    model.load_state_dict(model.state_dict())
    again = capture_of(better, IMAGES)
    model.eval()
    better(IMAGES), model(IMAGES), better.replace(budget=1)(IMAGES)
    model.scale = 1.0
    assert capture_of(better, IMAGES) is again is plan


class Masked(nn.Module):
    """Its control flow depends on a number in a buffer, and an index is read from another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 5, 3, 2, 1)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("order", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)[:, self.order]
        x = torch.relu(x) if self.mask.any() else torch.tanh(x)
        return self.b(x).mean((2, 3))


@pytest.mark.parametrize("name", ["mask", "order"])
def test_numbers_that_the_capture_depends_on(name: str) -> None:
    torch.manual_seed(0)
    model = Masked().eval()
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4, task="classification")
    before = better(IMAGES)
    value = getattr(model, name)
    value.copy_(~value if name == "mask" else value.flip(0))
    after = better(IMAGES)
    assert not torch.allclose(after, before, atol=1e-4)
    anew = unstride.enhance(model, IMAGES[:1], recipe="paper", budget=4, task="classification")
    torch.testing.assert_close(after, anew(IMAGES))


def test_at_most_eight_sizes_are_kept() -> None:
    better = unstride.enhance(made(), IMAGES[:1], recipe="paper", budget=2)
    first = capture_of(better, IMAGES)
    for side in range(16, 23):
        capture_of(better, IMAGES[:, :, :side, :side])
    assert len(better.networks["base"].captures) == 8 and capture_of(better, IMAGES) is first
    capture_of(better, IMAGES[:, :, :23, :23])
    assert (
        len(better.networks["base"].captures) == 8 and capture_of(better, IMAGES) is first
    )  # used last, so another one went


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
    better = unstride.enhance(model, images[:1], recipe="paper", budget=3)
    plan = capture_of(better, images)
    model(images)
    better.replace(budget=1)(images)
    assert capture_of(better, images) is plan
    assert model.calls == 1  # everything else ran copies of it
