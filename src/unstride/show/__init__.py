"""Predictions -> something to look at.

In: a `Prediction`, a `Report`, numbers. Out: words (`answers`), images (`classification`, `segmentation`, `maps`,
`photographs`; they need matplotlib), charts, and self-contained pages without scripts (`html`). Touch: how things look.
"""

from unstride.show.classification import plot_classification
from unstride.show.maps import plot_features, plot_map, plot_neighbours
from unstride.show.photographs import plot_photographs
from unstride.show.segmentation import overlay, plot_segmentation, strip
from unstride.show.style import check_target, save, seen

__all__ = [
    "check_target",
    "overlay",
    "plot_classification",
    "plot_features",
    "plot_map",
    "plot_neighbours",
    "plot_photographs",
    "plot_segmentation",
    "save",
    "seen",
    "strip",
]
