"""What users hold: one line of code, and what it promises."""

import copy

import pytest
import torch
from procedure_nets import SmallNet, seeded
from torch import nn

import unstride
from unstride.errors import CaptureError, InputError, NothingToSubsample, OptionError
from unstride.procedure.aggregate import entropy


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return seeded(SmallNet())


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def better(net: nn.Module, images: torch.Tensor) -> unstride.Enhanced:
    return unstride.enhance(net, images[:1], budget=10)


@torch.no_grad()
def test_budget_one_is_the_model(net: nn.Module, images: torch.Tensor, better: unstride.Enhanced) -> None:
    assert torch.equal(better.with_options(budget=1)(images), net(images))
    plain = torch.stack([p.plain for p in better.explain(images)])
    torch.testing.assert_close(plain, net(images), atol=1e-5, rtol=1e-5)


def test_an_images_answer_does_not_depend_on_its_batch(images: torch.Tensor, better: unstride.Enhanced) -> None:
    together = better(images)
    alone = torch.cat([better(images[i : i + 1]) for i in range(len(images))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together, better.with_options(budget=1)(images), atol=1e-3)


def test_rewrites_do_not_change_the_answer(net: nn.Module, images: torch.Tensor, better: unstride.Enhanced) -> None:
    fast = unstride.enhance(net, images[:1], budget=10, execution="frozen")
    torch.testing.assert_close(fast(images), better(images), atol=1e-5, rtol=1e-5)


def test_the_answer_is_the_paper_written_out(images: torch.Tensor, net: nn.Module) -> None:
    """Entropy-weighted sum of aligned features over the visited states, through the net's own head."""
    from unstride.procedure.align import Offset, align

    better = unstride.enhance(net, images[:1], budget=7, border="zeros")
    plan = better.prepare(images)
    run = plan.engine.start(images[:1])
    prediction = better.explain(images[:1])[0]
    states = [v.state for v in prediction.states]
    (features,) = run.add([(0, s) for s in states])
    logits = net.head(features.mean((2, 3)))  # type: ignore[operator, union-attr]
    weights = 1 - entropy(logits)
    space = plan.found.space
    aligned = [align(f, Offset.of(space.displacement(s), (16, 16))) for f, s in zip(features, states, strict=True)]
    total = sum(w * f for w, f in zip(weights, aligned, strict=True)) / weights.sum()
    torch.testing.assert_close(prediction.logits, net.head(total.mean((1, 2))), atol=1e-5, rtol=1e-5)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(
        torch.tensor([v.weight for v in prediction.states]), weights / weights.sum(), atol=1e-5, rtol=1e-4
    )


def test_one_search_serves_every_budget(images: torch.Tensor, better: unstride.Enhanced) -> None:
    curve = better.costs(images, [1, 4, 10])
    for budget, (logits, cost) in curve.items():
        single = better.with_options(budget=budget)
        torch.testing.assert_close(logits, single(images), atol=1e-5, rtol=1e-5)
        assert cost == [pytest.approx(p.cost) for p in single.explain(images)]


def test_explain_tells_what_happened(images: torch.Tensor, better: unstride.Enhanced) -> None:
    p = better.explain(images)[0]
    assert len(p.states) == 10
    assert p.stopped == "budget"
    assert sum(v.weight for v in p.states) == pytest.approx(1.0)
    plan = better.prepare(images)
    head = plan.targets[0].head
    assert head is not None
    assert p.macs == plan.engine.trie_macs([v.state for v in p.states]) + head.macs * 10
    assert p.plain_macs == unstride.inspect(better.model, images[:1]).macs
    assert 0 <= p.agreement <= 1
    assert float(p.spread) >= 0
    assert set(p.to_json()) >= {"logits", "plain", "states", "macs", "stopped"}


def test_repr_prints_the_search_space(better: unstride.Enhanced) -> None:
    assert "layers=(2, 3)" in repr(better)
    assert "budget=10" in repr(better)


def test_easy_images_stop_early_and_say_why(images: torch.Tensor, better: unstride.Enhanced) -> None:
    plain = better.with_options(budget=1)(images).softmax(1).amax(1)
    threshold = float(plain.sort().values[1:3].mean())
    stopped = better.with_options(stop=unstride.Confident(p=threshold)).explain(images)
    assert any(len(p.states) == 1 and "probability" in p.stopped for p in stopped)
    assert any(len(p.states) > 1 for p in stopped)
    agree = better.with_options(stop=unstride.Agreement(share=0.0, states=4)).explain(images)
    assert {len(p.states) for p in agree} == {4}


@pytest.mark.parametrize("stop", [unstride.Margin(0.0), unstride.LowEntropy(1.0), unstride.Confident(0.0)])
def test_rules_that_always_hold_leave_the_plain_answer(
    stop: object, images: torch.Tensor, better: unstride.Enhanced
) -> None:
    out = better.with_options(stop=stop)(images)
    torch.testing.assert_close(out, better.with_options(budget=1)(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("criterion", ["entropy", "displacement", "random"])
@pytest.mark.parametrize("order", ["paper", "cost"])
def test_every_criterion_and_order_uses_the_whole_budget(
    criterion: str, order: str, images: torch.Tensor, better: unstride.Enhanced
) -> None:
    for p in better.with_options(criterion=criterion, order=order, budget=6).explain(images[:2]):
        assert len({v.state for v in p.states}) == 6


def test_untrained_attention_is_the_mean(net: nn.Module, images: torch.Tensor) -> None:
    states = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 3, 0]]
    options = {"states": states, "border": "zeros"}
    mean = unstride.enhance(net, images[:1], aggregate="mean", **options)(images)
    attended = unstride.enhance(net, images[:1], aggregate="attention", criterion="learned", **options)(images)
    torch.testing.assert_close(mean, attended, atol=1e-5, rtol=1e-5)


def test_budget_one_is_the_model_even_with_a_trained_attention(net: nn.Module, images: torch.Tensor) -> None:
    better = unstride.enhance(net, images[:1], budget=4, aggregate="attention", criterion="learned")
    assert better.attention is not None
    torch.nn.init.normal_(better.attention.out)
    curve = better.curve(images, [1, 4])
    with torch.no_grad():
        torch.testing.assert_close(curve[1], net(images), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(curve[4], curve[1], atol=1e-2)


def test_explicit_states_need_no_search(net: nn.Module, images: torch.Tensor) -> None:
    better = unstride.enhance(net, images[:1], states=[[0, 0, 0, 0], [0, 2, 0, 1]])
    assert [str(v.state) for v in better.explain(images[:1])[0].states] == ["(0 0 0 0)", "(0 1,0 0 0,1)"]


def test_another_image_size_is_captured_once(net: nn.Module, images: torch.Tensor) -> None:
    better = unstride.enhance(net, images[:1], budget=4)
    odd = torch.randn(2, 3, 75, 49)
    assert better(odd).shape == (2, 5)
    assert better(odd).shape == (2, 5)
    assert len(better.plans) == 2


def test_new_weights_are_noticed(net: nn.Module, images: torch.Tensor) -> None:
    model = copy.deepcopy(net)
    better = unstride.enhance(model, images[:1], budget=4)
    before = better(images)
    with torch.no_grad():
        model.head.weight.mul_(2.0)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(better(images), unstride.enhance(model, images[:1], budget=4)(images))
    assert not torch.allclose(before, better(images))


def test_innocence(net: nn.Module, images: torch.Tensor) -> None:
    model = copy.deepcopy(net).train()
    model.bn.eval()  # type: ignore[union-attr]
    state = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    better = unstride.enhance(model, images[:1], budget=4)
    better.train()
    better(images)
    with pytest.raises(OptionError):
        unstride.enhance(model, images[:1], budget=0)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"budget": 0}, "budget"),
        ({"execution": True}, "execution"),
        ({"budget": 2.5}, "budget"),
        ({"criterion": "magic"}, "criterion"),
        ({"aggregate": "median"}, "aggregate"),
        ({"space": "pixels"}, "space"),
        ({"align": "maybe"}, "align"),
        ({"border": "mirror"}, "border"),
        ({"order": "bottom-up"}, "order"),
        ({"task": "detection"}, "task"),
        ({"layers": (1, 3)}, "contiguous"),
        ({"layers": (4, 5)}, "layers 1 to 4"),
        ({"states": [[0, 0]]}, "one per layer"),
        ({"states": [[0, 0, 9, 0]]}, "outside its rate"),
        ({"stop": 0.9}, "stop"),
        ({"criterion": "learned"}, "attention"),
        ({"align": "stitch"}, "segmentation"),
    ],
)
def test_bad_options_say_what_was_wanted(options: dict, word: str, net: nn.Module, images: torch.Tensor) -> None:
    with pytest.raises(OptionError, match=word):
        unstride.enhance(net, images[:1], **options)


