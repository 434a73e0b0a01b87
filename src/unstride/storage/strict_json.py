"""Standard JSON: written without NaN and infinity, read with limits, because anybody may have written the file.

strict_json.dumps({"loss": float("nan")})  # '{"loss": null}'
strict_json.loads("[" * 200_000)  # ValueError, not a crash
"""

import json
import math
from collections.abc import Mapping
from typing import Any

DEPTH = 64  # nesting that is understood; what unstride writes has less than ten
WHOLE = 2**63  # whole numbers beyond it are nobody's count


def dumps(data: Any, indent: int | None = None) -> str:
    """Valid JSON, on one line unless it is indented: what is not finite is null."""
    return json.dumps(_finite(data), allow_nan=False, indent=indent)


def loads(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError that says why where it is damaged, nested too deep or no number can be."""
    try:
        found = json.loads(text, parse_float=_number, parse_int=_whole, parse_constant=_number)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None
    check_depth(found)
    return found


def check_depth(value: Any) -> None:
    """A ValueError where lists and tables are nested deeper than in any file of ours: readers go down by calls."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [inner for v in level for inner in _inside(v)]
        if not level:
            return
    raise ValueError(f"nested more than {DEPTH} deep")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is not finite")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= WHOLE:
        raise ValueError(f"the number {text[:20]}... has {len(text)} digits")
    return int(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
