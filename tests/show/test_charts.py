"""Charts: ticks that enclose the values, and nothing drawn of nothing."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from unstride.show.charts import Chart, Point, Series, ticks


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_enclose_and_are_few(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 12
    slack = 1e-6 * (abs(low) + width + 1)
    assert found[0] <= low + slack
    assert found[-1] >= low + width - slack
    assert found == sorted(set(found))


def test_a_chart_of_one_value_and_of_none() -> None:
    assert Chart("t", "x", "y", ()).svg() == ""
    one = Chart("t", "x", "y", (Series("s", (Point(1, 0.5),)),), percent=False).svg()
    assert ElementTree.fromstring(one).tag == "svg"
    assert "nan" not in one
