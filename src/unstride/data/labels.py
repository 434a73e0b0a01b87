"""Which label means which class of the model: by name where both have names, by number otherwise, never by luck.

    match("csv:pets.csv", listing, Classes.of(("dog", "cat")))  # labels cat, dog become 1, 0

What cannot be matched is a DataError that names the row or the folder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from unstride.compat import import_torchvision
from unstride.data.items import Item, Listing, check_classes, check_labels
from unstride.errors import DataError, OptionError
from unstride.models.libraries import close_to, imagenet_names

_WHOLE = re.compile(r"[+-]?\d{1,9}(\.0*)?", re.ASCII)
_WNID = re.compile(r"n\d{8}", re.ASCII)
_SHOWN = 4


@dataclass(frozen=True)
class Classes:
    """What is known of the model's classes: their names in its order, or how many there are, or nothing."""

    count: int | None = None
    names: tuple[str, ...] = ()

    @staticmethod
    def of(classes: int | Sequence[str] | None) -> Classes:
        """`Classes.of(1000)`, `Classes.of(("cat", "dog"))`."""
        if classes is None or (isinstance(classes, int) and not isinstance(classes, bool) and classes >= 1):
            return Classes(classes)
        named = (
            isinstance(classes, Sequence) and not isinstance(classes, str) and all(isinstance(n, str) for n in classes)
        )
        if isinstance(classes, int) or not named or not classes:
            raise OptionError(
                f"classes is {classes!r}; expected the model's number of classes, or their names in its order"
            )
        return Classes(len(classes), tuple(classes))

    def find(self, word: str) -> int | None:
        """The class of that name; case and the kind of space do not count. None: no class, or more than one."""
        for key in (word, _plain(word)):
            if key in self._table:
                return self._table[key]
        return self._wnids.get(word) if _WNID.fullmatch(word) else None

    @cached_property
    def _table(self) -> dict[str, int]:
        table: dict[str, int] = {}
        for key in (_plain, str):  # exact names last: they win
            times = Counter(map(key, self.names))
            table |= {key(name): i for i, name in enumerate(self.names) if times[key(name)] == 1}
        return table

    @cached_property
    def _wnids(self) -> dict[str, int]:
        if self.names != imagenet_names():
            return {}
        import_torchvision()
        from timm.data import ImageNetInfo

        return {wnid: i for i, wnid in enumerate(ImageNetInfo("imagenet-1k").label_names())}


def match(name: str, listing: Listing, classes: Classes) -> Listing:
    """The listing with the model's class numbers for labels, their names, and `meaning`: what each label stands for."""
    own = listing.classes
    if not own:  # numbers, checked where they were read
        meaning = {str(k): k for k in range(len(classes.names))}
        return replace(listing, classes=classes.names, meaning=meaning)
    how, numbers = (_written if listing.written else _numbered)(name, listing, classes)
    if how == "order":
        return listing
    make = partial(_relabelled, listing.make, tuple(numbers[word] for word in own))
    return replace(listing, make=make, classes=classes.names, meaning=numbers)


def legend(listing: Listing) -> str:
    """`labels: cat is class 1, dog is class 0`: what the scores rest on, in one line; the first few, and how many."""
    classes = listing.classes
    pairs = sorted(listing.meaning.items(), key=lambda pair: pair[1]) or [(name, k) for k, name in enumerate(classes)]
    if not pairs:
        return "labels: class numbers; the names of the classes are not known"
    mapping = []
    for word, k in pairs[:_SHOWN]:
        name = f" ({classes[k]})" if k < len(classes) and classes[k] != word else ""
        mapping.append(f"{word} is class {k}{name}")
    more = f", ...; {len(pairs):,} in all" if len(pairs) > _SHOWN else ""
    return f"labels: {', '.join(mapping)}{more}"


Matched = tuple[str, dict[str, int]]  # how the labels were matched (name, number or order), and the class of each


