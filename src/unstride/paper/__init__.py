"""The paper's tables and figures by name: what must be run, what the paper found, and our numbers beside it.

from unstride.paper.reproducing import reproduce
from unstride.paper.sources import EmbeddedSample

print(markdown(reproduce("table4", EmbeddedSample(limit=50))))
"""
