"""Predictions to draw, and the words in a drawing."""

import io

import torch

from unstride.geometry.states import State
from unstride.execution.prediction import Prediction, Visited
from unstride.procedure.search import Expansion


def prediction(logits: torch.Tensor, states: list[State], spread: torch.Tensor, rule: str = "budget") -> Prediction:
    weights = torch.arange(1.0, len(states) + 1)
    visited = tuple(
        Visited(s, 0.1, float(w), own)
        for s, w, own in zip(states, (weights / weights.sum()).tolist(), logits, strict=True)
    )
    steps = (Expansion(states[0], 1),) if len(states) > 1 else ()
    return Prediction(logits.mean(0), logits[0], visited, steps, 300, 100, 0.5, spread, rule)


def texts(figure: object) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})  # type: ignore[attr-defined]
    return out.getvalue()
