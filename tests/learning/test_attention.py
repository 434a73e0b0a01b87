"""The learned aggregation on a network: against the paper in plain PyTorch, and whatever keeps or computes the maps."""

import pytest
import torch
from reference.paper import Learned, Net, Paper
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unstride
from unstride.execution.runner import executors_for
from unstride.learning import attention as learning
from unstride.learning.fitting import Fitted
from unstride.method.attention import Attention
from unstride.method.training import SCHEDULES, Schedule

FAST = Schedule("fast", lr=5e-2, epochs=3, budget=8, batch_size=16)
OPTIONS = {"schedule": FAST, "progress": False}


def reference(net: nn.Module, fitted: Fitted, budget: int, **switches: str) -> Paper:
    """The paper with the fitted numbers. The net has three layers, so all are searched."""
    a = fitted.better.attention
    learned = Learned(a.query.weight[0], a.key.weight[0], a.out, a.query.bias[0], a.key.bias[0])
    plain = Net(net, [["0"], ["2"], ["3"]], "5", net[5:])
    return Paper(plain, (1, 2, 3), budget, "learned", "learned", learned=learned, **switches)


def pixels(batches) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


@pytest.mark.parametrize(
    ("switches", "changes"), [({}, {}), ({"down": "nearest"}, {"align": "nearest"})], ids=["printed", "nearest"]
)
@torch.no_grad()
def test_validation_is_the_papers_procedure(net, train, held, switches, changes) -> None:
    """Search by the learned criterion, aggregate, classify: the kept epoch's figures by the independent reference."""
    with torch.enable_grad():
        fitted = unstride.fit(net, train, validation=held, **OPTIONS, **changes)
    x, y = pixels(held)
    paper = reference(net, fitted, FAST.budget, **switches)
    logits = torch.cat([paper.run(image[None]).y for image in x])
    assert fitted.report.fitted == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert fitted.report.fitted_nll == pytest.approx(float(cross_entropy(logits, y)), abs=1e-4)
    assert fitted.report.base == pytest.approx(float((net(x).argmax(1) == y).float().mean()))
    torch.testing.assert_close(fitted.better.replace(budget=FAST.budget)(x), logits, atol=1e-4, rtol=1e-4)


def test_epoch_0_is_the_mean_of_the_states_and_is_never_kept(net, train, held) -> None:
    fitted = unstride.fit(net, train, validation=held, **OPTIONS)
    x, y = pixels(held)
    mean = unstride.enhance(net, recipe="paper-learned", task="classification", budget=FAST.budget)
    mean.attention = Attention(12)
    logits = mean(x)
    start = fitted.epochs[0]
    assert (start.loss, start.moved) == (None, 0.0)
    assert start.nll == pytest.approx(float(cross_entropy(logits, y)), abs=1e-4)
    assert fitted.report.mean == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert fitted.report.kept in (1, 2, 3)
    assert fitted.better.attention.out.abs().max() > 0


def test_training_lowers_the_loss(net, train, held) -> None:
    fitted = unstride.fit(net, train, validation=held, schedule=FAST, epochs=8, progress=False)
    losses = [e.loss for e in fitted.epochs[1:]]
    assert losses[-1] < losses[0]
    assert fitted.report.moved


def test_the_papers_schedule_is_the_default_and_says_where_it_does_nothing(net, train, held) -> None:
    with pytest.warns(unstride.errors.UnstrideWarning, match="did not move the attention"):
        fitted = unstride.fit(net, train, validation=held, epochs=1, budget=3, progress=False)
    assert not fitted.report.moved
    assert fitted.report.schedule == "paper"
    assert fitted.report.warning in str(fitted)
    assert "lr 1e-06" in str(fitted)
    assert SCHEDULES["paper"].budget == 30


def test_maps_that_are_kept_and_maps_that_are_computed_anew_teach_the_same(net, train, held, monkeypatch) -> None:
    kept = unstride.fit(net, train, validation=held, **OPTIONS)
    monkeypatch.setattr(learning, "MAP_BYTES", 1000)
    live = unstride.fit(net, train, validation=held, **OPTIONS)
    assert [e.nll for e in kept.epochs] == pytest.approx([e.nll for e in live.epochs], abs=1e-3)
    x = held[0][0]  # the bias of the keys has no effect, so its rounding errors are what AdamW learns there
    torch.testing.assert_close(live.better(x), kept.better(x), atol=1e-3, rtol=1e-3)


def test_what_was_learned_runs_at_any_budget(net, train, held) -> None:
    fitted = unstride.fit(net, train, validation=held, **OPTIONS)
    x = held[0][0]
    for budget in (2, 5, 20):
        prediction = fitted.better.replace(budget=budget).explain(x[:1])[0]
        assert len(prediction.passes) == budget
    assert fitted.recipe.name == "paper-learned"


def test_the_network_is_left_as_it_was(net, train, held) -> None:
    before = {k: v.clone() for k, v in net.state_dict().items()}
    wanted = [p.requires_grad for p in net.parameters()]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    fitted = unstride.fit(net, train, validation=held, **OPTIONS)
    assert torch.equal(torch.rand(1), expected)  # the global random state, too
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == wanted
    assert not any(module._forward_hooks for module in net.modules())
    assert not any(p.requires_grad for p in fitted.better.attention.parameters())


def test_a_network_without_a_grid_is_learned_on_its_logits(train, held) -> None:
    """As the paper does for ViT: vectors are aggregated where no map lies on the image."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 3)).eval()
    fitted = unstride.fit(model, train, validation=held, space="logits", **OPTIONS)
    assert fitted.better.attention.channels == 3
    recipe = fitted.recipe
    assert recipe.search.state_space == "logits"
    assert executors_for(recipe, fitted.better.networks)[0].space(held[0][0]).rates == ((4, 4),)
