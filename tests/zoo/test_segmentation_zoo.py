"""The segmentation libraries' networks, and the paper's: what the model returns comes out, improved; odd sizes, too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import unstride

K = 5
Build = Callable[[], nn.Module]


def from_torchvision(name: str) -> Build:
    options: dict[str, Any] = {} if name.startswith("lraspp") else {"aux_loss": True}
    return lambda: torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=K, **options)


def from_smp(decoder: str, encoder: str, **options: Any) -> Build:
    def build() -> nn.Module:
        smp = pytest.importorskip("segmentation_models_pytorch")
        return getattr(smp, decoder)(encoder_name=encoder, encoder_weights=None, classes=K, **options)

    return build


def segformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = transformers.SegformerConfig(num_labels=K, depths=[1] * 4, hidden_sizes=[16, 24, 32, 40])
    return transformers.SegformerForSemanticSegmentation(small)


def upernet_swin() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    stages = [f"stage{i}" for i in range(1, 5)]
    swin = transformers.SwinConfig(
        embed_dim=16, depths=[1] * 4, num_heads=[1, 2, 4, 8], window_size=4, out_features=stages
    )
    both = transformers.UperNetConfig(
        backbone_config=swin, num_labels=K, hidden_size=16, auxiliary_in_channels=64, auxiliary_channels=8
    )
    return transformers.UperNetForSemanticSegmentation(both)


class MobileNetFCN(nn.Module):
    """The paper's MobileNet-FCN as mmsegmentation builds it: MobileNetV2 at stride 8, then two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torchvision.models.mobilenet_v2(width_mult=0.35).features[:18]
        for i in range(7, 18):
            for m in self.features[i].modules():
                if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3):
                    dilation = 1 if i == 7 else 2 if i < 15 else 4
                    m.stride, m.dilation, m.padding = (1, 1), (dilation, dilation), (dilation, dilation)
        wide = self.features[17].conv[-1].num_features
        self.head = nn.Sequential(nn.Conv2d(wide, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, K, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.head(self.features(x)), x.shape[2:], mode="bilinear", align_corners=False)


class ENet(nn.Module):
    """In ENet's style: one pool whose indices an unpooling uses later, and strided convolutions around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.inner = nn.Conv2d(8, 8, 3, 1, 1)
        self.last = nn.ConvTranspose2d(8, K, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.first(x))
        small, indices = self.pool(first)
        return self.last(F.relu(self.unpool(F.relu(self.inner(small)), indices, output_size=first.shape[2:])))


def leaves(output: Any) -> dict[str, Tensor]:
    return {"": output} if isinstance(output, Tensor) else {k: v for k, v in output.items() if isinstance(v, Tensor)}


def check(build: Build, layers: int, size: tuple[int, int]) -> None:
    """Type, keys and shapes of the model; its own answer at budget 1; another, finite one at budget 4."""
    torch.manual_seed(0)
    model = build().train()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 1.0
    with torch.no_grad():
        model(images)  # statistics of these images: in untrained nets nearly nothing comes through otherwise
    model.eval()
    better = unstride.enhance(model, images[:1], task="segmentation", recipe="paper", budget=4)
    assert len(unstride.inspect(model, images[:1]).layers) == layers
    with torch.no_grad():
        plain, out = model(images), better(images)
    assert type(out) is type(plain)
    assert list(leaves(out)) == list(leaves(plain))
    for name, one in leaves(plain).items():
        assert leaves(out)[name].shape == one.shape
        assert bool(leaves(out)[name].isfinite().all())
    main, enhanced = next(iter(leaves(plain).values())), next(iter(leaves(out).values()))
    with torch.no_grad():  # untrained nets round a lot: what is allowed is what the model's own float32 does
        exact = next(iter(leaves(copy.deepcopy(model).double()(images.double())).values()))
    scale, rounding = float(exact.abs().max()), float((main - exact).abs().max())
    assert float((better.curve(images, [1])[1][0] - exact).abs().max()) < 1e-5 * scale + 5 * rounding
    assert float((enhanced - main).abs().max()) > 1e-4 * scale + 20 * rounding


QUICK: list[tuple[str, Build, int]] = [
    ("lraspp", from_torchvision("lraspp_mobilenet_v3_large"), 4),
    ("mobilenet-fcn", MobileNetFCN, 3),
    ("enet", ENet, 1),  # the pool with indices stays where it is
]
SWIN, TWINS = "tu-swin_tiny_patch4_window7_224", "tu-twins_svt_small"
CNNS = [(d, e) for e in ("resnet18", "mobilenet_v2") for d in ("Unet", "FPN", "UPerNet", "Segformer")]
SLOW: list[tuple[str, Build, int]] = [
    ("fcn_resnet50", from_torchvision("fcn_resnet50"), 3),
    ("deeplabv3_resnet50", from_torchvision("deeplabv3_resnet50"), 3),
    ("deeplabv3_mobilenet", from_torchvision("deeplabv3_mobilenet_v3_large"), 4),
    *[(f"{d}-{e}", from_smp(d, e), 5) for d, e in CNNS],
    *[(f"DeepLabV3Plus-{e}", from_smp("DeepLabV3Plus", e), 4) for e in ("resnet18", "mobilenet_v2")],
    *[(f"{d}-mit_b0", from_smp(d, "mit_b0"), 4) for d in ("Unet", "FPN", "UPerNet", "Segformer")],
    ("DeepLabV3Plus-mit_b0", from_smp("DeepLabV3Plus", "mit_b0"), 3),
    *[(f"{d}-twins", from_smp(d, TWINS), 4) for d in ("Unet", "FPN", "UPerNet", "Segformer")],
    *[(f"{d}-swin", from_smp(d, SWIN, img_size=(64, 96)), 4) for d in ("Unet", "FPN", "UPerNet", "Segformer")],
    ("hf-upernet-swin", upernet_swin, 4),
]


@pytest.mark.parametrize(("build", "layers"), [q[1:] for q in QUICK], ids=[q[0] for q in QUICK])
def test_quick(build: Build, layers: int) -> None:
    check(build, layers, (64, 96))


def test_model_output() -> None:
    check(segformer, 4, (64, 96))


@pytest.mark.slow
@pytest.mark.parametrize(("build", "layers"), [s[1:] for s in SLOW], ids=[s[0] for s in SLOW])
def test_slow(build: Build, layers: int) -> None:
    check(build, layers, (64, 96))


@pytest.mark.slow
def test_pairs_that_smp_itself_does_not_build() -> None:
    """DeepLabV3+ wants dilated encoders; the day that smp gives these two, they belong into SLOW."""
    with pytest.raises(TypeError, match="output_stride"):
        from_smp("DeepLabV3Plus", TWINS)()
    swin = from_smp("DeepLabV3Plus", SWIN, img_size=(64, 96))().eval()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        swin(torch.randn(1, 3, 64, 96))


def test_odd_sizes() -> None:
    check(MobileNetFCN, 3, (75, 101))


def test_unpooling_says_why_its_pool_stays() -> None:
    torch.manual_seed(0)
    report = unstride.inspect(ENet().eval(), torch.randn(1, 3, 64, 96))
    assert any("indices" in x.reason for x in report.left_out)


def test_a_net_of_pools_with_indices_alone_has_no_states() -> None:
    class SegNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, K, 3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            small, indices = F.max_pool2d(self.a(x), 2, return_indices=True)
            return self.b(F.max_unpool2d(small, indices, 2))

    with pytest.raises(unstride.errors.NothingToSubsample, match="indices"):
        unstride.enhance(SegNet().eval(), torch.randn(1, 3, 32, 32), task="segmentation", recipe="paper")


def test_images_of_sizes_that_the_decoder_does_not_take_are_padded() -> None:
    torch.manual_seed(0)
    model = from_smp("FPN", "resnet18")().eval()
    odd = torch.randn(1, 3, 75, 101)
    with pytest.raises(RuntimeError, match="shape"):
        model(odd)
    assert unstride.enhance(model, odd, task="segmentation", recipe="paper", budget=3)(odd).shape == (1, K, 75, 101)
