"""The paper's networks by name: published sizes, one answer with a hand-made forward, strict converters, SPECs."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paper_references as ref
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from unstride import models
from unstride.errors import ArtefactError, SpecError
from unstride.models import paper_networks
from unstride.models.paper_networks import cifar

# Millions of parameters with 10 and with 100 classes: the README of github.com/chenyaofo/pytorch-cifar-models.
PUBLISHED_CIFAR = {
    "resnet20": (0.27, 0.28),
    "resnet32": (0.47, 0.47),
    "resnet44": (0.66, 0.67),
    "resnet56": (0.86, 0.86),
    "vgg11-bn": (9.76, 9.80),
    "vgg13-bn": (9.94, 9.99),
    "vgg16-bn": (15.25, 15.30),
    "vgg19-bn": (20.57, 20.61),
    "mobilenetv2-x0-5": (0.70, 0.82),
    "mobilenetv2-x0-75": (1.37, 1.48),
    "mobilenetv2-x1-0": (2.24, 2.35),
    "mobilenetv2-x1-4": (4.33, 4.50),
    "shufflenetv2-x0-5": (0.35, 0.44),
    "shufflenetv2-x1-0": (1.26, 1.36),
    "shufflenetv2-x1-5": (2.49, 2.58),
    "shufflenetv2-x2-0": (5.37, 5.55),
    "repvgg-a0": (7.84, 7.96),
    "repvgg-a1": (12.82, 12.94),
    "repvgg-a2": (26.82, 26.94),
}
# The same as the networks without blur pools, which have no parameters: torchvision's documentation of its weights.
PUBLISHED_ANTIALIASED = {
    "antialiased-resnet18": 11689512,
    "antialiased-resnet34": 21797672,
    "antialiased-resnet50": 25557032,
    "antialiased-wide-resnet50-2": 68883240,
    "antialiased-mobilenet-v2": 3504872,
}


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in paper_networks.paper_network(name).parameters())


@pytest.mark.parametrize("name", PUBLISHED_CIFAR)
def test_cifar_networks_have_the_published_size(name: str) -> None:
    for data, published in zip(("cifar10", "cifar100"), PUBLISHED_CIFAR[name], strict=True):
        assert round(parameters(f"{data}-{name}") / 1e6, 2) == published


@pytest.mark.parametrize("name", PUBLISHED_ANTIALIASED)
def test_antialiased_networks_have_the_published_size(name: str) -> None:
    assert parameters(name) == PUBLISHED_ANTIALIASED[name]


def test_there_are_19_networks_for_each_cifar() -> None:
    for data in ("cifar10-", "cifar100-"):
        found = [n for n in paper_networks.names() if n.startswith(data) and "option-a" not in n]
        assert found == [f"{data}{name}" for name in PUBLISHED_CIFAR]


Reference = Callable[[ref.Checkpoint, Tensor], Tensor]
CIFAR_STRIDES, BLUR_STRIDES = (1, 1, 1, 2, 2, 1, 2, 1), (2, 1, 2, 2, 2, 1, 2, 1)
REFERENCES: dict[str, Reference] = {
    "cifar10-resnet20": lambda f, x: ref.cifar_resnet(f, x, 20, 10),
    "cifar100-resnet44": lambda f, x: ref.cifar_resnet(f, x, 44, 100),
    "cifar10-resnet32-option-a": lambda f, x: ref.cifar_resnet(f, x, 32, 10, option_a=True),
    "cifar10-vgg11-bn": lambda f, x: ref.cifar_vgg(f, x, ref.VGG11, 10),
    "cifar100-vgg13-bn": lambda f, x: ref.cifar_vgg(f, x, ref.VGG13, 100),
    "cifar10-vgg16-bn": lambda f, x: ref.cifar_vgg(f, x, ref.VGG16, 10),
    "cifar10-vgg19-bn": lambda f, x: ref.cifar_vgg(f, x, ref.VGG19, 10),
    "cifar10-repvgg-a0": lambda f, x: ref.cifar_repvgg(f, x, cifar.REPVGG_WIDTHS["a0"], 10),
    "cifar100-repvgg-a2": lambda f, x: ref.cifar_repvgg(f, x, cifar.REPVGG_WIDTHS["a2"], 100),
    "cifar10-mobilenetv2-x0-5": lambda f, x: ref.mobilenet_v2(f, x, 0.5, 10, CIFAR_STRIDES),
    "cifar100-mobilenetv2-x1-4": lambda f, x: ref.mobilenet_v2(f, x, 1.4, 100, CIFAR_STRIDES),
    "cifar10-shufflenetv2-x0-5": lambda f, x: ref.cifar_shufflenet_v2(f, x, (24, 48, 96, 192, 1024), 10),
    "cifar100-shufflenetv2-x2-0": lambda f, x: ref.cifar_shufflenet_v2(f, x, (24, 244, 488, 976, 2048), 100),
    "antialiased-resnet18": lambda f, x: ref.antialiased_resnet(f, x, (2, 2, 2, 2), 1, False),
    "antialiased-resnet34": lambda f, x: ref.antialiased_resnet(f, x, (3, 4, 6, 3), 1, False),
    "antialiased-resnet50": lambda f, x: ref.antialiased_resnet(f, x, (3, 4, 6, 3), 1, True),
    "antialiased-wide-resnet50-2": lambda f, x: ref.antialiased_resnet(f, x, (3, 4, 6, 3), 2, True),
    "antialiased-mobilenet-v2": lambda f, x: ref.mobilenet_v2(f, x, 1.0, 1000, BLUR_STRIDES, blur=True),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_checkpoint_in_the_public_format_gives_the_hand_made_answer(name: str, tmp_path: Path) -> None:
    side = 32 if name.startswith("cifar") else 97
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    file = ref.Checkpoint()
    expected = REFERENCES[name](file, images)
    torch.save({"state_dict": file.state, "epoch": 3}, tmp_path / "checkpoint.pth")
    loaded = models.load(f"paper:{name}", weights=tmp_path / "checkpoint.pth")
    with torch.no_grad():
        output = loaded.model(images)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_missing_and_left_over_tensors_are_named_with_their_nearest() -> None:
    file = ref.Checkpoint()
    ref.cifar_resnet(file, torch.randn(1, 3, 32, 32), 20, 10)
    file.state["layer1.0.conv_1.weight"] = file.state.pop("layer1.0.conv1.weight")
    with pytest.raises(ArtefactError) as caught:
        paper_networks.convert(paper_networks.get("cifar10-resnet20"), file.state, "resnet.pt")
    message = str(caught.value)
    assert "resnet.pt" in message
    assert "1 missing: layer1.0.conv1.weight (nearest in the file: layer1.0.conv_1.weight)" in message
    assert "1 unexpected: layer1.0.conv_1.weight (nearest expected: layer1.0.conv1.weight)" in message


def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    file = ref.Checkpoint()
    ref.cifar_resnet(file, torch.randn(1, 3, 32, 32), 20, 10)
    file.state["conv1.weight"] = torch.zeros(16, 3, 5, 5)
    save_file(file.state, tmp_path / "resnet.safetensors")
    with pytest.raises(ArtefactError, match=r"conv1\.weight is"):
        models.load("paper:cifar10-resnet20", weights=tmp_path / "resnet.safetensors")


def test_a_head_of_another_size_and_a_wrapper_are_understood(tmp_path: Path) -> None:
    file = ref.Checkpoint()
    images = torch.randn(1, 3, 32, 32)
    expected = ref.cifar_resnet(file, images, 20, 7)
    save_file({f"module.{key}": value for key, value in file.state.items()}, tmp_path / "seven.safetensors")
    loaded = models.load("paper:cifar10-resnet20", weights=tmp_path / "seven.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), expected, rtol=1e-4, atol=1e-4)


def test_preprocessing_and_task_travel_with_the_name() -> None:
    loaded = models.load("paper:cifar100_vgg11_bn", weights="random")  # as the checkpoint's authors write it
    assert (loaded.spec, loaded.task, loaded.untrained) == ("paper:cifar100_vgg11_bn", "classification", True)
    assert loaded.preprocess.mean == (0.5070, 0.4865, 0.4409)
    assert loaded.example().shape == (1, 3, 32, 32)
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    mean, std = (torch.tensor(v)[:, None, None] for v in (loaded.preprocess.mean, loaded.preprocess.std))
    expected = (torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1) / 255 - mean) / std
    torch.testing.assert_close(
        loaded.preprocess(pixels), expected
    )  # its resize and crop change nothing of a CIFAR image
    assert models.load("paper:ade20k-segformer-mit-b0", weights="random").preprocess.resize == 512
    assert models.load("paper:antialiased-mobilenet-v2", weights="random").preprocess.crop == (224, 224)


def test_unknown_names_and_weights_that_no_library_fetches() -> None:
    with pytest.raises(SpecError, match=r"did you mean .*cifar10-resnet20"):
        models.load("paper:cifar10-resnet21", weights="random")
    with pytest.raises(SpecError, match="chenyaofo/pytorch-cifar-models; give the path"):
        models.load("paper:cifar10-resnet20")


@pytest.mark.assets
@pytest.mark.skipif("UNSTRIDE_ASSETS" not in os.environ, reason="UNSTRIDE_ASSETS is not set")
@pytest.mark.parametrize(("depth", "correct"), [(20, 457), (56, 462)])
def test_real_weights_predict_as_published(depth: int, correct: int) -> None:
    """500 test images of CIFAR-10; all 5,000 of the file give 91.36 and 93.58 %, as another implementation does."""
    folder = Path(os.environ["UNSTRIDE_ASSETS"]) / "cifar10"
    loaded = models.load(f"paper:cifar10-resnet{depth}-option-a", weights=folder / f"resnet{depth}.safetensors")
    with np.load(folder / "test_even.npz", allow_pickle=False) as data:
        images, labels = torch.from_numpy(data["x"][:500]), torch.from_numpy(data["y"][:500]).long()
    mean, std = (torch.tensor(v) for v in (loaded.preprocess.mean, loaded.preprocess.std))
    with torch.inference_mode():
        output = loaded.model(((images / 255 - mean) / std).permute(0, 3, 1, 2))
    assert abs(int((output.argmax(1) == labels).sum()) - correct) <= 1
