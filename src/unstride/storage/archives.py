"""Zip archives from elsewhere (.pt, .npz): how large they would become, asked before anything is unpacked."""

import zipfile
from pathlib import Path

_ZIP = b"PK\x03\x04"


def check_inflation(path: Path, factor: float, spare: int = 1 << 20) -> None:
    """A ValueError where an archive claims more than `factor` times its own size, and `spare` bytes, for its contents.

    Entries that share their bytes count as often as they are named. A file that is no archive is left to its reader.
    """
    with path.open("rb") as file:
        if file.read(4) != _ZIP:
            return
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"its list of contents is damaged: {error}") from error
    if claimed > factor * size + spare:
        raise ValueError(f"its {size:,} bytes would become {claimed:,}, so it was made to fill the memory")
