"""Networks of other tasks, small and with random weights: taken for what they are, and the same invariants for all.

The whole list is `tests/task_nets.py`, swept by `benchmarks/coverage.py`; here are the ones that differ most.
"""

import pytest
import task_nets
import torch
from captures import capture_of
from checks import Net, check_briefly, some_states
from torch import Tensor
from torch.utils import _pytree as pytree

import unstride
from unstride.errors import CaptureError

QUICK = ["hf-dinov2-registers", "hf-siglip", "hf-dpt", "timm-features"]


def ready(name: str) -> tuple[torch.nn.Module, Tensor]:
    pytest.importorskip("transformers" if name.startswith("hf") else "timm")
    torch.manual_seed(0)
    model, sizes, channels = task_nets.build(f"tasks:{name}")
    return model.eval(), torch.randn(2, channels, sizes[0], sizes[0])


def leaves(output: object) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n, task in task_nets.TASKS.items() if task],
)
def test_a_network_of_another_task(name: str) -> None:
    model, images = ready(name)
    better = unstride.enhance(model, images[:1], recipe="default")
    assert better.task == task_nets.TASKS[name] and not better.assumed
    with torch.no_grad():
        plain = model(images)
    got = better(images)
    assert type(got) is type(plain)
    for a, b in zip(leaves(got), leaves(plain), strict=True):
        assert a.shape == b.shape and bool(a.isfinite().all())
    again = better.replace(stages=(unstride.Stage(),))(images)  # one pass is the model itself
    for a, b in zip(leaves(again), leaves(plain), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    alone = better(images[:1])  # an image does not see the others
    for a, b in zip(leaves(got), leaves(alone), strict=True):
        torch.testing.assert_close(a[:1], b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torchvision-flow", marks=pytest.mark.slow),
        pytest.param("hf-mask2former", marks=pytest.mark.slow),
        pytest.param("timm-naflex", marks=pytest.mark.slow),
        "torchvision-detector",
    ],
)
def test_what_cannot_be_enhanced(name: str) -> None:
    model, images = ready(name)
    with pytest.raises(CaptureError) as error:
        unstride.enhance(model, images[:1])
    assert len(str(error.value)) < 400 and type(model).__name__ in str(error.value)


def test_the_backbone_of_a_detector() -> None:
    """Every map of its pyramid, in its own dict: what the rest of the detector takes."""
    detector, images = ready("torchvision-detector")
    better = unstride.enhance(detector.backbone, images[:1], task="features", recipe="flip")
    with torch.no_grad():
        plain, flipped = detector.backbone(images), detector.backbone(images.flip(-1))
    result = better(images)
    assert type(result) is type(plain) and list(result) == list(plain)
    for name, value in result.items():
        torch.testing.assert_close(value, (plain[name] + flipped[name].flip(-1)) / 2, atol=1e-5, rtol=1e-4)
    assert better.out_channels == detector.backbone.out_channels


@pytest.mark.slow
def test_mask2former_as_its_error_says() -> None:
    """Its levels are one sequence and read from each other at computed places: known, and as the oracle has it."""
    model, images = ready("hf-mask2former-classes")
    better = unstride.enhance(model, images[:1], recipe="paper", task="segmentation")
    capture = capture_of(better, images)
    net = Net(model, capture.graph, capture.found)
    assert [layer.rate[0] for layer in net.found.layers] == [4, 2, 2, 2] and not net.found.unknown
    changed, _ = check_briefly(net, images, some_states(net.found, 3)[1:], 3e-4)
    assert changed > 1e-2
    assert better(images).shape == model(images).shape
