"""MiT-B0 (SegFormer) and Twins-PCPVT-S, whose attention reads a reduced map; mmsegmentation's key names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REDUCTIONS = (8, 4, 2, 1)
HEADS = (1, 2, 5, 8)


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H * W, C)."""
    return x.flatten(2).transpose(1, 2)


def to_map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, H * W, C) -> (B, C, H, W)."""
    return tokens.transpose(1, 2).unflatten(2, size)


class PatchEmbed(nn.Module):
    """A strided convolution and a layer norm. Without padding, the map is filled up to whole patches at its end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, eps: float, padding: int = 0) -> None:
        super().__init__()
        self.projection = nn.Conv2d(inputs, outputs, kernel, stride, padding)
        self.norm = nn.LayerNorm(outputs, eps)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        stride = self.projection.stride[0]
        right, bottom = -x.shape[3] % stride, -x.shape[2] % stride
        if self.projection.padding == (0, 0) and (right or bottom):
            x = F.pad(x, (0, right, 0, bottom))
        x = self.projection(x)
        return self.norm(to_tokens(x)), (x.shape[2], x.shape[3])


class Projections(nn.Module):
    """The parameters of torch's MultiheadAttention, under its names."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * channels, channels))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * channels))
        self.out_proj = nn.Linear(channels, channels)
        nn.init.xavier_uniform_(self.in_proj_weight)


class ReducedAttention(nn.Module):
    """Attention whose keys and values come from a map that is `reduction` times smaller."""

    def __init__(self, channels: int, heads: int, reduction: int, eps: float) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels
        self.attn = Projections(channels)
        self.reduces = reduction > 1
        if self.reduces:
            self.sr = nn.Conv2d(channels, channels, reduction, reduction)
            self.norm = nn.LayerNorm(channels, eps)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        source = self.norm(to_tokens(self.sr(to_map(tokens, size)))) if self.reduces else tokens
        weights = self.attn.in_proj_weight.split(self.channels)
        biases = self.attn.in_proj_bias.split(self.channels)
        query, key, value = (
            F.linear(x, weight, bias).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((tokens, source, source), weights, biases, strict=True)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.attn.out_proj(mixed.transpose(1, 2).flatten(2))


class MixFFN(nn.Module):
    """SegFormer's perceptron: 1x1, depthwise 3x3 (which tells positions apart), 1x1."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, hidden, 1), depthwise, nn.GELU(), nn.Identity(), nn.Conv2d(hidden, channels, 1)
        )

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        return to_tokens(self.layers(to_map(tokens, size)))


class FFN(nn.Module):
    """A perceptron with one hidden layer, the same at every position."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(channels, hidden), nn.GELU())
        self.layers = nn.Sequential(first, nn.Linear(hidden, channels))

    def forward(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        return self.layers(tokens)


class Layer(nn.Module):
    """Attention and a perceptron, each with a norm before it and a shortcut around it."""

    def __init__(self, channels: int, heads: int, reduction: int, ffn: nn.Module, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels, eps)
        self.attn = ReducedAttention(channels, heads, reduction, eps)
        self.norm2 = nn.LayerNorm(channels, eps)
        self.ffn = ffn

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        tokens = tokens + self.attn(self.norm1(tokens), size)
        return tokens + self.ffn(self.norm2(tokens), size)


class MixTransformer(nn.Module):
    """MiT-B0: four stages of two layers; maps of 32, 64, 160 and 256 channels at strides 4 to 32."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        inputs = 3
        for stage, (heads, reduction) in enumerate(zip(HEADS, REDUCTIONS, strict=True)):
            channels = 32 * heads
            kernel, stride = (3, 2) if stage else (7, 4)
            embed = PatchEmbed(inputs, channels, kernel, stride, self.eps, padding=kernel // 2)
            layers = [Layer(channels, heads, reduction, MixFFN(channels, 4 * channels), self.eps) for _ in range(2)]
            self.layers.append(nn.ModuleList([embed, nn.ModuleList(layers), nn.LayerNorm(channels, self.eps)]))
            inputs = channels

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for stage in self.layers:
            embed, layers, norm = stage.children()
            tokens, size = embed(x)
            for layer in layers.children():
                tokens = layer(tokens, size)
            x = to_map(norm(tokens), size)
            maps.append(x)
        return maps


class PositionEncoding(nn.Module):
    """A depthwise 3x3 convolution beside the map: zeros at the border tell positions apart."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        x = to_map(tokens, size)
        return to_tokens(self.proj(x) + x)


class TwinsPCPVT(nn.Module):
    """Twins-PCPVT-S: 3, 4, 6 and 3 layers; maps of 64, 128, 320 and 512 channels at strides 4 to 32."""

    eps = 1e-5

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 320, 512)
        self.patch_embeds, self.position_encodings, self.layers = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        stages = zip((3, *widths), widths, (4, 2, 2, 2), (3, 4, 6, 3), (8, 8, 4, 4), HEADS, REDUCTIONS, strict=False)
        for inputs, channels, patch, depth, ratio, heads, reduction in stages:
            self.patch_embeds.append(PatchEmbed(inputs, channels, patch, patch, self.eps))
            self.position_encodings.append(PositionEncoding(channels))
            layers = [
                Layer(channels, heads, reduction, FFN(channels, ratio * channels), self.eps) for _ in range(depth)
            ]
            self.layers.append(nn.ModuleList(layers))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for embed, encoding, layers in zip(self.patch_embeds, self.position_encodings, self.layers, strict=True):
            tokens, size = embed(x)
            first, *rest = layers.children()
            tokens = encoding(first(tokens, size), size)
            for layer in rest:
                tokens = layer(tokens, size)
            x = to_map(tokens, size)
            maps.append(x)
        return maps
