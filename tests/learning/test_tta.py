"""Learned TTA: weights that are learned, and recipes that do with them what the methods say."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import unstride
from unstride.errors import OptionError
from unstride.learning import tta
from unstride.learning.tta import combined, fit_views, normalised, views_of
from unstride.recipe.policies import expanded, standard
from unstride.recipe.view import View

POLICY = 'views = ["plain", "flip", "FlipUD", "Rotate=90"]\n'


class Bright(nn.Module):
    """Classifies by which third of the image is brightest: hurt by a horizontal flip and by Rotate=90."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(40.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part.mean((1, 2, 3)) for part in x.split(8, dim=-1)], 1) * self.scale


def data(n: int, seed: int, batch: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=generator)
    x = torch.rand(n, 3, 24, 24, generator=generator) * 0.5
    x += one_hot(labels, 3).repeat_interleave(8, 1)[:, None, None] * 0.02
    return [(x[i : i + batch], labels[i : i + batch]) for i in range(0, n, batch)]


@pytest.fixture(scope="module")
def model() -> unstride.Enhanced:
    preprocess = unstride.Preprocess(None, None, mean=(0.0,) * 3, std=(1.0,) * 3)
    return unstride.enhance(Bright().eval(), recipe="plain", task="classification", preprocess=preprocess)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("policy") / "mine.toml"
    path.write_text(POLICY)
    return str(path)


def logits_of(model: unstride.Enhanced, views: tuple[View, ...], x: Tensor) -> Tensor:
    """(V, N, K), view by view, without a recipe of several."""
    return torch.stack([model.replace(unstride.Recipe((unstride.Stage((view,)),)))(x) for view in views])


@pytest.mark.parametrize("method", ["gps", "gps-shanmugam", "augtta", "classtta"])
def test_views_that_hurt_lose_their_weight(model, policy: str, method: str) -> None:
    fitted = unstride.fit(
        model, data(120, 0), validation=data(80, 1), method=method, policy=policy, epochs=40, progress=False
    )
    report = fitted.report
    assert report.validation_images == 80
    stage = fitted.recipe.stages[0]
    used = list(map(str, stage.views))
    if method == "augtta":
        weights = dict(zip(used, stage.weights, strict=True))
        assert weights["plain"] + weights["FlipUD"] > weights.get("flip", 0) + weights.get("Rotate=90", 0) + 0.2
        assert math.isclose(sum(stage.weights), 1, abs_tol=1e-5)
    if method == "classtta":
        weights = fitted.better.view_weights
        assert weights.shape == (len(used), 3)
        assert weights[used.index("plain")].mean() > weights[used.index("flip")].mean()
        assert torch.allclose(weights.sum(0), torch.ones(3), atol=1e-4)
    if method == "gps":
        assert not {"flip", "Rotate=90"} & set(used)
    if method == "gps-shanmugam":
        assert len(used) == 3 and not stage.weights  # it must take one that hurts
    else:
        assert report.fitted >= report.mean
    assert report.moved


