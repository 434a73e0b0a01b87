"""What users hold: one line of code, and what it returns."""

import copy
import itertools
from typing import Any

import pytest
import torch
from captures import split_of
from procedure_nets import SmallNet, seeded
from torch import nn

import unstride
from unstride import Gate, Near, Recipe, Search, Stage
from unstride.errors import CaptureError, InputError, NothingToSubsample, OptionError
from unstride.method.align import Offset, align
from unstride.method.attention import Attention
from unstride.tasks.tasks import entropy


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return seeded(SmallNet())


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def better(net: nn.Module) -> unstride.Enhanced:
    return unstride.enhance(net, recipe="paper-refined", task="classification", budget=10)


def listed(states: Any, **fields: Any) -> Recipe:
    return Recipe((Stage(states=states, space="features", edges="zeros", **fields),))


class Counted(nn.Module):
    """Counts its calls, and remembers the images of each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.sizes = model, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return self.model(x)


# -------------------------------------------------------------------------------------------------- recipes of views


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr("unstride.execution.graph_executor.capture", fail)


@torch.no_grad()
@pytest.mark.usefixtures("no_capture")
def test_a_flip_calls_the_model_twice_and_captures_nothing(net: nn.Module, images: torch.Tensor) -> None:
    model = Counted(net).eval()
    better = unstride.enhance(model, recipe="flip", task="classification")
    torch.testing.assert_close(better(images), (net(images) + net(images.flip(-1))) / 2)
    assert model.sizes == [4, 4]


@torch.no_grad()
@pytest.mark.usefixtures("no_capture")
def test_a_gate_flips_only_uncertain_images(net: nn.Module, images: torch.Tensor) -> None:
    model, plain = Counted(net).eval(), net(images)
    top = plain.softmax(1).topk(2, 1).values
    margin = top[:, 0] - top[:, 1]
    below = float(margin.sort().values[1:3].mean())
    better = unstride.enhance(model, recipe=Recipe((Stage(), Stage(("flip",), gate=Gate(below=below)))))
    expected = plain.where((margin >= below)[:, None], (plain + net(images.flip(-1))) / 2)
    torch.testing.assert_close(better(images), expected)
    assert model.sizes == [4, 2]


@torch.no_grad()
@pytest.mark.usefixtures("no_capture")
def test_a_cascade_replaces_uncertain_answers(net: nn.Module, images: torch.Tensor) -> None:
    large = Counted(seeded(SmallNet(), seed=1)).eval()
    stages = (Stage(), Stage(network="large", gate=Gate(below=1.0), join="replace"))
    better = unstride.enhance({"base": net, "large": large}, recipe=Recipe(stages))
    torch.testing.assert_close(better(images), large.model(images))
    assert large.sizes == [4] and better.run(images).costs == pytest.approx([2.0] * 4)


@torch.no_grad()
@pytest.mark.usefixtures("no_capture")
def test_the_plain_recipe_is_the_model_bit_for_bit(net: nn.Module, images: torch.Tensor) -> None:
    assert torch.equal(unstride.enhance(net, recipe="plain")(images), net(images))


# -------------------------------------------------------------------------------------------------- recipes of states


@torch.no_grad()
def test_budget_one_is_the_model(net: nn.Module, images: torch.Tensor, better: unstride.Enhanced) -> None:
    torch.testing.assert_close(better.replace(budget=1)(images), net(images), atol=1e-5, rtol=1e-5)
    base = torch.stack([p.base for p in better.explain(images)])
    torch.testing.assert_close(base, net(images), atol=1e-5, rtol=1e-5)


def test_an_images_answer_does_not_depend_on_its_batch(images: torch.Tensor, better: unstride.Enhanced) -> None:
    together = better(images)
    alone = torch.cat([better(images[i : i + 1]) for i in range(len(images))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together, better.replace(budget=1)(images), atol=1e-3)


def test_rewrites_do_not_change_the_answer(net: nn.Module, images: torch.Tensor, better: unstride.Enhanced) -> None:
    fast = unstride.enhance(net, recipe=better.recipe, execution="frozen")
    torch.testing.assert_close(fast(images), better(images), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_answer_is_the_formula(images: torch.Tensor, net: nn.Module) -> None:
    """Entropy-weighted sum of aligned features over the visited states, through the model's own head."""
    better = unstride.enhance(net, recipe="paper-refined", task="classification", budget=7, border="zeros")
    split = split_of(better, images)
    prediction = better.explain(images[:1])[0]
    states = [p.state for p in prediction.passes]
    (features,) = split.engine.start(images[:1]).add([(0, s) for s in states])
    weights = 1 - entropy(net.head(features.mean((2, 3))))
    space = split.found.space
    aligned = [align(f, Offset.of(space.displacement(s), (16, 16))) for f, s in zip(features, states, strict=True)]
    total = sum(w * f for w, f in zip(weights, aligned, strict=True)) / weights.sum()
    torch.testing.assert_close(prediction.output, net.head(total.mean((1, 2))), atol=1e-5, rtol=1e-5)
    shares = torch.tensor([p.weight for p in prediction.passes])
    torch.testing.assert_close(shares, weights / weights.sum(), atol=1e-5, rtol=1e-4)


