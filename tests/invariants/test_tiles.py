"""Gates in space: a tile's answer equals the whole image's there, and what is clear costs nothing more."""

import json
import math

import pytest
import torch
from procedure_nets import SmallSegmenter, SmallUnet, seeded
from torch import Tensor, nn
from typer.testing import CliRunner

import unstride
from unstride.cli.main import app
from unstride.errors import OptionError
from unstride.procedure.gates import Gate, Stage, sureness
from unstride.procedure.tiles import Tiling, spread, tile_means
from unstride.recipe import Recipe, get, read, write
from unstride.recipe.view import parse_view


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


def both(model: nn.Module, x: Tensor, views: tuple[str, ...], states: str = "plain", share: float = 0.02):
    """The whole image's answer with every look, the plain one, ours in tiles, and which tiles were open."""
    again = tuple(parse_view(v) for v in views)
    task = {"task": "segmentation", "merge": "probabilities"}
    whole = unstride.enhance(model, x[:1], recipe=Recipe(stages=(Stage(), Stage(again, states)), **task))
    plain = whole.with_options(recipe=Recipe(stages=(Stage(),), **task))
    margin = sureness(plain.looks(x)[0], "margin")
    means = tile_means(margin, x.shape[2:], 16)
    below = float(means.flatten().sort().values[int(share * means.numel())])
    gate = Gate("margin", below, tile=16, context=20)
    ours = whole.with_options(recipe=Recipe(stages=(Stage(), Stage(again, states, gate)), **task))
    return whole, plain, ours, gate.opens(means), gate


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
def test_a_tile_is_answered_as_in_the_whole_image(model, size, view):
    model, x = seeded(model), image(*size)
    whole, plain, ours, opens, gate = both(model, x, (view,))
    wanted, before, got = (better.looks(x)[0] for better in (whole, plain, ours))
    open_ = torch.stack([spread(o, size, wanted.shape[2:], 16) for o in opens])[:, None]
    windows = [ours._looked(ours._source(x))[0].tiling(parse_view(view), gate).cover(o) for o in opens]
    assert any(w is not None for w in windows)
    for i, found in enumerate(windows):
        expected = wanted[i] if found is None else wanted[i].where(open_[i], before[i])
        torch.testing.assert_close(got[i], expected, atol=2e-5, rtol=1e-4)


def test_states_of_a_tile_are_those_of_the_image():
    model, x = seeded(SmallSegmenter()), image(160, 208)
    whole, plain, ours, opens, _ = both(model, x, ("plain", "flip"), "near:4")
    wanted, before, got = (better.looks(x)[0] for better in (whole, plain, ours))
    open_ = torch.stack([spread(o, x.shape[2:], wanted.shape[2:], 16) for o in opens])[:, None]
    torch.testing.assert_close(got, wanted.where(open_, before), atol=2e-5, rtol=1e-4)


def test_cost_is_the_area_that_was_computed_and_never_more_than_the_whole():
    model, x = seeded(SmallSegmenter()), image(160, 208)
    for share in (0.02, 0.3):
        whole, plain, ours, opens, gate = both(model, x, ("flip", "1.5x"), share=share)
        run = ours._looked(ours._source(x))[0]
        costs, most = ours.looks(x)[1], whole.looks(x)[1]
        for i, (cost, at_most) in enumerate(zip(costs, most, strict=True)):
            tilings = [run.tiling(parse_view(v), gate) for v in ("flip", "1.5x")]
            area = 1 + sum(t.share(opens[i]) * math.prod(t.shown) / math.prod(t.size) for t in tilings)
            assert cost == pytest.approx(area, rel=0.02) and cost <= at_most * 1.001
    clear = ours.with_options(
        recipe=ours.recipe.changed(stages=(Stage(), Stage(ours.recipe.stages[1].views, gate=Gate(below=0.0, tile=16))))
    )
    logits, costs = clear.looks(x)
    assert costs == [1.0, 1.0] and "margin" in clear.explain(x)[0].stopped
    torch.testing.assert_close(logits, plain.looks(x)[0])


def test_a_whole_image_may_stand_behind_a_gate_too():
    model, x = seeded(SmallSegmenter()), image(64, 96, 4)
    recipe = get("flip", "segmentation").changed(stages=(Stage(), Stage((parse_view("flip"),), gate=Gate(share=0.5))))
    better = unstride.enhance(model, x[:1], recipe=recipe)
    assert better.calibrate(x).cost == pytest.approx(1.5)
    assert sorted(better.looks(x)[1]) == pytest.approx([1, 1, 2, 2])


