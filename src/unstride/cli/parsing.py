"""What several commands read alike from the command line."""

import typer

ALIGNS: dict[str, bool | str] = {"on": True, "off": False, "stitch": "stitch"}


def read_align(text: str) -> bool | str:
    """--align on|off|stitch -> what `enhance` takes."""
    if text not in ALIGNS:
        raise typer.BadParameter(f"--align is {text}; wanted on, off or stitch")
    return ALIGNS[text]
