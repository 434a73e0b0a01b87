"""Segmentation: per pixel, on the logits before the final upsampling, skips on the moved grid."""

import pytest
import torch
import torch.nn.functional as F
from captures import split_of
from procedure_nets import Pooled, SmallSegmenter, SmallUnet, seeded
from torch import nn

import unstride
from unstride.errors import CaptureError, OptionError
from unstride.method.align import Offset, align
from unstride.method.search import default_layers
from unstride.tasks.tasks import entropy


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_output_type_and_base_prediction(images: torch.Tensor) -> None:
    net = seeded(SmallSegmenter())
    better = unstride.enhance(net, images[:1], task="segmentation", recipe="paper", budget=4)
    out, plain = better(images), net(images)
    assert list(out) == ["out", "half"]
    assert out["out"].shape == plain["out"].shape
    assert not torch.allclose(out["out"], plain["out"], atol=1e-4)
    torch.testing.assert_close(better.explain(images)[0].base, plain["out"][0], atol=1e-5, rtol=1e-5)


def test_all_layers_are_searched(images: torch.Tensor) -> None:
    better = unstride.enhance(seeded(SmallSegmenter()), images[:1], recipe="paper", task="segmentation")
    search = better.explain(images)[0].expansions
    assert {e.layer for e in search} <= {1, 2, 3} and default_layers(split_of(better, images).found.space, True) == (
        1,
        2,
        3,
    )


@torch.no_grad()
def test_the_answer_is_the_formula_per_pixel(images: torch.Tensor) -> None:
    net = seeded(SmallSegmenter())
    better = unstride.enhance(net, images[:1], task="segmentation", recipe="paper-refined", budget=6)
    split = split_of(better, images)
    states = [v.state for v in better.explain(images[:1])[0].passes]
    (logits,) = (v for v in split.engine.start(images[:1]).add([(0, s) for s in states])[:1])
    top = bottom = torch.zeros(())
    for s, f in zip(states, logits, strict=True):
        offset = Offset.of(split.found.space.displacement(s), (8, 8))
        inside = align(torch.ones(1, *f.shape[1:]), offset)
        f = align(f, offset) / inside
        w = (1 - entropy(f[None])) * inside
        top, bottom = top + f * w, bottom + w
    expected = F.interpolate((top / bottom)[None], images.shape[2:], mode="bilinear")
    torch.testing.assert_close(better(images[:1])["out"], expected, atol=1e-5, rtol=1e-5)


