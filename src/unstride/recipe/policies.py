"""A policy is a named, ordered list of views. `standard()` and `expanded()` are the paper's tables."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, overload

import numpy as np

from unstride.errors import OptionError
from unstride.recipe.view import CROPS, PLAIN, RULES, SCALES, Op, View, cutout
from unstride.storage import strict_json

_BYTES = 8 << 20  # the largest file that is read: all views of `expanded` take half a megabyte


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

    The first 30 are the original policy of Shanmugam et al. (scales 1.00, 1.04, 1.10). The first view is the image.
    """
    views = [_view(flip, scale, crop) for scale in SCALES for crop in CROPS for flip in (False, True)]
    return Policy("standard", tuple(sorted(views, key=lambda view: view.intensity)), seed)


def _view(flip: bool, scale: float, crop: str) -> View:
    """A view of the standard policy, without the ops that do nothing."""
    ops = [Op("FlipLR")] * flip + [Op("Scale", scale)] * (scale != 1) + [Op("FiveCrop", crop)] * (crop != "Center")
    return View(tuple(ops)) if ops else PLAIN


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
    """Size (1, 0.75, 1.25, 0.5, 1.5) x flip (2) = 10 views that can be undone; the first 2 are the paper's flip."""
    views = []
    for size in (1.0, 0.75, 1.25, 0.5, 1.5):
        scaled = () if size == 1 else (Op("Size", size),)
        views += [View(scaled or PLAIN.ops), View((Op("FlipLR"), *scaled))]
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
    """A policy from a small file, in its own order: `views = ["plain", "flip", "Rotate=10 + Contrast=1.1"]`.

    Optional keys: `name`, and `seed` for the place of Cutout (default: the argument).
    """
    path = Path(path)
    data = _parsed(path)
    views = data.get("views") if isinstance(data, dict) else None
    if not isinstance(views, list) or not views or not all(isinstance(v, str) for v in views):
        raise OptionError(f'policy {path} needs a list like views = ["plain", "flip", "Rotate=10 + Contrast=1.1"].')
    seed, name = data.get("seed", seed), data.get("name", path.stem)
    if (
        isinstance(seed, bool)
        or not isinstance(seed, int)
        or not isinstance(name, str)
        or set(data) - {"views", "seed", "name"}
    ):
        raise OptionError(f"policy {path} may have views, a text name and a whole-number seed; it has {sorted(data)}.")
    return Policy(name, tuple(View.parse(view, seed) for view in views), seed)


def _parsed(path: Path) -> Any:
    try:
        if path.stat().st_size > _BYTES:
            raise OptionError(f"policy {path} has {path.stat().st_size:,} bytes; at most {_BYTES:,} are read.")
        text = path.read_text(encoding="utf-8")
        data = strict_json.loads(text) if path.suffix != ".toml" else tomllib.loads(text)
        strict_json.check_depth(data)
    except OSError as error:
        raise OptionError(f"cannot read policy {path}: {error.strerror or error}.") from error
    except RecursionError as error:
        raise OptionError(f"policy {path} is nested too deep; it needs a list of views, not more.") from error
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"policy {path} is not valid {path.suffix[1:] or 'JSON'}: {error}.") from error
    return data


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
