"""Compiled segments: the same network, one compilation for all batch sizes."""

import shutil
from typing import Any

import pytest
import torch
from captures import split_of
from torch import Tensor, nn

import unstride
from unstride.engine import compiled
from unstride.engine.compiled import Compiled
from unstride.errors import OptionError


class Mixed(nn.Module):
    """A residual stage, a slice that subsamples, windows that multiply the batch: every way to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.a, self.b, self.skip = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 1, 2)
        self.mix, self.head = nn.Linear(32, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (self.b(self.a(x).relu()) + self.skip(x)).relu()
        x = torch.cat([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], 1)
        n, c, h, w = x.shape
        windows = self.mix(x.permute(0, 2, 3, 1).reshape(n * h, w, c)).relu()
        return self.head(windows.view(n, h, w, 8).mean((1, 2)))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    net = Mixed().eval()
    nn.init.uniform_(net.norm.running_var, 0.5, 2.0)
    return net


def parts(better: unstride.Enhanced, images: Tensor) -> list[nn.Module]:
    engine = split_of(better, images).engine
    return [s.module for s in [*engine.as_trained, *engine.moved]]


def test_movers_outside_and_arithmetic_inside(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.torch, "compile", lambda module, **_: module)  # how it is cut, without a compiler
    images = torch.randn(3, 3, 64, 48)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=16, execution="compile")
    cut = [m for m in parts(better, images) if isinstance(m, Compiled)]
    assert len(cut) >= 6
    for m in cut:
        assert not [n for n in m.body.graph.nodes if n.op == "call_module"]
        assert not [n for n in m.movers.graph.nodes if "conv" in str(n.target) or "linear" in str(n.target)]
    expected = unstride.enhance(net, images[:1], recipe="paper", budget=16)(images)
    torch.testing.assert_close(better(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_one_compilation_for_all_batches(net: nn.Module) -> None:
    images = torch.randn(7, 3, 64, 48)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=7, execution="compile")
    expected = unstride.enhance(net, images[:1], recipe="paper", budget=7)
    torch.compiler.reset()
    counts: list[Any] = []
    for n in (2, 7, 3, 5):
        torch.testing.assert_close(better(images[:n]), expected(images[:n]), rtol=1e-4, atol=1e-4)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] > 0 and counts[1:] == [counts[1]] * 3  # 2 images may meet single rows; later sizes bring nothing


def test_a_wrong_switch_is_refused(net: nn.Module) -> None:
    with pytest.raises(OptionError, match=r"execution: got 'fast'.*'compile'"):
        unstride.enhance(net, torch.randn(1, 3, 64, 48), execution="fast")
