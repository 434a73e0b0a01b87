"""Tuning while the page goes on."""

import gzip
import json
import time
from typing import Any

import pytest

from unstride import models
from unstride.errors import DataError
from unstride.studio import Studio, tuner


def told(answer: bytes) -> dict[str, Any]:
    return json.loads(gzip.decompress(answer))


def finished(ask: Any, seconds: float = 300) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while (now := ask())["state"] == "running":
        assert time.monotonic() < end
        assert 0 <= now["seen"] <= now["images"]
        time.sleep(0.05)
    return now


def test_what_tuning_finds_can_be_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "IMAGES", 40)
    studio = Studio("sample")
    assert "tuned" not in studio.recipes("0")
    assert told(studio.tune("0"))["state"] == "idle"
    assert told(studio.tune("0", start=True))["state"] == "running"
    studio.tune("0", start=True)  # once is enough
    found = finished(lambda: told(studio.tune("0")))
    assert found["state"] == "done"
    head, *rows = found["table"]
    assert [row[0] for row in rows][:2] == ["plain", "flip"]
    assert all(len(row) == len(head) for row in rows)
    assert "tuned" in studio.recipes("0")
    data = told(studio.look("0", "0", "tuned"))
    assert data["recipe"] == found["recipe"] == str(studio.tuner.recipe)
    assert data["story"]
    assert told(studio.tune("0", start=True)) == found


def test_what_fails_is_said_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise DataError("no images here")

    monkeypatch.setattr(tuner, "tune", broken)
    made, loaded = tuner.Tuner(), models.load("sample")
    for _ in range(2):
        made.start(loaded)
        assert finished(made.told)["error"] == "no images here"
    assert made.recipe is None
