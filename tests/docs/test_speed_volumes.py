"""The page's first sentences are what its rows say."""

from typing import Any

import pytest

from benchmarks.speed_volumes import GOAL, MOST, answer, page


def rows(over: float, memory: float) -> list[dict[str, Any]]:
    one = {"time": 2.0, "floor": 8.0, "over": over, "memory": memory}
    named = {"4 near states": 4, "8 near states": 8, "8 near states, max_bytes at 1.9 x plain": 8}
    found = [{"setting": name, "looks": looks, **one} for name, looks in named.items()]
    found[2]["over"] = 9.0  # a bound has its price: it is not held against the goal
    return [*found, {"setting": "8 mirrored forwards, by hand", "looks": 8, **one, "time": 8.0}]


@pytest.mark.parametrize(("over", "verdict"), [(GOAL, "met"), (GOAL + 0.01, "missed")])
@pytest.mark.parametrize(("memory", "side"), [(MOST, "within"), (MOST + 0.1, "beyond")])
def test_the_answer_comes_from_the_rows(over: float, verdict: str, memory: float, side: str) -> None:
    told = answer(rows(over, memory))
    assert f"is {verdict}." in told and f"({side} {MOST})" in told
    assert f"4 and 8 near looks take {over:.2f} and {over:.2f} times" in told
    assert "0.25 of the time of eight mirrored forwards, 2.0 times" in told
    assert told in page(rows(over, memory), "", "")
