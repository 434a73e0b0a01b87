"""A disk that is full after so many files, then has a little more space, until a run gets through."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from unstride.errors import ArtefactError


def runs_until_there_is_space(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, step: int = 1) -> Any:
    """What `run` returns at last; each failure before that must be an ArtefactError that says why."""
    fsync, messages = os.fsync, []
    space = 0

    def full(handle: int) -> None:
        nonlocal space
        space -= 1
        if space < 0:
            raise OSError(28, "No space left on device")
        fsync(handle)

    for attempt in range(0, 100 * step, step):
        space = attempt
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            try:
                result = run()
                break
            except ArtefactError as error:
                messages.append(str(error))
    assert messages
    assert all("No space left on device" in message for message in messages)
    return result
