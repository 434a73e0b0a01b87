"""Criteria of the search (section 4.2): which visited state is expanded first. Lower is better.

The learned criterion is in `attention`: it depends on all the visited states, the others on one state alone. Entropy
(Eq. 12, divided by log K) is `Task.uncertainty` in `tasks`, where gates read it as well.
"""

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unstride.errors import InputError
from unstride.geometry.states import State, StateSpace


def displacement_criterion(space: StateSpace, state: State) -> float:
    """|Delta| of Eq. 10 in image pixels, summed over the axes."""
    return float(sum(map(abs, space.displacement(state))))


def random_criterion(state: State, seed: int) -> float:
    """One random order of the states, the same for every image and every batch."""
    return random.Random(f"{seed} {state}").random()


def random_criterion_per_image(state: State, seed: int, digest: str) -> float:
    """A random order of the states for each image, drawn from its content: the batch does not matter."""
    return random.Random(f"{seed} {digest} {state}").random()


def image_digest(image: Tensor) -> str:
    """A name for the content of one image (C, H, W)."""
    sha = hashlib.sha256(f"{tuple(image.shape)} {image.dtype}".encode())
    sha.update(image.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]


def training_draw(seed: str) -> Callable[[Sequence[State], Mapping[State, float]], State]:
    """How training chooses the state to expand (section 5.1): drawn with probability proportional to 1 / criterion.

    Give it to `BestFirst(choose=...)`. The same seed draws the same numbers.
    """
    generator = random.Random(seed)

    def choose(queue: Sequence[State], criterion: Mapping[State, float]) -> State:
        if not all(0.0 < criterion[state] < math.inf for state in queue):
            raise InputError(
                "the criterion of some state is not a positive number, so nothing can be learned from this image; "
                "half precision may have overflowed: use float32, or leave the image out"
            )
        return generator.choices(queue, [1.0 / criterion[state] for state in queue])[0]

    return choose
