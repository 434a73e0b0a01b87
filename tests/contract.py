"""Every invariant of ARCHITECTURE.md on one model. A new architecture is five lines:

    class TestResNet18(Contract):
        layers = 5

        def build(self) -> nn.Module:
            return torchvision.models.resnet18(num_classes=5)

Invariants 2 and 5 are tested op by op in tests/invariants; here the oracle runs the model itself with the inputs of its
strided ops moved by hand, and every state of the engine must equal that.
"""

import copy
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import capture_of
from checks import Net, check_briefly, some_states
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import unstride
from unstride import Gate, Recipe, Stage
from unstride.errors import ModelChanged
from unstride.pipeline import open_pipeline

BUDGET = 4


def tensors(output: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]


def assert_alike(result: Any, expected: Any, slack: float) -> None:
    """The same kind of output, equal within this share of the largest value."""
    assert type(result) is type(expected)
    assert len(tensors(result)) == len(tensors(expected))
    for a, b in zip(tensors(result), tensors(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = float(b.detach().abs().max().clamp(min=1e-6))
        torch.testing.assert_close(a, b, rtol=0, atol=slack * scale, equal_nan=True)


class Contract:
    """Base of a test class for one architecture; `build` is all that it must have."""

    size: tuple[int, int] = (64, 64)
    channels = 3
    task = "classification"
    layers: int | None = None  # subsampling layers; None: whatever there are
    slack = 3e-4  # of a deep network in float32, where sums are made in another order

    def build(self) -> nn.Module:
        raise NotImplementedError

    # -- what the tests share, made once for each class
    @cached_property
    def images(self) -> Tensor:
        return torch.randn(2, self.channels, *self.size, generator=torch.Generator().manual_seed(1))

    @cached_property
    def model(self) -> nn.Module:
        """With batch statistics of these images: in an untrained network nearly nothing comes through otherwise."""
        torch.manual_seed(0)
        model = self.build()
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 1.0
        if norms:
            with torch.no_grad():
                model.train()(self.images)
        return model.eval()

    @cached_property
    def paper(self) -> unstride.Enhanced:
        return unstride.enhance(self.model, recipe="paper", task=self.task, budget=BUDGET)

    @cached_property
    def flip(self) -> unstride.Enhanced:
        return unstride.enhance(self.model, recipe="flip", task=self.task)

    def base(self, images: Tensor) -> Any:
        with torch.no_grad():
            return self.model(images)

    @pytest.fixture(autouse=True)
    def _shared(self) -> None:
        """pytest makes an instance for each test; the expensive parts belong to the class."""
        shared = type(self).__dict__.get("_parts")
        if shared is None:
            shared = type(self)._parts = {}  # type: ignore[attr-defined]
        self.__dict__.update(shared)
        for name in ("images", "model", "paper", "flip"):
            shared[name] = getattr(self, name)

    # -- the invariants
    def test_identity(self) -> None:
        """1. The plain recipe is the model: bit for bit when called, within rounding through a frozen graph."""
        plain = self.base(self.images)
        assert_alike(unstride.enhance(self.model, recipe="plain", task=self.task)(self.images), plain, 0.0)
        frozen = unstride.enhance(self.model, recipe="paper", task=self.task, execution="frozen", budget=1)
        assert_alike(frozen(self.images), plain, self.slack)
        broken = self.images.clone()
        broken[1, :, 3, 4] = float("nan")
        result, expected = tensors(self.flip(broken))[0], tensors(self.base(broken))[0]
        assert bool(result[1].isnan().any()) == bool(expected[1].isnan().any())
        assert bool(result[0].isfinite().all())

    def test_states_are_those_of_the_oracle(self) -> None:
        """2, 3 and 6. Selections, shared prefixes and work: as the model itself, moved by hand, from the image."""
        capture = capture_of(self.paper, self.images)
        net = Net(self.model, capture.graph, capture.found)
        assert self.layers is None or len(net.found.layers) == self.layers
        change, _ = check_briefly(net, self.images, some_states(net.found, 3)[1:], self.slack)
        assert change > self.slack, "no state changes the output"

    def test_independence(self) -> None:
        """4. An image's result does not depend on its batch, in views, behind gates and in a search."""
        gated = Recipe((Stage(), Stage(("flip",), gate=Gate(below=0.5))), self.task)
        gates = () if self.task != "classification" else (self.flip.replace(gated),)
        for better in (self.flip, self.paper.replace(criterion="displacement"), *gates):
            together = tensors(better(self.images))[0]
            alone = torch.cat([tensors(better(x))[0] for x in self.images.split(1)])
            assert_alike(together, alone, self.slack)

    def test_geometry(self) -> None:
        """5. A cell is as many pixels as all strides before it, and a state moves by its selections times these."""
        found = capture_of(self.paper, self.images).found
        for state in some_states(found, 4):
            by_hand = [
                sum(s[a] * strides[a] for s, strides in zip(state.selections, found.strides, strict=True))
                for a in range(2)
            ]
            assert found.space.displacement(state) == pytest.approx(by_hand)
        assert not any(found.space.displacement(found.space.zero))

    def test_budget(self) -> None:
        """6. Never more passes than asked for, none twice; cost grows with every pass."""
        for p in self.paper.explain(self.images):
            states = [q.state for q in p.passes]
            assert len(states) == len(set(states)) == min(BUDGET, len(capture_of(self.paper, self.images).found.space))
            assert 1 < p.cost <= BUDGET * 1.01 and all(q.cost > 0 for q in p.passes)

    def test_innocence(self) -> None:
        """7. Weights, buffers, hooks and modes of the model stay, also with threads; all threads get the same."""
        model = self.model
        before = {k: v.clone() for k, v in model.state_dict().items()}
        modes = [m.training for m in model.modules()]
        expected, results = self.paper(self.images), [None, None]

        def work(k: int) -> None:
            results[k] = self.paper(self.images)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            assert_alike(result, expected, 1e-5)
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_output_type(self) -> None:
        """8. What the model returns, with as many tensors of the same shapes and dtypes."""
        plain = self.base(self.images)
        for better in (self.flip, self.paper):
            result = better(self.images)
            assert type(result) is type(plain)
            assert [(t.shape, t.dtype) for t in tensors(result)] == [(t.shape, t.dtype) for t in tensors(plain)]
            if isinstance(plain, dict):
                assert list(result) == list(plain)

    def test_freshness(self) -> None:
        """9. New weights change the answer at once; a frozen form says that it keeps the old ones."""
        model = copy.deepcopy(self.model)
        live = unstride.enhance(model, recipe="paper", task=self.task, budget=2, criterion="displacement")
        frozen = unstride.enhance(model, recipe=live.recipe, execution="frozen")
        flip = unstride.enhance(model, recipe="flip", task=self.task)
        for better in (live, frozen, flip):
            better(self.images)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.05)
        assert_alike(live(self.images), unstride.enhance(model, recipe=live.recipe)(self.images), self.slack)
        both = [tensors(model(x))[0] for x in (self.images, self.images.flip(-1))]
        if self.task == "classification":
            assert_alike(tensors(flip(self.images))[0], (both[0] + both[1]).detach() / 2, self.slack)
        with pytest.raises(ModelChanged):
            frozen(self.images)

    def test_one_recipe(self, tmp_path: Path) -> None:
        """10. A recipe file, the pipeline of the commands and this object run the same."""
        path = self.paper.save(tmp_path / "paper.toml")
        again = unstride.enhance(self.model, recipe=path)
        assert again.recipe == self.paper.recipe
        pipeline = open_pipeline(self.model, recipe=path, task=self.task, execution="auto")
        expected = self.paper.run(self.images)
        for better in (again, pipeline.better):
            result = better.run(self.images)
            assert_alike(result.output, expected.output, self.slack)
            assert result.costs == expected.costs
