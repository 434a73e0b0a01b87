"""Any sequence of changes, predictions, copies, saved recipes and threads: the answer is that of the model as it is.

The oracle is the model itself, called directly. The captured forms visit one state, so that they must give its answer.
"""

import copy
import enum
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor, nn

import unstride
from unstride.errors import ModelChanged

GAIN = 1.0
IMAGES = [torch.randn(2, 3, size, 16, generator=torch.Generator().manual_seed(size)) for size in (16, 24)]


class Act(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


class Config:
    __slots__ = ("act",)

    def __init__(self) -> None:
        self.act = Act.RELU


def scaling(factor: float) -> Any:
    return lambda x: x * factor


class Base(nn.Module):
    shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * GAIN + self.shift
        x = x.relu() if self.config.act is Act.RELU else x.tanh()
        return self.head(self.scaled(self.second(x).relu()).mean((2, 3)) * self.gains[0] * self.amount)


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, 2, 1)
        self.head, self.config, self.scaled = nn.Linear(6, 5), Config(), scaling(1.0)
        self.gains, self.amount = [1.0], 1.0


FORWARD = Base.forward


def patched(amount: float) -> Any:
    return lambda self, x: FORWARD(self, x) * amount


def hooked(amount: float) -> Any:
    return lambda module, inputs, output: output * amount


class Changes:
    """The ways that are listed as noticed, each with a number."""

    def weight(self, model: Model, value: float) -> None:
        with torch.no_grad():
            model.second.weight.mul_(value)

    def data(self, model: Model, value: float) -> None:
        model.head.weight.data = model.head.weight.data * value

    def statistics(self, model: Model, value: float) -> None:
        model.norm.running_mean.fill_(value)

    def module(self, model: Model, value: float) -> None:
        torch.manual_seed(int(value * 100))
        model.head = nn.Linear(6, 5)

    def attribute(self, model: Model, value: float) -> None:
        model.amount = value

    def item(self, model: Model, value: float) -> None:
        model.gains[0] = value

    def slot(self, model: Model, value: float) -> None:
        model.config.act = Act.TANH if value > 1 else Act.RELU

    def cell(self, model: Model, value: float) -> None:
        model.scaled.__closure__[0].cell_contents = value

    def function(self, model: Model, value: float) -> None:
        model.scaled = scaling(value)

    def hook(self, model: Model, value: float) -> None:
        model.second.register_forward_hook(hooked(value))

    def class_attribute(self, model: Model, value: float) -> None:
        Base.shift = value

    def parent(self, model: Model, value: float) -> None:
        Base.forward = patched(value)  # type: ignore[method-assign]

    def module_global(self, model: Model, value: float) -> None:
        globals()["GAIN"] = value


CHANGES = sorted(name for name in vars(Changes) if not name.startswith("_"))
FORMS: dict[str, dict[str, Any]] = {
    "captured": {"recipe": "paper", "budget": 1},
    "frozen": {"recipe": "paper", "budget": 1, "execution": "frozen"},
    "flip": {"recipe": "flip"},
}


class AnySequence(RuleBasedStateMachine):
    @initialize()
    def enhance(self) -> None:
        torch.manual_seed(0)
        self.model = Model().eval()
        self.enhanced()

    def enhanced(self) -> None:
        options: dict[str, Any] = {"task": "classification"}
        self.forms = {name: unstride.enhance(self.model, **options, **form) for name, form in FORMS.items()}

    def expected(self, name: str, images: Tensor) -> Tensor:
        with torch.no_grad():
            answer = self.model(images)
            return answer if name != "flip" else (answer + self.model(images.flip(-1))) / 2

    def check(self, name: str, images: Tensor) -> None:
        try:
            answer = self.forms[name](images)
        except ModelChanged:
            assert name == "frozen"
            answer = self.forms[name].refresh() or self.forms[name](images)
        torch.testing.assert_close(answer, self.expected(name, images), rtol=1e-3, atol=1e-4)

    @rule(change=st.sampled_from(CHANGES), value=st.sampled_from([0.5, 1.5, 2.0]))
    def change(self, change: str, value: float) -> None:
        getattr(Changes(), change)(self.model, value)

    @rule(name=st.sampled_from(sorted(FORMS)), images=st.sampled_from(IMAGES))
    def predict(self, name: str, images: Tensor) -> None:
        self.check(name, images)

    @rule(images=st.sampled_from(IMAGES))
    def predict_in_threads(self, images: Tensor) -> None:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda name: self.check(name, images), ("captured", "flip", "captured")))

    @rule()
    def copy(self) -> None:
        """The copy goes on; what is done to it does not reach the first."""
        self.forms = copy.deepcopy(self.forms)
        self.model = self.forms["flip"].model
        for form in self.forms.values():
            assert form.model is self.model

    @rule(name=st.sampled_from(sorted(FORMS)))
    def save_and_load(self, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = self.forms[name].save(Path(folder) / "r.toml")
            execution = FORMS[name].get("execution", "auto")
            self.forms[name] = unstride.enhance(self.model, recipe=file, execution=execution)
        self.check(name, IMAGES[0])

    def teardown(self) -> None:
        Base.shift, Base.forward = 0.0, FORWARD  # type: ignore[method-assign]
        globals()["GAIN"] = 1.0


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=12, stateful_step_count=10, deadline=None)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows(change: str) -> None:
    """Otherwise the sequences would test nothing."""
    machine = AnySequence()
    machine.enhance()
    try:
        before = machine.expected("captured", IMAGES[0])
        machine.change(change, 2.0)
        assert not torch.allclose(machine.expected("captured", IMAGES[0]), before, atol=1e-3)
        for name in FORMS:
            machine.check(name, IMAGES[0])
    finally:
        machine.teardown()
