"""One rule per op: how its result lies on the image, and whether it thins the grid out.

In: the walk, a node and its value for one image. Out: the position of the value, and the operands it came from.
Layout ops are simply executed on the coordinates; windows, contractions and merges have a rule; an op that is not in
`RULES` is named in the report and hides positions (`LOST`), never guessed. Each file is a family of ops and enters its
rules in the table where they stand. Touch: a family; for an op of your own there is `unstride.extend.rule`.
"""

from unstride.geometry.rules import contractions, elementwise, layout, resize, windows
from unstride.geometry.rules.base import RULES, Result, Rule, register

__all__ = [
    "RULES",
    "Result",
    "Rule",
    "contractions",
    "elementwise",
    "layout",
    "register",
    "resize",
    "windows",
]
