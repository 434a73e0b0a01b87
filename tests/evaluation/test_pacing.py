"""What fits into a given time, and what a progress line counts."""

import pytest

from unstride.evaluation.pacing import LEAST, SLOWER, paced

SETTINGS = {1: [4, 10], 8: [4, 10, 30]}


def least(pace):
    """Seconds that everything takes at least, as promised: first calls, memory, and all rounds."""
    found = [(n, b) for n, budgets in pace.settings.items() for b in budgets]
    call = lambda n, b: SLOWER * pace.plain * n * b  # noqa: E731
    first = sum(3 * call(n, b) + 2 * call(n, 1) for n, b in found)
    return first + pace.rounds * sum(2 * (max(LEAST, call(n, b)) + max(LEAST, call(n, 1))) for n, b in found)


def test_without_a_bound_everything_is_measured():
    pace = paced(SETTINGS, plain=3.0, seconds=None, repeats=5)
    assert (pace.settings, pace.rounds, pace.left_out) == (SETTINGS, 5, ())


@pytest.mark.parametrize("plain", [0.0005, 0.01, 0.1, 0.3])
def test_what_is_kept_fits_and_what_is_not_is_said(plain):
    pace = paced(SETTINGS, plain, seconds=45, repeats=5)
    assert least(pace) <= 45
    kept = {(n, b) for n, budgets in pace.settings.items() for b in budgets}
    assert kept | set(pace.left_out) == {(n, b) for n, budgets in SETTINGS.items() for b in budgets}
    assert all(n * b >= max(m * k for m, k in kept) for n, b in pace.left_out)  # the dearest go
    assert pace.total(()) > 0
    assert pace.total(range(1, 100)) == 2 * pace.total(())


def test_a_network_that_is_too_slow_for_anything_is_still_measured_once():
    pace = paced(SETTINGS, plain=60.0, seconds=45, repeats=5)
    assert (pace.settings, pace.rounds) == ({1: [4]}, 1)


def test_quick_networks_get_all_rounds():
    assert paced({1: [4]}, plain=0.001, seconds=45, repeats=5).rounds == 5
