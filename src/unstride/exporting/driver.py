"""Stages of an exported recipe, driven as the recipe asks: look again only at the images that are not sure.

    logits = run_stages("net.stages.json", images)        # numpy (B, C, H, W) or a tensor

What it does fits in a few lines of any language: run stage 1 on all images; of those whose sureness is below the
gate's threshold run stage 2, and take the weighted mean of both stages' outputs; and so on. `net.stages.json` has the
file, the weight and the gate of each stage, and says whether outputs are logits or probabilities.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstride.errors import ArtefactError
from unstride.procedure.gates import Gate, sureness
from unstride.procedure.looks import Merged
from unstride.storage import strict_json

VERSION = 1
Call = Callable[[Tensor], Tensor]


class Stages:
    """The exported stages, opened once: `Stages("net.stages.json")(images)`."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        try:
            told = strict_json.loads(path.read_bytes())
            if told["version"] != VERSION:
                raise ValueError(f"version {told['version']}, this reads {VERSION}")
            self.merge, self.temperature = str(told["merge"]), float(told["temperature"])
            self.stages = [
                (
                    open_graph(path.parent / one["file"]),
                    float(one["weight"]),
                    Gate(**one["gate"]) if one["gate"] else None,
                )
                for one in told["stages"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtefactError(f"{path} does not describe exported stages ({error}). Export again.") from error

    def __call__(self, images: Any, gated: bool = True) -> Tensor:
        """Logits (B, K); `gated=False` takes every look of every image."""
        x = torch.as_tensor(images)
        merged, rows = Merged(self.merge), list(range(len(x)))
        for call, weight, gate in self.stages:
            if gate is not None and gated:
                opens = gate.opens(sureness(merged.logits(rows), gate.by)).tolist()
                rows = [i for i, again in zip(rows, opens, strict=True) if again]
            if not rows:
                break
            merged.add_mean(len(x), rows, call(x[rows]), weight)
        return merged.logits() / self.temperature


def run_stages(path: str | Path, images: Any) -> Tensor:
    """`run_stages("net.stages.json", images)`: opens the stages and runs them; keep a `Stages` to run them often."""
    return Stages(path)(images)


def open_graph(path: Path) -> Call:
    """An .onnx file in onnxruntime, or a .pt2 file in torch."""
    if not path.is_file():
        raise ArtefactError(f"{path}: no such file; keep the exported files together")
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda x: module(x)
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ArtefactError(f"{path}: running it needs onnxruntime: pip install 'unstride[onnx]'") from error
    session = runtime.InferenceSession(str(path), providers=runtime.get_available_providers())
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(np.asarray(session.run(None, {name: x.numpy()})[0]))
