"""Models that cannot be captured: views, gates and several networks work, and states name what stands in the way."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from procedure_nets import SmallNet, SmallSegmenter, seeded
from torch import Tensor, nn

import unstride
from unstride import Gate, Recipe, Search, Stage
from unstride.errors import CaptureError, LessAtOnce
from unstride.execution.prediction import COST_UNIT, TIME_UNIT

IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Asks something of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(SmallNet())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x[0].mean() > -9 else self.net(-x)


@torch.library.custom_op("unstride_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


class CustomOp(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(twice(x))


def quantised() -> nn.Module:
    from torch.ao import quantization

    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(quantization.QuantStub(), body, quantization.DeQuantStub()).eval()
    model.qconfig = quantization.default_qconfig
    model = quantization.prepare(model)
    model(IMAGES)
    return quantization.convert(model)


def sharded() -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return fully_shard(seeded(SmallNet()))


BUILD: dict[str, Callable[[], nn.Module]] = {
    "control flow": lambda: Branches().eval(),
    "scripted": lambda: torch.jit.script(seeded(SmallNet())),
    "traced": lambda: torch.jit.trace(seeded(SmallNet()), IMAGES),
    "quantised": quantised,
    "custom op": lambda: CustomOp().eval(),
    "FSDP": sharded,
}
CAPTURED: dict[str, Callable[[], nn.Module]] = {
    "torch.compile": lambda: torch.compile(seeded(SmallNet()), backend="eager"),
    "DataParallel": lambda: nn.DataParallel(seeded(SmallNet())),
}


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", BUILD | CAPTURED)
def test_views_gates_and_several_networks_work(name: str) -> None:
    model = (BUILD | CAPTURED)[name]()
    base, flipped = model(IMAGES), model(IMAGES.flip(-1))
    torch.testing.assert_close(unstride.enhance(model, recipe="flip")(IMAGES), (base + flipped) / 2)
    gated = Recipe((Stage(), Stage(("flip",), gate=Gate(below=1.000001))))
    torch.testing.assert_close(unstride.enhance(model, recipe=gated)(IMAGES), (base + flipped) / 2)
    other = seeded(SmallNet(), seed=1)
    cascade = unstride.enhance([model, other], below=1.000001)
    torch.testing.assert_close(cascade(IMAGES), (base + other(IMAGES)) / 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", BUILD)
def test_states_name_what_stands_in_the_way_and_offer_a_recipe(name: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)recipe='flip'") as error:
        unstride.enhance(BUILD[name](), recipe="paper", task="classification")(IMAGES)
    if name in ("control flow", "custom op"):
        assert "test_any_model.py, line" in str(error.value) and "in forward" in str(error.value)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", BUILD | CAPTURED)
def test_evaluate_and_tune_work(name: str) -> None:
    model = (BUILD | CAPTURED)[name]()
    batches = [(IMAGES + k, torch.arange(4)) for k in range(8)]
    (plain, flip) = unstride.evaluate(model, batches, recipe="flip", task="classification")
    assert plain.images == 32
    if name == "quantised":
        assert flip.cost_unit == "times the time of the base model" and flip.cost.estimate > 0
    else:
        assert flip.cost_unit == COST_UNIT and flip.cost.estimate == pytest.approx(2.0)
    tuned = unstride.tune(model, batches, cost=2.0, task="classification")
    left_out = [note for note in tuned.notes if note.startswith("Left out") and "nearest states" in note]
    assert len(left_out) == (name in BUILD)


@torch.no_grad()
@pytest.mark.parametrize("name", CAPTURED)
def test_states_of_wrapped_models_are_those_of_the_model_inside(name: str) -> None:
    plain = unstride.enhance(seeded(SmallNet()), recipe="paper", task="classification", budget=3)
    wrapped = unstride.enhance(CAPTURED[name](), recipe="paper", task="classification", budget=3)
    torch.testing.assert_close(wrapped(IMAGES), plain(IMAGES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_where_macs_cannot_be_counted_cost_is_time_and_says_so() -> None:
    better = unstride.enhance(quantised(), recipe="flip", task="classification")
    result = better.run(IMAGES, details=True)
    (p, *_) = result.predictions()
    assert result.cost_unit == p.cost_unit == TIME_UNIT
    assert p.cost == pytest.approx(2.0) and [q.cost for q in p.passes] == pytest.approx([1.0, 1.0])
    assert result.record.base_macs == 0 and result.record.macs == [0] * 4
    mixed = unstride.enhance([seeded(SmallNet()), quantised()], below=1.0)
    assert mixed.run(IMAGES).cost_unit == TIME_UNIT and min(mixed.run(IMAGES).costs) > 1
    plain = unstride.enhance(seeded(SmallNet()), recipe="flip", task="classification")
    assert plain.run(IMAGES).cost_unit == plain.explain(IMAGES)[0].cost_unit == COST_UNIT


@torch.no_grad()
def test_tiles_of_a_model_that_cannot_be_captured() -> None:
    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(SmallSegmenter())

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)["out"] if x[0].mean() > -9 else x

    model, gate = Maps().eval(), Gate(below=1.0, tile=16, context=32)
    whole = unstride.enhance(model, recipe="flip", task="segmentation")
    tiled = whole.replace(Recipe((Stage(), Stage(("flip",), gate=gate)), "segmentation", "probabilities"))
    torch.testing.assert_close(tiled(IMAGES), whole(IMAGES), atol=1e-4, rtol=1e-4)


class Limited(nn.Module):
    """Out of memory above so many images, as a device says it."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.net, self.most, self.sizes = seeded(SmallNet()), most, list[int]()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return {"logits": self.net(x), "scale": torch.ones(())}


def test_out_of_memory_halves_the_images_at_once_and_says_so_once() -> None:
    model = Limited(2).eval()
    better = unstride.enhance(model, recipe="flip", task="classification")
    images = torch.cat([IMAGES, IMAGES[:3]])
    with torch.no_grad():
        expected = (model.net(images) + model.net(images.flip(-1))) / 2
    with pytest.warns(LessAtOnce, match="with 7 images at once") as caught:
        result = better(images)
    assert len(caught) == 1
    torch.testing.assert_close(result["logits"], expected)
    assert result["scale"].shape == ()
    assert model.sizes[:3] == [7, 3, 1] and set(model.sizes[3:]) == {1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        better(images)


def test_out_of_memory_with_one_image_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        unstride.enhance(Limited(0).eval(), recipe="flip", task="classification")(IMAGES[:1])


def test_the_example_is_optional_and_states_are_captured_when_they_are_needed() -> None:
    better = unstride.enhance(
        seeded(SmallNet()), recipe=Recipe((Stage(), Stage(states=Search(3), gate=Gate(below=0.0))))
    )
    better(IMAGES[:, :, :32, :32])
    assert better(IMAGES).shape == (4, 5)


def test_a_flip_imports_no_compiler() -> None:
    """What only captures need takes a second to import."""
    lines = """
import sys, torch, unstride
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
unstride.enhance(model.eval(), recipe="flip", task="classification")(torch.zeros(1, 3, 8, 8))
print([name for name in ("sympy", "torch._dynamo", "torch._inductor", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
