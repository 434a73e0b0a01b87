"""Lays docstrings out for the API page: indented lines are code, `name   text` lines are a list. Used by mkdocs.yml."""

import re
from typing import Any

from griffe import Extension

ALIGNED = re.compile(r"^(\S+(?:, \S+| \S+)?)(?: {2,})(\S.*)$")


class Docstrings(Extension):
    """Every docstring, as it is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = layout(obj.docstring.value)


def layout(text: str) -> str:
    """Plain text -> Markdown."""
    out: list[str] = []
    kind = "text"
    for line in [*text.splitlines(), ""]:
        listed = ALIGNED.match(line)
        if kind == "list" and line.startswith("  "):
            out[-1] += " " + line.strip()
            continue
        now = "code" if line.startswith("    ") or (kind == "code" and not line) else "list" if listed else "text"
        if now != kind:
            out += ["```", ""] if kind == "code" else []
            out += ["", "```python"] if now == "code" else [""]
        if not line and kind == now == "code":
            out += ["```"]
            now = "text"
        out.append(line[4:] if now == "code" else f"- `{listed[1]}`: {listed[2]}" if listed and now == "list" else line)
        kind = now
    return "\n".join(out).strip()
