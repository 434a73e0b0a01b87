"""What training sees of an image: another light, states drawn by their criterion, aligned maps."""

import torch

from unstride.geometry.states import State, StateSpace
from unstride.learning.pools import SampledSearch, draw_pools, unfamiliar
from unstride.procedure.aggregate import Attention


def test_familiar_images_get_another_light_whatever_their_batch():
    x = torch.randn(6, 3, 24, 24, generator=torch.Generator().manual_seed(0)) + 0.3
    seeds = [str(i) for i in range(6)]
    new = unfamiliar(x, seeds)
    assert torch.equal(unfamiliar(x[2:4], seeds[2:4]), new[2:4])
    assert not torch.equal(unfamiliar(x[:1], ["other"]), new[:1])
    coarse = torch.nn.functional.adaptive_avg_pool2d
    assert (coarse(new, 4) - coarse(x, 4)).abs().amax((1, 2, 3)).min() > 0.01
    fine = lambda v: v[..., 1:] - v[..., :-1]  # noqa: E731
    assert (fine(new) - fine(x)).abs().mean() < 0.1 * fine(x).abs().mean()  # shapes stay


def test_a_state_of_low_criterion_is_expanded_more_often():
    space = StateSpace(((2, 2),) * 4, tuple((2.0**i, 2.0**i) for i in range(4)))
    count = 0
    for seed in range(300):
        search = SampledSearch(space, (1, 2, 3, 4), 7, seed=str(seed))
        new = search.next([0.9])
        scores = [0.9, 0.02, 0.9, 0.9]
        assert len(new) == 3
        search.next(scores)
        count += search.expansions[1].state == search.visited[1]
    # weights 1 / (c + 0.05): 14.3 against three of 1.05
    assert 0.75 < count / 300 < 0.9


def test_pools_hold_what_the_attention_sees(better):
    x = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    plan = better.prepare(x)
    states = list(plan.found.space.states((1, 2)))[:6]
    fixed = better.with_options(states=states, aggregate="attention", criterion="entropy")
    torch.manual_seed(1)
    fixed.attention = Attention(12)
    with torch.no_grad():
        fixed.attention.out.normal_()
    options = fixed.options(plan)
    pools = draw_pools(plan, x, [0, 1, 2], lambda key: states, options)
    maps = torch.stack([p.maps.float() for p in pools])
    logits = plan.targets[0].finish(fixed.attention(maps))
    assert torch.allclose(logits, fixed(x), atol=5e-3)
    assert [p.label for p in pools] == [0, 1, 2]
    assert isinstance(states[0], State)
