"""A folder that one run uses alone, and what an error leaves of it."""

from pathlib import Path

import pytest

from unstride.errors import DataError
from unstride.storage.locks import exclusive


def fail(folder: Path, *files: str) -> None:
    """A run that ends with an error, after it wrote some files."""
    with exclusive(folder):
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"")
        raise DataError("there is no image")


def test_a_folder_in_which_nothing_was_finished_is_removed(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fail(tmp_path / "run", "run.json")
    assert not (tmp_path / "run").exists()


def test_what_was_finished_stays_and_so_does_a_folder_that_was_there(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fail(tmp_path / "run", "predict-1/part.safetensors")
    assert (tmp_path / "run" / "predict-1" / "part.safetensors").exists()
    (tmp_path / "own").mkdir()
    with pytest.raises(DataError):
        fail(tmp_path / "own")
    assert (tmp_path / "own").exists()
