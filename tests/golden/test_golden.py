"""Every case gives what it gave when the golden files were recorded."""

from functools import cache

import pytest
from golden import adapter, store
from golden.cases import CASES

golden = cache(store.read)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_as_recorded(case: adapter.Case) -> None:
    changed = adapter.recorded_otherwise(case)
    assert not store.differences(adapter.replay(case), golden()[case["name"]], changed)


def test_every_case_is_recorded_once() -> None:
    names = [case["name"] for case in CASES]
    assert names == list(golden()) and len(set(names)) == len(names)
