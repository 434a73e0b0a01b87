"""A recipe as a graph that other programs run: ONNX or torch.export's .pt2.

In: a model with a recipe of fixed looks. Out: one file with a dynamic batch, checked against the model before it is
there; with gates, a file for each stage and a small text beside them, which `run_stages` drives. `looks` makes the
graph, `writing` writes and checks it, `driver` runs stages. Touch: a view that a graph could show, a format.
"""

from unstride.exporting.driver import Stages, run_stages
from unstride.exporting.writing import export

__all__ = ["Stages", "export", "run_stages"]
