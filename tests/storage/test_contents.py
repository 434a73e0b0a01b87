"""Files are known by what is in them."""

import os
from pathlib import Path

import pytest

from unstride.storage import contents
from unstride.storage.contents import FileDigests, file_digest, image_key


def test_images_are_known_by_their_contents_and_their_labels(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    digests = FileDigests()
    a, b, c = (image_key([tmp_path / name], digests, 1) for name in "abc")
    assert a == b != c
    assert image_key([tmp_path / "a"], digests, 2) != a
    assert image_key([tmp_path / "gone"], digests) != image_key([], digests)


def test_files_that_did_not_change_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "data" / name for name in ("a", "b", "gone")]
    paths[0].parent.mkdir()
    paths[0].write_text("one")
    paths[1].write_text("two")
    os.utime(paths[0], (1, 1))  # the other may still change within the same tick of the clock
    FileDigests(tmp_path / "cache").read(paths)
    read = []
    monkeypatch.setattr(contents, "file_digest", lambda path: read.append(path) or file_digest(path))
    again = FileDigests(tmp_path / "cache")
    again.read(paths)
    assert read == paths[1:]
    assert again.of(paths[0]) == file_digest(paths[0]) and again.of(paths[2]) == ""
    paths[0].write_text("six")  # as long, but later
    assert FileDigests(tmp_path / "cache").of(paths[0]) == file_digest(paths[0])
