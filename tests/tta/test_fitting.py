"""Fitting: it learns what there is to learn, reports what happened, and goes on where it was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from unstride.errors import DataError, OptionError
from unstride.recipe.view import parse_view
from unstride.tta import TTA, Policy, cache, fitting
from unstride.tta.fitting import normalise

LEARNED = ["gps", "gps-shanmugam", "augtta", "classtta"]


class Bright(nn.Module):
    """Classifies by which third of the image is brightest, unsure where it is dark: hurt by FlipLR, not by FlipUD."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(40.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += len(x)
        return torch.stack([part.mean((1, 2, 3)) for part in x.split(8, dim=-1)], 1) * self.scale


def data(n: int, seed: int, batch: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=generator)
    x = torch.rand(n, 3, 24, 24, generator=generator) * 0.5
    x += torch.nn.functional.one_hot(labels, 3).repeat_interleave(8, 1)[:, None, None] * 0.02
    return [(x[i : i + batch], labels[i : i + batch]) for i in range(0, n, batch)]


MINE = Policy("mine", tuple(parse_view(t) for t in ("Identity", "FlipLR", "FlipUD", "Contrast=0.1", "Rotate=90")))


@pytest.mark.parametrize("method", LEARNED)
def test_views_that_hurt_lose_their_weight(method: str) -> None:
    net = TTA(Bright(), MINE, method, 5)
    report = net.fit(data(120, 0), data(80, 1), epochs=40, lr=0.05, progress=False)
    assert net.weights is not None
    assert (net.weights >= 0).all()
    assert torch.allclose(net.weights.sum(0), torch.ones(()), atol=1e-5)
    assert report.val >= report.mean
    if method != "gps-shanmugam":  # which must take three of the five
        hurt = net.weights.reshape(5, -1)[[1, 4]].mean()
        assert hurt < 0.1  # where uniform is 0.2
    assert net(data(20, 2)[0][0]).shape == (20, 3)


@pytest.mark.parametrize("method", LEARNED)
def test_a_fit_is_a_function_of_data_and_seed(method: str) -> None:
    runs = []
    for state in (1, 2):
        torch.manual_seed(state)
        net = TTA(Bright(), MINE, method, 5)
        report = net.fit(data(60, 0), epochs=3, seed=7, progress=False)
        runs.append((net.weights.tolist(), json.dumps(report.to_dict())))
    assert runs[0] == runs[1]


def test_the_report_counts_what_happened() -> None:
    net = TTA(Bright(), MINE, "augtta", 5)
    train, val = data(60, 0), data(40, 1)
    report = net.fit(train, val, epochs=4, progress=False)
    assert (report.images, report.val_images, report.budget) == (60, 40, 5)
    assert (report.computed, report.cached) == (5 * (3 + 2), 0)
    assert [row.epoch for row in report.epochs] == [0, 1, 2, 3, 4]
    assert report.val == max(row.val for row in report.epochs) == report.epochs[report.best_epoch].val
    assert [row.budget for row in report.by_budget] == [1, 5]
    x, y = (torch.cat(part) for part in zip(*val, strict=True))
    ours, plain = net(x).argmax(1) == y, net.model(x).argmax(1) == y
    assert report.val == pytest.approx(float(ours.float().mean()))
    assert report.plain == pytest.approx(float(plain.float().mean()))
    assert (report.corrected, report.corrupted) == (int((ours & ~plain).sum()), int((plain & ~ours).sum()))
    assert sum(row.images for row in report.by_class) == 40
    for row in report.by_class:
        assert row.val == pytest.approx(float(ours[y == row.label].float().mean()))
    assert report.advice in ("on", "off", "mean")
    assert "corrected" in str(report)


def test_without_validation_one_image_in_five_is_held_out() -> None:
    report = TTA(Bright(), MINE, "augtta", 2).fit(data(50, 0), epochs=1, progress=False)
    assert (report.images, report.val_images) == (40, 10)


def test_overfitting_of_classtta_is_visible() -> None:
    """Few images, many noisy views: training accuracy of the last epoch runs away from validation, and it shows."""
    torch.manual_seed(0)
    views, n, classes = 60, 24, 12

    def rows(seed: int) -> cache.Rows:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(n) % classes
        logits = torch.randn(views, n, classes, generator=generator) * 3
        logits[:1] += 4 * torch.nn.functional.one_hot(labels, classes)
        store = cache.LogitCache(None, "")
        keys = [str(v) for v in range(views)]
        return cache.Rows([cache.Block(labels, keys, {}, dict(zip(keys, logits, strict=True)), store)], [None], views)

    run = fitting.fit(fitting.ClassTTA(), rows(0), rows(1), 200, 1.0, 0, lambda note: None)
    last = run.epochs[-1]
    assert last.train > last.val + 0.2


def test_weights_are_normalised_even_from_nothing() -> None:
    assert normalise(torch.tensor([-1.0, 1.0, 3.0])).tolist() == [0.0, 0.25, 0.75]
    assert normalise(torch.tensor([[0.0, 1.0], [-2.0, 1.0]])).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_the_cache_is_used_by_other_methods_and_budgets(tmp_path) -> None:
    model, train = Bright(), data(60, 0)
    TTA(model, MINE, "augtta", 3).fit(train, cache_dir=tmp_path, epochs=1, progress=False)
    assert model.calls == 60 * 3
    report = TTA(model, MINE, "gps", 5).fit(train, cache_dir=tmp_path, epochs=1, progress=False)
    assert model.calls == 60 * 5
    assert (report.computed, report.cached) == (6, 9)
    cached = TTA(model, MINE, "classtta", 5)
    cached.fit(train, cache_dir=tmp_path, epochs=3, progress=False)
    assert model.calls == 60 * 5
    fresh = TTA(model, MINE, "classtta", 5)
    fresh.fit(train, epochs=3, progress=False)
    assert torch.equal(fresh.weights, cached.weights)


