"""What several commands read alike from the command line."""

import re

import typer

ALIGNS: dict[str, bool | str] = {"on": True, "off": False, "stitch": "stitch"}
MOST = 1_000_000  # that a count may be: of states, of images in a batch
SEVERAL = 1000  # counts in one list
SEEDS = 2**63 - 1


def read_align(text: str) -> bool | str:
    """--align on|off|stitch -> what `enhance` takes."""
    if text not in ALIGNS:
        raise typer.BadParameter(f"--align is {text}; wanted on, off or stitch")
    return ALIGNS[text]


def numbers(name: str, text: str, most: int = MOST) -> list[int]:
    """`1,4,10` or `2-4`: whole numbers from 1 to `most`."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= most:
            wanted = f"whole numbers from 1 to {most:,} such as 1,4,10 or 2-4"
            raise typer.BadParameter(f"{name} is {text[:60]!r}; wanted {wanted}")
        if len(found) + last - first >= SEVERAL:
            raise typer.BadParameter(f"{name} is {text[:60]!r}; wanted at most {SEVERAL:,} of them")
        found += range(first, last + 1)
    return found
