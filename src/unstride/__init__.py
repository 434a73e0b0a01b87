"""unstride: better predictions from a pretrained vision model, with the activations its strided layers throw away."""

from unstride import _torchvision

_torchvision.ensure_importable()

__version__ = "0.1.0"
