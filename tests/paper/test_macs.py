"""MACs in both ways of counting, against sums by hand and the paper's printed figures."""

import math

import pytest

from unstride.paper.macs import Work, work
from unstride.paper.reproducing import reproduce


def test_counting_by_hand():
    net = Work(100, {1: 100.0}, levels=(0, 10, 40, 30, 20), layers=(2, 3), rates=(4, 4, 4, 4))
    assert net.as_paper(1) == (100, 100)
    # The first expansion: 10 once, then 90 four times; it reaches 4 states, so budgets 2, 3 and 4 cost the same.
    assert net.as_paper(3) == net.as_paper(4) == (370, 370)
    # One more for up to 7 states: four times what follows layer 3 (50), or layer 2 (90).
    assert net.as_paper(5) == net.as_paper(7) == (370 + 200, 370 + 360)


@pytest.mark.parametrize(
    ("model", "base", "as_paper", "printed"),
    [
        ("ResNet18", 1_814_073_344, 1_824_033_792, {1: (273.6, 150), 3: (69.3, 10), 10: (167.7, 10), 15: (253.6, 10)}),
        ("MobileNetV2", 300_774_272, 327_486_720, {1: (49.1, 150), 3: (11.6, 10), 10: (30.7, 10), 15: (48.6, 10)}),
    ],
)
def test_the_papers_figures_follow_from_its_way_of_counting(model, base, as_paper, printed):
    counted = work(model)
    assert counted.base == base
    assert counted.as_paper(1) == (as_paper, as_paper)
    for budget, (table, images) in printed.items():
        low, high = (m * images / 1e9 for m in counted.as_paper(budget))
        if math.isclose(low, high):
            assert low == pytest.approx(table, abs=0.051)  # one decimal is printed
        else:
            assert low < table < high
    assert all(counted.ours[b] < counted.as_paper(b)[1] for b in (3, 10, 15))

    values = reproduce(f"computation-{model.lower()}").values  # the table needs no data, and leaves accuracy open
    found = {(v.row, v.column): v for v in values}
    assert found[("150", "AugTTA", "no"), "MACs, x base"].ours == pytest.approx(150)
    assert found[("100", "GPS", "no"), "MACs, x base"].ours == pytest.approx(3)
    with_ours = found[("150", "ClassTTA", "yes"), "MACs, x base"]
    assert with_ours.ours == pytest.approx(10 * counted.ours[15] / base)
    assert with_ours.ours < with_ours.paper
    assert all(v.ours is None for v in values if v.column in ("top-1 %", "time, x base", "ms / image"))
