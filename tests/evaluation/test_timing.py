"""Times are ratios of calls that take turns; what is prepared ahead is not timed."""

from itertools import count

import pytest
import tiny
import torch
from small_nets import photo

import unstride
from unstride.errors import OptionError
from unstride.evaluation import timing
from unstride.evaluation.bench import BenchRow, bench
from unstride.evaluation.intervals import ConfidenceInterval
from unstride.evaluation.timing import TimeRatio, compare_times, median_interval, peak_bytes, prepared_once, time_ratio


@pytest.fixture
def clock(monkeypatch):
    """A clock that calls move: `clock(0.2)` is a call that takes 0.2 seconds."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(seconds):
        def run():
            now[0] += seconds() if callable(seconds) else seconds

        return run

    return call


def test_ratios_of_calls(clock):
    found = compare_times(clock(0.1), {"twice": clock(0.2), "half": clock(0.05)}, rounds=5)
    assert found["twice"].ratio.estimate == pytest.approx(2.0)
    assert found["half"].ratio.estimate == pytest.approx(0.5)
    assert found["twice"].seconds == pytest.approx(0.1) and found["twice"].rounds == 5


def test_a_machine_that_slows_down_changes_no_ratio(clock):
    steps = count()
    slower = lambda base: lambda: base * (1 + 0.05 * next(steps))  # noqa: E731
    found = compare_times(clock(slower(0.1)), {"twice": clock(slower(0.2))}, rounds=9)
    assert found["twice"].ratio.estimate == pytest.approx(2.0, rel=0.02)


def test_as_many_rounds_as_fit(clock):
    assert compare_times(clock(1.0), {"a": clock(1.0)}, rounds=50, seconds=20)["a"].rounds == 10
    assert compare_times(clock(1.0), {"a": clock(1.0)}, rounds=50, seconds=0.1)["a"].rounds == timing.FEWEST
    with pytest.raises(OptionError, match="rounds: got 0"):
        compare_times(clock(1.0), {}, rounds=0)


def test_the_interval_of_a_median():
    interval = median_interval([9, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (interval.estimate, interval.low, interval.high) == (5, 2, 8)
    assert interval.level == pytest.approx(1 - 2 * (1 + 9) / 2**9)  # of the binomial distribution
    assert (median_interval([1, 2, 3]).low, median_interval([1, 2, 3]).high) == (1, 3)


def test_peak_memory_is_what_is_alive_at_once():
    def call():
        for _ in range(3):
            torch.ones(1 << 18)  # 1 MB, let go of each time

    assert 0.9e6 < peak_bytes(call) < 2.5e6


def test_views_are_rendered_once(monkeypatch):
    better = unstride.enhance(tiny.net(), recipe="flip", preprocess=tiny.PREPROCESS)
    images = prepared_once([photo(0, (16, 16)), photo(1, (16, 16))], tiny.PREPROCESS)
    wanted = better([photo(0, (16, 16)), photo(1, (16, 16))])
    torch.testing.assert_close(better(images), wanted)
    monkeypatch.setattr(type(tiny.PREPROCESS), "__call__", lambda *_: pytest.fail("prepared again"))
    torch.testing.assert_close(better(images), wanted)


def test_a_flip_takes_longer_than_one_pass():
    better = unstride.enhance(tiny.net(), recipe="flip")
    ratio = time_ratio(better, better.replace("plain"), torch.randn(2, 3, 32, 32), rounds=3)
    assert ratio.ratio.low > 1
    assert "x (" in str(ratio)


def bench_row(ratio, cost, alone):
    return BenchRow("flip", 4, TimeRatio(ConfidenceInterval(ratio, ratio, ratio), 0.1, 5), cost, 1.0, alone, 0.1)


def test_time_that_the_cost_does_not_explain_is_a_warning():
    assert bench_row(2.4, 2.0, 1.0).warning == ""
    assert "time 3.00x, but cost 2.00x" in bench_row(3.0, 2.0, 1.5).warning
    assert "they run fewer MACs per second here" in bench_row(3.0, 2.0, 1.0).warning
    assert bench_row(9.0, None, None).warning == ""
    assert bench_row(2.0, 2.0, None).images_per_second == pytest.approx(20)


def test_gates_are_measured_as_they_are_and_open(monkeypatch):
    monkeypatch.setattr(unstride.evaluation.bench, "_onnx_runtime", lambda *_: (None, "not here"))  # it takes seconds
    gated = unstride.Recipe((unstride.Stage(), unstride.Stage(("flip",), gate=unstride.Gate(below=0.0))), name="gated")
    better = unstride.enhance(tiny.net(), recipe=gated)
    result = bench(better, torch.randn(4, 3, 16, 16), batch_sizes=(2,), seconds=0.5, rounds=3)
    costs = {row.name: row.cost for row in result.rows}
    assert costs["gated"] == 1.0 and costs["gated, every gate open"] == 2.0
    assert result.base_macs > 0 and result.left_out == ("ONNX Runtime: not here",)
    with pytest.raises(OptionError, match="batch_sizes"):
        bench(better, torch.randn(4, 3, 16, 16), batch_sizes=())
