"""What is not finite stays not finite, and what is finite does not become NaN because of it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from procedure_nets import SmallNet, SmallSegmenter, seeded
from torch import Tensor, nn

import unstride
from unstride.method.aggregate import entropy_weight
from unstride.tasks.tasks import agreement, entropy, top_class

BAD = [math.nan, math.inf, -math.inf]
WAYS: list[Any] = ["auto", "frozen", pytest.param("compile", marks=pytest.mark.slow)]


class Blocks(nn.Module):
    """Convolutions, sums and one kind of activation, as they are packed together; the first layer thins out 2 x 2."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1, groups=16)
        self.a, self.norm, self.b = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, 1, 1)
        self.head, self.act = nn.Linear(16, 5), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.wide(self.act(self.stem(x))))
        x = self.act(self.b(self.act(self.norm(self.a(x)))) + x)
        return self.head(x.mean((2, 3)))


class Maps(SmallSegmenter):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)["out"]


def images(bad: float) -> Tensor:
    """Three images, the middle one with a bad pixel."""
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x[1, :, 9, 9] = bad
    return x


def blocks(act: Callable[[Tensor], Tensor]) -> Blocks:
    torch.manual_seed(0)
    return Blocks(act).eval()


def refined(model: nn.Module, x: Tensor, budget: int = 4, **options: Any) -> unstride.Enhanced:
    return unstride.enhance(model, x[:1], recipe="paper-refined", task="classification", budget=budget, **options)


ACTS = [F.relu, F.relu6, F.silu, F.hardswish, F.gelu]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", ACTS, ids=lambda f: f.__name__)
def test_a_bad_pixel_is_seen_in_the_answer(act: Callable[[Tensor], Tensor], way: Any, bad: float) -> None:
    model, x = blocks(act), images(bad)
    better = refined(model, x, execution=way)
    with torch.no_grad():
        plain = model(x).isfinite()
    for budget in (1, 2, 4):
        got = better.replace(budget=budget)(x)
        assert torch.equal(got.isfinite(), plain), budget
        alone = better.replace(budget=budget)(x[[0, 2]])
        torch.testing.assert_close(got[[0, 2]], alone, atol=1e-5, rtol=1e-4)
    assert plain[[0, 2]].all()
    if math.isnan(bad):
        assert not plain[1].any()


@pytest.mark.parametrize("way", ["auto", "frozen"])
def test_statistics_and_weights_that_are_not_numbers(way: str) -> None:
    model, x = blocks(F.relu), images(0.0)
    better = refined(model, x, execution=way)
    model.norm.running_mean[3] = math.nan  # type: ignore[index]
    better.refresh()  # which live weights do not need
    assert not better(x).isfinite().any()
    assert not refined(model, x, execution=way)(x).isfinite().any()


@pytest.mark.parametrize("way", ["auto", "frozen"])
def test_a_network_that_overflows_inside(way: str) -> None:
    """Infinities of both signs meet in a sum, just before an activation that knows no NaN in the same pass."""
    model = blocks(F.relu)
    with torch.no_grad():
        model.a.weight.mul_(1e30)
        model.b.weight.mul_(1e30)
    x = images(0.0)
    with torch.no_grad():
        assert not model(x).isfinite().any()
    better = refined(model, x, execution=way)
    assert not better(x).isfinite().any()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("act", [F.relu6, nn.Identity()], ids=["relu6", "none"])
