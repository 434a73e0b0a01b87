"""The networks of the paper that no library has: CIFAR, segmentation, anti-aliased.

A name comes in (`names()` lists them), an nn.Module comes out, with random weights or those of a public checkpoint.
As a SPEC it is `paper:NAME`; `unstride.models.load("paper:cifar10-resnet20", weights="cifar10_resnet20.pt")`.
"""

# ruff: noqa: E402
from unstride.compat import import_torchvision

import_torchvision()  # before the modules below, which are made of its parts

from unstride.models.paper_networks.catalogue import PaperNetwork, get, names, paper_network
from unstride.models.paper_networks.converters import convert

__all__ = ["PaperNetwork", "convert", "get", "names", "paper_network"]
