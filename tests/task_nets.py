"""Networks of other tasks for the coverage sweep: transformers' towers, depth and segmentation, timm without a head.

`build("tasks:dinov2")` -> the model with random weights, the image sizes to try, the channels. What cannot be enhanced
(detectors, optical flow, masks of queries, NaFlex) is in the sweep as well: it must be one clear error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
_VIT = {**_TINY, "intermediate_size": 32}
_STAGES = [f"stage{i}" for i in range(1, 5)]


def _hf() -> Any:
    import transformers

    return transformers


def _resnet(kind: str, **more: Any) -> nn.Module:
    config = _hf().ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic", **more
    )
    return getattr(_hf(), kind)(config)


def _swin(**more: Any) -> Any:
    return _hf().SwinConfig(image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1, 2, 2, 4], window_size=2, **more)


def _convnext(kind: str, config: str) -> nn.Module:
    return getattr(_hf(), kind)(getattr(_hf(), config)(hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_labels=5))


def _tower(kind: str, config: str, **more: Any) -> nn.Module:
    return getattr(_hf(), kind)(getattr(_hf(), config)(**more))


def _mit(kind: str, config: str) -> nn.Module:
    small = {"depths": [1] * 4, "hidden_sizes": [16, 24, 32, 40], "num_attention_heads": [1, 2, 2, 2]}
    return getattr(_hf(), kind)(getattr(_hf(), config)(**small, decoder_hidden_size=16, num_labels=5))


def _upernet() -> nn.Module:
    config = _hf().UperNetConfig(
        backbone_config=_swin(out_features=_STAGES), hidden_size=16, use_auxiliary_head=False, num_labels=4
    )
    return _hf().UperNetForSemanticSegmentation(config)


def _mask2former() -> nn.Module:
    sizes = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    few = {"encoder_feedforward_dim": 16, "encoder_layers": 1, "decoder_layers": 2, "dim_feedforward": 16}
    config = _hf().Mask2FormerConfig(
        backbone_config=_swin(out_features=_STAGES), **sizes, **few, num_attention_heads=2, num_queries=5
    )
    return _hf().Mask2FormerForUniversalSegmentation(config)


class Classes(nn.Module):
    """Scores of classes at each pixel from masks of queries, as the error on such models says."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        classes, masks = out.class_queries_logits.softmax(-1)[..., :-1], out.masks_queries_logits.sigmoid()
        return torch.einsum("bqc,bqhw->bchw", classes, masks).log()


def _dpt() -> nn.Module:
    neck = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
    model = _hf().DPTForDepthEstimation(_hf().DPTConfig(**{**_VIT, "num_hidden_layers": 4}, **neck))
    nn.init.ones_(model.head.head[4].bias)  # before the last ReLU: random depths are below zero, so all would be 0
    return model


def _depth_anything() -> nn.Module:
    deep = {**_TINY, "num_hidden_layers": 4, "image_size": 56, "patch_size": 14, "mlp_ratio": 2}
    tower = _hf().Dinov2Config(**deep, out_indices=[1, 2, 3, 4], reshape_hidden_states=False)
    neck = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "head_hidden_size": 8}
    config = _hf().DepthAnythingConfig(backbone_config=tower, reassemble_hidden_size=16, patch_size=14, **neck)
    return _hf().DepthAnythingForDepthEstimation(config)


def _timm(name: str, **more: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, **more)


def _torchvision(module: str, name: str, **more: Any) -> nn.Module:
    import torchvision

    return getattr(getattr(torchvision.models, module), name)(weights=None, **more)


