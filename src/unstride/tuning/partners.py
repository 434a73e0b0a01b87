"""Smaller networks of timm that go well with a given one: a cascade needs a cheap first network.

The figures are those that timm and the papers publish for ImageNet-1k, at each network's own size: top-1 accuracy in
per cent, and GMACs. All have the same 1,000 classes in the same order.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstride.errors import OptionError, SpecError, UnstrideWarning
from unstride.models import LoadedModel, load

MOST = 3
CHEAPER = 0.7  # of the given network's GMACs, at most
LOSS = 12.0  # points of accuracy that a partner may be behind
APART = 1.4  # times the GMACs, between two partners


@dataclass(frozen=True)
class Published:
    """What is published about a network of timm."""

    name: str
    accuracy: float
    gmacs: float

    @property
    def spec(self) -> str:
        return f"timm:{self.name}"

    def __str__(self) -> str:
        return f"{self.spec} ({self.accuracy:.1f} %, {self.gmacs:g} GMACs)"


TABLE = (
    Published("mobilenetv3_small_100.lamb_in1k", 67.7, 0.06),
    Published("mobilenetv3_large_100.ra_in1k", 75.8, 0.22),
    Published("mobilenetv2_100.ra_in1k", 73.0, 0.30),
    Published("tf_efficientnet_lite0.in1k", 74.8, 0.40),
    Published("efficientnet_b0.ra_in1k", 77.7, 0.40),
    Published("mobilenetv4_conv_medium.e500_r256_in1k", 79.9, 1.1),
    Published("tf_efficientnet_lite2.in1k", 77.5, 0.89),
    Published("efficientnet_b1.ft_in1k", 78.8, 0.59),
    Published("efficientnet_b2.ra_in1k", 80.6, 1.1),
    Published("regnety_008.pycls_in1k", 76.3, 0.81),
    Published("resnet18.a1_in1k", 71.5, 1.8),
    Published("regnety_016.tv2_in1k", 80.7, 1.6),
    Published("resnet34.a1_in1k", 76.4, 3.7),
    Published("resnet50.a1_in1k", 80.2, 4.1),
    Published("convnext_tiny.fb_in1k", 82.1, 4.5),
    Published("deit_small_patch16_224.fb_in1k", 79.9, 4.6),
    Published("swin_tiny_patch4_window7_224.ms_in1k", 81.4, 4.5),
    Published("resnet101.a1_in1k", 81.3, 7.8),
    Published("convnext_small.fb_in1k", 83.1, 8.7),
    Published("resnet152.a1_in1k", 81.7, 11.6),
    Published("convnext_base.fb_in1k", 83.8, 15.4),
    Published("deit_base_patch16_224.fb_in1k", 82.0, 17.6),
    Published("vit_base_patch16_224.augreg_in1k", 79.2, 17.6),
)


def partners_of(spec: str) -> tuple[Published, ...]:
    """Up to three smaller networks for one of timm, the most accurate first; each much cheaper than the one before."""
    library, _, name = spec.partition(":")
    own = [p for p in TABLE if library == "timm" and (p.name == name or p.name.partition(".")[0] == name)]
    if not own:
        names = ", ".join(dict.fromkeys(p.name.partition(".")[0] for p in TABLE))
        raise OptionError(f"partners: got {spec!r}, expected a network of timm that the table has: {names}.")
    able = [p for p in TABLE if p.gmacs <= CHEAPER * own[0].gmacs and p.accuracy >= own[0].accuracy - LOSS]
    found: list[Published] = []
    for partner in sorted(able, key=lambda p: -p.accuracy):
        if all(partner.gmacs * APART <= other.gmacs for other in found):
            found.append(partner)
    return tuple(found[:MOST])


def with_partners(models: Any, how: str, weights: str | Path | None = "default") -> list[LoadedModel]:
    """A network by SPEC with its partners, the given one first. Those that cannot be fetched are named.

    Args:
        weights: of the given network. Partners have pretrained ones, or random ones beside random ones.
    """
    if how != "auto":
        raise OptionError(f"partners: got {how!r}, expected 'auto'.")
    several = list(models) if isinstance(models, list | tuple) else [models]
    if len(several) != 1 or not isinstance(several[0], str):
        raise OptionError("partners: 'auto' is for one network given by SPEC, such as 'timm:resnet50'.")
    partners = partners_of(several[0])
    if not partners:
        raise OptionError(f"partners: the table has no network much cheaper than {several[0]}. Name two networks.")
    print(f"partners of {several[0]}: {_listed(partners)}", file=sys.stderr)
    try:
        found = [load(several[0], weights)]
    except SpecError as error:
        raise SpecError(f"{error}. Partners to try where a hub can be reached: {_listed(partners)}.") from error
    missing = []
    for partner in partners:
        try:
            found.append(load(partner.spec, "random" if weights == "random" else "default"))
        except SpecError:
            missing.append(partner)
    if missing:
        warnings.warn(
            UnstrideWarning(
                f"partners: cannot fetch {_listed(missing)}. Try them where a hub can be reached, "
                "or name networks whose weights are here."
            ),
            stacklevel=3,
        )
    return found


def _listed(partners: Sequence[Published]) -> str:
    return ", ".join(map(str, partners))
