"""What is asked for, in one frozen noun.

In: a name, a file, or what a tuner chose. Out: a `Recipe`: stages of looks with gates between them, or the paper's
search. `recipe` defines, documents and checks every field once; `presets` names some; `files` is their readable form.
Nothing here runs anything. Touch: a preset, a field (and then what runs it).
"""

from unstride.recipe.files import Written, read, write
from unstride.recipe.presets import PRESETS, get
from unstride.recipe.recipe import Recipe, field_table

__all__ = ["PRESETS", "Recipe", "Written", "field_table", "get", "read", "write"]