@pytest.mark.parametrize("change", ["weights", "data", "labels", "mean", "structure", "signature"])
def test_the_cache_is_not_used_for_anything_else(tmp_path, change: str) -> None:
    model, train = Bright(), data(20, 0)
    TTA(model, MINE, "augtta", 2).fit(train, cache_dir=tmp_path, epochs=1, progress=False)
    options = {}
    if change == "weights":
        model.scale.data += 1e-3
    elif change == "data":
        train = [(x + 1e-6, y) for x, y in train]
    elif change == "labels":
        train = [(x, y.flip(0)) for x, y in train]
    elif change == "mean":
        options = {"mean": (0.1,) * 3, "std": (1.0,) * 3}
    elif change == "structure":
        model.extra = nn.ReLU()
    else:
        model.signature = "budget=3"
    report = TTA(model, MINE, "augtta", 2, **options).fit(train, cache_dir=tmp_path, epochs=1, progress=False)
    assert (report.computed, report.cached) == (2, 0)


def test_a_damaged_shard_is_computed_again(tmp_path) -> None:
    model, train = Bright(), data(60, 0)
    first = TTA(model, MINE, "augtta", 3)
    first.fit(train, cache_dir=tmp_path, epochs=2, progress=False)
    shard = sorted(tmp_path.rglob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-5])
    second = TTA(model, MINE, "augtta", 3)
    report = second.fit(train, cache_dir=tmp_path, epochs=2, progress=False)
    assert (report.computed, report.cached) == (3, 6)
    assert torch.equal(first.weights, second.weights)


def test_blocks_beyond_the_memory_bound_are_read_from_disk(tmp_path, monkeypatch) -> None:
    model, train = Bright(), data(60, 0)
    kept = TTA(model, MINE, "augtta", 5)
    kept.fit(train, cache_dir=tmp_path, epochs=3, progress=False)
    monkeypatch.setattr(cache, "MEMORY_BYTES", 0)
    read = TTA(model, MINE, "augtta", 5)
    read.fit(train, cache_dir=tmp_path, epochs=3, progress=False)
    assert torch.equal(kept.weights, read.weights)


SLOW_FIT = """
import sys, time, torch
sys.path.insert(0, {here!r})
import unstride.tta.cache as cache
cache.FLUSH_SECONDS = 0.0
from test_fitting import MINE, Bright, data
from unstride.tta import TTA
class Slow(Bright):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)
Slow.__name__ = "Bright"
TTA(Slow(), MINE, "augtta", 5).fit(data(400, 0), cache_dir={folder!r}, epochs=1, progress=False)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_fit_goes_on_where_it_was(tmp_path) -> None:
    code = SLOW_FIT.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while len(list(tmp_path.rglob("*.safetensors"))) < 7:
        assert process.poll() is None, "the fit ended before it could be killed"
        assert time.monotonic() < deadline, "no shard was written"
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = len(list(tmp_path.rglob("*.safetensors")))
    assert 7 <= done < 100
    model = Bright()
    resumed = TTA(model, MINE, "augtta", 5)
    report = resumed.fit(data(400, 0), cache_dir=tmp_path, epochs=1, progress=False)
    assert report.cached >= done
    assert model.calls == 20 * report.computed == 20 * (100 - report.cached)
    fresh = TTA(Bright(), MINE, "augtta", 5)
    fresh.fit(data(400, 0), epochs=1, progress=False)
    assert torch.equal(resumed.weights, fresh.weights)


def test_progress_is_plain_lines_without_a_terminal(capsys) -> None:
    TTA(Bright(), MINE, "augtta", 2).fit(data(40, 0), epochs=2)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("training views: 4/4") for line in lines)
    assert any(line.startswith("fitting augtta: 6/6") and "validation" in line for line in lines)


def test_a_fitted_tta_is_saved_whole(tmp_path) -> None:
    model = Bright()
    net = TTA(model, MINE, "classtta", 4)
    net.fit(data(60, 0), epochs=2, progress=False)
    again = TTA.load(net.save(tmp_path / "t.safetensors"), model)
    x = data(20, 3)[0][0]
    assert torch.equal(again(x), net(x))


def test_bad_fits() -> None:
    with pytest.raises(OptionError, match="nothing to fit"):
        TTA(Bright(), MINE, "mean", 2).fit(data(20, 0))
    net = TTA(Bright(), MINE, "augtta", 2)
    for options in ({"epochs": 0}, {"lr": 0.0}, {"lr": float("nan")}):
        with pytest.raises(OptionError, match="epochs must be"):
            net.fit(data(20, 0), **options)
    with pytest.raises(DataError, match="no batch"):
        net.fit([], progress=False)
    with pytest.raises(DataError, match="images, labels"):
        net.fit([torch.rand(2, 3, 24, 24)], progress=False)
    with pytest.raises(DataError, match="whole numbers"):
        net.fit([(torch.rand(2, 3, 24, 24), torch.rand(2))], progress=False)
    with pytest.raises(DataError, match="not enough"):
        net.fit(data(1, 0), progress=False)
    with pytest.raises(DataError, match="label"):
        net.fit([(torch.rand(4, 3, 24, 24), torch.tensor([0, 1, 2, 3]))], progress=False)