def test_one_search_serves_every_budget(images: torch.Tensor, better: unstride.Enhanced) -> None:
    for budget, (output, costs) in better.curve(images, [1, 4, 10]).items():
        single = better.replace(budget=budget)
        torch.testing.assert_close(output, single(images), atol=1e-5, rtol=1e-5)
        assert costs == [pytest.approx(p.cost) for p in single.explain(images)]


def test_explain_gives_every_pass(images: torch.Tensor, better: unstride.Enhanced) -> None:
    p = better.explain(images)[0]
    split = split_of(better, images)
    assert len(p.passes) == 10 and p.stopped == "budget"
    assert sum(v.weight for v in p.passes) == pytest.approx(1.0)
    macs = split.engine.trie_macs([v.state for v in p.passes]) + split.head_macs * 10
    assert p.cost == pytest.approx(macs / unstride.inspect(better.model, images[:1]).macs)
    assert 0 <= p.agreement <= 1 and float(p.spread) >= 0
    torch.testing.assert_close(p.passes[-1].running, p.output, atol=1e-5, rtol=1e-5)
    assert set(p.to_json()) >= {"output", "base", "passes", "cost", "stopped"}


def test_confident_images_stop_early_and_say_why(images: torch.Tensor, better: unstride.Enhanced) -> None:
    top = better.replace(budget=1)(images).softmax(1).amax(1)
    below = float(top.sort().values[1:3].mean())
    stopped = better.replace(until=Gate("probability", below=below)).explain(images)
    assert any(len(p.passes) == 1 and "probability" in p.stopped for p in stopped)
    assert any(len(p.passes) > 1 for p in stopped)
    agree = better.replace(until=Gate("agreement", below=0.0)).explain(images)
    assert {len(p.passes) for p in agree} == {4}


@pytest.mark.parametrize("by", ["margin", "entropy", "probability"])
def test_a_threshold_of_zero_leaves_the_base_answer(by: str, images: torch.Tensor, better: unstride.Enhanced) -> None:
    result = better.replace(until=Gate(by, below=0.0))(images)
    torch.testing.assert_close(result, better.replace(budget=1)(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("criterion", ["entropy", "displacement", "random", "random-per-image"])
def test_every_criterion_uses_the_whole_budget(criterion: str, images: torch.Tensor, better: unstride.Enhanced) -> None:
    for p in better.replace(criterion=criterion, budget=6).explain(images[:2]):
        assert len({v.state for v in p.passes}) == 6


def test_untrained_attention_is_the_mean(net: nn.Module, images: torch.Tensor) -> None:
    states = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 3, 0]]
    mean = unstride.enhance(net, recipe=listed(states, border="zeros"))(images)
    attended = unstride.enhance(net, recipe=listed(states, aggregate="learned", border="zeros"))
    attended.attention = Attention(16)
    torch.testing.assert_close(mean, attended(images), atol=1e-5, rtol=1e-5)


