"""Swin-T with mmsegmentation's key names.

timm's shifts a map before it fills it up to whole windows, mmsegmentation's after: equal only where nothing is filled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.models.paper_networks.attention import FFN, PatchEmbed, to_map

WINDOW = 7
SHIFT = WINDOW // 2
MASKED = -100.0  # what is added to the attention between positions that are no neighbours


def relative_positions() -> Tensor:
    """(49, 49): where in the table the bias of each pair of positions of a window is."""
    at = torch.arange(WINDOW)
    rows, columns = at.repeat_interleave(WINDOW), at.repeat(WINDOW)
    down, right = (x[:, None] - x[None, :] + WINDOW - 1 for x in (rows, columns))
    return down * (2 * WINDOW - 1) + right


def windows(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B * windows, 49, C)."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels)
    return x.transpose(2, 3).reshape(-1, WINDOW * WINDOW, channels)


def from_windows(x: Tensor, height: int, width: int) -> Tensor:
    """(B * windows, 49, C) -> (B, H, W, C)."""
    x = x.reshape(-1, height // WINDOW, width // WINDOW, WINDOW, WINDOW, x.shape[-1])
    return x.transpose(2, 3).reshape(-1, height, width, x.shape[-1])


def shift_mask(height: int, width: int, device: torch.device) -> Tensor:
    """(windows, 49, 49): in a shifted map, positions from different edges of the image do not attend to each other."""
    rows, columns = (
        (torch.arange(n, device=device) >= n - WINDOW).long() + (torch.arange(n, device=device) >= n - SHIFT)
        for n in (height, width)
    )
    region = windows((3 * rows[:, None] + columns[None, :])[None, :, :, None]).squeeze(-1)
    return torch.where(region[:, :, None] == region[:, None, :], 0.0, MASKED)


class WindowAttention(nn.Module):
    """Attention inside each window, with a learned bias for every relative position."""

    relative_position_index: Tensor

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_positions())
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)[None]
        if mask is not None:  # one for every window of an image
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        query, key, value = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3) + bias
        return self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class ShiftedWindowAttention(nn.Module):
    """Fills a map up to whole windows, shifts it in every second block, and lets each window attend to itself."""

    def __init__(self, channels: int, heads: int, shift: bool) -> None:
        super().__init__()
        self.w_msa = WindowAttention(channels, heads)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -width % WINDOW, 0, -height % WINDOW))
        rows, columns = x.shape[1:3]
        mask = None
        if self.shift:
            x = x.roll((-SHIFT, -SHIFT), (1, 2))
            mask = shift_mask(rows, columns, x.device)
        x = from_windows(self.w_msa(windows(x), mask), rows, columns)
        if self.shift:
            x = x.roll((SHIFT, SHIFT), (1, 2))
        return x[:, :height, :width]


class SwinBlock(nn.Module):
    """Window attention and a perceptron, each with a norm before it and a shortcut around it."""

    def __init__(self, channels: int, heads: int, shift: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attn = ShiftedWindowAttention(channels, heads, shift)
        self.norm2 = nn.LayerNorm(channels)
        self.ffn = FFN(channels, 4 * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class PatchMerging(nn.Module):
    """Four neighbours become the channels of one position; the position among the four varies fastest, as in unfold."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 5, 2, 4)
        return self.reduction(self.norm(x.flatten(3)))


class SwinStage(nn.Module):
    """The blocks of one size, and the merging that leads to the next."""

    def __init__(self, channels: int, depth: int, heads: int, last: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[SwinBlock(channels, heads, bool(index % 2)) for index in range(depth)])
        self.downsample = nn.Identity() if last else PatchMerging(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class SwinTransformer(nn.Module):
    """Swin-T: 2, 2, 6 and 2 blocks; maps of 96, 192, 384 and 768 channels at strides 4 to 32."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(3, 96, 4, 4, eps=1e-5)
        self.stages = nn.ModuleList()
        for index, (depth, heads) in enumerate(zip((2, 2, 6, 2), (3, 6, 12, 24), strict=True)):
            channels = 96 * 2**index
            self.stages.append(SwinStage(channels, depth, heads, last=index == 3))
            self.add_module(f"norm{index}", nn.LayerNorm(channels))

    def forward(self, image: Tensor) -> list[Tensor]:
        tokens, size = self.patch_embed(image)
        x = to_map(tokens, size).permute(0, 2, 3, 1)
        maps = []
        for index, stage in enumerate(self.stages):
            x = stage(x)
            maps.append(self.get_submodule(f"norm{index}")(x).permute(0, 3, 1, 2))
            x = stage.get_submodule("downsample")(x)
        return maps