def _written(name: str, listing: Listing, classes: Classes) -> Matched:
    """Labels that a user wrote: words of a CSV, names of folders. All of them are names, or all of them are numbers;
    without names to hold them against they count in the order of their text, as torchvision's ImageFolder has it.
    """
    words = listing.classes
    numbers = {word: classes.find(word) for word in words}
    unknown = [word for word, k in numbers.items() if k is None]
    if not unknown:
        return "name", {word: k for word, k in numbers.items() if k is not None}
    whole = {word: int(float(word)) for word in words if _WHOLE.fullmatch(word)}
    in_order = {word: k for k, word in enumerate(words)}
    if len(whole) == len(words):
        return _by_number(name, listing, classes, whole, in_order)
    if whole and not listing.folders:
        word = min((w for w in words if w not in whole), key=lambda w: len(w))
        raise DataError(f"{listing.written[word]}: its label is {word!r}, where others are numbers; expected one kind")
    if classes.names:
        word = unknown[0]
        raise DataError(
            f"{listing.written[word]}: {word!r} is not one of the model's {len(classes.names):,} classes"
            f"{_several(word, classes)}{close_to(word, classes.names)}"
        )
    check_classes(f"{name}: {', '.join(words[:_SHOWN])}{', ...' * (len(words) > _SHOWN)}", len(words), classes.count)
    return "order", in_order


def _by_number(
    name: str, listing: Listing, classes: Classes, whole: Mapping[str, int], in_order: dict[str, int]
) -> Matched:
    """Whole numbers. Of folders it may be the number that counts, or the place in the order of their text."""
    if not listing.folders:
        check_labels([listing.written[word] for word in whole], list(whole.values()), classes.count)
        return "number", dict(whole)
    if classes.count is None:
        return "order", in_order
    if not all(0 <= k < classes.count for k in whole.values()):
        check_classes(name, len(in_order), classes.count)
        return "order", in_order
    other = [word for word in in_order if whole[word] != in_order[word]]
    if other and classes.count == len(in_order):
        word = other[0]
        raise DataError(
            f"{listing.written[word]}: class {whole[word]} by its number, but class {in_order[word]} in the order of "
            "the folders' names, as torchvision counts; write all numbers with as many digits, in the model's order"
        )
    return "number" if other or classes.names else "order", dict(whole)


def _numbered(name: str, listing: Listing, classes: Classes) -> Matched:
    """A data set with an order of its own. It is the model's, unless names say that the model has another."""
    own = listing.classes
    in_order = {word: k for k, word in enumerate(own)}
    once = [word for word, times in Counter(own).items() if times == 1]
    numbers = {word: k for word in once if (k := classes.find(word)) is not None}
    if classes.names and len(numbers) == len(own):
        return "name", numbers
    moved = [word for word, k in numbers.items() if k != in_order[word]]
    if 2 * len(moved) > len(numbers):
        word, missing = moved[0], next(w for w in own if w not in numbers)
        raise DataError(
            f"{name}: its class {in_order[word]} is {word!r}, which is the model's class {numbers[word]}, "
            f"but {missing!r} is no class of the model; the labels cannot be matched"
        )
    check_classes(name, len(own), classes.count)
    return "order", in_order


def _several(word: str, classes: Classes) -> str:
    same = [k for k, name in enumerate(classes.names) if _plain(name) == _plain(word)]
    return f"; it is the name of classes {' and '.join(map(str, same))}, so write their numbers" if same else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _relabelled(make: Callable[[Any], Item], numbers: tuple[int, ...], entry: Any) -> Item:
    item = make(entry)
    if isinstance(item.target, int):
        return replace(item, target=numbers[item.target])
    return replace(item, target=partial(_relabelled_mask, item.target, numbers))


def _relabelled_mask(mask: Callable[[], Tensor], numbers: tuple[int, ...]) -> Tensor:
    """Values 0..K-1 become the model's; what has no label (255) stays."""
    table = torch.arange(256)
    table[: len(numbers)] = torch.tensor(numbers)
    return table[mask()]