def test_budget_one_is_the_model_even_with_a_trained_attention(net: nn.Module, images: torch.Tensor) -> None:
    better = unstride.enhance(net, recipe="paper-learned", task="classification", budget=4)
    better.attention = Attention(16).requires_grad_(False)
    torch.nn.init.normal_(better.attention.out)
    curve = better.curve(images, [1, 4])
    with torch.no_grad():
        torch.testing.assert_close(curve[1][0], net(images), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(curve[4][0], curve[1][0], atol=1e-2)


def test_a_list_of_states_needs_no_search(net: nn.Module, images: torch.Tensor) -> None:
    better = unstride.enhance(net, recipe=listed([[0, 0, 0, 0], [0, 2, 0, 1]]))
    assert [str(v.state) for v in better.explain(images[:1])[0].passes] == ["(0 0 0 0)", "(0 1,0 0 0,1)"]


def test_another_image_size_is_captured_once_and_at_most_eight_are_kept(net: nn.Module) -> None:
    better = unstride.enhance(net, recipe=Recipe((Stage(states=Near(2)),)))
    captures = better.networks["base"].captures
    for size in range(32, 32 + 9 * 8, 8):
        assert better(torch.randn(2, 3, size, 40)).shape == (2, 5)
    first = (3, 32, 40, torch.float32, torch.device("cpu"))
    assert len(captures) == 8 and first not in captures
    kept = list(captures.values())
    better(torch.randn(1, 3, 96, 40))
    assert list(captures.values()) == kept


def test_new_weights_are_noticed(net: nn.Module, images: torch.Tensor) -> None:
    model = copy.deepcopy(net)
    better = unstride.enhance(model, recipe="paper", task="classification", budget=4)
    before = better(images)
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    fresh = unstride.enhance(model, recipe="paper", task="classification", budget=4)
    torch.testing.assert_close(better(images), fresh(images))
    assert not torch.allclose(before, better(images))


# -------------------------------------------------------------------------------------------------- errors, innocence


@pytest.mark.parametrize(("recipe", "execution"), [*itertools.product(["flip", "paper"], ["auto", "frozen"])])
def test_innocence(net: nn.Module, images: torch.Tensor, recipe: str, execution: str) -> None:
    model = copy.deepcopy(net).train()
    model.bn.eval()
    state = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    better = unstride.enhance(model, recipe=recipe, task="classification", execution=execution)
    better.train()
    better(images)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"execution": True}, "execution"),
        ({"criterion": "magic"}, "criterion"),
        ({"aggregate": "median"}, "aggregate"),
        ({"space": "pixels"}, "space"),
        ({"align": "maybe"}, "align"),
        ({"border": "mirror"}, "border"),
        ({"order": "bottom-up"}, "no 'order'"),
        ({"task": "detection"}, "task"),
        ({"layers": (1, 3)}, "contiguous"),
        ({"until": 0.9}, "until"),
        ({"criterion": "learned"}, "aggregate='learned'"),
        ({"align": "stitch"}, "stitch"),
    ],
)
def test_wrong_options_are_errors_that_say_what_is_expected(options: dict, words: str, net: nn.Module) -> None:
    with pytest.raises(OptionError, match=words):
        unstride.enhance(net, **{"recipe": "paper", "task": "classification", **options})


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (Stage(states=Search(layers=(4, 5))), "layers 1 to 4"),
        (Stage(states=[[0, 0]]), "one per layer"),
        (Stage(states=[[0, 0, 9, 0]]), "outside its rate"),
    ],
)
def test_states_that_the_network_does_not_have(stage: Stage, words: str, net: nn.Module, images: torch.Tensor) -> None:
    with pytest.raises(OptionError, match=words):
        unstride.enhance(net, recipe=Recipe((stage,)))(images)


def test_wrong_input_is_typed(images: torch.Tensor, better: unstride.Enhanced) -> None:
    with pytest.raises(InputError, match="unsqueeze"):
        better(images[0])
    with pytest.raises(InputError, match="preprocess"):
        better((images * 255).byte())
    with pytest.raises(CaptureError, match="task='segmentation'"):
        unstride.enhance(nn.Conv2d(3, 4, 3, 2), recipe="flip", task="classification")(images)


def test_a_network_without_strides_has_views_but_no_states(images: torch.Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with torch.no_grad():
        expected = (model(images) + model(images.flip(-1))) / 2
    torch.testing.assert_close(unstride.enhance(model, recipe="flip")(images), expected)
    with pytest.raises(NothingToSubsample):
        unstride.enhance(model, recipe="paper")(images)


@pytest.mark.parametrize("changes", [{"precision": "bfloat16"}, {"temperature": 2.0}, {"budget": 4}])
def test_run_curve_and_explain_agree(net: nn.Module, images: torch.Tensor, changes: dict) -> None:
    better = unstride.enhance(net, recipe="paper", task="classification", **{"budget": 3, **changes})
    result, output = better.run(images), better(images)
    assert result.output.dtype == torch.float32
    torch.testing.assert_close(result.output.to(output.dtype), output)
    assert result.costs == [p.cost for p in better.explain(images)] and min(result.costs) > 1.5
    budget = better.recipe.search.states.budget
    torch.testing.assert_close(better.curve(images, (budget,))[budget][0], result.output)
