"""Stitching: states as the finer grid that they are samples of."""

import pytest
import torch
from procedure_nets import Pooled, SmallSegmenter, seeded

import unstride


def stitched(
    states: object, align: str = "stitch", aggregate: str = "mean", task: str = "segmentation"
) -> unstride.Recipe:
    """Aggregated as a search does it, without a search."""
    stage = unstride.Stage(states=states, align=align, aggregate=aggregate, edges="zeros")
    return unstride.Recipe((stage,), task)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_stitching_one_state_is_the_plain_map_and_all_states_refine_it(images: torch.Tensor) -> None:
    net = seeded(SmallSegmenter())
    one = unstride.enhance(net, recipe=stitched([[0, 0, 0]]))
    torch.testing.assert_close(one(images)["out"], net(images)["out"], atol=1e-4, rtol=1e-4)
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
    ramp = torch.stack([y, x, y - x])[None]
    pool = Pooled()
    every = [list(s) for s in ([a, b] for a in range(4) for b in range(4))]
    fine = unstride.enhance(pool, recipe=stitched(every))(ramp)
    inside = (slice(None), slice(None), slice(8, -8), slice(8, -8))
    torch.testing.assert_close(fine[inside], ramp[inside], atol=1e-3, rtol=0)


@torch.no_grad()
def test_stitching_keeps_an_edge_sharper_than_averaging_on_the_coarse_grid() -> None:
    x = torch.arange(64.0).expand(1, 1, 48, 64)
    image = torch.cat([x - 30.5, 30.5 - x, torch.full_like(x, -99)], 1).sign() * 5
    truth = image[0].argmax(0)
    every = [[a, b] for a in range(4) for b in range(4)]
    plain = Pooled()(image)[0]
    outputs = {
        align: unstride.enhance(Pooled(), recipe=stitched(every, align))(image) for align in ("average", "stitch")
    }
    slope = {name: float(f[0, 0, 24].diff().amax()) for name, f in outputs.items()}
    assert slope["stitch"] > slope["average"]
    assert bool((outputs["stitch"][0].argmax(0) == truth).float().mean() >= (plain.argmax(0) == truth).float().mean())


@torch.no_grad()
def test_maps_without_channels_are_stitched_as_those_with_one(images: torch.Tensor) -> None:
    class Bare(torch.nn.Module):
        def __init__(self, net: torch.nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)[:, 0]

    net = seeded(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 3, 2, 1)))
    recipe = stitched(unstride.Search(4, criterion="displacement"), task="dense")
    enhanced = [unstride.enhance(model, images[:1], recipe=recipe) for model in (Bare(net).eval(), net)]
    bare, whole = (better(images) for better in enhanced)
    assert bare.shape == whole[:, 0].shape and float((bare - net(images)[:, 0]).abs().max()) > 0
    torch.testing.assert_close(bare, whole[:, 0])
    assert enhanced[0].explain(images)[0].output.shape == bare.shape[1:]
