"""All exhibits by name, by their number in the paper, and what the commands make beside them."""

from __future__ import annotations

import difflib
import re

from unstride.errors import SpecError
from unstride.paper.exhibits import Exhibit
from unstride.paper.figures import FIGURES
from unstride.paper.macs import WITHOUT_DATA
from unstride.paper.tables import TABLES

EXHIBITS: dict[str, Exhibit] = {exhibit.name: exhibit for exhibit in (*TABLES, *WITHOUT_DATA, *FIGURES)}
FINETUNE = "flowers102-finetune"  # what Table 2 rests on: no exhibit, but a step to it
_SHORT = {"tab": "table", "tbl": "table", "fig": "figure"}


def get(name: str) -> Exhibit:
    """`get("table1")`, `get("Figure A2")`, `get("imagenet-expanded")`."""
    numbers = {_plain(exhibit.where): exhibit.name for exhibit in EXHIBITS.values()}
    found = numbers.get(_plain(name), name.strip().lower())
    if found in EXHIBITS:
        return EXHIBITS[found]
    known = [*EXHIBITS, *numbers, FINETUNE]
    close = difflib.get_close_matches(found, known, 1, 0.5) or difflib.get_close_matches(_plain(name), known, 1, 0.5)
    hint = f" Did you mean {_shown(numbers.get(close[0], close[0]))}?" if close else ""
    raise SpecError(
        f"the paper has no exhibit {name[:60]!r} that can be measured.{hint} `unstride reproduce list` shows all."
    )


def _plain(text: str) -> str:
    """`Tab. A4` -> tablea4."""
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    match = re.fullmatch(r"(tab|tbl|fig)(a?\d+)", letters)
    return _SHORT[match[1]] + match[2] if match else letters


def _shown(name: str) -> str:
    return f"{name!r} ({EXHIBITS[name].where})" if name in EXHIBITS else repr(name)
