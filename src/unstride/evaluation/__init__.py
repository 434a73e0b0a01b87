"""An enhanced model + labelled images -> rows.

In: what was enhanced and a data set. Out: `Row`s with accuracy, gain, interval and cost (`loop`, one resumable pass
over `shards`), a page and a curve, and how long it takes (`benching`). Touch: a metric (`metrics`), a figure.
"""

from unstride.evaluation.curve import plot_rows
from unstride.evaluation.loop import evaluate
from unstride.evaluation.rows import Row, append_rows, read_rows

__all__ = ["Row", "append_rows", "evaluate", "plot_rows", "read_rows"]