def test_bad_input_is_typed(net: nn.Module, images: torch.Tensor, better: unstride.Enhanced) -> None:
    with pytest.raises(InputError, match="unsqueeze"):
        better(images[0])
    with pytest.raises(InputError, match="preprocessing"):
        better((images * 255).byte())
    with pytest.raises(CaptureError, match="task='segmentation'"):
        unstride.enhance(nn.Conv2d(3, 4, 3, 2), images[:1], task="classification")
    with pytest.raises(NothingToSubsample):
        unstride.enhance(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), images[:1])


def test_looks_and_curves_are_what_the_recipe_answers(net: nn.Module, images: torch.Tensor) -> None:
    zero = unstride.enhance(net, images[:1]).plan.found.space.zero
    states = (zero, zero.at(1, (0, 1)), zero.at(1, (1, 0)))
    for more in ({"states": states}, {"precision": "bfloat16"}, {"temperature": 2.0}):
        one = unstride.enhance(net, images[:1], recipe="paper", budget=1 if "states" in more else 4, **more)
        logits, costs = one.looks(images)
        wanted = one(images)
        assert logits.dtype == wanted.dtype
        assert torch.allclose(logits, wanted, atol=0.1 if "precision" in more else 1e-5), more
        assert costs == [p.cost for p in one.explain(images)] and min(costs) > 1.5
    assert torch.equal(one.curve(images, (4,))[4], logits)


def test_a_search_from_the_default_recipe_keeps_what_both_have(net: nn.Module, images: torch.Tensor) -> None:
    warm = unstride.enhance(net, images[:1], temperature=2.0, precision="bfloat16").with_options(budget=4)
    assert (warm.recipe.budget, warm.recipe.temperature, warm.recipe.precision) == (4, 2.0, "bfloat16")


def test_alignment_and_border_ask_for_the_search(net: nn.Module, images: torch.Tensor) -> None:
    for asked in ({"align": False}, {"border": "zeros"}):
        assert unstride.enhance(net, images[:1], **asked).recipe.searches
        with pytest.raises(OptionError, match="belongs to the paper's search"):
            unstride.enhance(net, images[:1], recipe="flip", **asked)
