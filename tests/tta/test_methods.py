"""Merges against the plainest possible code: one loop per number."""

import math

import pytest
import torch

from unstride.errors import InputError, OptionError
from unstride.tta import GPS, AugTTA, ClassTTA, MaxTTA, MeanTTA, merge
from unstride.tta.methods import METHODS, Merger, get, gps_shanmugam, select_gps


def logits(views: int = 4, images: int = 30, classes: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(views, images, classes, generator=torch.Generator().manual_seed(seed)) * 2


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def brute(x: torch.Tensor, method, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[1:])
    for n in range(x.shape[1]):
        rows = [x[v, n].tolist() for v in range(len(x))]
        if method.space == "probabilities":
            rows = [softmax(row) for row in rows]
        for k in range(x.shape[2]):
            column = [row[k] for row in rows]
            w = (weights if weights.ndim == 1 else weights[:, k]).tolist()
            value = max(column) if isinstance(method, MaxTTA) else sum(a * b for a, b in zip(w, column, strict=True))
            out[n, k] = math.log(value) if method.space == "probabilities" else value
    return out


UNIFORM = torch.full((4,), 0.25)
PER_VIEW = torch.tensor([0.5, 0.0, 0.2, 0.3])
PER_CLASS = torch.softmax(torch.randn(4, 5, generator=torch.Generator().manual_seed(9)), 0)


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (MeanTTA(), UNIFORM),
        (MeanTTA("probabilities"), UNIFORM),
        (MaxTTA(), UNIFORM),
        (GPS(), PER_VIEW),
        (gps_shanmugam(), PER_VIEW),
        (AugTTA(), PER_VIEW),
        (ClassTTA(), PER_CLASS),
        (ClassTTA("probabilities"), PER_CLASS),
    ],
    ids=str,
)
def test_merges_are_their_definitions(method, weights) -> None:
    x = logits()
    assert torch.allclose(merge(x, method, weights), brute(x, method, weights), atol=1e-5)


def test_names_and_spaces() -> None:
    assert {name: (get(name).name, get(name).space) for name in METHODS} == {
        "mean": ("mean", "logits"),
        "max": ("max", "logits"),
        "gps": ("gps", "probabilities"),
        "gps-shanmugam": ("gps-shanmugam", "logits"),
        "augtta": ("augtta", "logits"),
        "classtta": ("classtta", "logits"),
    }


def test_valid_regions_leave_views_out() -> None:
    a, b = torch.zeros(1, 2, 1, 3), torch.ones(1, 2, 1, 3)
    seen = torch.tensor([True, False, False]).reshape(1, 1, 1, 3)
    other = torch.tensor([True, True, False]).reshape(1, 1, 1, 3)
    for order in ((0, 1), (1, 0)):
        merger = Merger(MeanTTA(), 2)
        for i in order:
            merger.add(i, (a, b)[i], (seen, other)[i])
        # both see the first place, one the second, none the third: there the plain mean is better than nothing
        assert merger.result()[0, 0, 0].tolist() == [0.5, 1.0, 0.5]
    merger = Merger(MaxTTA(), 2)
    merger.add(0, a)
    merger.add(1, b, seen)
    assert merger.result()[0, 0, 0].tolist() == [1.0, 0.0, 0.0]
    merger = Merger(MaxTTA(), 1)
    merger.add(0, b, seen)
    assert merger.result()[0, 0, 0].tolist() == [1.0, 1.0, 1.0]


def test_half_precision_is_merged_in_single_and_given_back() -> None:
    x = logits().half()
    assert merge(x, "mean").dtype == torch.half
    assert torch.equal(merge(x, "mean"), merge(x.float(), "mean").half())


def calibrated(p: torch.Tensor, labels: torch.Tensor) -> float:
    """The best mean loss over temperatures, by trying very many."""
    inverse = torch.logspace(-2, 2, 4001, dtype=torch.float64)
    logp = p.double().log()
    loss = -(inverse[:, None, None] * logp).log_softmax(-1)[:, range(len(labels)), labels].mean(1)
    return float(loss.min())


def greedy(
    x: torch.Tensor, labels: torch.Tensor, length: int, replacement: bool, loss
) -> tuple[list[int], list[float]]:
    p = x.double().softmax(-1)
    taken: list[int] = []
    losses: list[float] = []
    for _ in range(length):
        tried = {v: loss(p[[*taken, v]].mean(0), labels) for v in range(len(x)) if replacement or v not in taken}
        best = min(tried, key=lambda v: tried[v])
        taken.append(best)
        losses.append(tried[best])
    return taken, losses


def labelled(seed: int, views: int = 5, images: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (images,), generator=generator)
    x = torch.randn(views, images, 4, generator=generator) * torch.linspace(0.5, 3, views)[:, None, None]
    x += 1.5 * torch.nn.functional.one_hot(labels, 4) * torch.rand(views, 1, 1, generator=generator) * 2
    return x, labels


@pytest.mark.parametrize("seed", range(3))
def test_gps_takes_what_trying_everything_takes(seed: int) -> None:
    x, labels = labelled(seed)
    taken, losses = select_gps([(x[:, :25], labels[:25]), (x[:, 25:], labels[25:])], GPS(), 4)
    wanted, best = greedy(x, labels, 4, True, calibrated)
    assert taken == wanted
    assert losses == pytest.approx(best, abs=1e-4)


def test_gps_with_replacement_can_take_a_view_twice() -> None:
    x, labels = labelled(1)
    x[0] = 6 * torch.nn.functional.one_hot(labels, 4)
    x[0, :5] = 0
    assert select_gps([(x, labels)], GPS(), 3)[0].count(0) == 2


@pytest.mark.parametrize("seed", range(3))
def test_shanmugams_gps_takes_three_different_views_at_one_temperature(seed: int) -> None:
    x, labels = labelled(seed)
    inverse = torch.logspace(-2, 2, 4001).tolist()
    t = min(inverse, key=lambda b: float(torch.nn.functional.cross_entropy(x[0] * b, labels)))
    wanted, best = greedy(x * t, labels, 3, False, lambda p, y: float(-p[range(len(y)), y].log().mean()))
    taken, losses = select_gps([(x, labels)], gps_shanmugam(), 3)
    assert taken == wanted
    assert len(set(taken)) == 3
    assert losses == pytest.approx(best, abs=1e-3)


def test_bad_merges() -> None:
    with pytest.raises(OptionError, match="unknown TTA method 'median'"):
        merge(logits(), "median")
    with pytest.raises(OptionError, match="has no weights yet"):
        merge(logits(), "augtta")
    with pytest.raises(InputError, match="3 weights for 4 views"):
        merge(logits(), AugTTA(), torch.ones(3))
    with pytest.raises(InputError, match=r"\(V, N, K\)"):
        merge(torch.rand(3, 4), "mean")
    with pytest.raises(OptionError, match="space"):
        MeanTTA("odds")
    with pytest.raises(InputError, match="no view"):
        Merger(MeanTTA(), 2).result()
