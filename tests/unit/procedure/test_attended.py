"""The attention step by step is the attention over all maps at once."""

import pytest
import torch

from unstride.procedure.aggregate import Attended, Attention


@pytest.mark.parametrize("shape", [(6, 3, 4), (6,)])
def test_step_by_step_is_all_at_once(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    attention = Attention(6)
    torch.nn.init.normal_(attention.out)
    kept, maps = Attended(attention), torch.randn(5, *shape)
    with torch.no_grad():
        for count, f in enumerate(maps, 1):
            kept.add(slice(0, 1), f[None], torch.ones(1), None)
            torch.testing.assert_close(torch.tensor(kept.criteria(0)), attention.criterion(maps[None, :count])[0])
            if count > 1:
                torch.testing.assert_close(kept.value(), attention(maps[None, :count]))
