"""A warning without labels: a network that was never trained on moved images shows it in its own answers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unstride.procedure.aggregate import two_class
from unstride.procedure.looks import Look, Seen
from unstride.views.policies import IDENTITY

DROP, SLACK = 0.25, 0.005  # of confidence, as a share of what the network leaves to doubt, and beyond that
CHANGED, ROOM = 2.0, 0.02  # answers that change, as a multiple of the same


def unfamiliar(plain: Tensor, moved: Tensor) -> str | None:
    """Logits (N, K) of the plain and of moved looks -> why they look unfamiliar to the network, or None.

    An ordinary network is as sure of an image that moved by a pixel as of the image itself, and changes its answer
    about as often as its own doubt says. Where confidence drops and answers change far more often than that, moved
    images were not in its training.
    """
    before, after = (two_class(z.float()).softmax(1) for z in (plain, moved))
    doubt = 1 - float(before.amax(1).mean())
    drop = float((before.amax(1) - after.amax(1)).mean())
    changed = float((before.argmax(1) != after.argmax(1)).float().mean())
    if not (drop > DROP * doubt + SLACK and changed > CHANGED * doubt + ROOM):
        return None
    return (
        f"confidence drops by {drop:.3f} and {changed:.1%} of the answers change on moved images, though the network "
        f"leaves only {doubt:.1%} to doubt"
    )


def warn_looks(plain: Tensor, looks: Mapping[str, Tensor]) -> str | None:
    """What to tell the user of kinds of looks, each (S, N, K), that look unfamiliar, or None."""
    told = []
    for name, moved in looks.items():
        why = unfamiliar(plain.expand_as(moved).reshape(-1, plain.shape[-1]), torch.flatten(moved, 0, 1))
        if why is not None:
            told.append(f"{name} look unfamiliar to this network: {why}.")
    if not told:
        return None
    return " ".join([*told, "Leave them out (recipe='plain' takes no further look), or tune on labels."])


def warn_seen(said: Sequence[Sequence[Seen]]) -> str | None:
    """The same from explained looks of batches with all gates open: states together, every other view by itself."""
    heard: dict[Look, list[Tensor]] = {}
    for batch in said:
        by: dict[Look, list[Seen]] = {}
        for one in batch:  # a large batch runs in parts
            by.setdefault(one.looks[0], []).append(one)
        for look, parts in by.items():
            order = torch.tensor([row for one in parts for row in one.rows]).argsort()
            heard.setdefault(look, []).append(torch.cat([one.logits for one in parts])[order])
    looks: dict[str, list[Tensor]] = {}
    for look, logits in heard.items():
        name = "states" if look.view == IDENTITY else f"views such as {look.view}"
        looks.setdefault(name, []).append(torch.cat(logits))
    plain, *near = looks.pop("states")
    moved = {"states": near, **looks} if near else looks
    return warn_looks(plain, {name: torch.stack(found) for name, found in moved.items()})
