"""The paper's tables and figures by name: what must be run, what the paper found, and ours beside it.

    result = reproduce("ablation-aggregation", Sample(limit=50))
    print(render.markdown(result))

An Exhibit is a list of cells, and a cell is a Run with the paper's number; nothing here knows how a Run is carried out.
"""

from unstride.paper.catalogue import EXHIBITS, get
from unstride.paper.exhibits import Cell, Exhibit, Run, Value
from unstride.paper.places import Nowhere, Place, Root, Sample
from unstride.paper.reproducing import Result, reproduce

__all__ = [
    "EXHIBITS", "Cell", "Exhibit", "Nowhere", "Place", "Result", "Root", "Run", "Sample", "Value", "get", "reproduce",
]  # fmt: skip
