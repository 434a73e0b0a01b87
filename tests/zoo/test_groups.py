"""Known architectures give the layers that they are known to have, and the invariants hold on them."""

import pytest
import timm
import torch
import torchvision
from checks import Net, check_briefly, some_states
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import Tensor, nn


def ops(net: Net) -> list[list[str]]:
    return [[path for path, _ in layer.ops] for layer in net.found.layers]


def invariants(net: Net, size: int) -> None:
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    check_briefly(net, images, some_states(net.found, 3)[1:], 3e-4)


def of(model: nn.Module, size: int) -> Net:
    torch.manual_seed(0)
    return Net.of(model.eval(), torch.randn(1, 3, size, size))


def test_resnet18_has_the_papers_five_layers() -> None:
    net = of(torchvision.models.resnet18(), 64)
    stages = [[f"layer{i}.0.conv1", f"layer{i}.0.downsample.0"] for i in (2, 3, 4)]
    assert ops(net) == [["conv1"], ["maxpool"], *stages]
    assert [layer.rate for layer in net.found.layers] == [(2, 2)] * 5
    assert [layer.stride for layer in net.found.layers] == [(2, 2), (4, 4), (8, 8), (16, 16), (32, 32)]
    assert not net.found.left_out
    invariants(net, 64)


def test_shufflenet_branches_move_together() -> None:
    net = of(torchvision.models.shufflenet_v2_x0_5(), 64)
    assert ops(net)[2] == ["stage2.0.branch1.0", "stage2.0.branch2.3"]
    assert len(net.found.layers) == 5
    invariants(net, 64)


def test_densenet() -> None:
    net = of(torchvision.models.densenet121(), 64)
    transitions = [[f"features.transition{i}.pool"] for i in (1, 2, 3)]
    assert ops(net) == [["features.conv0"], ["features.pool0"], *transitions]


def test_inception_branches_and_pools_move_together() -> None:
    net = of(torchvision.models.inception_v3(init_weights=False), 107)
    assert ops(net)[:3] == [["Conv2d_1a_3x3.conv"], ["maxpool1"], ["maxpool2"]]
    assert ops(net)[3] == ["Mixed_6a.branch3x3.conv", "Mixed_6a.branch3x3dbl_3.conv", "Mixed_6a"]
    assert ops(net)[4] == ["Mixed_7a.branch3x3_2.conv", "Mixed_7a.branch7x7x3_4.conv", "Mixed_7a"]
    assert len(net.found.layers) == 5


def test_mvit_queries_and_skips_move_together() -> None:
    config = MultiScaleVitCfg(embed_dim=16, num_heads=(1, 2, 4, 8), depths=(1, 1, 1, 1))
    net = of(MultiScaleVit(config, img_size=64, num_classes=10), 64)
    blocks = [f"stages.{i}.blocks.0" for i in (1, 2, 3)]
    assert ops(net) == [["patch_embed.proj"], *([f"{b}.shortcut_pool_attn", f"{b}.attn.pool_q"] for b in blocks)]
    keys = [item.op for item in net.found.left_out if "side path" in item.reason]
    assert "stages.0.blocks.0.attn.pool_k (conv2d)" in keys
    invariants(net, 64)


def test_segformer_head_lays_every_stage_on_one_grid() -> None:
    hf = pytest.importorskip("transformers")
    config = hf.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 16], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16
    )
    net = of(hf.SegformerForSemanticSegmentation(config), 64)
    assert [layer.rate for layer in net.found.layers] == [(4, 4), (2, 2), (2, 2), (2, 2)]
    assert all("sequence_reduction" in item.op for item in net.found.left_out)
    invariants(net, 64)


def test_mobilenet_v3_gates_are_no_layers() -> None:
    net = of(torchvision.models.mobilenet_v3_small(), 64)
    assert len(net.found.layers) == 5
    assert not net.found.unknown


def test_swin_with_slices() -> None:
    net = of(torchvision.models.swin_t(), 64)
    assert [layer.rate for layer in net.found.layers] == [(4, 4), (2, 2), (2, 2), (2, 2)]
    assert [kind for _, kind in net.found.layers[1].ops] == ["slice"]
    invariants(net, 64)


def test_swin_with_reshapes() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(1, 1, 1, 1))
    net = of(model, 64)
    assert [layer.rate for layer in net.found.layers] == [(4, 4), (2, 2), (2, 2), (2, 2)]
    assert [kind for _, kind in net.found.layers[1].ops] == ["merge"]
    invariants(net, 64)


def test_blur_pool_and_reflecting_pads() -> None:
    net = of(timm.create_model("resnetblur18"), 64)
    assert len(net.found.layers) == 5
    invariants(net, 64)


def test_repvgg_branches() -> None:
    net = of(timm.create_model("repvgg_a0"), 64)
    assert len(net.found.layers) == 5
    assert all(len(group) == 2 for group in ops(net))
    invariants(net, 64)


class OptionA(nn.Module):
    """A CIFAR ResNet: shortcuts x[:, :, ::2, ::2] with zero channels, and avg_pool2d(x, 8) at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.a, self.b, self.head = nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv in (self.a, self.b):
            zeros = (0, 0, 0, 0, conv.in_channels // 2, conv.in_channels // 2)
            x = (conv(x) + nn.functional.pad(x[:, :, ::2, ::2], zeros)).relu()
        return self.head(nn.functional.avg_pool2d(x, 8).flatten(1))


def test_option_a_shortcuts() -> None:
    net = of(OptionA(), 32)
    assert [{kind for _, kind in layer.ops} for layer in net.found.layers] == [{"conv", "slice"}, {"conv", "slice"}]
    assert any("global pool" in item.reason for item in net.found.left_out)
    invariants(net, 32)


@pytest.mark.parametrize(
    ("name", "layers"), [("deeplabv3_mobilenet_v3_large", 4), ("lraspp_mobilenet_v3_large", 4), ("fcn_resnet50", 3)]
)
def test_torchvision_segmentation(name: str, layers: int) -> None:
    net = of(torchvision.models.get_model(name, weights=None, weights_backbone=None), 64)
    assert len(net.found.layers) == layers
