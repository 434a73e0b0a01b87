"""unstride: better predictions from a pretrained vision model, with the activations its strided layers throw away."""

import importlib
from typing import TYPE_CHECKING, Any

from unstride import _torchvision

_torchvision.ensure_importable()

from unstride.enhanced import Enhanced, enhance  # noqa: E402
from unstride.prediction import Prediction  # noqa: E402
from unstride.report import Report, inspect  # noqa: E402
from unstride.states import State, StateSpace  # noqa: E402
from unstride.stopping import Agreement, Confident, LowEntropy, Margin  # noqa: E402

if TYPE_CHECKING:
    from unstride import data, models, tta
    from unstride.evaluation import evaluate
    from unstride.fitting import fit
    from unstride.saving import load
    from unstride.selecting import fixed, select_states

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
    "data",
    "enhance",
    "evaluate",
    "fit",
    "fixed",
    "inspect",
    "load",
    "models",
    "select_states",
    "tta",
]

# Loaded when first asked for, so that `import unstride` stays quick.
_LATER = {
    "evaluate": "unstride.evaluation",
    "fit": "unstride.fitting",
    "fixed": "unstride.selecting",
    "load": "unstride.saving",
    "select_states": "unstride.selecting",
}


def __getattr__(name: str) -> Any:
    if name in ("data", "models", "tta"):
        return importlib.import_module(f"unstride.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'unstride' has no attribute {name!r}")
