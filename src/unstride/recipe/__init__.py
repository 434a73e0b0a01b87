"""What is asked for, in one frozen noun.

In: a name, a file, or what a tuner chose. Out: a `Recipe`: stages of looks with gates between them, or the paper's
search. `recipe` defines and checks every field once, `words` says what each is; `presets` names some; `files` is their
readable form.
Nothing here runs anything. Touch: a preset, a field (and then what runs it).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unstride.recipe.files import Written, read, write
    from unstride.recipe.presets import PRESETS, get
    from unstride.recipe.recipe import Recipe, field_table

# Loaded when first asked for: a page of help needs only the words.
_HOME = {
    "Written": "files",
    "read": "files",
    "write": "files",
    "PRESETS": "presets",
    "get": "presets",
    "Recipe": "recipe",
    "field_table": "recipe",
}

__all__ = ["PRESETS", "Recipe", "Written", "field_table", "get", "read", "write"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"unstride.recipe.{_HOME[name]}"), name)
    raise AttributeError(f"module 'unstride.recipe' has no attribute {name!r}")
