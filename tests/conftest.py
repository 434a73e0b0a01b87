"""torchvision first: it becomes importable where its compiled part does not fit the installed torch."""

import pytest
from hypothesis import settings

from unstride.compat import import_torchvision

import_torchvision()

settings.register_profile("unstride", deadline=None)  # a busy machine is no failure
settings.load_profile("unstride")


@pytest.fixture(autouse=True)
def as_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of pytest-xdist have a width of their own; what is printed does not depend on who runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)
