"""Proof on labelled data: one resumable loop, metrics, rows."""

from unstride.evaluation.loop import evaluate
from unstride.evaluation.rows import Row, append_rows, read_rows

__all__ = ["Row", "append_rows", "evaluate", "read_rows"]
