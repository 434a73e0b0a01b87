"""All tables and figures by name."""

from __future__ import annotations

from unstride.errors import SpecError
from unstride.models.libraries import close_to
from unstride.paper.exhibits import Exhibit
from unstride.paper.figures import FIGURES
from unstride.paper.macs import WITHOUT_DATA
from unstride.paper.tables import TABLES

EXHIBITS: dict[str, Exhibit] = {exhibit.name: exhibit for exhibit in (*TABLES, *WITHOUT_DATA, *FIGURES)}


def get(name: str) -> Exhibit:
    """`get("imagenet-expanded")`."""
    if name not in EXHIBITS:
        raise SpecError(f"no table or figure {name!r}{close_to(name, EXHIBITS)}; there are {', '.join(EXHIBITS)}")
    return EXHIBITS[name]
