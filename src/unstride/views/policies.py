"""Policies are data: which views of an image, in which order. `standard()` and `expanded()` are the paper's tables."""

import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from unstride.errors import OptionError
from unstride.storage import strict

Value = float | int | str | bool | None
_BYTES = 8 << 20  # of a file: all views of `expanded`, written out, take half a megabyte


class BudgetPair(NamedTuple):
    """`BudgetPair(10, 3)`: views (B_tta) and states inside each view (B_ours)."""

    tta: int
    ours: int

    @property
    def total(self) -> int:
        """B_total = B_tta x B_ours."""
        return self.tta * self.ours


PRESETS = tuple(BudgetPair(*pair) for pair in ((10, 3), (10, 10), (10, 15), (15, 2), (15, 5), (15, 10), (1, 30)))
"""The paper's pairs: learned methods (10, .), `standard` without learning (15, .), the procedure alone (1, 30)."""

CROPS = ("Center", "LeftTop", "LeftBottom", "RightTop", "RightBottom")
SCALES = (
    1.00, 1.04, 1.10, 0.98, 0.92, 0.86, 0.80, 0.74, 0.68, 0.62, 0.56, 0.50, 0.44, 0.38, 0.32, 0.26, 0.20, 0.14, 0.08
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What a value of an op may be, and how strong it is: 0 does nothing, 1 is the far end of the paper's table."""

    low: float | None = None  # None: the op takes no number
    high: float = 0.0
    whole: bool = False
    choices: tuple[Value, ...] = ()
    neutral: float = 0.0
    reach: float = 1.0  # the distance from neutral that has intensity 1
    base: float = 0.0  # the intensity of an op without a number


RULES: dict[str, Rule] = {
    # Without a number, intensity says how far from a photo the result is: a mirrored one is one, a negative is not.
    "Identity": Rule(),
    "FlipLR": Rule(choices=(None, True, False)),
    "FlipUD": Rule(base=1.0),
    "FlipFB": Rule(base=1.0),  # front to back, of volumes
    "Invert": Rule(base=1.0),
    "PIL_Blur": Rule(base=0.5),
    "PIL_Smooth": Rule(base=0.25),
    "AutoContrast": Rule(base=0.25),
    "Equalize": Rule(base=0.5),
    "Posterize": Rule(1, 7, whole=True, reach=4),
    "Rotate": Rule(-180, 180, reach=30),
    "CropBilinear": Rule(1, 128, whole=True, reach=10),
    "Solarize": Rule(0, 1, neutral=1, reach=1),
    "Contrast": Rule(0, 10, neutral=1, reach=0.9),
    "Saturation": Rule(0, 10, neutral=1, reach=0.9),
    "Brightness": Rule(0, 10, neutral=1, reach=0.9),
    "Sharpness": Rule(0, 10, neutral=1, reach=0.9),
    "ShearX": Rule(-1, 1, reach=0.3),
    "ShearY": Rule(-1, 1, reach=0.3),
    "TranslateX": Rule(-256, 256, whole=True, reach=9),
    "TranslateY": Rule(-256, 256, whole=True, reach=9),
    "Cutout": Rule(1, 512, whole=True, reach=20),
    "Scale": Rule(0.01, 8, neutral=1, reach=0.92),
    "FiveCrop": Rule(choices=CROPS),
    # Where and how large the network looks at the image (views/canvas.py); the others change what it is shown.
    "Size": Rule(0.25, 4, neutral=1),
    "Field": Rule(0.25, 4, neutral=1),
    "ShiftX": Rule(-512, 512, whole=True, reach=9),
    "ShiftY": Rule(-512, 512, whole=True, reach=9),
}


@dataclass(frozen=True)
class Op:
    """`Op("Rotate", 10.0)`: an op of the paper's tables and its value; `place`: where Cutout cuts, (y, x) in [0, 1]."""

    name: str
    value: Value = None
    place: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        rule = RULES.get(self.name)
        if rule is None:
            raise OptionError(f"unknown op {self.name!r}: there are {', '.join(RULES)}.")
        if rule.choices:
            if not any(self.value is c or (isinstance(c, str) and self.value == c) for c in rule.choices):
                raise OptionError(f"{self.name} takes one of {', '.join(map(str, rule.choices))}, not {self.value!r}.")
        elif rule.low is None:
            if self.value is not None:
                raise OptionError(f"{self.name} takes no value, not {self.value!r}.")
        else:
            kind = "a whole number" if rule.whole else "a number"
            number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
            if not number or not rule.low <= self.value <= rule.high or (rule.whole and self.value != int(self.value)):  # type: ignore[operator,arg-type]
                raise OptionError(f"{self.name} takes {kind} from {rule.low:g} to {rule.high:g}, not {self.value!r}.")
        if self.place is not None and not (self.name == "Cutout" and all(0 <= p <= 1 for p in self.place)):
            raise OptionError(f"only Cutout has a place, (y, x) in [0, 1]: {self.name} came with {self.place!r}.")

    @property
    def number(self) -> float:
        """The value of an op that takes a number."""
        assert isinstance(self.value, int | float)
        return float(self.value)

    @property
    def intensity(self) -> float:
        """The distance from doing nothing: 0 is nothing, 1 the far end of the paper's range."""
        rule = RULES[self.name]
        if self.name == "FiveCrop":
            return 0.0 if self.value == "Center" else 0.04
        if self.name == "Scale" and self.value in SCALES:
            return round(SCALES.index(self.value) / (len(SCALES) - 1), 6)
        if rule.low is None:
            return rule.base
        return round(abs(self.number - rule.neutral) / rule.reach, 6)

    def __str__(self) -> str:
        if self.value is None:
            return self.name
        return f"{self.name}={self.value:g}" if _is_number(self.value) else f"{self.name}={self.value}"

    def spec(self) -> str:
        """The op in full, as `parse_op` reads it: nothing is rounded."""
        place = "" if self.place is None else f"@{self.place[0]!r},{self.place[1]!r}"
        return self.name + ("" if self.value is None else f"={self.value!r}".replace("'", "")) + place


@dataclass(frozen=True)
class View:
    """`View((Op("FlipLR"), Op("Rotate", 10.0)))`: ops applied in this order."""

    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        if not self.ops:
            raise OptionError('a view needs at least one op; "Identity" is the image itself.')

    @property
    def intensity(self) -> float:
        """The sum of its ops' intensities."""
        return round(sum(op.intensity for op in self.ops), 6)

    def __str__(self) -> str:
        return " + ".join(_SHORT.get(str(op), f"{op.value:g}x" if op.name == "Size" else str(op)) for op in self.ops)

    def spec(self) -> str:
        """The view in full, as `parse_view` reads it."""
        return " + ".join(op.spec() for op in self.ops)


IDENTITY = View((Op("Identity"),))
_SHORT = {"Identity": "plain", "FlipLR": "mirror"}  # as people say it; `parse_view` reads both, and "1.3x"


@dataclass(frozen=True, repr=False)
class Policy(Sequence[View]):
    """`expanded()[:30]`: a named, ordered sequence of views; a budget takes the first n."""

    name: str
    views: tuple[View, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.views:
            raise OptionError(f"policy {self.name!r} has no view.")

    def __len__(self) -> int:
        return len(self.views)

    @overload
    def __getitem__(self, index: int) -> View: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[View, ...]: ...
    def __getitem__(self, index: int | slice) -> View | tuple[View, ...]:
        return self.views[index]

    def __iter__(self) -> Iterator[View]:
        return iter(self.views)

    def __repr__(self) -> str:
        return f"Policy({self.name!r}, {len(self)} views, seed={self.seed})"

    def first(self, budget: int) -> tuple[View, ...]:
        """The first `budget` views."""
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise OptionError(f"budget {budget!r} is not a whole number of at least 1.")
        if budget > len(self):
            raise OptionError(
                f"budget {budget} is above the {len(self)} views of policy {self.name!r}. Take at most {len(self)}."
            )
        return self.views[:budget]


@lru_cache(maxsize=8)
def standard(seed: int = 0) -> Policy:
    """Flip (2) x scale (19) x five-crop (5) = 190, by intensity: scale in the table's order, then crop, then flip.

    The first 30 are the original policy of Shanmugam et al. (scales 1.00, 1.04, 1.10).
    """
    views = [
        View((Op("FlipLR", flip), Op("Scale", scale), Op("FiveCrop", crop)))
        for scale in SCALES
        for crop in CROPS
        for flip in (False, True)
    ]
    return Policy("standard", tuple(sorted(views, key=lambda view: view.intensity)), seed)


@lru_cache(maxsize=8)
def expanded(seed: int = 0) -> Policy:
    """132 single ops and their 8,646 pairs, 8,778 in all: singles, then pairs, by intensity, ties in the table's order.

    Pairs with Identity repeat a single op, so they come last. The seed says where Cutout cuts.
    """
    singles = sorted(_expanded_table(seed), key=lambda op: op.intensity)
    pairs = sorted(
        combinations(singles, 2), key=lambda pair: (pair[0].name == "Identity", pair[0].intensity + pair[1].intensity)
    )
    return Policy("expanded", tuple(View((op,)) for op in singles) + tuple(View(pair) for pair in pairs), seed)


@lru_cache(maxsize=8)
def segmentation(seed: int = 0) -> Policy:
    """Flip (2) x scale (1, 0.75, 1.25, 0.5, 1.5) = 10 views that can be undone; the first 2 are the paper's flip."""
    views = [
        View((Op("FlipLR", flip), Op("Scale", scale)))
        for scale in (1.0, 0.75, 1.25, 0.5, 1.5)
        for flip in (False, True)
    ]
    return Policy("segmentation", tuple(views), seed)


BUILT_IN = {"standard": standard, "expanded": expanded, "segmentation": segmentation}


def get(policy: "str | Path | Policy", seed: int = 0) -> Policy:
    """`get("expanded")`, `get("mine.toml")`, or a Policy as it is."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str | Path):
        raise OptionError(f"a policy is given by its name, a file or a Policy, not as {type(policy).__name__}.")
    if str(policy) in BUILT_IN:
        return BUILT_IN[str(policy)](seed)
    if Path(policy).suffix in (".toml", ".json"):
        return load(policy, seed)
    raise OptionError(f"unknown policy {str(policy)!r}: give {', '.join(BUILT_IN)}, or a .toml or .json file.")


def load(path: str | Path, seed: int = 0) -> Policy:
    """A policy from a small file, in its own order: `views = ["Identity", "FlipLR", "Rotate=10 + Contrast=1.1"]`.

    Optional keys: `name`, and `seed` for the place of Cutout (default: the argument).
    """
    path = Path(path)
    data = _parsed(path)
    views = data.get("views") if isinstance(data, dict) else None
    if not isinstance(views, list) or not views or not all(isinstance(v, str) for v in views):
        raise OptionError(
            f'policy {path} needs a list like views = ["Identity", "FlipLR", "Rotate=10 + Contrast=1.1"].'
        )
    seed, name = data.get("seed", seed), data.get("name", path.stem)
    if (
        isinstance(seed, bool)
        or not isinstance(seed, int)
        or not isinstance(name, str)
        or set(data) - {"views", "seed", "name"}
    ):
        raise OptionError(f"policy {path} may have views, a text name and a whole-number seed; it has {sorted(data)}.")
    return Policy(name, tuple(parse_view(view, seed) for view in views), seed)


def _parsed(path: Path) -> Any:
    try:
        if path.stat().st_size > _BYTES:
            raise OptionError(f"policy {path} has {path.stat().st_size:,} bytes; at most {_BYTES:,} are read.")
        text = path.read_text(encoding="utf-8")
        data = strict.loads(text) if path.suffix != ".toml" else tomllib.loads(text)
        strict.check_depth(data)
    except OSError as error:
        raise OptionError(f"cannot read policy {path}: {error.strerror or error}.") from error
    except RecursionError as error:
        raise OptionError(f"policy {path} is nested too deep; it needs a list of views, not more.") from error
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"policy {path} is not valid {path.suffix[1:] or 'JSON'}: {error}.") from error
    return data


def parse_view(text: str, seed: int = 0) -> View:
    """`parse_view("FlipLR + Rotate=10")`, `parse_view("mirror + 1.3x")`."""
    return View(tuple(parse_op(part.strip(), seed) for part in text.split(" + ")))


_LARGEST = 1e6  # no op takes more


def parse_op(text: str, seed: int = 0) -> Op:
    """`parse_op("Rotate=10")`; Cutout without a place (`Cutout=8@0.3,0.7`) gets the seed's."""
    if len(text) > 200:
        raise OptionError(f"{text[:60]!r}...: an op is written in a few letters, such as Rotate=10.")
    text = _LONG.get(text, text)
    if text.endswith("x") and text[:-1].replace(".", "", 1).isdecimal():
        text = f"Size={text[:-1]}"
    head, _, where = text.partition("@")
    name, has_value, raw = head.partition("=")
    value: Value = None
    if has_value:
        value = {"True": True, "true": True, "False": False, "false": False}.get(raw, raw)
        try:
            value = value if isinstance(value, bool) else (int(raw) if raw.lstrip("+-").isdigit() else float(raw))
        except ValueError:
            value = raw
    if _is_number(value) and not abs(value) <= _LARGEST:  # type: ignore[arg-type]
        raise OptionError(f"{text[:60]!r}: a value must be finite, and at most {_LARGEST:g}.")
    if not where:
        return cutout(value, seed) if name == "Cutout" and _is_number(value) else Op(name, value)
    try:
        y, x = map(float, where.split(","))
    except ValueError as error:
        raise OptionError(f"{text!r}: a place is written @y,x with numbers in [0, 1].") from error
    return Op(name, value, (y, x))


_LONG = {short: long for long, short in _SHORT.items()}


def cutout(size: Value, seed: int) -> Op:
    """Cutout whose place depends on the seed and its size alone, never on a global random state."""
    place = random.Random(f"cutout {seed} {float(size):g}")  # type: ignore[arg-type]
    return Op("Cutout", size, (place.random(), place.random()))


def _expanded_table(seed: int) -> list[Op]:
    """The 132 rows of the paper's table, in its order."""
    plain = ("Identity", "FlipLR", "FlipUD", "Invert", "PIL_Blur", "PIL_Smooth", "AutoContrast", "Equalize")
    ranges = {
        "Rotate": (-30, 30), "CropBilinear": (1, 10), "Solarize": (0, 1), "Contrast": (0.1, 1.9),
        "Saturation": (0.1, 1.9), "Brightness": (0.1, 1.9), "Sharpness": (0.1, 1.9),
        "ShearX": (-0.3, 0.3), "ShearY": (-0.3, 0.3), "TranslateX": (-9, 9), "TranslateY": (-9, 9), "Cutout": (2, 20),
    }  # fmt: skip
    ops = [Op(name) for name in plain] + [Op("Posterize", bits) for bits in (1, 2, 3, 4)]
    for name, (low, high) in ranges.items():
        for value in np.linspace(low, high, 10).tolist():
            number = round(value) if RULES[name].whole else value
            ops.append(cutout(number, seed) if name == "Cutout" else Op(name, number))
    return ops


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
