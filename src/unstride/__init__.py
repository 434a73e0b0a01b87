"""unstride makes a frozen PyTorch vision model more accurate at test time.

It combines views of the image (test-time augmentation), states of the network's strided layers (ECCV 2024) and further
networks (cascades), and spends extra passes only on images where the model is uncertain.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unstride import data, models
    from unstride.enhanced import Enhanced, enhance
    from unstride.evaluation.evaluate import evaluate
    from unstride.execution.prediction import Prediction
    from unstride.exporting.writing import export
    from unstride.geometry.report import inspect
    from unstride.learning.fitting import fit
    from unstride.predicting.run import predict
    from unstride.recipe.recipe import Recipe
    from unstride.recipe.stage import Gate, Near, Search, Stage
    from unstride.tuning.tune import tune
    from unstride.views.images import Preprocess
    from unstride.views.source import Canvas

__version__ = "0.2.0"

# Where each public name lives. They are loaded when first used, so that `import unstride` stays quick.
_HOME = {
    "Canvas": "views.source",
    "Enhanced": "enhanced",
    "Gate": "recipe.stage",
    "Near": "recipe.stage",
    "Prediction": "execution.prediction",
    "Preprocess": "views.images",
    "Recipe": "recipe.recipe",
    "Search": "recipe.stage",
    "Stage": "recipe.stage",
    "enhance": "enhanced",
    "evaluate": "evaluation.evaluate",
    "export": "exporting.writing",
    "fit": "learning.fitting",
    "inspect": "geometry.report",
    "predict": "predicting.run",
    "tune": "tuning.tune",
}
_PACKAGES = ("data", "models")

__all__ = [
    "Canvas",
    "Enhanced",
    "Gate",
    "Near",
    "Prediction",
    "Preprocess",
    "Recipe",
    "Search",
    "Stage",
    "data",
    "enhance",
    "evaluate",
    "export",
    "fit",
    "inspect",
    "models",
    "predict",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"unstride.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"unstride.{_HOME[name]}"), name)
    raise AttributeError(f"module 'unstride' has no attribute {name!r}")
