"""Where states disagree."""

import pytest
import torch

from unstride.studio.disagreement import Disagreement


def test_disagreement_is_the_mutual_information_of_the_states_that_cover_a_place() -> None:
    p = torch.rand(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)).softmax(1)  # three states, four classes
    shifts = [(0, 0), (2, 0), (1, 3)]
    so_far = Disagreement()
    for k, shift in enumerate(shifts):
        out = so_far.add(p[k], shift)
    for y, x in ((0, 0), (1, 5), (4, 5), (2, 1)):
        here = torch.stack([p[k, :, y - a, x - b] for k, (a, b) in enumerate(shifts) if y >= a and x >= b])
        mean = here.mean(0)
        wanted = -(mean * mean.log()).sum() + (here * here.log()).sum(1).mean()
        assert float(out[y, x]) == pytest.approx(float(wanted.clamp(min=0)), abs=1e-6)
