"""Graph rewritings: what gives back what it reads is removed, what does not depend on the image becomes a constant."""

import torch
import torch.nn.functional as F
from captures import split_of
from torch import Tensor, nn

import unstride
from unstride.graph.capture import capture
from unstride.graph.ops import op_name
from unstride.graph.rewrite import frozen


class Windowed(nn.Module):
    """A mask drawn anew at every call, as Swin does, with pads and slices that change nothing, and some that do."""

    def __init__(self, pad: int) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 2, 2)
        self.head = nn.Linear(8, 5)
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.stem(x), (0, self.pad, 0, self.pad))
        mask = x.new_zeros((x.shape[2], x.shape[3]))
        mask[:3, 2:] = 1.0
        x = x * (mask != 0) + torch.full_like(x[:1, :1], 0.25) + torch.zeros_like(x)
        x = x[:, :, : x.shape[2] - self.pad, : x.shape[3] - self.pad]
        return self.head(self.down(x).relu().mean((2, 3)))


def test_a_mask_is_constant_and_empty_pads_and_slices_are_gone() -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 3, 32, 32)
    for pad in (0, 1):
        net = Windowed(pad).eval()
        fast, literal = (
            unstride.enhance(net, images[:1], recipe="paper", budget=10, execution=e) for e in ("frozen", "auto")
        )
        torch.testing.assert_close(fast(images), literal(images), rtol=1e-5, atol=1e-5)
        segments = split_of(fast, images).engine.as_trained
        run = [op_name(n) for s in segments for n in s.module.graph.nodes if n.op == "call_function"]
        assert not any("scatter" in name or name.startswith(("new_", "fill", "ne")) for name in run)
        assert run.count("pad") == (1 if pad else 0)
        assert run.count("slice") == (2 if pad else 0)


def test_an_empty_pad_by_reflection_still_says_how_a_moved_layer_goes_on() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 13, 13)
    for mode in ("reflect", "replicate", "circular"):
        stem = nn.Conv2d(3, 8, 1, 2, padding_mode=mode)
        net = nn.Sequential(stem, nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
        fast, literal = (
            unstride.enhance(net, images[:1], recipe="paper", budget=4, execution=e) for e in ("frozen", "auto")
        )
        torch.testing.assert_close(fast(images), literal(images), rtol=1e-5, atol=1e-5)


def test_what_depends_on_the_number_of_images_stays() -> None:
    net, images = Windowed(0).eval(), torch.randn(2, 3, 32, 32)
    names = [op_name(n) for n in frozen(capture(net, images[:1])).fx.nodes if n.op == "call_function"]
    assert "zeros_like" in names and "full" in names
    better = unstride.enhance(net, images[:1], recipe="paper", budget=1)
    torch.testing.assert_close(better(images), net(images), rtol=1e-5, atol=1e-5)
