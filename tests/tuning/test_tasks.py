"""Segmentation with tiles, several labels, numbers, depth and embeddings."""

import made_pools
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unstride
from unstride.evaluation.labelled import open_labelled
from unstride.evaluation.measuring import first_image
from unstride.models import LoadedModel
from unstride.models.weights import place
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Stage
from unstride.recipe.view import parse_view
from unstride.storage.distributed import World
from unstride.tuning.candidates import PassGroup
from unstride.tuning.pool import PoolStore, gather_pool
from unstride.tuning.simulate import simulate

SIZE, CLASSES = 48, 4


class Pixels(nn.Module):
    """(B, 3, H, W) -> (B, 4, H, W): a class of each colour, read with an error that differs from side to side."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, CLASSES, 3, 1, 1)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.weight[:, :, 1, 1] = 3 * colours()
            self.head.bias.zero_()
        self.register_buffer("noise", error * torch.randn(CLASSES, 1, SIZE, generator=made_pools.seeded(3)))

    def forward(self, x):
        noise = nn.functional.interpolate(self.noise[None], (1, x.shape[-1]), mode="bilinear")
        return self.head(x) + noise


def colours():
    return torch.randn(CLASSES, 3, generator=made_pools.seeded(1))


def masks(count: int, seed: int = 0):
    """Images of colours with noise, and which colour is where; half of each image is easy."""
    g = made_pools.seeded(seed)
    coarse = torch.randint(CLASSES, (count, 1, 4, 4), generator=g).float()
    mask = nn.functional.interpolate(coarse, (SIZE, SIZE)).long()[:, 0]
    noise = torch.randn(count, 3, SIZE, SIZE, generator=g)
    noise[..., : SIZE // 2] *= 0.2
    return colours()[mask].permute(0, 3, 1, 2) + 0.8 * noise, mask


def pool_of(model, task, x, y, views=("flip",), networks=("base",)):
    pipeline, data = open_labelled(model, DataLoader(TensorDataset(x, y), batch_size=8), task=task)
    example = first_image(data)[None].to(*place(pipeline.better.model))
    store = PoolStore(pipeline, data, None, example)
    groups = [PassGroup(n, parse_view(v)) for n in networks for v in ("plain", *views)]
    return gather_pool(store, groups, World()), pipeline


def test_simulated_maps_equal_run():
    """All pixels of these images are kept, so everything can be compared; without tiles exactly."""
    x, y = masks(6)
    y[0, :5] = 255
    pool, pipeline = pool_of([Pixels(2.0), Pixels(0.5)], "segmentation", x, y, ("flip", "1.25x"), ("base", "net2"))
    for stages in (
        (Stage(("plain", "flip")),),
        (Stage(), Stage(("plain", "flip"), network="net2", weights=(2.0, 2.0))),
    ):
        for combine in ("probabilities", "logits"):
            recipe = Recipe(stages, "segmentation", combine)
            ran = pipeline.better.replace(recipe).run(x)
            done = simulate(pool, recipe)
            for i in range(len(x)):
                labelled = (y[i] != 255).flatten()
                expected = ran.output[i].flatten(1)[:, labelled]
                found = done.outputs[i, :, 0, : expected.shape[1]]
                torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)  # half precision
            assert done.costs.tolist() == pytest.approx(ran.costs, rel=1e-3)


def test_simulated_tiles_are_those_that_run():
    """The same tiles pass and the same area is computed; a network of one 3x3 layer sees no further than a window."""
    x, y = masks(6)
    pool, pipeline = pool_of(Pixels(2.0), "segmentation", x, y)
    assert pool.maps is not None
    gate = Gate(tile=pool.maps.gate.tile, context=pool.maps.gate.context, share=0.4)
    done = simulate(pool, Recipe((Stage(), Stage(("flip",), gate=gate)), "segmentation", "probabilities"), [0.4])
    recipe = Recipe(done.stages, "segmentation", "probabilities")
    ran = pipeline.better.replace(recipe).run(x)
    passed = done.passed[0].flatten(1).any(1).nonzero()[:, 0].tolist()
    assert passed == ran.record.passed_gates[0]
    assert done.costs.tolist() == pytest.approx(ran.costs, rel=0.05)
    assert 0.3 < float(done.passed[0].double().mean()) < 0.5


def test_segmentation_finds_a_second_network(tmp_path):
    x, y = masks(14)
    pair = [Pixels(4.0), Pixels(0.2)]
    for k, net in enumerate(pair):
        pair[k] = LoadedModel(f"net{k}", net.eval(), unstride.Preprocess(None, None), "segmentation")
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    tuned = unstride.tune(pair, data, cost=2.0, progress=False)
    assert tuned.recipe.task == "segmentation" and "net2" in tuned.recipe.networks
    assert tuned.row.metric == "mIoU" and tuned.decision.verdict == "use"
    assert "mIoU" in str(tuned)
    dice = unstride.tune(pair, data, cost=2.0, metric="Dice", progress=False)
    assert dice.row.metric == "Dice" and dice.row.value == dice.row.metrics["Dice"]
    path = tuned.save(tmp_path / "maps.toml")
    rows = unstride.evaluate(pair, data, recipe=path, progress=False)
    assert rows[-1].value > rows[0].value + 0.1


class Twofold(nn.Module):
    """An answer that is right on average over an image and its flip: (B, 3, 16, 16) -> (B, 4)."""

    def __init__(self, error: float = 1.5, maps: bool = False, classes: int = 4) -> None:
        super().__init__()
        self.error, self.maps, self.classes = error, maps, classes
        self.scale, self.idle = nn.Parameter(torch.ones(())), nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.answer(x) + 0 * self.idle(x).mean()

    def answer(self, x):
        side = x[..., :, :4].mean((1, 2, 3)) - x[..., :, -4:].mean((1, 2, 3))  # changes sign in the flip
        if self.maps:
            return (9 + x.mean(1) + self.error * side[:, None, None]) * self.scale
        middle = x[:, :, 4:8].mean((2, 3)) + x[:, :, 8:12].mean((2, 3))
        values = torch.cat([middle, middle.mean(1, keepdim=True)], 1)[:, : self.classes]
        return (values + self.error * side[:, None]) * self.scale


def labelled(task: str, count: int):
    x = torch.randn(count, 3, 16, 16, generator=made_pools.seeded(5))
    clean = (Twofold()(x) + Twofold()(x.flip(-1))) / 2
    labels = {
        "multilabel": (clean > 0).float(),
        "regression": clean.detach(),
        "dense": 9 + (x + x.flip(-1)).mean(1) / 2,
        "embedding": torch.arange(count) % 4,
    }
    if task == "embedding":
        x = 0.3 * x + labels["embedding"][:, None, None, None] * torch.tensor([1.0, -0.5, 0.2])[None, :, None, None]
    return x, labels[task]


@pytest.mark.parametrize(("task", "metric"), [("multilabel", "mAP"), ("regression", "RMSE"), ("dense", "RMSE")])
def test_a_flip_that_cancels_the_error_is_found(task, metric):
    x, y = labelled(task, 150 if task == "multilabel" else 50)
    data = DataLoader(TensorDataset(x, y), batch_size=20)
    tuned = unstride.tune(Twofold(maps=task == "dense"), data, task=task, cost=2.0, progress=False)
    assert any("flip" in str(v) for stage in tuned.recipe.stages for v in stage.views)
    assert tuned.decision.verdict == "use" and tuned.row.metric == metric and tuned.cost.estimate <= 2.0
    base = tuned.rows[0].value
    assert tuned.row.value < base if metric == "RMSE" else tuned.row.value > base
    if metric == "RMSE":
        assert "RMSE (95 % CI" in str(tuned.decision)


def test_embeddings_are_averaged_without_gates():
    x, y = labelled("embedding", 60)
    data = DataLoader(TensorDataset(x, y), batch_size=20)
    tuned = unstride.tune(Twofold(), data, task="embedding", cost=3.0, progress=False)
    assert all(stage.gate is None for stage in tuned.recipe.stages)
    assert tuned.row.metric == "recall@1" and np.isfinite(tuned.row.value)
