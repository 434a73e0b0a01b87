"""Each computation once, one at a time; uploads are checked, and remembered for a while."""

import gzip
import io
import json
import struct
import threading
import zlib
from typing import Any

import pytest
from PIL import Image
from small_nets import photo, png, write_nets

from unstride.errors import InputError
from unstride.pipeline import open_pipeline
from unstride.studio import Studio, studio


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return Studio(open_pipeline([f"{write_nets(tmp_path_factory.mktemp('nets'))}:net"], recipe="flip"))


def read(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(content))
    return found


def test_the_catalogue_names_networks_and_limits(made: Studio) -> None:
    found = read(made.catalogue())
    assert [n["title"] for n in found["networks"]][:2] == ["nets.py:net", "sample + sample-large"]
    offer = read(made.offer("0"))
    assert offer["recipes"][0]["title"].startswith("flip")
    assert all(image["data"].startswith("data:image/png") for image in offer["images"])


def test_an_answer_is_computed_once(made: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {}

    monkeypatch.setattr(studio, "explained", counting)
    body = png(photo(11))
    first = made.explain("0", "0", body)
    assert made.explain("0", "0", body) == first
    name = read(first)["image"]
    assert made.explain("0", "0", name) == first  # a link to an uploaded image
    assert len(calls) == 1
    made.explain("0", "1", name)
    assert len(calls) == 2


def test_uploads_are_forgotten_in_time(made: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    old = read(made.explain("0", "0", png(photo(21))))["image"]
    monkeypatch.setattr(studio, "UPLOADS", 1)
    made.explain("0", "0", png(photo(22)))
    with pytest.raises(InputError, match="not here any more"):
        made.explain("0", "1", old)


def bomb(side: int) -> bytes:
    """A PNG of so many pixels to each side in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def strip() -> bytes:
    stream = io.BytesIO()
    Image.new("L", (5000, 1)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"GIF89a not really", "cannot be read as an image"),
        (png(photo(1))[:300], "cannot be read as an image"),
        (bomb(6500), "40 million pixels"),
        (bomb(60_000), "40 million pixels"),
        (strip(), "20 times as long as wide"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read as an image"),
    ],
    ids=["empty", "text", "cut", "large", "bomb", "strip", "program"],
)
def test_what_is_no_image_is_an_error_in_words(made: Studio, body: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        made.explain("0", "0", body)


@pytest.mark.parametrize("key", ["9", "", "../../etc/passwd", "0/../0"])
def test_names_are_looked_up_in_lists(made: Studio, key: str) -> None:
    for keys in ((key, "0", "0"), ("0", key, "0"), ("0", "0", f"{key}x")):
        with pytest.raises(InputError, match="got '"):
            made.explain(*keys)


def test_a_request_behind_a_slow_one_is_told_so(made: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def slow(*_: Any) -> dict[str, Any]:
        begun.set()
        end.wait(30)
        return {}

    monkeypatch.setattr(studio, "explained", slow)
    monkeypatch.setattr(studio, "PATIENCE", 0.1)
    first = threading.Thread(target=made.explain, args=("0", "0", png(photo(31))))
    first.start()
    assert begun.wait(30)
    try:
        with pytest.raises(studio.Busy, match="still being computed"):
            made.explain("0", "0", png(photo(32)))
    finally:
        end.set()
        first.join()