def test_calibrating_tiles_tells_what_it_will_cost():
    model, x = seeded(SmallSegmenter()), image(160, 208, 3)
    gate = Gate(share=0.2, tile=16, context=20)
    stages = (Stage(), Stage((parse_view("flip"), parse_view("1.5x")), gate=gate))
    better = unstride.enhance(model, x[:1], recipe=Recipe("t", "segmentation", stages, merge="probabilities"))
    found = better.calibrate(x)
    costs = better.looks(x)[1]
    assert found.shares[0] == pytest.approx(0.2, abs=0.01) and found.cost == pytest.approx(sum(costs) / 3, rel=0.02)
    again = better.calibrate(x, cost=2.0)
    assert again.cost <= 2.0 and sum(better.looks(x)[1]) / 3 == pytest.approx(again.cost, rel=0.02)
    assert better.recipe.stages[1].gate.tile == 16 and "tiles of 16 px" in str(again)


def test_windows_serve_every_open_tile_with_its_context():
    gate = Gate(below=0.5, tile=16, context=20)
    for view, size in (("plain", (160, 208)), ("flip + 1.5x", (161, 209)), ("0.5x", (320, 200))):
        tiling = Tiling.of(parse_view(view), gate, size, (8, 8))
        where = torch.zeros(-(-size[0] // 16), -(-size[1] // 16), dtype=torch.bool)
        for spot in [(0, 0), (4, 5), (-1, -1)]:
            where[spot] = True
            windows = tiling.cover(where)
            if windows is None:
                continue
            for y, x in where.nonzero().tolist():
                assert any(a <= y < b and c <= x < d for a, b, c, d in (w.tiles for w in windows))
            for w in windows:
                assert w.top % 8 == 0 and w.left % 8 == 0
                assert w.top + tiling.window[0] <= tiling.shown[0] and (tiling.window[0] - tiling.shown[0]) % 8 == 0


def test_a_file_and_the_command_line(tmp_path):
    gate = Gate("entropy", below=0.7, tile=16, context=8)
    recipe = Recipe("in space", "segmentation", (Stage(), Stage((parse_view("flip"),), gate=gate)), "probabilities")
    path = write(tmp_path / "space.toml", recipe)
    assert read(path).recipe == recipe and "tile = 16" in path.read_text() and "tiles of 16 px" in str(recipe)
    name, ask = "sample-segmentation", ["--recipe", str(path), "--limit", "4", "--json"]
    done = CliRunner().invoke(app, ["evaluate", name, "--data", name, *ask])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert 1 < rows[-1]["macs"] < 2  # between plain and the mirror everywhere
    scene = tmp_path / "scene.png"
    unstride.data.load(name, unstride.models.load(name).preprocess)[0].read()[0].save(scene)
    done = CliRunner().invoke(app, ["predict", name, str(scene), "--recipe", str(path), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)["images"][0]
    assert 1 < answer["cost"] <= 2 and "of the tiles" in answer["stopped"]


def test_bad_questions():
    mirror = (parse_view("flip"),)
    with pytest.raises(OptionError, match="segmentation"):
        Recipe(stages=(Stage(), Stage(mirror, gate=Gate(below=0.5, tile=16))))
    stages = (Stage(), Stage(mirror, gate=Gate(below=0.5, tile=16)), Stage(mirror, "near:2", Gate(below=0.4)))
    with pytest.raises(OptionError, match="one size"):
        Recipe("", "segmentation", stages)
    with pytest.raises(OptionError, match="agreement"):
        Recipe("", "segmentation", (Stage(), Stage(mirror, gate=Gate("agreement", 0.5))))
    with pytest.raises(OptionError, match="whole number"):
        Gate(below=0.5, tile=0)
    x = image(64, 64, 1)
    moved = (Stage(), Stage((parse_view("ShiftX=8"),), gate=Gate(below=1.0, tile=16)))
    better = unstride.enhance(seeded(SmallSegmenter()), x, recipe=Recipe("", "segmentation", moved))
    with pytest.raises(OptionError, match="mirrors and sizes"):
        better(x)
