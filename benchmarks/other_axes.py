"""Networks of clips, volumes and signals for `benchmarks.coverage`: random weights, small inputs.

`video:` torchvision; `monai:NAME:2|3` and `nnunet:NAME:2|3` where those packages are installed;
`signal:` a 1-D ResNet, and the feature encoders of wav2vec2 and HuBERT.
"""

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import torchvision
from torch import Tensor, nn

VIDEO = ["r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "mvit_v2_s", "swin3d_t", "swin3d_s", "swin3d_b"]
SIGNAL = ["resnet", "wav2vec2", "hubert"]
NNUNET = ["PlainConvUNet", "ResidualEncoderUNet"]
Size = tuple[int, ...]


def specs() -> list[str]:
    out = [f"video:{n}" for n in VIDEO] + [f"signal:{n}" for n in SIGNAL]
    if importlib.util.find_spec("monai") is not None:
        out += [f"monai:{n}:{axes}" for n in MONAI for axes in ONLY.get(n, (2, 3))]
    if importlib.util.find_spec("dynamic_network_architectures") is not None:
        out += [f"nnunet:{n}:{axes}" for n in NNUNET for axes in (2, 3)]
    return out


def build(spec: str) -> tuple[nn.Module, list[Size], int]:
    """The model, input sizes to try, and channels."""
    library, name, *more = spec.split(":")
    if library == "video":
        model = _mvit(name) if name.startswith("mvit") else getattr(torchvision.models.video, name)(weights=None)
        return model, [(16, 224, 224)] if name == "s3d" else [(8, 64, 64)], 3
    if library == "signal":
        return _signal(name), [(4000,)] if name != "resnet" else [(256,)], 1
    axes = int(more[0])
    if library == "nnunet":
        return _nnunet(name, axes), [(32,) * axes, (64,) * axes], 1
    return MONAI[name](axes), [(32,) * axes, (64,) * axes], 1


def _mvit(name: str) -> nn.Module:
    """MViT is built for one size, and torchvision's builders for 16 x 224 x 224: the same blocks for a small one."""
    from torchvision.models.video import mvit

    whole = mvit.MViT
    small = {"spatial_size": (64, 64), "temporal_size": 8}
    with mock.patch.object(mvit, "MViT", lambda **options: whole(**{**options, **small})):
        return getattr(mvit, name)(weights=None)


# ---------------------------------------------------------------- MONAI
def _monai(name: str, **options: Any) -> Callable[[int], nn.Module]:
    def make(axes: int) -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(**{k: v(axes) if callable(v) else v for k, v in options.items()})

    return make


_IO: dict[str, Any] = {"spatial_dims": lambda n: n, "in_channels": 1, "out_channels": 2}
_SE = {"spatial_dims": lambda n: n, "in_channels": 1, "num_classes": 3}
_LEVELS = {"channels": (4, 8, 16), "strides": (2, 2)}
_LEVELS_EACH = {"channels": (4, 8, 16), "strides": (2, 2, 2)}
_VIT = {"spatial_dims": lambda n: n, "in_channels": 1, "img_size": lambda n: (32,) * n, "patch_size": 8}
_VIT |= {"hidden_size": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 2}
_DYN = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 16]}
_B0 = {"pretrained": False}
_RESNET = {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 8, 16], "n_input_channels": 1}
_RESNET |= {"spatial_dims": lambda n: n, "num_classes": 3}
MONAI: dict[str, Callable[[int], nn.Module]] = {
    "UNet": _monai("UNet", **_IO, **_LEVELS, num_res_units=1),
    "AttentionUnet": _monai("AttentionUnet", **_IO, **_LEVELS),
    "BasicUNet": _monai("BasicUNet", **_IO, features=(4, 4, 8, 8, 8, 4)),
    "BasicUNetPlusPlus": _monai("BasicUNetPlusPlus", **_IO, features=(4, 4, 8, 8, 8, 4)),
    "DynUNet": _monai("DynUNet", **_IO, **_DYN),
    "SegResNet": _monai("SegResNet", **_IO, init_filters=8),
    "SegResNetDS": _monai("SegResNetDS", **_IO, init_filters=8, blocks_down=(1, 1, 1)),
    "VNet": _monai("VNet", **_IO),
    "UNETR": _monai(
        "UNETR", **_IO, img_size=lambda n: (32,) * n, feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2
    ),
    "SwinUNETR": _monai("SwinUNETR", **_IO, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4)),
    "DenseNet121": _monai("DenseNet121", **_IO),
    "SEResNet50": _monai("SEResNet50", **_SE),
    "ResNet": _monai("ResNet", **_RESNET),
    "EfficientNetBN": _monai("EfficientNetBN", **_SE, **_B0, model_name="efficientnet-b0"),
    "HighResNet": _monai("HighResNet", **_IO),
    "FlexibleUNet": _monai("FlexibleUNet", **_IO, **_B0, backbone="efficientnet-b0"),
    "AHNet": _monai("AHNet", layers=(1, 1, 1, 1), psp_block_num=0, **_IO),
    "MedNeXtSmall": _monai("MedNeXtSmall", **_IO),
    "AutoEncoder": _monai("AutoEncoder", **_IO, **_LEVELS_EACH),
    "RegUNet": _monai("RegUNet", **_IO, num_channel_initial=4, depth=2),
    "Classifier": _monai("Classifier", in_shape=lambda n: (1, *(32,) * n), classes=3, **_LEVELS_EACH),
    "ViT": _monai("ViT", **_VIT, classification=True, num_classes=3),
    "ViTAutoEnc": _monai("ViTAutoEnc", **{**_VIT, "patch_size": 4}),
    "Quicknat": _monai("Quicknat", num_classes=3, num_channels=1, num_filters=8),
    "DAF3D": _monai("DAF3D", in_channels=1, out_channels=2, visual_output=False),
}
ONLY = {"DAF3D": (3,), "Quicknat": (2,)}