@torch.no_grad()
@pytest.mark.parametrize("method", tta.METHODS)
def test_the_recipe_is_the_method_in_plain_code(model, policy: str, method: str, tmp_path) -> None:
    """The saved file, opened around the same network, against loops over the logits of the views."""
    path = tmp_path / "fitted.toml"
    with torch.enable_grad():
        fitted = unstride.fit(
            model, data(60, 0), validation=data(40, 1), method=method, policy=policy, out=path, progress=False
        )
    x = data(20, 3)[0][0]
    recipe = fitted.recipe
    z = logits_of(model, recipe.stages[0].views, x).double()
    weights = torch.tensor(recipe.stages[0].weights or [1.0] * len(z)).double()
    if method == "classtta":
        weights = fitted.better.view_weights.double()
    expected = torch.zeros_like(z[0])
    for n in range(len(x)):
        for k in range(3):
            w = weights if weights.ndim == 1 else weights[:, k]
            values = z[:, n, k] if method != "gps" else z[:, n].softmax(-1)[:, k]
            value = values.max() if method == "maxtta" else (w / w.sum() * values).sum()
            expected[n, k] = value.log() if method == "gps" else value
    better = unstride.enhance(model.model, recipe=path, preprocess=model.preprocess)
    torch.testing.assert_close(better(x).double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(better(x), fitted.better(x))
    x, y = (torch.cat(part) for part in zip(*data(40, 1), strict=True))
    assert fitted.report.fitted == pytest.approx(float((better(x).argmax(1) == y).float().mean()))
    assert fitted.report.base == pytest.approx(float((model(x).argmax(1) == y).float().mean()))


@torch.no_grad()
@pytest.mark.parametrize("method", ["augtta", "classtta"])
def test_around_a_search(net, train, held, method: str, tmp_path) -> None:
    """B_total = B_tta x B_ours: every view is searched by itself, and its logits are weighted as fitted."""
    path = tmp_path / "fitted.toml"
    with torch.enable_grad():
        fitted = unstride.fit(
            net,
            train,
            validation=held,
            method=method,
            policy="standard:3",
            recipe="paper",
            budget=4,
            out=path,
            progress=False,
        )
    stage = fitted.recipe.stages[0]
    assert (stage.states.budget, stage.aggregate) == (4, "entropy")
    assert 2 <= len(stage.views) <= 3  # a view may have lost all its weight
    x = held[0][0][:5]
    alone = [
        unstride.enhance(net, recipe="paper", task="classification", budget=4, stages=(stage_of(stage, view),))(x)
        for view in stage.views
    ]
    weights = fitted.better.view_weights if method == "classtta" else torch.tensor(stage.weights)[:, None]
    expected = sum(w * z for w, z in zip(weights, alone, strict=True))
    better = unstride.enhance(net, recipe=path)
    torch.testing.assert_close(better(x), expected, atol=1e-5, rtol=1e-5)
    assert all(len(p.passes) == 4 * len(stage.views) for p in better.explain(x[:2]))


def stage_of(stage: unstride.Stage, view: View) -> unstride.Stage:
    return unstride.Stage((view,), stage.states, aggregate=stage.aggregate)


def test_around_a_learned_search(net, train, held, tmp_path) -> None:
    """The attention of a fitted file stays in the recipe that combines the views."""
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    unstride.fit(net, train, validation=held, schedule="fast", epochs=1, budget=4, out=first, progress=False)
    fitted = unstride.fit(
        net, train, validation=held, method="classtta", policy="standard:2", recipe=first, out=second, progress=False
    )
    better = unstride.enhance(net, recipe=second)
    assert better.attention is not None and better.view_weights is not None
    x = held[0][0][:3]
    torch.testing.assert_close(better(x), fitted.better(x))


def test_mean_and_max_need_no_data(net, tmp_path) -> None:
    for method in ("meantta", "maxtta"):
        fitted = unstride.fit(net, method=method, policy="expanded:5", out=tmp_path / f"{method}.toml")
        assert len(fitted.recipe.stages[0].views) == 5
        assert fitted.report.fitted is None
    with pytest.raises(OptionError, match="augtta learns from labelled images"):
        unstride.fit(net, method="augtta")


def test_policies_by_name_and_count(policy: str) -> None:
    assert views_of("standard:30") == standard().first(30)
    assert views_of("expanded:150") == expanded().first(150)
    assert len(views_of("standard")) == 190
    assert len(views_of(policy)) == 4 and len(views_of(f"{policy}:2")) == 2
    with pytest.raises(OptionError, match="above the 190 views"):
        views_of("standard:191")
    with pytest.raises(OptionError, match="unknown policy 'luck'"):
        views_of("luck:3")


def test_logits_are_used_by_other_methods_and_longer_policies(model, tmp_path, monkeypatch) -> None:
    run, views = tta._run, []

    def counted(pipeline, recipe, group, images, rows):
        views.extend(str(view) for view in group for _ in rows)
        return run(pipeline, recipe, group, images, rows)

    monkeypatch.setattr(tta, "_run", counted)
    options = {"validation": data(20, 1), "cache": tmp_path, "epochs": 1, "progress": False}
    unstride.fit(model, data(40, 0), method="augtta", policy="standard:10", **options)
    assert len(views) == 10 * 60 + 20  # and the base model on the validation images
    views.clear()
    unstride.fit(model, data(40, 0), method="classtta", policy="standard:10", **options)
    unstride.fit(model, data(40, 0), method="gps", policy="standard:10", **options)
    assert not views
    unstride.fit(model, data(40, 0), method="augtta", policy="standard:15", **options)
    assert len(views) == 5 * 60
    views.clear()
    changed = [(x + 1e-3, y) for x, y in data(40, 0)]
    unstride.fit(model, changed, method="augtta", policy="standard:10", **options)
    assert len(views) == 10 * 40


@pytest.mark.parametrize("method", ["augtta", "classtta"])
def test_weights_start_at_the_mean_and_the_mean_is_never_kept(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (50,), generator=generator)
    x = torch.randn(3, 50, 4, generator=generator) + one_hot(labels, 4)
    fit = fit_views(method, [(x, labels)], [(x, labels)], epochs=2)
    assert fit.epochs[0].moved < 1e-6 and fit.epochs[0].loss is None
    assert fit.kept in (1, 2)
    expected = torch.nn.functional.cross_entropy(x.mean(0), labels)
    assert fit.epochs[0].nll == pytest.approx(float(expected))


def test_the_descent_is_torchs_own() -> None:
    """AugTTA by hand: SGD with momentum on softmax cross entropy, clamped at 0."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (30,), generator=generator)
    x = torch.randn(3, 30, 4, generator=generator)
    x[0] += 2 * one_hot(labels, 4)
    w = nn.Parameter(torch.full((3,), 1 / 3))
    optimiser = torch.optim.SGD([w], lr=0.01, momentum=0.9, weight_decay=1e-4)
    losses = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(((w / w.sum())[:, None, None] * x).sum(0), labels)
        losses.append(float(loss.detach()))
        loss.backward()
        optimiser.step()
        w.data.clamp_(min=0)
    fit = fit_views("augtta", [(x, labels)], [(x, labels)], epochs=3)
    assert [e.nll for e in fit.epochs] == pytest.approx(losses, abs=1e-5)
    assert [e.loss for e in fit.epochs[1:]] == pytest.approx(losses[:3], abs=1e-5)


def test_overfitting_of_classtta_is_visible() -> None:
    """Few images and many noisy views: the training loss falls while validation gets worse than the mean's."""

    def rows(seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(24) % 12
        logits = torch.randn(60, 24, 12, generator=generator) * 3
        logits[:1] += 4 * one_hot(labels, 12)
        return [(logits, labels)]

    fit = fit_views("classtta", rows(0), rows(1), epochs=300)
    assert fit.epochs[-1].loss < 0.7 * fit.epochs[1].loss
    assert fit.epochs[-1].nll > fit.epochs[0].nll


def test_weights_are_normalised_even_from_nothing() -> None:
    assert normalised(torch.tensor([-1.0, 1.0, 3.0])).tolist() == [0.0, 0.25, 0.75]
    assert normalised(torch.tensor([[0.0, 1.0], [-2.0, 1.0]])).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    z = torch.tensor([[[1.0, 2.0]], [[3.0, 0.0]]])
    assert combined(z, torch.tensor([0.25, 0.75])).tolist() == [[2.5, 0.5]]
    assert combined(z, torch.tensor([0.5, 0.5]), "max").tolist() == [[3.0, 2.0]]


@pytest.mark.parametrize("method", ["classtta", "augtta", "gps", "maxtta"])
def test_a_model_with_one_score_for_two_classes(method: str, policy: str, tmp_path) -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(40.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x[..., 12:].mean((1, 2, 3)) - x[..., :12].mean((1, 2, 3)))[:, None] * self.scale

    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (60,), generator=generator)
    x = torch.rand(60, 3, 24, 24, generator=generator)
    x[..., 12:] += (y * 0.04 - 0.02)[:, None, None, None]
    network = Score().eval()
    better = unstride.enhance(network, recipe="plain", task="classification")
    path = tmp_path / "fitted.toml"
    fitted = unstride.fit(
        better,
        [(x[:40], y[:40])],
        validation=[(x[40:], y[40:])],
        method=method,
        policy=policy,
        out=path,
        progress=False,
    )
    output = unstride.enhance(network, recipe=path)(x[40:])
    assert output.shape == (20, 1)
    assert float(((output[:, 0] > 0) == y[40:].bool()).float().mean()) == pytest.approx(fitted.report.fitted)
