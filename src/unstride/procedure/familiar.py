"""A warning without labels: a network that was never trained on moved pictures shows it in its own answers."""

import torch
from torch import Tensor

from unstride.procedure.aggregate import two_class

DROP, SLACK = 0.25, 0.005  # of confidence, as a share of what the network leaves to doubt, and beyond that
CHANGED, ROOM = 2.0, 0.02  # answers that change, as a multiple of the same


def unfamiliar(plain: Tensor, moved: Tensor) -> str | None:
    """Logits (N, K) of the plain and of moved looks -> why they look unfamiliar to the network, or None.

    An ordinary network is as sure of a picture that moved by a pixel as of the picture itself, and changes its answer
    about as often as its own doubt says. Where confidence drops and answers change far more often than that, moved
    pictures were not in its training.
    """
    before, after = (two_class(z.float()).softmax(1) for z in (plain, moved))
    doubt = 1 - float(before.amax(1).mean())
    drop = float((before.amax(1) - after.amax(1)).mean())
    changed = float((before.argmax(1) != after.argmax(1)).float().mean())
    if not (drop > DROP * doubt + SLACK and changed > CHANGED * doubt + ROOM):
        return None
    return (
        f"confidence drops by {drop:.3f} and {changed:.1%} of the answers change on moved pictures, though the network "
        f"leaves only {doubt:.1%} to doubt"
    )


def warn_states(plain: Tensor, states: Tensor) -> str | None:
    """`states`: (S, N, K) of near states. What to tell the user, or None."""
    why = unfamiliar(plain.expand_as(states).reshape(-1, plain.shape[-1]), torch.flatten(states, 0, 1))
    if why is None:
        return None
    return (
        f"states look unfamiliar to this network: {why}. Leave them out (recipe='default' has none), or try on labels."
    )
