"""unstride: better predictions from a pretrained vision model, with the activations its strided layers throw away."""

import importlib
from typing import TYPE_CHECKING, Any

from unstride.compat import moved, torchvision

if TYPE_CHECKING:
    from unstride import data, extend, models, recipe, tta
    from unstride.enhanced import Enhanced, enhance, load
    from unstride.evaluation import Row, evaluate, plot_rows, read_rows
    from unstride.evaluation.benching import bench
    from unstride.exporting.writing import export
    from unstride.geometry.report import Report, inspect
    from unstride.geometry.states import State, StateSpace
    from unstride.learning.fitting import FitReport, fit
    from unstride.learning.selecting import FixedStates, fixed, select_states
    from unstride.predicting import Predicted, predict
    from unstride.procedure.gates import Gate, Stage
    from unstride.procedure.prediction import Prediction, Visited
    from unstride.procedure.stopping import Agreement, Confident, LowEntropy, Margin
    from unstride.procedure.windows import SlidingWindow
    from unstride.recipe import Recipe
    from unstride.show import plot_classification, plot_features, plot_map, plot_neighbours, plot_segmentation
    from unstride.tuning.tune import tune
    from unstride.tuning.tuned import Tuned
    from unstride.views.canvas import Canvas
    from unstride.views.images import Preprocess, open_image

__version__ = "0.1.0"

# Where each public name lives. They are loaded when first asked for, so that `import unstride` stays quick.
_NAMES = {
    "enhanced": ("Enhanced", "enhance", "load"),
    "exporting.writing": ("export",),
    "geometry.report": ("Report", "inspect"),
    "geometry.states": ("State", "StateSpace"),
    "learning.fitting": ("FitReport", "fit"),
    "learning.selecting": ("FixedStates", "fixed", "select_states"),
    "predicting": ("Predicted", "predict"),
    "procedure.prediction": ("Prediction", "Visited"),
    "procedure.stopping": ("Agreement", "Confident", "LowEntropy", "Margin"),
    "procedure.windows": ("SlidingWindow",),
    "proof": ("Row", "evaluate", "plot_rows", "read_rows"),
    "proof.benching": ("bench",),
    "show": ("plot_classification", "plot_features", "plot_map", "plot_neighbours", "plot_segmentation"),
    "procedure.gates": ("Gate", "Stage"),
    "recipe": ("Recipe",),
    "tuning.tune": ("tune",),
    "tuning.tuned": ("Tuned",),
    "views.canvas": ("Canvas",),
    "views.images": ("Preprocess", "open_image"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("data", "extend", "models", "recipe", "tta")

__all__ = [
    "Agreement",
    "Canvas",
    "Confident",
    "Enhanced",
    "FitReport",
    "FixedStates",
    "Gate",
    "LowEntropy",
    "Margin",
    "Predicted",
    "Prediction",
    "Preprocess",
    "Recipe",
    "Report",
    "Row",
    "SlidingWindow",
    "Stage",
    "State",
    "StateSpace",
    "Tuned",
    "Visited",
    "bench",
    "data",
    "enhance",
    "evaluate",
    "export",
    "extend",
    "fit",
    "fixed",
    "inspect",
    "load",
    "models",
    "open_image",
    "plot_classification",
    "plot_features",
    "plot_map",
    "plot_neighbours",
    "plot_rows",
    "plot_segmentation",
    "predict",
    "read_rows",
    "recipe",
    "select_states",
    "tta",
    "tune",
]

torchvision.install()
moved.install()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"unstride.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"unstride.{_HOME[name]}"), name)
    raise AttributeError(f"module 'unstride' has no attribute {name!r}")
