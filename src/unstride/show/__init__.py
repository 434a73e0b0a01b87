"""Predictions as figures and words, and the parts of a report. Computes nothing.

`answers` (words and plain data), `passes`, `segmentation`, `maps`, `photographs` (figures; they need matplotlib),
`charts` (SVG) and `html` (self-contained pages).
"""

from typing import Any

from PIL.Image import Image

from unstride.errors import InputError
from unstride.execution.prediction import Prediction
from unstride.show.maps import plot_map
from unstride.show.passes import plot_passes
from unstride.show.photographs import plot_photographs
from unstride.show.segmentation import overlay, plot_segmentation, strip
from unstride.show.style import check_target, save

__all__ = [
    "check_target",
    "overlay",
    "plot_map",
    "plot_passes",
    "plot_photographs",
    "plot_prediction",
    "plot_segmentation",
    "save",
    "strip",
]


def plot_prediction(
    prediction: Prediction, image: Image | None = None, classes: tuple[str, ...] = (), title: str = ""
) -> Any:
    """A matplotlib Figure of a prediction of any task: `plot_prediction(better.explain([photo])[0], photo)`.

    Args:
        image: shown beside it; of a map, as the network gets it.
        classes: names of the classes.
    """
    if not isinstance(image, Image | None):
        raise InputError(f"plot: image: got {type(image).__name__}, expected a PIL image.")
    axes = prediction.output.ndim - (prediction.output.ndim > 2)
    if prediction.meaning.maps and axes != 2:
        shape = tuple(prediction.output.shape)
        raise InputError(f"plot: got an output of shape {shape}, expected a vector or a map of an image.")
    if prediction.task == "segmentation":
        return plot_segmentation(image, prediction, classes, title)
    if prediction.meaning.maps:
        return plot_map(image, prediction, title)
    return plot_passes(image, prediction, tuple(classes), title)