def test_zero_taps_make_no_nan_of_what_they_do_not_read(act: Any, bad: float) -> None:
    """A large map whose strided depthwise convolution moves its taps: as if its rows were copied."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.wide = nn.Conv2d(3, 64, 1, 2), nn.Conv2d(64, 64, 3, 2, 1, groups=64)
            self.last, self.act = nn.Conv2d(64, 4, 1), act

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.last(self.act(self.wide(self.stem(x)))), scale_factor=4)

    torch.manual_seed(0)
    model, x = Large().eval(), torch.randn(1, 3, 160, 160)
    x[0, :, 40, 40] = bad
    states = [[0, 0], [0, 1], [0, 3], [1, 2]]
    for s in states:
        recipe = unstride.Recipe((unstride.Stage(states=[s]),), "segmentation")
        packed, literal = (unstride.enhance(model, x, recipe=recipe, execution=way)(x) for way in ("frozen", "auto"))
        assert torch.equal(packed.isfinite(), literal.isfinite())
        good = literal.isfinite()
        torch.testing.assert_close(packed[good], literal[good], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("options", [{}, {"aggregate": "mean"}, {"aggregate": "max"}, {"align": "stitch"}], ids=str)
@pytest.mark.parametrize("way", ["auto", "frozen"])
def test_a_bad_pixel_in_a_map_stays_where_it_is(way: str, options: dict[str, Any], bad: float) -> None:
    model, x = seeded(Maps()), torch.randn(2, 3, 64, 64)
    x[0, :, 20, 20] = bad
    better = unstride.enhance(model, x[1:], task="segmentation", recipe="paper", budget=5, execution=way, **options)
    with torch.no_grad():
        plain = model(x).isfinite()
    got = better(x).isfinite()
    assert not got[0][~plain[0]].any()
    assert got[1].all()
    assert got[0].float().mean() > 0.25


@pytest.mark.parametrize("recipe", ["default", "flip"])
@pytest.mark.parametrize("bad", BAD)
def test_views_keep_what_is_not_finite(recipe: str, bad: float) -> None:
    model, x = blocks(F.relu), images(bad)
    got = unstride.enhance(model, recipe=recipe)(x)
    assert not got[1].isfinite().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    "until", [None, unstride.Gate("agreement", below=0.0), unstride.Gate("probability", below=0.0)]
)
def test_what_is_said_of_it_is_not_finite_either(until: unstride.Gate | None) -> None:
    model, x = blocks(F.relu), images(math.nan)
    good, bad = refined(model, x, 6, until=until).explain(x)[:2]
    assert math.isfinite(good.agreement) and good.spread.isfinite().all() and good.problem is None
    assert math.isnan(bad.agreement) and bad.spread.isnan().all()
    assert all(math.isnan(p.weight) for p in bad.passes)
    assert bad.stopped == "budget" and "not finite" in str(bad.problem)  # no rule may call it certain
    repr(bad)


def test_a_class_that_is_ruled_out_rules_out_nothing_else() -> None:
    """-inf is a usual way to say that a class cannot be."""

    class Ruled(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), x.new_full((len(x), 1), -math.inf)], 1)

    model, x = seeded(Ruled()), torch.randn(2, 3, 64, 64)
    got = refined(model, x, 5)(x)
    assert got[:, :-1].isfinite().all() and (got[:, -1] == -math.inf).all()


def test_measures_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf], [1.0, math.nan, 0.0], [2.0, 1.0, 0.0], [math.inf, 0.0, 0.0]])
    assert entropy(logits)[0] == pytest.approx(math.log(2) / math.log(3))
    assert entropy(logits)[[1, 3]].isnan().all()
    assert top_class(logits).tolist() == [0, -1, 0, 0]
    assert agreement(torch.tensor([0, 1, -1, 0]), torch.tensor([0, 0, 0, -1])).tolist()[:2] == [1.0, 0.0]
    assert agreement(torch.tensor([-1, 0]), torch.tensor([-1, -1])).isnan().all()


@pytest.mark.parametrize("level", [0.0, 3.0, -7.0])
def test_a_network_that_knows_nothing_is_not_blown_up(level: float) -> None:
    """All classes alike at every pixel: every weight is 0 up to rounding, some below."""
    model, x = seeded(Maps()), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        model.cls.weight.zero_()  # type: ignore[union-attr]
        model.cls.bias.fill_(level)  # type: ignore[union-attr]
    for options in ({"budget": 5}, {"budget": 5, "align": "stitch"}):
        got = unstride.enhance(model, x, task="segmentation", recipe="paper-refined", **options)(x)  # type: ignore[arg-type]
        torch.testing.assert_close(got, torch.full_like(got, level), atol=1e-4, rtol=1e-4)
    assert (entropy_weight(torch.full((1, 7, 2), level)) > 0).all()
