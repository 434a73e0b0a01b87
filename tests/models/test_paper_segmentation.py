"""The paper's segmentation networks: one answer with mmsegmentation's networks by hand or in another library."""

from collections.abc import Callable
from pathlib import Path

import paper_segmenters as ref
import pytest
import torch
import torch.nn.functional as F
from paper_references import Checkpoint
from torch import Tensor

from unstride import models
from unstride.models import paper_networks


def training_head(inputs: int) -> int:
    """What mmsegmentation's counts have beyond a network that only predicts."""
    return inputs * 256 * 9 + 2 * 256 + 256 * 150 + 150


CLASSIFIER_OF_TWINS = 512 * 1000 + 1000
# Millions of parameters as the papers of SegFormer (Table 2), Swin and Twins count them, rounded; what they add.
PUBLISHED = {
    "ade20k-fcn-m-v2-d8": (9.8, training_head(96)),
    "ade20k-deeplabv3plus-m-v2-d8": (15.4, training_head(96)),
    "ade20k-segformer-mit-b0": (3.8, 0),
    "ade20k-upernet-swin-t": (60, training_head(384)),
    "ade20k-upernet-twins-pcpvt-s": (54.6, training_head(320) + CLASSIFIER_OF_TWINS),
    "ade20k-fpn-twins-pcpvt-s": (28.4, CLASSIFIER_OF_TWINS),
}
Maps = Callable[[Checkpoint, Tensor], list[Tensor]]
Head = Callable[[Checkpoint, list[Tensor], int], Tensor]


def twins(file: Checkpoint, x: Tensor) -> list[Tensor]:
    timm = pytest.importorskip("timm")
    model = ref.with_eps(ref.randomised(timm.create_model("twins_pcpvt_small")), 1e-5)
    file.state |= ref.twins_of_timm(model.state_dict())
    return model.forward_intermediates(x, intermediates_only=True)


def mit(file: Checkpoint, x: Tensor) -> list[Tensor]:
    hf = pytest.importorskip("transformers", minversion="5")
    model = ref.with_eps(ref.randomised(hf.SegformerModel(hf.SegformerConfig())), 1e-6)
    file.state |= ref.mit_of_transformers(model.state_dict())
    return list(model(x, output_hidden_states=True).hidden_states)


def swin(file: Checkpoint, x: Tensor) -> list[Tensor]:
    hf = pytest.importorskip("transformers", minversion="5")
    stages = [f"stage{i}" for i in range(1, 5)]
    model = ref.randomised(hf.SwinBackbone(hf.SwinConfig(out_features=stages)))
    file.state |= ref.swin_of_transformers(model.state_dict())
    return list(model(x).feature_maps)


CASES: dict[str, tuple[Maps, Head, tuple[int, int]]] = {
    "cityscapes-fcn-r50-d8": (ref.resnet50c, ref.fcn, (65, 97)),
    "ade20k-fcn-m-v2-d8": (ref.mobilenet_v2, ref.fcn, (65, 97)),
    "ade20k-deeplabv3-r50-d8": (ref.resnet50c, ref.deeplab, (64, 96)),
    "cityscapes-deeplabv3-m-v2-d8": (ref.mobilenet_v2, ref.deeplab, (64, 96)),
    "cityscapes-deeplabv3plus-r50-d8": (ref.resnet50c, ref.deeplab_plus, (64, 96)),
    "ade20k-deeplabv3plus-m-v2-d8": (ref.mobilenet_v2, ref.deeplab_plus, (65, 97)),
    "cityscapes-segformer-mit-b0": (mit, ref.segformer, (72, 104)),
    "cityscapes-lraspp-m-v3-d8": (ref.mobilenet_v3, ref.lraspp, (389, 554)),
    "cityscapes-fcn-unet-s5-d16": (ref.unet, ref.fcn_of_unet, (64, 96)),
    "ade20k-upernet-swin-t": (swin, ref.uper, (260, 292)),
    "ade20k-upernet-twins-pcpvt-s": (twins, ref.uper, (64, 96)),
    "ade20k-fpn-twins-pcpvt-s": (twins, ref.fpn, (64, 96)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_mmsegmentation_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    backbone, head, size = CASES[name]
    network = paper_networks.get(name)
    file, images = Checkpoint(), torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = head(file, backbone(file, images), network.classes)
    expected = F.interpolate(logits, size, mode="bilinear", align_corners=False)
    state = {**file.state, "auxiliary_head.conv_seg.weight": torch.zeros(19, 256, 1, 1)}
    torch.save({"meta": {"mmseg_version": "0.11"}, "state_dict": state}, tmp_path / "mmseg.pth")
    loaded = models.load(f"paper:{name}", weights=tmp_path / "mmseg.pth")
    with torch.no_grad():
        output = loaded.model(images)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in paper_networks.paper_network(name).parameters())
    published, beyond = PUBLISHED[name]
    assert (count + beyond) / 1e6 == pytest.approx(published, abs=0.1)


def test_every_architecture_is_tested() -> None:
    tested = {name.partition("-")[2] for name in CASES}
    names = [n for n in paper_networks.names() if n.startswith(("cityscapes-", "ade20k-"))]
    assert {name.partition("-")[2] for name in names} == tested