# ---------------------------------------------------------------- nnU-Net
def _nnunet(name: str, axes: int) -> nn.Module:
    from dynamic_network_architectures.architectures import unet

    conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if axes == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    blocks = "n_conv_per_stage" if name == "PlainConvUNet" else "n_blocks_per_stage"
    return getattr(unet, name)(
        input_channels=1, n_stages=3, features_per_stage=[4, 8, 16], conv_op=conv, kernel_sizes=3, strides=[1, 2, 2],
        num_classes=2, n_conv_per_stage_decoder=[1, 1], conv_bias=True, norm_op=norm, norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU, **{blocks: [1, 1, 1]},
    )  # fmt: skip


# ---------------------------------------------------------------- signals
class Block1d(nn.Module):
    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        first, second = nn.Conv1d(wide_in, wide_out, 7, 2, 3), nn.Conv1d(wide_out, wide_out, 7, 1, 3)
        self.body = nn.Sequential(first, nn.BatchNorm1d(wide_out), nn.ReLU(), second)
        self.short = nn.Sequential(nn.MaxPool1d(2, ceil_mode=True), nn.Conv1d(wide_in, wide_out, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.short(x)).relu()


class Encoder(nn.Module):
    """The convolutions of a speech model on (B, 1, L), and the mean of what they say."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x[:, 0]).mean(2))


def _signal(name: str) -> nn.Module:
    if name == "resnet":
        stem = nn.Sequential(nn.Conv1d(1, 8, 15, 2, 7), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(3, 2, 1))
        blocks = nn.Sequential(Block1d(8, 16), Block1d(16, 16))
        return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4))
    import transformers as hf

    kind, model = (hf.Wav2Vec2Config, hf.Wav2Vec2Model) if name == "wav2vec2" else (hf.HubertConfig, hf.HubertModel)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return Encoder(model(kind(conv_dim=[16] * 7, **small)).feature_extractor)
