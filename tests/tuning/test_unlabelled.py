"""Gates from images alone: for a mean cost, of images or of their tiles, and nothing is promised."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import unstride
from unstride import models
from unstride.errors import DataError, LeftOut, NotProved, OptionError
from unstride.sample import classification_sample, segmentation_sample
from unstride.tuning.unlabelled import Album, settle
from unstride.views.images import Preprocess, open_image


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Images of two sizes, one of which cannot be read."""
    folder = tmp_path_factory.mktemp("scenes")
    for i, image in enumerate(segmentation_sample(6)[0]):
        wide = np.tile(image, (3, 4)) if i % 2 else np.tile(image, (3, 3))
        Image.fromarray(wide).save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def test_tiles_are_set_for_a_mean_cost(scenes):
    with pytest.warns(LeftOut, match=r"broken\.png") as told:
        found = settle(models.load("sample-segmentation"), [scenes], cost=1.5)
    assert len(told) == 1  # though it is read twice
    gate = found.recipe.stages[1].gate
    assert gate.tile == 32 and gate.below > 0 and found.calibration.images == 6
    assert 1.2 < found.calibration.cost <= 1.5 and 0 < found.changed < 0.5
    costs, changed, count = [], 0, 0
    for path in sorted(scenes.glob("?.png")):
        logits, cost = found.better.looks([open_image(path)])
        plain = unstride.enhance(
            found.better.model, torch.zeros(1, 1, 96, 96), recipe="plain", task="segmentation",
            preprocess=found.better.preprocess,
        ).looks([open_image(path)])[0]  # fmt: skip
        costs += cost
        changed, count = changed + int((logits.argmax(1) != plain.argmax(1)).sum()), count + plain[:, 0].numel()
    assert sum(costs) / 6 == pytest.approx(found.calibration.cost, rel=0.03)
    assert found.changed == pytest.approx(changed / count, abs=1e-3)
    assert "of the pixels change" in str(found) and "Nothing was proved" in str(found)


def test_images_are_set_for_a_mean_cost(tmp_path):
    for i, image in enumerate(classification_sample(40)[0]):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    found = settle(models.load("sample"), [tmp_path], cost=1.25)
    assert found.calibration.cost == pytest.approx(1.25, abs=0.03) and found.recipe.stages[1].gate.tile is None
    assert "of the answers change" in str(found)
    assert unstride.load(found.save(tmp_path / "set.toml"), found.better.model).recipe.stages == found.recipe.stages


def test_what_has_no_gates_is_refused_with_what_to_do(tmp_path):
    Image.fromarray(classification_sample(1)[0][0]).save(tmp_path / "one.png")
    with pytest.raises(OptionError, match=r"regression has no gates.*--data"):
        settle(models.load("sample"), [tmp_path], cost=1.5, task="regression")


def test_no_image_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.warns(LeftOut), pytest.raises(DataError, match="no image could be read"):
        settle(models.load("sample"), [tmp_path], cost=1.5)


def test_an_album_gives_images_of_one_size_together(scenes):
    album = Album(sorted(scenes.glob("?.png")), models.load("sample-segmentation").preprocess)
    assert [len(batch) for batch in album] == [1] * 6 == [len(batch) for batch in album]
    assert [len(batch) for batch in Album(album.paths[::2] * 5, album.preprocess)] == [8, 7]
    assert [p.name for p in album.some(4).paths] == ["0.png", "1.png", "3.png", "4.png"]  # of all, not of the first


@pytest.mark.parametrize(("task", "outputs"), [("classification", 1), ("multilabel", 3)])
def test_changed_answers_are_those_of_the_task(task, outputs, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(8, outputs))
    noise = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), np.uint8)
    for i, image in enumerate(noise):
        Image.fromarray(image).save(tmp_path / f"{i:02}.png")
    prepare = Preprocess(None, None, (0.5,) * 3, (0.5,) * 3)
    with torch.no_grad():
        seen = torch.stack([prepare(Image.fromarray(p)) for p in noise])
        net[3].bias -= net(seen).median(0).values  # on the brink
    found = settle(models.LoadedModel("net", net.eval(), prepare, task), [tmp_path], cost=2.0)
    with torch.no_grad():
        both = torch.stack([net(seen), found.better(seen)]) > 0
    assert found.changed == pytest.approx(float((both[0] != both[1]).float().mean()), abs=1e-6) and found.changed > 0
    with pytest.warns(NotProved, match="set without labels"):
        unstride.load(found.save(tmp_path / "set.toml"), net)


def test_a_list_of_batches_calibrates_as_one():
    x = torch.randn(12, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    costs = []
    for given in (x, [x[:5], x[5:]], iter([x[:5], x[5:]])):
        better = unstride.enhance(models.load("sample").model, x[:1], task="classification")
        costs.append((better.calibrate(given, cost=1.5).cost, better.recipe.stages[1].gate.below))
    assert costs[0] == costs[1] == costs[2]
    with pytest.raises(OptionError, match="what every image takes costs 1 "):
        better.calibrate(x, cost=0.9)
    assert better.calibrate(x, cost=1.0).stages[1].gate.below == 0.0
