"""Predictions to draw, and the words in a figure."""

import io

import torch

from unstride.execution.prediction import ForwardPass, Prediction
from unstride.geometry.states import State
from unstride.method.search import Expansion
from unstride.recipe.view import PLAIN


def prediction(
    outputs: torch.Tensor, states: list[State], spread: torch.Tensor, task: str = "classification"
) -> Prediction:
    weights = torch.arange(1.0, len(states) + 1)
    passes = tuple(
        ForwardPass(0, "base", PLAIN, s, own, float(w), 0.1, own, 0.75)
        for s, w, own in zip(states, (weights / weights.sum()).tolist(), outputs, strict=True)
    )
    steps = (Expansion(states[0], 1),) if len(states) > 1 else ()
    return Prediction(outputs.mean(0), outputs[0], passes, 3.0, 0.5, spread, "budget", task, steps)


def texts(figure: object) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})  # type: ignore[attr-defined]
    return out.getvalue()
