"""Classes of two networks, matched by name."""

from __future__ import annotations

from collections.abc import Sequence

from unstride.errors import InputError

_SHOWN = 5


def class_map(base: Sequence[str], other: Sequence[str], name: str = "the other network") -> tuple[int, ...]:
    """Of each class of the base network, its index in the other one; () if they are alike or one has no names.

    Names are compared without case, spaces and underscores. Another set of names is an InputError that lists the
    difference.
    """
    if not base or not other or tuple(base) == tuple(other):
        return ()
    ours, theirs = ([_comparable(n) for n in names] for names in (base, other))
    if set(ours) != set(theirs) or len(set(ours)) < len(ours) or len(ours) != len(theirs):
        missing = [n for n, key in zip(base, ours, strict=True) if key not in theirs]
        more = [n for n, key in zip(other, theirs, strict=True) if key not in ours]
        raise InputError(
            f"{name}: its {len(other)} classes are not the base network's {len(base)}; "
            f"it lacks {_listed(missing)} and has besides {_listed(more)}. "
            "Networks of one recipe predict the same classes."
        )
    where = {key: index for index, key in enumerate(theirs)}
    found = tuple(where[key] for key in ours)
    return () if found == tuple(range(len(found))) else found


def _comparable(name: str) -> str:
    return "".join(name.casefold().replace("_", " ").replace("-", " ").split())


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + rest
