"""What a model's output means: its library's word, else its shape, and then a warning."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from procedure_nets import SmallNet, SmallSegmenter, seeded
from torch import Tensor, nn

import unstride
from unstride.errors import CaptureError, TaskAssumed
from unstride.models.tasks import Guess, check_kind, guess, library_task

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def named(name: str, module: str, **attributes: Any) -> nn.Module:
    """A module of another library, as far as its name goes."""
    model = type(name, (nn.Module,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(model, key, value)
    return model


@pytest.mark.parametrize(
    ("name", "problem", "task"),
    [
        ("ViTForImageClassification", None, "classification"),
        ("ViTForImageClassification", "multi_label_classification", "multilabel"),
        ("ViTForImageClassification", "regression", "regression"),
        ("SegformerForSemanticSegmentation", None, "segmentation"),
        ("DPTForDepthEstimation", None, "dense"),
        ("ResNetBackbone", None, "features"),
        ("CLIPVisionModelWithProjection", None, "embedding"),
        ("ViTForMaskedImageModeling", None, None),
    ],
)
def test_transformers_says_it_by_the_class(name: str, problem: str | None, task: str | None) -> None:
    model = named(name, "transformers.models.x", config=SimpleNamespace(problem_type=problem))
    assert library_task(model) == task


def test_timm_smp_and_torchvision_say_it() -> None:
    assert library_task(named("ResNet", "timm.models.resnet", num_classes=10)) == "classification"
    assert library_task(named("ResNet", "timm.models.resnet", num_classes=0)) == "embedding"
    assert library_task(named("FeatureListNet", "timm.models._features")) == "features"
    head = {"segmentation_head": nn.Identity()}
    assert library_task(named("Unet", "segmentation_models_pytorch.decoders.unet", **head)) == "segmentation"
    net = torchvision.models.squeezenet1_1(weights=None)
    assert library_task(net) == "classification"
    net.classifier = nn.Identity()
    assert library_task(net) == "embedding"
    assert library_task(seeded(SmallNet())) is None


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.conv = make, nn.Conv2d(3, 6, 3, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.make(self.conv(x))


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (lambda y: y.mean((2, 3)), "classification"),
        (lambda y: y.mean((1, 2, 3)), "regression"),
        (lambda y: y, "segmentation"),
        (lambda y: y.mean(1), "dense"),
        (lambda y: y.flatten(2).transpose(1, 2), "features"),
        (lambda y: y.mean((2, 3), keepdim=True), "embedding"),
        (lambda y: y.repeat(1, 60, 1, 1), "features"),
        (lambda y: [y, y[..., ::2, ::2], y[..., ::4, ::4]], "features"),
        (lambda y: {"text": "a", "logits": y.mean((2, 3)), "maps": y}, "classification"),
    ],
)
def test_the_shape_says_the_rest(make: Callable[[Tensor], Any], task: str) -> None:
    found = guess(Returns(make), IMAGES)
    assert found.task == task and found.assumed.startswith("output (B")


def test_an_assumption_is_a_warning_and_stays() -> None:
    with pytest.warns(TaskAssumed, match=r"output \(B, 5\) read as the scores of 5 classes.*Pass task="):
        better = unstride.enhance(seeded(SmallNet()), IMAGES[:1])
    assert "assumed" in repr(better) and better.assumed
    p = better.explain(IMAGES)[0]
    assert p.assumed == better.assumed and "assumed" in repr(p) and p.to_json()["assumed"] == p.assumed
    assert better.replace("flip").assumed == better.assumed
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskAssumed)
        named = unstride.enhance(seeded(SmallNet()), IMAGES[:1], task="classification")
        unstride.enhance(seeded(SmallNet()), IMAGES[:1], recipe=unstride.Recipe())  # a recipe says its task
    assert not named.assumed and "assumed" not in repr(named) + repr(named.explain(IMAGES)[0])


def test_maps_need_no_task() -> None:
    better = unstride.enhance(seeded(SmallSegmenter()), IMAGES[:1])
    assert better.task == "segmentation" and better(IMAGES)["out"].shape == (2, 4, 32, 32)


def test_finding_out_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    guess(model, IMAGES)
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_model_that_raises_is_left_to_the_capture() -> None:
    def fail(y: Tensor) -> Any:
        raise ValueError("no")

    assert guess(Returns(fail), IMAGES) == Guess("classification")


@pytest.mark.parametrize(
    ("out", "words"), [(None, "NoneType"), ("text", "str"), ({"boxes": [1, 2]}, "int"), ((), "nothing")], ids=str
)
def test_no_tensor_is_one_clear_error(out: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=f"returns {words}; unstride needs a tensor of floats"):
        unstride.enhance(Returns(lambda y: out), IMAGES[:1])


def test_a_tensor_of_integers_is_called_one() -> None:
    with pytest.raises(CaptureError, match=r"returns a tensor of torch.int64; unstride needs a tensor of floats"):
        unstride.enhance(Returns(lambda y: y.flatten(1).argmax(1)), IMAGES[:1])


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("FasterRCNN", "torchvision.models.detection.faster_rcnn", r"detector.*model\.backbone = unstride"),
        ("DetrForObjectDetection", "transformers.models.detr", "detector.*backbone"),
        ("RAFT", "torchvision.models.optical_flow.raft", "two images"),
        ("Mask2FormerForUniversalSegmentation", "transformers.models.mask2former", "queries.*per-pixel.*einsum"),
        ("MaskFormerForInstanceSegmentation", "transformers.models.maskformer", "queries.*per-pixel.*einsum"),
        ("NaFlexVit", "timm.models.naflexvit", "patches.*one size"),
    ],
)
def test_what_cannot_be_enhanced_is_refused_in_a_sentence(name: str, module: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        check_kind(named(name, module))
    with pytest.raises(CaptureError, match=words):
        unstride.enhance(named(name, module), IMAGES[:1], task="features")
