"""The learned aggregation against the formula of the paper, and step by step against all at once."""

import pytest
import torch
from reference.paper import Learned
from torch import Tensor

from unstride.errors import OptionError
from unstride.method.attention import Attended, Attention, learned_criterion


def filled(channels: int = 6, heads: int = 1) -> Attention:
    attention = Attention(channels, heads)
    generator = torch.Generator().manual_seed(2)
    for p in attention.parameters():
        torch.nn.init.normal_(p, generator=generator)
    return attention


def maps(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def reference(attention: Attention) -> Learned:
    query, key = attention.query, attention.key
    return Learned(query.weight[0], key.weight[0], attention.out, query.bias[0], key.bias[0])


def criterion(attention: Attention, f: Tensor) -> Tensor:
    return learned_criterion(attention.received(f))


SHAPES = pytest.mark.parametrize("shape", [(6, 3, 4), (6,)], ids=["map", "vector"])


@SHAPES
@torch.no_grad()
def test_the_module_is_the_papers_formula(shape: tuple[int, ...]) -> None:
    attention, f = filled(), maps(2, 5, *shape)
    expected = torch.cat([reference(attention).aggregate(own) for own in f])
    torch.testing.assert_close(attention(f), expected)
    torch.testing.assert_close(
        criterion(attention, f), torch.tensor([reference(attention).criterion(own) for own in f])
    )


@torch.no_grad()
def test_each_of_several_heads_attends_to_its_own_channels() -> None:
    attention, f = filled(6, heads=3), maps(2, 5, 6, 3, 4)
    query, key = (torch.einsum("nschw,kc->nskhw", f, m.weight) for m in (attention.query, attention.key))
    query, key = query + attention.query.bias.view(-1, 1, 1), key + attention.key.bias.view(-1, 1, 1)
    weight = (query[:, :, None] * key[:, None]).softmax(2)  # (n, s, s', head, h, w)
    attended = torch.einsum("nstkhw,ntkchw->nskchw", weight, f.unflatten(2, (3, 2))).flatten(2, 3)
    expected = (f + attention.out.view(-1, 1, 1) * attended).mean(1)
    torch.testing.assert_close(attention(f), expected)
    received = weight.sum(1).mean((2, 3, 4))
    torch.testing.assert_close(criterion(attention, f), 1 / received)


@pytest.mark.parametrize("heads", [1, 2])
@torch.no_grad()
def test_the_untrained_module_is_the_mean_and_prefers_no_state(heads: int) -> None:
    attention, f = Attention(6, heads), maps(2, 5, 6, 3, 4)
    assert torch.equal(attention(f), f.mean(1))
    torch.testing.assert_close(criterion(attention, f), torch.ones(2, 5))
    assert float(attention.key.weight.abs().max()) > 0  # otherwise w_q could not start to learn


def test_a_seed_gives_the_same_module_and_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (Attention(6, seed=seed).key.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("heads", [1, 2])
@SHAPES
@torch.no_grad()
def test_step_by_step_is_all_at_once(shape: tuple[int, ...], heads: int) -> None:
    attention, f = filled(6, heads), maps(5, *shape)
    kept = Attended(attention)
    for count, own in enumerate(f, 1):
        kept.add([0], own[None])
        torch.testing.assert_close(torch.tensor(kept.criteria([0])), criterion(attention, f[None, :count]))
        torch.testing.assert_close(kept.value(), attention(f[None, :count]))


@torch.no_grad()
def test_one_state_is_the_model_whatever_was_learned() -> None:
    attention, f = filled(), maps(2, 1, 6, 3, 4)
    kept = Attended(attention, 2)
    kept.add(slice(None), f[:, 0])
    assert torch.equal(attention(f), f[:, 0])
    assert torch.equal(kept.value(), f[:, 0])


@torch.no_grad()
def test_images_together_are_images_alone() -> None:
    """Three images, of which the last two have two more states, added in mixed order."""
    f, together = maps(3, 3, 6, 4, 5), Attended(filled(), 3)
    alone = [Attended(filled()) for _ in range(3)]
    for s, images in enumerate(([0, 1, 2], [2, 1], [1, 2])):
        together.add(images, f[s, images])
        for i in images:
            alone[i].add([0], f[s, i : i + 1])
    for i, own in zip([2, 0], together.value([2, 0]), strict=True):
        torch.testing.assert_close(own, alone[i].value()[0])
    assert together.criteria([1, 0]) == [alone[1].criteria([0])[0], alone[0].criteria([0])[0]]


def test_heads_must_divide_the_channels_and_maps_must_fit() -> None:
    with pytest.raises(OptionError, match="divisor of the 6 channels"):
        Attention(6, heads=4)
    with pytest.raises(OptionError, match="made for 6 channels, this map has 5"):
        Attention(6).check(5)