def _detector() -> nn.Module:
    return _torchvision("detection", "fasterrcnn_mobilenet_v3_large_320_fpn", weights_backbone=None)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "hf-resnet": (lambda: _resnet("ResNetForImageClassification", num_labels=5), 64),
    "hf-resnet-tower": (lambda: _resnet("ResNetModel"), 64),
    "hf-resnet-backbone": (lambda: _resnet("ResNetBackbone", out_features=_STAGES), 64),
    "hf-swin": (lambda: _hf().SwinForImageClassification(_swin(num_labels=5)), 64),
    "hf-swin-tower": (lambda: _hf().SwinModel(_swin()), 64),
    "hf-convnext": (lambda: _convnext("ConvNextForImageClassification", "ConvNextConfig"), 64),
    "hf-convnext-tower": (lambda: _convnext("ConvNextModel", "ConvNextConfig"), 64),
    "hf-vit": (lambda: _tower("ViTForImageClassification", "ViTConfig", **_VIT, num_labels=5), 32),
    "hf-vit-tower": (lambda: _tower("ViTModel", "ViTConfig", **_VIT), 32),
    "hf-dinov2": (lambda: _tower("Dinov2Model", "Dinov2Config", **_TINY, mlp_ratio=2), 32),
    "hf-dinov2-registers": (
        lambda: _tower("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", **_TINY, mlp_ratio=2),
        32,
    ),
    "hf-dinov3": (lambda: _tower("DINOv3ViTModel", "DINOv3ViTConfig", **_VIT, num_register_tokens=2), 32),
    "hf-dinov3-convnext": (lambda: _convnext("DINOv3ConvNextModel", "DINOv3ConvNextConfig"), 64),
    "hf-clip": (lambda: _tower("CLIPVisionModel", "CLIPVisionConfig", **_VIT), 32),
    "hf-clip-projected": (
        lambda: _tower("CLIPVisionModelWithProjection", "CLIPVisionConfig", **_VIT, projection_dim=8),
        32,
    ),
    "hf-siglip": (lambda: _tower("SiglipVisionModel", "SiglipVisionConfig", **_VIT), 32),
    "hf-segformer": (lambda: _mit("SegformerForSemanticSegmentation", "SegformerConfig"), 64),
    "hf-upernet": (_upernet, 64),
    "hf-dpt": (_dpt, 32),
    "hf-depth-anything": (_depth_anything, 56),
    "hf-glpn": (lambda: _mit("GLPNForDepthEstimation", "GLPNConfig"), 64),
    "timm-without-head": (lambda: _timm("resnet18", num_classes=0), 64),
    "timm-vit-without-head": (lambda: _timm("vit_tiny_patch16_224", num_classes=0, img_size=64, depth=2), 64),
    "timm-features": (lambda: _timm("resnet18", features_only=True), 64),
    "timm-vit-features": (lambda: _timm("vit_tiny_patch16_224", features_only=True, img_size=64), 64),
    "timm-without-pool": (lambda: _timm("resnet18", num_classes=0, global_pool=""), 64),
    "hf-mask2former": (_mask2former, 64),
    "hf-mask2former-classes": (lambda: Classes(_mask2former()), 64),
    "timm-naflex": (lambda: _timm("naflexvit_base_patch16_gap", depth=1), 64),
    "torchvision-detector": (_detector, 64),
    "torchvision-detector-backbone": (lambda: _detector().backbone, 64),
    "torchvision-flow": (lambda: _torchvision("optical_flow", "raft_small"), 128),
}
# What each is taken for without being told; None: refused.
TASKS = {
    "hf-resnet": "classification",
    "hf-resnet-tower": "embedding",
    "hf-resnet-backbone": "features",
    "hf-swin": "classification",
    "hf-swin-tower": "embedding",
    "hf-convnext": "classification",
    "hf-convnext-tower": "embedding",
    "hf-vit": "classification",
    "hf-vit-tower": "embedding",
    "hf-dinov2": "embedding",
    "hf-dinov2-registers": "embedding",
    "hf-dinov3": "embedding",
    "hf-dinov3-convnext": "embedding",
    "hf-clip": "embedding",
    "hf-clip-projected": "embedding",
    "hf-siglip": "embedding",
    "hf-segformer": "segmentation",
    "hf-upernet": "segmentation",
    "hf-dpt": "dense",
    "hf-depth-anything": "dense",
    "hf-glpn": "dense",
    "timm-without-head": "embedding",
    "timm-vit-without-head": "embedding",
    "timm-features": "features",
    "timm-vit-features": "features",
    "timm-without-pool": "features",
    "hf-mask2former": None,
    "timm-naflex": None,
    "torchvision-detector": None,
    "torchvision-flow": None,
}


def specs() -> list[str]:
    return [f"tasks:{name}" for name in MODELS]


def build(spec: str) -> tuple[nn.Module, list[int], int]:
    make, size = MODELS[spec.partition(":")[2]]
    return make(), [size], 3
