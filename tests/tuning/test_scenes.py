"""Tuning for segmentation: what is simulated at some pixels is what runs; it may answer "plain"."""

import json

import pytest
import torch
from procedure_nets import SmallSegmenter, seeded
from torch import Tensor
from typer.testing import CliRunner

import unstride
from unstride.cli.main import app
from unstride.errors import DataError, OptionError
from unstride.procedure.gates import Gate
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import parse_view
from unstride.storage.distributed import world
from unstride.tuning.candidates import Unit
from unstride.tuning.choose_pixels import Places, areas, choose_pixels, losses, stages_of
from unstride.tuning.pixels import Pixels, Said, gather_pixels, scenes, simulate_pixels

UNITS = [Unit(parse_view("flip")), Unit(parse_view("1.25x")), Unit(parse_view("plain"), "near:3")]
GATE = Gate(share=1.0, tile=16, context=20)


def masked(count: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    masks = torch.randint(4, (count, h, w), generator=g)
    masks[:, :9] = 255
    return torch.randn(count, 3, h, w, generator=g), masks


def test_simulated_equals_run(tmp_path, monkeypatch):
    x, y = masked(2, 144, 160)
    plain = unstride.enhance(seeded(SmallSegmenter()), x[:1], recipe="plain", task="segmentation")
    given = list(scenes([(x, y)], x.new_zeros(())))
    with world() as us:
        pool = gather_pixels(plain, given, UNITS, GATE, 500, tmp_path, us, False)
        monkeypatch.setattr("unstride.tuning.pixels.listen", lambda *_: pytest.fail("computed again"))
        pool = gather_pixels(plain, given, UNITS, GATE, 500, tmp_path, us, False)
    assert (pool.labels != 255).all() and len(pool.labels) == 1000
    few = float(torch.cat([s.sure.flatten() for s in pool.said]).sort().values[3])
    for units, below in (((), None), ((0, 1), None), ((1, 0), few), ((0,), 2.0), ((2, 1), None), ((2,), few)):
        places = Places(units, 1.0 if below is None else 0.1, below if below != 2.0 else 1.0)
        seen = simulate_pixels(pool, places.units, places.below)
        recipe = Recipe("", "segmentation", stages_of(places, pool), "probabilities")
        logits, costs = plain.with_options(recipe=recipe).looks(x)
        run = torch.cat([m.flatten(1)[:, s.pixels].T for m, s in zip(logits.softmax(1), pool.said, strict=True)])
        torch.testing.assert_close(seen.p, run, atol=3e-3, rtol=0)  # half precision on disk
        assert seen.costs.tolist() == pytest.approx(costs, rel=0.02)


def made_up(count: int, helps: float, seed: int = 0, pixels: int = 200, classes: int = 4) -> Pixels:
    """Looks that share most of their errors; each image has its own difficulty."""
    g = torch.Generator().manual_seed(seed)
    said = []
    for _ in range(count):
        labels = torch.randint(classes, (pixels,), generator=g)
        truth = 2.5 * torch.nn.functional.one_hot(labels, classes) * (0.5 + torch.rand(1, generator=g))
        own = truth + 1.2 * torch.randn(pixels, classes, generator=g)
        looks = own + 1.2 * helps * torch.randn(1 + len(UNITS), pixels, classes, generator=g)
        at, sure = torch.randint(30, (pixels,), generator=g), torch.rand(5, 6, generator=g)
        costs = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)
        said.append(Said(looks, labels, at, sure, costs, (80, 96), 4.0, torch.arange(pixels), 1, (8, 8)))
    return Pixels.of(UNITS, GATE, said)


@pytest.mark.parametrize("objective", ["likelihood", "miou"])
def test_it_finds_what_helps_and_leaves_alone_what_does_not(objective):
    fresh = made_up(200, 1.0, seed=9)
    places = choose_pixels(made_up(40, 1.0), 3.0, objective)
    seen = simulate_pixels(fresh, places.units, places.below)
    assert places.units and float(seen.costs.mean()) <= 3.05
    assert losses(fresh, seen.p, objective).mean() < losses(fresh, fresh.p[0], objective).mean() - 0.01
    same = made_up(40, 0.0)
    assert not choose_pixels(same, 3.0, objective).units


def test_what_people_do_is_tried_whatever_the_greedy_order_is(monkeypatch):
    monkeypatch.setattr("unstride.tuning.choose_pixels.greedy", lambda *_: [])
    chosen = [choose_pixels(made_up(40, 1.0), ceiling) for ceiling in (1.4, 3.0)]
    assert not chosen[0].units  # nothing that people do is that cheap
    assert chosen[1].units and chosen[1].below is None


def test_areas_are_those_of_the_confusion():
    pool = made_up(3, 0.5)
    found = areas(pool, pool.p[0])
    first = pool.image == 0
    guess, truth = pool.p[0][first].argmax(1), pool.labels[first]
    assert found[0, 0, 2] == 4 * int(((guess == 2) & (truth == 2)).sum())
    assert found[0, 1, 2] == 4 * int((guess == 2).sum()) and found[0, 2, 2] == 4 * int((truth == 2).sum())


def test_the_whole_way(tmp_path):
    out, name = tmp_path / "tuned.toml", "sample-segmentation"
    ask = ["tune", name, "--data", name, "--cost", "1.25", "--pool", "small", "--objective", "miou", "--limit", "12"]
    done = CliRunner().invoke(app, [*ask, "--out", str(out), "--cache", str(tmp_path / "pool"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert [row["name"] for row in found["rows"]][:2] == ["plain", "flip"] and 0 < found["rows"][0]["mIoU"] < 1
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["flip"]["time"] > 0 and rows["paper, 10 states"]["cost"] > 4
    loaded = unstride.models.load(name)
    images = torch.randn(1, 1, 96, 96)
    better = unstride.enhance(loaded.model, images, recipe=out, preprocess=loaded.preprocess)
    assert better.recipe.task == "segmentation" and better(images) is not None


def test_large_images_in_windows():
    x, y = masked(1, 100, 150)
    found = list(scenes([(x, y)], x.new_zeros(()), window=64))
    assert len(found) == 6 and {tuple(s.mask.shape) for s in found} == {(64, 64)}
    torch.testing.assert_close(found[-1].source.render(parse_view("plain"))[0], x[0, :, 36:, 86:])


def test_bad_questions():
    x, y = masked(12, 32, 32)
    model = seeded(SmallSegmenter())
    with pytest.raises(OptionError, match="miou"):
        unstride.tune(model, [(x, y)], task="segmentation", objective="accuracy")
    with pytest.raises(DataError, match="too few"):
        unstride.tune(model, [(x[:4], y[:4])], task="segmentation")
    with pytest.raises(DataError, match="masks"):
        unstride.tune(model, [(x, y[:, 0])], task="segmentation")
