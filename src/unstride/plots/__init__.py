"""Pictures of predictions, for slides and reports. They need matplotlib: pip install 'unstride[plot]'."""

from unstride.plots.classification import plot_classification
from unstride.plots.curve import plot_rows
from unstride.plots.segmentation import overlay, plot_segmentation, strip
from unstride.plots.style import check_target, seen

__all__ = ["check_target", "overlay", "plot_classification", "plot_rows", "plot_segmentation", "seen", "strip"]
