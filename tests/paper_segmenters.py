"""mmsegmentation's convolutional networks by hand, and its key names for the ones that other libraries have as well."""

import torch
import torch.nn.functional as F
from paper_references import Checkpoint, identity
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------- backbones


def resnet50c(file: Checkpoint, x: Tensor) -> list[Tensor]:
    for index, width, stride in ((0, 32, 2), (3, 32, 1), (6, 64, 1)):
        x = file.conv(x, f"backbone.stem.{index}", width, 3, stride=stride, padding=1)
        x = F.relu(file.norm(x, f"backbone.stem.{index + 1}"))
    x = F.max_pool2d(x, 3, 2, 1)
    maps = []
    # Strides (1, 2, 1, 1); dilations (1, 1, 2, 4), and half of it in the first block of a dilated stage.
    for stage, blocks, planes, stride, dilation in ((1, 3, 64, 1, 1), (2, 4, 128, 2, 1), (3, 6, 256, 1, 2), (4, 3, 512, 1, 4)):  # fmt: skip # noqa: E501
        for block in range(blocks):
            name = f"backbone.layer{stage}.{block}"
            step = stride if block == 0 else 1
            wide = max(1, dilation // 2) if block == 0 else dilation
            y = F.relu(file.norm(file.conv(x, f"{name}.conv1", planes), f"{name}.bn1"))
            y = file.conv(y, f"{name}.conv2", planes, 3, stride=step, padding=wide, dilation=wide)
            y = file.conv(F.relu(file.norm(y, f"{name}.bn2")), f"{name}.conv3", 4 * planes)
            if block == 0:
                x = file.conv(x, f"{name}.downsample.0", 4 * planes, stride=step)
                x = file.norm(x, f"{name}.downsample.1")
            x = F.relu(x + file.norm(y, f"{name}.bn3"))
        maps.append(x)
    return maps


def mobilenet_v2(file: Checkpoint, x: Tensor) -> list[Tensor]:
    x = file.module(x, "backbone.conv1", 32, 3, F.relu6, stride=2)
    widths, blocks = (16, 24, 32, 64, 96, 160, 320), (1, 2, 3, 4, 3, 3, 1)
    strides, dilations = (1, 2, 2, 1, 1, 1, 1), (1, 1, 1, 2, 2, 4, 4)
    maps = []
    for stage, (width, count, stride, dilation) in enumerate(zip(widths, blocks, strides, dilations, strict=True), 1):
        for block in range(count):
            name, part, y = f"backbone.layer{stage}.{block}.conv", 0, x
            if stage > 1:
                y, part = file.module(y, f"{name}.0", 6 * x.shape[1], activation=F.relu6), 1
            step, wide = (stride, dilation) if block == 0 else (1, 1)
            hidden = y.shape[1]
            y = file.module(y, f"{name}.{part}", hidden, 3, F.relu6, groups=hidden, stride=step, dilation=wide)
            y = file.module(y, f"{name}.{part + 1}", width, activation=identity)
            x = x + y if step == 1 and x.shape[1] == width else y
        maps.append(x)
    return [maps[1], maps[2], maps[4], maps[6]]


def mobilenet_v3(file: Checkpoint, x: Tensor) -> list[Tensor]:
    kernels = (3, 3, 3, 5, 5, 5, 3, 3, 3, 3, 3, 3, 5, 5, 5)
    hidden = (16, 64, 72, 72, 120, 120, 240, 200, 184, 184, 480, 672, 672, 960, 960)
    widths = (16, 24, 24, 40, 40, 40, 80, 80, 80, 80, 112, 112, 160, 160, 160)
    excites = {4: 24, 5: 32, 6: 32, 11: 120, 12: 168, 13: 168, 14: 240, 15: 240}
    eps = 1e-3
    maps = [file.module(x, "backbone.layer0", 16, 3, F.hardswish, eps, same=True, stride=2)]
    for number, (kernel, mid, width) in enumerate(zip(kernels, hidden, widths, strict=True), 1):
        x, name, act = maps[-1], f"backbone.layer{number}", F.relu if number < 7 else F.hardswish
        y = x if mid == x.shape[1] else file.module(x, f"{name}.expand_conv", mid, activation=act, eps=eps)
        if number in (2, 4):
            y = file.module(y, f"{name}.depthwise_conv", mid, kernel, act, eps, same=True, stride=2, groups=mid)
        else:
            wide = 1 if number < 7 else 2 if number < 13 else 4
            y = file.module(y, f"{name}.depthwise_conv", mid, kernel, act, eps, groups=mid, dilation=wide)
        if number in excites:
            gate = file.biased(y.mean((2, 3), keepdim=True), f"{name}.se.conv1", excites[number], F.relu)
            y = y * file.biased(gate, f"{name}.se.conv2", mid, lambda z: ((z + 3) / 6).clamp(0, 1))
        y = file.module(y, f"{name}.linear_conv", width, activation=identity, eps=eps)
        maps.append(x + y if x.shape == y.shape else y)
    maps.append(file.module(maps[-1], "backbone.layer16", 960, activation=F.hardswish, eps=eps))
    return [maps[1], maps[3], maps[16]]


def unet(file: Checkpoint, x: Tensor) -> list[Tensor]:
    def block(x: Tensor, name: str, width: int) -> Tensor:
        return file.module(file.module(x, f"{name}.convs.0", width, 3), f"{name}.convs.1", width, 3)

    skips = [block(x, "backbone.encoder.0.0", 64)]
    for stage in range(1, 5):
        skips.append(block(F.max_pool2d(skips[-1], 2), f"backbone.encoder.{stage}.1", 64 * 2**stage))
    x = skips[-1]
    for stage in (3, 2, 1, 0):
        name, width = f"backbone.decoder.{stage}", 64 * 2**stage
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = file.module(x, f"{name}.upsample.interp_upsample.1", width)
        x = block(torch.cat([skips[stage], x], 1), f"{name}.conv_block", width)
    return [x]


# ---------------------------------------------------------------------------------------------------- decoders


def enlarged(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)


def classified(file: Checkpoint, x: Tensor, classes: int) -> Tensor:
    return file.conv(x, "decode_head.conv_seg", classes, bias=True)


def separable(file: Checkpoint, x: Tensor, name: str, width: int, dilation: int = 1) -> Tensor:
    x = file.module(x, f"{name}.depthwise_conv", x.shape[1], 3, groups=x.shape[1], dilation=dilation)
    return file.module(x, f"{name}.pointwise_conv", width)


def fcn(file: Checkpoint, maps: list[Tensor], classes: int) -> Tensor:
    y = file.module(maps[-1], "decode_head.convs.0", 512, 3)
    y = file.module(y, "decode_head.convs.1", 512, 3)
    return classified(file, file.module(torch.cat([maps[-1], y], 1), "decode_head.conv_cat", 512, 3), classes)


def fcn_of_unet(file: Checkpoint, maps: list[Tensor], classes: int) -> Tensor:
    return classified(file, file.module(maps[-1], "decode_head.convs.0", 64, 3), classes)


def deeplab(file: Checkpoint, maps: list[Tensor], classes: int, plus: bool = False) -> Tensor:
    x, head = maps[-1], "decode_head"
    parts = [enlarged(file.module(x.mean((2, 3), keepdim=True), f"{head}.image_pool.1", 512), x)]
    parts.append(file.module(x, f"{head}.aspp_modules.0", 512))
    for index, dilation in ((1, 12), (2, 24), (3, 36)):
        name = f"{head}.aspp_modules.{index}"
        wide = file.module(x, name, 512, 3, dilation=dilation) if not plus else separable(file, x, name, 512, dilation)
        parts.append(wide)
    y = file.module(torch.cat(parts, 1), f"{head}.bottleneck", 512, 3)
    if plus:
        fine = file.module(maps[0], f"{head}.c1_bottleneck", 48)
        y = separable(file, torch.cat([enlarged(y, fine), fine], 1), f"{head}.sep_bottleneck.0", 512)
        y = separable(file, y, f"{head}.sep_bottleneck.1", 512)
    return classified(file, y, classes)


def deeplab_plus(file: Checkpoint, maps: list[Tensor], classes: int) -> Tensor:
    return deeplab(file, maps, classes, plus=True)


def lraspp(file: Checkpoint, maps: list[Tensor], classes: int) -> Tensor:
    fine, middle, x = maps
    gate = F.avg_pool2d(x, 49, (16, 20))
    gate = file.conv(gate, "decode_head.image_pool.1.conv", 128).sigmoid()
    gate = F.interpolate(gate, x.shape[2:], mode="bilinear", align_corners=True)
    x = file.module(x, "decode_head.aspp_conv", 128, eps=1e-3) * gate
    x = file.conv(x, "decode_head.conv_up_input", 128, bias=True)
    for index, finer, width in ((1, middle, 64), (0, fine, 32)):
        skip = file.conv(finer, f"decode_head.convs.conv{index}", width)
        x = torch.cat([enlarged(x, finer), skip], 1)
        x = file.module(x, f"decode_head.conv_ups.conv_up{index}", 128, eps=1e-3)
    return classified(file, x, classes)


def segformer(file: Checkpoint, maps: list[Tensor], classes: int) -> Tensor:
    same = [enlarged(file.module(x, f"decode_head.convs.{i}", 256), maps[0]) for i, x in enumerate(maps)]
    return classified(file, file.module(torch.cat(same, 1), "decode_head.fusion_conv", 256), classes)


def fpn(file: Checkpoint, maps: list[Tensor], classes: int) -> Tensor:
    merged = [file.biased(x, f"neck.lateral_convs.{i}", 256, identity) for i, x in enumerate(maps)]
    for i in (2, 1, 0):
        merged[i] = merged[i] + F.interpolate(merged[i + 1], merged[i].shape[2:], mode="nearest")
    total = None
    for i, x in enumerate(merged):
        x = file.biased(x, f"neck.fpn_convs.{i}", 256, identity, 3)
        for step in range(max(1, i)):
            x = file.module(x, f"decode_head.scale_heads.{i}.{2 * step}", 128, 3)
            if i:
                x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        total = x if total is None else total + enlarged(x, total)
    assert total is not None
    return classified(file, total, classes)


def uper(file: Checkpoint, maps: list[Tensor], classes: int) -> Tensor:
    last, head = maps[-1], "decode_head"
    pooled = [last]
    for i, side in enumerate((1, 2, 3, 6)):
        x = file.module(F.adaptive_avg_pool2d(last, side), f"{head}.psp_modules.{i}.1", 512)
        pooled.append(enlarged(x, last))
    top = file.module(torch.cat(pooled, 1), f"{head}.bottleneck", 512, 3)
    merged = [file.module(x, f"{head}.lateral_convs.{i}", 512) for i, x in enumerate(maps[:-1])] + [top]
    for i in (2, 1, 0):
        merged[i] = merged[i] + enlarged(merged[i + 1], merged[i])
    fine = [file.module(x, f"{head}.fpn_convs.{i}", 512, 3) for i, x in enumerate(merged[:-1])] + [top]
    joined = torch.cat([enlarged(x, fine[0]) for x in fine], 1)
    return classified(file, file.module(joined, f"{head}.fpn_bottleneck", 512, 3), classes)


# ---------------------------------------------------------------------------------------------------- other libraries


def randomised(model: nn.Module) -> nn.Module:
    """Weights that would show a mistake anywhere: libraries start norms at 1 and biases at 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            spread = 0.1 if parameter.ndim == 1 else float(parameter[0].numel()) ** -0.5
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def with_eps(model: nn.Module, eps: float) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps
    return model


def twins_of_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's twins_pcpvt_small under mmsegmentation's names."""
    made: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.startswith(("norm.", "head.")):
            continue  # of the classifier
        key = key.replace("pos_block.", "position_encodings.").replace(".proj.0.", ".proj.")
        key = key.replace(".proj.", ".projection.") if key.startswith("patch_embeds.") else key
        key = key.replace("blocks.", "layers.").replace(".mlp.fc1.", ".ffn.layers.0.0.")
        key = key.replace(".mlp.fc2.", ".ffn.layers.1.").replace(".attn.proj.", ".attn.attn.out_proj.")
        if ".attn.kv." in key:
            query = state[key.replace("layers.", "blocks.").replace(".kv.", ".q.")]
            value, key = torch.cat([query, value]), key.replace(".attn.kv.", ".attn.attn.in_proj_")
        if ".attn.q." not in key:
            made[f"backbone.{key}"] = value
    return made


def mit_of_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of a transformers Segformer under mmsegmentation's names."""
    made: dict[str, Tensor] = {}
    for stage in range(4):
        here, there = f"stages.{stage}", f"backbone.layers.{stage}"
        pairs = [("patch_embeddings.proj", "0.projection"), ("patch_embeddings.layer_norm", "0.norm")]
        pairs.append(("layer_norm", "2"))
        for layer in range(2):
            attention, to = f"blocks.{layer}.attention", f"1.{layer}"
            pairs += [(f"blocks.{layer}.layernorm_before", f"{to}.norm1")]
            pairs += [(f"blocks.{layer}.layernorm_after", f"{to}.norm2")]
            pairs += [(f"{attention}.o_proj", f"{to}.attn.attn.out_proj")]
            pairs += [(f"blocks.{layer}.mlp.dwconv.dwconv", f"{to}.ffn.layers.1")]
            if stage < 3:
                pairs += [(f"{attention}.sequence_reduction.sequence_reduction", f"{to}.attn.sr")]
                pairs += [(f"{attention}.sequence_reduction.layer_norm", f"{to}.attn.norm")]
            for part in ("weight", "bias"):
                joined = [state[f"{here}.{attention}.{letter}_proj.{part}"] for letter in "qkv"]
                made[f"{there}.{to}.attn.attn.in_proj_{part}"] = torch.cat(joined)
            for name, index in (("fc1", 0), ("fc2", 4)):  # 1x1 convolutions there
                weight, bias = (state[f"{here}.blocks.{layer}.mlp.{name}.{part}"] for part in ("weight", "bias"))
                made[f"{there}.{to}.ffn.layers.{index}.weight"] = weight[:, :, None, None]
                made[f"{there}.{to}.ffn.layers.{index}.bias"] = bias
        for old, new in pairs:
            for part in ("weight", "bias"):
                made[f"{there}.{new}.{part}"] = state[f"{here}.{old}.{part}"]
    return made


SWIN_NAMES = {
    "swin.embeddings.patch_embeddings.projection": "patch_embed.projection",
    "swin.embeddings.norm": "patch_embed.norm",
    "swin.encoder.layers": "stages",
    "attention.relative_position_bias.relative": "attn.w_msa.relative",
    "attention.o_proj": "attn.w_msa.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "mlp.fc1": "ffn.layers.0.0",
    "mlp.fc2": "ffn.layers.1",
}


def swin_of_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A transformers SwinBackbone under mmsegmentation's names, whose unfold orders merged channels in its own way."""
    made: dict[str, Tensor] = {}
    steps = torch.arange(7)
    at = (13 * steps[:, None] + steps[None, :]).reshape(1, -1)
    index = (at + at.T).flip(1)
    for key, value in state.items():
        if key.startswith("swin.layernorm."):
            continue  # of the classifier
        for old, new in SWIN_NAMES.items():
            key = key.replace(old, new)
        for stage in range(4):
            key = key.replace(f"hidden_states_norms.stage{stage + 1}.", f"norm{stage}.")
        if "downsample" in key:  # (column, row, channel) -> (channel, row, column)
            value = value.unflatten(-1, (2, 2, -1)).transpose(-3, -1).flatten(-3)
        if ".q_proj." in key:
            joined = [state[old] for old in _siblings(state, value)]
            value, key = torch.cat(joined), key.replace("attention.q_proj", "attn.w_msa.qkv")
        if "k_proj" not in key and "v_proj" not in key:
            made[f"backbone.{key}"] = value
        if key.endswith("relative_position_bias_table"):
            made[f"backbone.{key.replace('bias_table', 'index')}"] = index
    return made


def _siblings(state: dict[str, Tensor], query: Tensor) -> list[str]:
    (name,) = (key for key, value in state.items() if value is query)
    return [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
