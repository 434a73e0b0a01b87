"""Gates in space: a tile's output equals the whole image's there, and confident tiles cost nothing more."""

import math

import pytest
import torch
from procedure_nets import SmallSegmenter, SmallUnet, seeded
from torch import Tensor, nn

import unstride
from unstride.errors import OptionError
from unstride.execution.padding import MULTIPLE
from unstride.execution.tiles import Tiling, spread, tile_means
from unstride.recipe.files import read, write
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Search, Stage
from unstride.recipe.view import parse_view
from unstride.tasks.tasks import confidence


class Corners(nn.Module):
    """Upsampling that lays corner cells on corner pixels, as some DeepLabs do: sizes of 8 n + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = SmallSegmenter()

    def forward(self, x: Tensor) -> Tensor:
        b = self.body
        y = b.cls(b.c(b.b(b.a(x)).relu()).relu())
        return nn.functional.interpolate(y, x.shape[2:], mode="bilinear", align_corners=True)


class Cells(nn.Module):
    """A map of cells, which the user enlarges, of images of whole cells only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = SmallSegmenter()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] % 32 or x.shape[3] % 32:
            raise ValueError("multiples of 32")
        b = self.body
        return b.cls(b.b(b.a(x)).relu().repeat(1, 2, 1, 1)[:, :16])


def image(h: int, w: int, count: int = 2) -> Tensor:
    return torch.randn(count, 3, h, w, generator=torch.Generator().manual_seed(3))


def segment(*stages: Stage) -> Recipe:
    return Recipe(stages, "segmentation", "probabilities")


def both(model: nn.Module, x: Tensor, views: tuple[str, ...], states: Near | None = None, share: float = 0.02):
    """All passes of the whole image, the base model, ours in tiles, which tiles are open, and the gate."""
    whole = unstride.enhance(model, recipe=segment(Stage(), Stage(views, states)))
    plain = whole.replace(segment(Stage()))
    margin = confidence(plain.run(x).output, "margin")
    means = tile_means(margin, x.shape[2:], 16)
    below = float(means.flatten().sort().values[int(share * means.numel())])
    gate = Gate("margin", below, tile=16, context=20)
    ours = whole.replace(segment(Stage(), Stage(views, states, gate=gate)))
    return whole, plain, ours, gate.passes(means), gate


def tiling(better: unstride.Enhanced, x: Tensor, view: str, gate: Gate) -> Tiling:
    """How the runner cuts a view: every 32 pixels, where the model is called directly."""
    padded = MULTIPLE if better.run(x[:1]).record.frame.padded else 1
    return Tiling.of(parse_view(view), gate, x.shape[2:], (MULTIPLE, MULTIPLE), padded)


@pytest.mark.parametrize(
    ("model", "size", "view"),
    [
        (SmallSegmenter(), (160, 208), "flip + 1.5x"),
        (SmallSegmenter(), (160, 208), "0.75x"),
        (Corners(), (161, 209), "1.25x"),
        (SmallUnet(), (160, 176), "FlipUD"),
        (Cells(), (150, 200), "flip"),
    ],
)
def test_a_tile_has_the_output_of_the_whole_image(model, size, view):
    model, x = seeded(model), image(*size)
    whole, plain, ours, opens, gate = both(model, x, (view,))
    wanted, before, got = (better.run(x).output for better in (whole, plain, ours))
    open_ = torch.stack([spread(o, size, wanted.shape[2:], 16) for o in opens])[:, None]
    windows = [tiling(ours, x, view, gate).cover(o) for o in opens]
    assert any(w is not None for w in windows)
    for i, cut in enumerate(windows):
        expected = wanted[i] if cut is None else wanted[i].where(open_[i], before[i])
        torch.testing.assert_close(got[i], expected, atol=2e-5, rtol=1e-4)


def test_states_of_a_tile_are_those_of_the_image():
    model, x = seeded(SmallSegmenter()), image(160, 208)
    whole, plain, ours, opens, _ = both(model, x, ("plain", "flip"), Near(4))
    wanted, before, got = (better.run(x).output for better in (whole, plain, ours))
    open_ = torch.stack([spread(o, x.shape[2:], wanted.shape[2:], 16) for o in opens])[:, None]
    torch.testing.assert_close(got, wanted.where(open_, before), atol=2e-5, rtol=1e-4)


