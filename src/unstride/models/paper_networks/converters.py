"""From the key names of a public checkpoint to those of our module, strictly: nothing missing, nothing left over."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from unstride.errors import ArtefactError
from unstride.models.paper_networks.catalogue import PaperNetwork

SHOWN = 3
# mmsegmentation's ResNetV1c names its stem by position, timm ends it with a norm outside.
STEM = {"stem.0.": "conv1.0.", "stem.1.": "conv1.1.", "stem.3.": "conv1.3.", "stem.4.": "conv1.4."}
STEM |= {"stem.6.": "conv1.6.", "stem.7.": "bn1."}
TRAINING_ONLY = ("auxiliary_head.",)  # a second decoder of mmsegmentation, for its loss alone


def from_akamaster(key: str) -> str | None:
    return re.sub(r"^linear\.", "fc.", key)


def from_mmsegmentation(key: str) -> str | None:
    """None: the tensor has no place in a network that only predicts."""
    if key.startswith(TRAINING_ONLY):
        return None
    stem = re.match(r"backbone\.(stem\.\d\.)", key)
    return key.replace(stem[1], STEM[stem[1]], 1) if stem and stem[1] in STEM else key


RENAME: dict[str, Callable[[str], str | None]] = {
    "chenyaofo": lambda key: key,
    "antialiased-cnns": lambda key: key,
    "akamaster": from_akamaster,
    "mmsegmentation": from_mmsegmentation,
}


def convert(network: PaperNetwork, state: Mapping[str, Tensor], origin: str = "the checkpoint") -> dict[str, Tensor]:
    """The tensors of a public checkpoint under our names.

    Raises:
        ArtefactError: a name is missing or left over; the message gives the nearest names.
    """
    wrapped = bool(state) and all(key.startswith("module.") for key in state)  # by DataParallel
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = RENAME[network.keys](key.removeprefix("module.") if wrapped else key)
        if name is not None:
            renamed[name] = tensor
    with torch.device("meta"):
        own = network.build(network.classes).state_dict()
    missing = [key for key in own if key not in renamed and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in renamed if key not in own]
    if missing or unexpected:
        parts = [
            *_listed("missing", missing, unexpected, "nearest in the file"),
            *_listed("unexpected", unexpected, missing, "nearest expected"),
        ]
        raise ArtefactError(
            f"{origin}: these are not weights of paper:{network.name} with the key names of {network.keys}: of "
            f"{len(own)} tensors, {'; '.join(parts)}. Its weights are {network.checkpoint}"
        )
    return renamed


def _listed(what: str, keys: list[str], others: Collection[str], relation: str) -> list[str]:
    if not keys:
        return []
    lines = []
    for key in keys[:SHOWN]:
        near = difflib.get_close_matches(key, others, n=1, cutoff=0.4)
        lines.append(f"{key} ({relation}: {near[0]})" if near else key)
    return [f"{len(keys)} {what}: {', '.join(lines)}{', ...' if len(keys) > SHOWN else ''}"]