class Averages(nn.Module):
    """A U-Net of averages: every value is a local mean of the image, so every state must agree inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        b = F.avg_pool2d(a, 2)
        c = F.avg_pool2d(b, 2)
        up = F.interpolate(c, scale_factor=2.0, mode="bilinear")
        y = 0.5 * (up + b)
        return 0.5 * (F.interpolate(y, scale_factor=2.0, mode="bilinear") + a)


@torch.no_grad()
def test_a_ramp_at_the_output_of_a_decoder_with_skips() -> None:
    """A ramp through averages, encoder, skips and decoder, is the same ramp for every state once aligned (interior)."""
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(48.0), indexing="ij")
    image = torch.stack([0.1 * y + 0.3 * x, 0.2 * y, 0.1 * x])[None]
    better = unstride.enhance(Averages(), image, task="segmentation", recipe="paper", budget=4)
    split = split_of(better, image)
    assert [layer.rate for layer in split.found.layers] == [(2, 2), (2, 2)]
    states = list(split.found.space.states())
    (maps,) = split.engine.start(image).add([(0, s) for s in states])
    target = split.targets[0]
    for s, f in zip(states, maps, strict=True):
        offset = split.offset(s, target)
        assert offset is not None
        moved = align(f, offset)
        torch.testing.assert_close(moved[:, 12:-12, 12:-12], maps[0][:, 12:-12, 12:-12], atol=1e-4, rtol=0)


@torch.no_grad()
def test_an_impulse_at_the_output_of_a_decoder_with_skips() -> None:
    """An impulse stays where it is in the aligned output of every state: skips and upsamplings meet on one grid."""
    image = torch.zeros(1, 3, 48, 48)
    image[:, :, 24, 20] = 16.0
    better = unstride.enhance(Averages(), image, task="segmentation", recipe="paper", budget=4)
    split = split_of(better, image)
    for s in split.found.space.states():
        (f,) = split.engine.start(image).add([(0, s)])
        offset = split.offset(s, split.targets[0])
        assert offset is not None
        moved = align(f[0], offset)[0]
        rows, columns = torch.arange(48.0), torch.arange(48.0)
        centre = ((moved.sum(1) * rows).sum() / moved.sum(), (moved.sum(0) * columns).sum() / moved.sum())
        assert abs(centre[0] - 24) < 2.1
        assert abs(centre[1] - 20) < 2.1
        peak = divmod(int(moved.argmax()), 48)
        assert abs(peak[0] - 24) <= 1
        assert abs(peak[1] - 20) <= 1


@pytest.mark.parametrize("size", [(48, 64), (47, 61), (33, 40)])
def test_any_size_pads_and_crops_inside(size: tuple[int, int]) -> None:
    net = seeded(SmallUnet())  # takes multiples of 4 only
    better = unstride.enhance(net, torch.randn(1, 3, 48, 64), task="segmentation", recipe="paper", budget=3)
    images = torch.randn(2, 3, *size)
    assert better(images).shape == (2, 3, *size)
    assert better.explain(images)[1].output.shape == (3, *size)


@torch.no_grad()
@pytest.mark.parametrize("align", ["average", "stitch"])
def test_states_are_compared_where_they_belong(align: str) -> None:
    """An edge that every state sees at the same place of the image is no disagreement, though their grids differ."""
    x = torch.arange(64.0).expand(1, 3, 48, 64)
    image = 40 * torch.tanh(x / 4 - 7.6)  # smooth, so that where a state samples it hardly matters
    image = torch.stack([image[:, 0], -image[:, 0], image[:, 0] - 60], 1)
    stage = unstride.Stage(states=unstride.Search(16), align=align, aggregate="mean")
    better = unstride.enhance(Pooled(), image, recipe=unstride.Recipe((stage,), "segmentation"))
    p = better.explain(image)[0]
    split = split_of(better, image)
    (own,) = split.engine.start(image).add([(0, v.state) for v in p.passes])
    own = F.interpolate(own, image.shape[2:], mode="bilinear").argmax(1)  # on their own grids: up to 3 pixels apart
    assert p.agreement > 0.99
    assert float((own == p.output.argmax(0)).float().mean()) < p.agreement - 0.01
    assert float(p.spread[:, 8:-8].max()) < 0.35


class LowAndHigh(nn.Module):
    """Logits twice, before and after upsampling, and perhaps the mask made of them."""

    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.mask, self.a, self.b = mask, nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        low = self.b(self.a(x).relu())
        out = F.interpolate(low, x.shape[2:], mode="bilinear")
        return {"low": low, "out": out} | ({"mask": out.argmax(1)} if self.mask else {})


@torch.no_grad()
def test_outputs_that_come_from_one_map_stay_together(images: torch.Tensor) -> None:
    better = unstride.enhance(seeded(LowAndHigh(True)), images[:1], task="segmentation", recipe="paper", budget=5)
    out = better(images)
    torch.testing.assert_close(F.interpolate(out["low"], images.shape[2:], mode="bilinear"), out["out"])
    assert torch.equal(out["out"].argmax(1), out["mask"])
    fine = unstride.enhance(
        seeded(LowAndHigh(False)), images[:1], task="segmentation", recipe="paper", budget=5, align="stitch"
    )
    assert {k: v.shape for k, v in fine(images).items()} == {k: v.shape for k, v in out.items() if k != "mask"}
    with pytest.raises(OptionError, match="finer"):
        better.replace(align="stitch")(images)


def test_errors_are_clear(images: torch.Tensor) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(CaptureError, match=r"\(B, K, H, W\)"):
        unstride.enhance(net, task="segmentation", recipe="flip")(images)
    with pytest.raises(OptionError, match="aggregate: got 'learned'"):
        unstride.enhance(seeded(SmallSegmenter()), task="segmentation", recipe="paper", aggregate="learned")
    with pytest.raises(CaptureError, match="2x1 before its upsampling at images of 16x8"):
        unstride.enhance(seeded(SmallSegmenter()), images[:1, :, :16, :8], task="segmentation", recipe="paper")
