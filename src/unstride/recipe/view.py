"""A view says how an image is transformed before a forward pass: flipped, scaled, cropped, recoloured.

    View.parse("flip + 1.3x") == View((Op("FlipLR"), Op("Size", 1.3)))
    str(view)                                            # "flip + 1.3x", exact: View.parse reads it back

There are two families of ops. The placing ops (Size, Crop, ShiftX, ShiftY) choose which part of the uncropped image the
network gets, and at what size. The others are the ops of the paper's TTA policies. Nothing here runs anything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from unstride.errors import OptionError

Value = float | int | str | bool | None

CROPS = ("Center", "LeftTop", "LeftBottom", "RightTop", "RightBottom")
SCALES = (
    1.00, 1.04, 1.10, 0.98, 0.92, 0.86, 0.80, 0.74, 0.68, 0.62, 0.56, 0.50, 0.44, 0.38, 0.32, 0.26, 0.20, 0.14, 0.08
)  # fmt: skip

_SHORT = {"Identity": "plain", "FlipLR": "flip"}
_LONG = {short: name for name, short in _SHORT.items()}
_LARGEST = 1e6  # no op takes more
_LONGEST = 200  # characters of one op


@dataclass(frozen=True)
class Rule:
    """The values that an op takes, and their intensity: 0 does nothing, 1 is the far end of the paper's table."""

    low: float | None = None  # None: the op takes no number
    high: float = 0.0
    whole: bool = False
    choices: tuple[Value, ...] = ()
    neutral: float = 0.0
    reach: float = 1.0  # the distance from neutral that has intensity 1
    base: float = 0.0  # the intensity of an op without a number


RULES: dict[str, Rule] = {
    # Without a number, intensity is how far the result is from a photo: a flipped photo is one, a negative is not.
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
    # The placing ops: which part of the uncropped image, and at what size (views/source.py).
    "Size": Rule(0.25, 4, neutral=1),
    "Crop": Rule(0.25, 4, neutral=1),
    "ShiftX": Rule(-512, 512, whole=True, reach=9),
    "ShiftY": Rule(-512, 512, whole=True, reach=9),
}


@dataclass(frozen=True)
class Op:
    """`Op("Rotate", 10.0)`: an op and its value. `place` is where Cutout cuts, (y, x) in [0, 1]."""

    name: str
    value: Value = None
    place: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        rule = RULES.get(self.name) if isinstance(self.name, str) else None
        if rule is None:
            raise OptionError(f"unknown op {self.name!r}: there are {', '.join(RULES)}.")
        if rule.choices:
            if not any(self.value is c or (isinstance(c, str) and self.value == c) for c in rule.choices):
                raise OptionError(f"{self.name} takes one of {', '.join(map(str, rule.choices))}, not {self.value!r}.")
        elif rule.low is None:
            if self.value is not None:
                raise OptionError(f"{self.name} takes no value, not {self.value!r}.")
        elif not _fits(self.value, rule):
            kind = "a whole number" if rule.whole else "a number"
            raise OptionError(f"{self.name} takes {kind} from {rule.low:g} to {rule.high:g}, not {self.value!r}.")
        if self.place is not None and not (self.name == "Cutout" and _is_place(self.place)):
            raise OptionError(f"only Cutout has a place, (y, x) in [0, 1]: {self.name} came with {self.place!r}.")

    @property
    def number(self) -> float:
        """The value of an op that takes a number."""
        assert isinstance(self.value, int | float)
        return float(self.value)

    @property
    def intensity(self) -> float:
        """How far the op is from doing nothing: 0 is nothing, 1 is the far end of the paper's range."""
        rule = RULES[self.name]
        if self.name == "FiveCrop":
            return 0.0 if self.value == "Center" else 0.04
        if self.name == "Scale" and self.value in SCALES:
            return round(SCALES.index(self.value) / (len(SCALES) - 1), 6)
        if rule.low is None:
            return rule.base
        return round(abs(self.number - rule.neutral) / rule.reach, 6)

    def __str__(self) -> str:
        """The op as `parse_op` reads it, nothing rounded."""
        if self.value is None:
            return _SHORT.get(self.name, self.name)
        value = _written(self.value)
        if self.name == "Size":
            return f"{value}x"
        place = "" if self.place is None else "@" + ",".join(map(repr, map(float, self.place)))
        return f"{self.name}={value}{place}"


