"""An accelerator without one: fake tensors on cuda:0 have shapes and devices, and no values."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from procedure_nets import SmallNet, SmallSegmenter, seeded
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import unstride
from unstride import Gate, Near, Preprocess, Recipe, Stage
from unstride.errors import InputError

CUDA = torch.device("cuda:0")
IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class Devices(TorchDispatchMode):
    """Counts results on other devices than the accelerator, and reads of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        asked = func is torch.ops.prim.device.default  # where it is, which is no result
        for t in () if asked else pytree.tree_leaves(out):
            if CUDA in inputs and not (isinstance(t, Tensor) and t.device == CUDA):
                self.elsewhere[str(func.overloadpacket)] += 1
        return out


def on_cuda(build: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor, FakeTensorMode]:
    model = build().eval()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, device=CUDA), requires_grad=False))
            for name, b in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(b.shape, dtype=b.dtype, device=CUDA))
        return model, torch.empty(4, 3, 64, 64, device=CUDA), mode


@pytest.mark.parametrize(
    ("build", "task", "recipe"),
    [
        (SmallNet, "classification", "flip"),
        (SmallNet, "classification", "multiscale-flip"),
        (SmallSegmenter, "segmentation", "flip"),
        (SmallSegmenter, "segmentation", "multiscale-flip"),
    ],
)
def test_views_stay_on_the_accelerator(build: type, task: str, recipe: str) -> None:
    model, images, mode = on_cuda(build)
    better = unstride.enhance(model, recipe=recipe, task=task)
    with mode, Devices() as devices:
        result = better(images)
    assert all(t.device == CUDA for t in pytree.tree_leaves(result))
    assert not devices.elsewhere


class Passes:
    """The decision of a gate, which fake tensors cannot make."""

    def any(self) -> bool:
        return True


@pytest.mark.parametrize("views", [("flip",), ("flip", "1.3x", "flip + 1.3x")])
def test_a_gate_is_read_once_for_each_stage(monkeypatch: pytest.MonkeyPatch, views: tuple[str, ...]) -> None:
    model, images, mode = on_cuda(SmallNet)
    monkeypatch.setattr(Gate, "passes", lambda gate, confidence: [Passes()] * len(confidence))
    better = unstride.enhance(model, recipe=Recipe((Stage(), Stage(views, gate=Gate(below=0.5)))))
    with mode, Devices() as devices:
        better(images)
    assert devices.elsewhere == {"aten._to_copy": 1}


class Reads(TorchFunctionMode):
    """Counts what makes an accelerator wait: numbers that Python reads from tensors."""

    WAIT = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.WAIT
        return func(*args, **(kwargs or {}))


def reads(better: unstride.Enhanced) -> int:
    better(IMAGES)  # captured and counted
    with Reads() as found:
        better(IMAGES)
    return found.count


@pytest.mark.parametrize("build", [SmallNet, SmallSegmenter])
@pytest.mark.parametrize("recipe", ["flip", "multiscale-flip", Stage(("plain", "flip"), Near(4))])
def test_passes_read_no_number(build: type, recipe: Any) -> None:
    task = "segmentation" if build is SmallSegmenter else "classification"
    recipe = Recipe((recipe,), task=task) if isinstance(recipe, Stage) else recipe
    assert reads(unstride.enhance(seeded(build()), recipe=recipe, task=task)) == 0


def test_a_gate_reads_once_and_a_search_at_every_step() -> None:
    gated = Recipe(
        (Stage(), Stage(("flip", "1.3x"), gate=Gate(below=0.5)), Stage(("flip + 1.3x",), gate=Gate(below=0.3)))
    )
    better = unstride.enhance(seeded(SmallNet()), recipe=gated)
    with_numbers = len(IMAGES)  # what `Gate.passes` reads of confidences that are on the CPU already
    assert reads(better) <= 2 * (1 + 2 * with_numbers)
    search = unstride.enhance(seeded(SmallNet()), recipe="paper", task="classification", budget=7)
    expansions = max(len(p.expansions) for p in search.explain(IMAGES))
    assert 0 < reads(search) <= 3 * 7 * (1 + expansions)


def test_images_on_another_device_are_an_error_that_says_so() -> None:
    model, _, _ = on_cuda(SmallNet)
    better = unstride.enhance(model, recipe="flip", task="classification")
    with pytest.raises(InputError, match=r"on cpu, and the model is on cuda:0\. Pass images\.to\('cuda:0'\)"):
        better(IMAGES)


def test_pil_images_go_where_the_model_is_as_it_takes_them() -> None:
    model = seeded(SmallNet()).double()
    better = unstride.enhance(model, recipe="flip", task="classification", preprocess=Preprocess(32, 32))
    images = [Image.new("RGB", (40, 36), color) for color in ("red", "blue")]
    assert better(images).shape == (2, 5)
    x = torch.stack([better.preprocess(image) for image in images]).double()
    with torch.no_grad():
        torch.testing.assert_close(better(images), ((model(x) + model(x.flip(-1))) / 2).float(), check_dtype=False)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("recipe", ["flip", "paper"])
def test_precision_is_that_of_autocast(recipe: str, precision: str) -> None:
    """In views as in states; an outer autocast does the same."""
    model = seeded(SmallNet())
    better = unstride.enhance(model, recipe=recipe, task="classification")
    dtype = getattr(torch, precision)
    inside = better.replace(precision=precision)(IMAGES)
    with torch.autocast("cpu", dtype):
        outside = better(IMAGES)
    assert inside.dtype == outside.dtype == dtype
    torch.testing.assert_close(inside, outside)
    torch.testing.assert_close(inside.float(), better(IMAGES), atol=0.3, rtol=0.1)


def test_channels_last_and_uint8_images_give_the_same() -> None:
    better = unstride.enhance(
        seeded(SmallNet()), recipe="flip", task="classification", preprocess=Preprocess(None, None)
    )
    torch.testing.assert_close(better(IMAGES.contiguous(memory_format=torch.channels_last)), better(IMAGES))
    pixels = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    as_pil = better([Image.fromarray(p.numpy()) for p in pixels])
    torch.testing.assert_close(better(pixels), as_pil)
    torch.testing.assert_close(better(pixels.permute(0, 3, 1, 2)), as_pil)
