"""unstride: better predictions from a pretrained vision model, with the activations its strided layers throw away."""

from unstride import _torchvision

_torchvision.ensure_importable()

from unstride.enhanced import Enhanced, enhance  # noqa: E402
from unstride.prediction import Prediction  # noqa: E402
from unstride.report import Report, inspect  # noqa: E402
from unstride.states import State, StateSpace  # noqa: E402
from unstride.stopping import Agreement, Confident, LowEntropy, Margin  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "Agreement",
    "Confident",
    "Enhanced",
    "LowEntropy",
    "Margin",
    "Prediction",
    "Report",
    "State",
    "StateSpace",
    "enhance",
    "inspect",
]