def test_cost_is_the_area_that_was_computed_and_never_more_than_the_whole():
    model, x = seeded(SmallSegmenter()), image(160, 208)
    for share in (0.02, 0.3):
        whole, plain, ours, opens, gate = both(model, x, ("flip", "1.5x"), share=share)
        costs, most = ours.run(x).costs, whole.run(x).costs
        for i, (cost, at_most) in enumerate(zip(costs, most, strict=True)):
            tilings = [tiling(ours, x, v, gate) for v in ("flip", "1.5x")]
            area = 1 + sum(t.share(opens[i]) * math.prod(t.shown) / math.prod(t.size) for t in tilings)
            assert cost == pytest.approx(area, rel=0.02) and cost <= at_most * 1.001
    closed = ours.replace(segment(Stage(), Stage(("flip", "1.5x"), gate=Gate(below=0.0, tile=16))))
    result = closed.run(x)
    assert result.costs == [1.0, 1.0] and "margin" in closed.explain(x)[0].stopped
    torch.testing.assert_close(result.output, plain.run(x).output)


def test_a_whole_image_may_stand_behind_a_gate_too():
    model, x = seeded(SmallSegmenter()), image(64, 96, 4)
    recipe = segment(Stage(), Stage(("flip",), gate=Gate(share=0.5)))
    better = unstride.enhance(model, x[:1], recipe=recipe)
    assert better.calibrate(x).cost == pytest.approx(1.5)
    assert sorted(better.run(x).costs) == pytest.approx([1, 1, 2, 2])


def test_calibrating_tiles_predicts_the_cost():
    model, x = seeded(SmallSegmenter()), image(160, 208, 3)
    gate = Gate(share=0.2, tile=16, context=20)
    better = unstride.enhance(model, recipe=segment(Stage(), Stage(("flip", "1.5x"), gate=gate)))
    result = better.calibrate(x)
    costs = better.run(x).costs
    assert result.shares[0] == pytest.approx(0.2, abs=0.01) and result.cost == pytest.approx(sum(costs) / 3, rel=0.02)
    again = better.calibrate(x, cost=2.0)
    assert again.cost <= 2.0 and sum(better.run(x).costs) / 3 == pytest.approx(again.cost, rel=0.02)
    assert better.recipe.stages[1].gate.tile == 16 and "tiles of 16 px" in str(again)


def test_windows_serve_every_open_tile_with_its_context():
    gate = Gate(below=0.5, tile=16, context=20)
    for view, size in (("plain", (160, 208)), ("flip + 1.5x", (161, 209)), ("0.5x", (320, 200))):
        cut = Tiling.of(parse_view(view), gate, size, (8, 8))
        where = torch.zeros(-(-size[0] // 16), -(-size[1] // 16), dtype=torch.bool)
        for spot in [(0, 0), (4, 5), (-1, -1)]:
            where[spot] = True
            windows = cut.cover(where)
            if windows is None:
                continue
            for y, x in where.nonzero().tolist():
                assert any(a <= y < b and c <= x < d for a, b, c, d in (w.tiles for w in windows))
            for w in windows:
                assert w.top % 8 == 0 and w.left % 8 == 0
                assert w.top + cut.window[0] <= cut.shown[0] and (cut.window[0] - cut.shown[0]) % 8 == 0


def test_a_recipe_file_keeps_the_tiles(tmp_path):
    gate = Gate("entropy", below=0.7, tile=16, context=8)
    recipe = segment(Stage(), Stage(("flip",), gate=gate))
    path = write(tmp_path / "space.toml", recipe)
    assert read(path).recipe == recipe and "tile = 16" in path.read_text() and "tiles of 16 px" in str(recipe)


def test_where_tiles_make_no_sense():
    with pytest.raises(OptionError, match="segmentation"):
        Recipe((Stage(), Stage(("flip",), gate=Gate(below=0.5, tile=16))))
    stages = (Stage(), Stage(("flip",), gate=Gate(below=0.5, tile=16)), Stage(("flip",), Near(2), gate=Gate(below=0.4)))
    with pytest.raises(OptionError, match="one size"):
        segment(*stages)
    with pytest.raises(OptionError, match="agreement"):
        segment(Stage(), Stage(("flip",), gate=Gate("agreement", 0.5)))
    with pytest.raises(OptionError, match="whole number"):
        Gate(below=0.5, tile=0)
    with pytest.raises(OptionError, match="cannot stand before a Search"):
        Stage(states=Search(4), gate=Gate(below=0.5, tile=16))
    moved = segment(Stage(), Stage(("ShiftX=8",), gate=Gate(below=1.0, tile=16)))
    with pytest.raises(OptionError, match="flips and sizes"):
        unstride.enhance(seeded(SmallSegmenter()), recipe=moved)(image(64, 64, 1))