@dataclass(frozen=True)
class View:
    """`View((Op("FlipLR"), Op("Rotate", 10.0)))`: ops applied in this order. Hashable, and a key of many tables."""

    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        ops = tuple(self.ops) if isinstance(self.ops, list | tuple) else ()
        if not ops or not all(isinstance(op, Op) for op in ops):
            raise OptionError(f'a view is a tuple of at least one Op, not {self.ops!r}; "plain" is the image itself.')
        object.__setattr__(self, "ops", ops)

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> View:
        """`View.parse("flip + 1.3x")`: the inverse of `str(view)`."""
        return parse_view(text, seed)

    @property
    def intensity(self) -> float:
        """The sum of its ops' intensities."""
        return round(sum(op.intensity for op in self.ops), 6)

    def __str__(self) -> str:
        return " + ".join(map(str, self.ops))


PLAIN = View((Op("Identity"),))


def as_view(view: str | View) -> View:
    """`as_view("flip")`: a view from its name, or a View as it is."""
    if isinstance(view, View):
        return view
    if isinstance(view, str):
        return parse_view(view)
    raise OptionError(f"view: got {view!r}, expected a View or its name, such as 'plain', 'flip' or 'flip + 1.3x'.")


def parse_view(text: str, seed: int = 0) -> View:
    """`parse_view("flip + Rotate=10")`. A Cutout without a place gets one that depends on the seed."""
    if not isinstance(text, str):
        raise OptionError(f"view: got {text!r:.80}, expected text such as 'flip + 1.3x'.")
    return View(tuple(parse_op(part.strip(), seed) for part in text.split(" + ")))


def parse_op(text: str, seed: int = 0) -> Op:
    """`parse_op("Rotate=10")`, `parse_op("1.3x")`, `parse_op("Cutout=8@0.3,0.7")`."""
    if len(text) > _LONGEST:
        raise OptionError(f"{text[:60]!r}...: an op has at most {_LONGEST} characters, such as Rotate=10.")
    text = _LONG.get(text, text)
    if text.endswith("x") and text[:-1].replace(".", "", 1).isdecimal():
        text = f"Size={text[:-1]}"
    head, _, where = text.partition("@")
    name, has_value, raw = head.partition("=")
    value = _value(raw) if has_value else None
    if _is_number(value) and not abs(value) <= _LARGEST:  # type: ignore[arg-type]
        raise OptionError(f"{text[:60]!r}: a value must be finite, and at most {_LARGEST:g}.")
    if not where:
        return cutout(value, seed) if name == "Cutout" and _is_number(value) else Op(name, value)
    try:
        y, x = map(float, where.split(","))
    except ValueError as error:
        raise OptionError(f"{text!r}: a place is written @y,x with numbers in [0, 1].") from error
    return Op(name, value, (y, x))


def cutout(size: Value, seed: int) -> Op:
    """Cutout at a place that depends on the seed and its size alone, never on a global random state."""
    place = random.Random(f"cutout {seed} {float(size):g}")  # type: ignore[arg-type]
    return Op("Cutout", size, (place.random(), place.random()))


def _value(text: str) -> Value:
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        return text


def _written(value: Value) -> str:
    """The shortest text that is read as the same value: 1 for 1.0, 1.15 for 1.15."""
    if not _is_number(value):
        return str(value)
    number = float(value)  # type: ignore[arg-type]
    return str(int(number)) if number.is_integer() else repr(number)


def _fits(value: Value, rule: Rule) -> bool:
    assert rule.low is not None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return rule.low <= value <= rule.high and not (rule.whole and value != int(value))


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_place(place: object) -> bool:
    return isinstance(place, tuple) and len(place) == 2 and all(_is_number(p) and 0 <= p <= 1 for p in place)
