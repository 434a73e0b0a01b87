"""What tells that a model is no longer the one that was captured, by name."""

import copy
import enum
import sys
import types

import pytest
import torch
from torch import Tensor, nn

from unstride.graph.freshness import Freshness

SCALE = 2.0


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Config:
    def __init__(self) -> None:
        self.width, self.kind, self.act = 3, Kind.ONE, torch.relu


class Slotted:
    __slots__ = ("width",)

    def __init__(self) -> None:
        self.width = 3


class Parent(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class Model(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.config, self.slots = Config(), Slotted()
        self.gains, self.table = [1.0, 2.0], {"a": 1}
        self.offset, self.shape = torch.zeros(2), (1, 2)
        factor = 3.0

        def by_closure(x: Tensor) -> Tensor:
            return x * factor

        self.function = by_closure


def test_nothing_changes_by_itself() -> None:
    model = Model()
    seen = Freshness(model, numbers=True)
    model.shape, model.config.width = (1, 2), 3  # the same values again
    model.train()
    copy.deepcopy(model)  # Python notes slots on a class when it is copied
    assert seen.change() is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m, "conv", nn.Conv2d(3, 4, 3)), "conv"),
        (lambda m: setattr(m.conv, "weight", nn.Parameter(torch.zeros(4, 3, 3, 3))), "conv.weight"),
        (lambda m: setattr(m.norm, "running_mean", torch.zeros(4)), "norm.running_mean"),
        (lambda m: m.conv.half(), "conv.weight"),
        (lambda m: setattr(m, "offset", torch.zeros(2)), "offset"),
        (lambda m: m.conv.register_forward_hook(lambda *_: None), "conv._forward_hooks"),
        (lambda m: m.conv.register_forward_pre_hook(lambda *_: None), "conv._forward_pre_hooks"),
        (lambda m: setattr(m.conv, "stride", (2, 2)), "conv.stride"),
        (lambda m: setattr(m.norm, "eps", 0.1), "norm.eps"),
        (lambda m: setattr(m, "forward", lambda x: x), "forward"),
        (lambda m: m.gains.__setitem__(1, 5.0), "gains"),
        (lambda m: m.table.update(b=2), "table"),
        (lambda m: setattr(m.config, "width", 4), "config"),
        (lambda m: setattr(m.config, "kind", Kind.TWO), "config"),
        (lambda m: setattr(m.config, "act", torch.tanh), "config"),
        (lambda m: setattr(m.slots, "width", 4), "slots"),
        (lambda m: setattr(m, "__class__", Parent), "the class of a module"),
        (lambda m: setattr(m.function.__closure__[0], "cell_contents", 4.0), "a closure"),
    ],
)
def test_a_change_has_a_name(change, name: str) -> None:
    model = Model()
    seen = Freshness(model)
    change(model)
    assert seen.change() == name
    assert Freshness(model).change() is None


@pytest.mark.parametrize(("kind", "name"), [(Model, "scaled"), (Parent, "scaled"), (Parent, "forward")])
def test_a_patched_method_of_a_class(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Freshness(Model())
    monkeypatch.setattr(kind, name, lambda self, x: x, raising=False)
    assert seen.change() == f"{kind.__qualname__}.{name}"


def test_class_attributes_globals_and_forwards_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Freshness(Model())
    for target, name in ((Parent, "factor"), (sys.modules[__name__], "SCALE"), (nn.Conv2d, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, 7.0 if name != "forward" else lambda self, x: x)
            assert seen.change() is not None, name
        assert seen.change() is None


def test_global_hooks() -> None:
    seen = Freshness(Model())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert seen.change() == "global hooks"
    finally:
        handle.remove()


def test_numbers_count_only_where_they_are_asked_for() -> None:
    model = Model()
    live, copies = Freshness(model), Freshness(model, numbers=True)
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 1] += 1.0
    assert live.change() is None and copies.change() == "conv.weight"
    copies = Freshness(model, numbers=True)
    model.conv.bias.data = torch.ones(4)
    assert live.change() is None and copies.change() == "conv.bias"
    copies = Freshness(model, numbers=True)
    model.offset.numpy()[0] = 4.0  # behind torch's back: only samples tell
    assert live.change() is None and copies.change() == "offset"
    live.count([model.offset])
    model.offset += 1
    assert live.change() == "offset"


def test_what_the_model_changes_itself_is_left_out() -> None:
    model = Model()
    seen = Freshness(model, besides=("gains", "conv.stride"))
    model.gains.append(1.0)
    model.conv.stride = (2, 2)
    assert seen.change() is None
    model.norm.eps = 1.0
    assert seen.change() == "norm.eps"


def test_large_objects_count_by_identity_alone() -> None:
    model = Model()
    model.trainer = types.SimpleNamespace(step=object())
    seen = Freshness(model)
    model.trainer.step = object()
    assert seen.change() is None
