"""Fixed sets of states: the unrolled module equals the engine, and can be exported."""

import warnings
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

import unstride
from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.learning.selecting import fixed

BATCH = ({0: torch.export.Dim.DYNAMIC},)


class Mixed(nn.Module):
    """Every kind of move in one net: reflecting pad, pools of both kinds, slices, a shortcut, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1, padding_mode="reflect")
        self.mean = nn.AvgPool2d(3, 2, 1, count_include_pad=False)
        self.conv = nn.Conv2d(6, 6, 3, 2, 1)
        self.pool = nn.MaxPool2d(2, 2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.mean(torch.relu(self.stem(x)))
        x = torch.relu(self.conv(x)) + x[:, :, ::2, ::2]
        x = self.pool(x).mean((2, 3))
        return {"logits": self.head(x), "features": x}


def states_of(better: unstride.Enhanced, x: Tensor, count: int, seed: int = 0) -> list[State]:
    space = better.prepare(x).found.space
    g = torch.Generator().manual_seed(seed)
    pick = lambda r: tuple(int(torch.randint(1 - v, v, (), generator=g)) for v in r)  # noqa: E731
    return [State(tuple(pick(r) for r in space.rates)) for _ in range(count)]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-5 * float(b.detach().abs().max().clamp(min=1)))


@pytest.mark.parametrize("aggregate", ["entropy", "mean", "max"])
@pytest.mark.parametrize("border", ["renormalise", "zeros"])
def test_the_module_equals_the_engine(aggregate, border):
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(3, 3, 33, 40)
    better = unstride.enhance(model, x, aggregate=aggregate, border=border)
    states = states_of(better, x, 5)
    module = fixed(model, x[:1], states, aggregate=aggregate, border=border)
    wanted = better.with_options(states=tuple(states))(x)
    got = module(x)
    assert list(got) == ["logits", "features"]
    assert close(got["logits"], wanted["logits"]) and close(got["features"], wanted["features"])
    plain = model(x)
    assert not close(got["logits"], plain["logits"])
    assert module.states[0] == better.prepare(x).found.space.zero


def test_without_align_and_with_attention():
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(2, 3, 33, 40)
    better = unstride.enhance(model, x, align=False, aggregate="attention")
    with torch.no_grad():
        better.attention.out.normal_()
    for align in (False, True):
        chosen = better.with_options(states=tuple(states_of(better, x, 4)), align=align)
        from unstride.learning.selecting import _fixed

        assert close(_fixed(chosen, x)(x)["logits"], chosen(x)["logits"])


def test_segmentation_maps():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1), nn.Upsample(scale_factor=4, mode="bilinear")
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    for border in ("renormalise", "zeros"):
        better = unstride.enhance(model, x, recipe="paper", task="segmentation", border=border)
        states = states_of(better, x, 4)
        module = fixed(model, x, states, task="segmentation", border=border)
        assert close(module(x), better.with_options(states=tuple(states))(x))
    with pytest.raises(OptionError, match="stitch"):
        fixed(model, x, states, task="segmentation", align="stitch")


@pytest.mark.parametrize(
    ("build", "size"),
    [(torchvision.models.resnet18, 64), pytest.param(torchvision.models.swin_t, 64, marks=pytest.mark.slow)],
)
def test_library_nets_and_export_with_any_batch(build, size):
    torch.manual_seed(0)
    model, x = build(weights=None).eval(), torch.randn(2, 3, size, size)
    better = unstride.enhance(model, x)
    states = states_of(better, x, 3)
    module = fixed(model, x, states)
    wanted = better.with_options(states=tuple(states))
    assert close(module(x), wanted(x))
    program = torch.export.export(module, (x,), dynamic_shapes=BATCH).module()
    more = torch.randn(3, 3, size, size)
    assert close(program(more), wanted(more))


def test_onnx_gives_equal_outputs(tmp_path: Path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(2, 3, 33, 40)
    better = unstride.enhance(model, x)
    states = states_of(better, x, 4)
    path = str(tmp_path / "net.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(fixed(model, x, states), (x,), path, dynamo=True, dynamic_shapes=BATCH, verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    more = torch.randn(5, 3, 33, 40)
    wanted = better.with_options(states=tuple(states))(more)
    got = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    assert close(torch.from_numpy(got[0]), wanted["logits"])
    assert close(torch.from_numpy(got[1]), wanted["features"])


@pytest.mark.slow
def test_a_swin_runs_in_onnxruntime(tmp_path: Path):
    """Window attention, patch merging and its moves are ops that ONNX has; a small one, since exporting is slow."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    build = torchvision.models.swin_transformer.SwinTransformer
    model = build([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5).eval()
    x = torch.randn(2, 3, 64, 64)
    better = unstride.enhance(model, x)
    states = states_of(better, x, 3)
    path = str(tmp_path / "swin.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(fixed(model, x, states), (x,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert close(torch.from_numpy(got), better.with_options(states=tuple(states))(x))
