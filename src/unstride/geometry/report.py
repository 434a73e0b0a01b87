"""`unstride.inspect(model, example)`: what a model subsamples, what that costs, and what was left out."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unstride.geometry.find import find_layers
from unstride.geometry.grids import by
from unstride.geometry.layers import SkippedOp, SubsamplingLayer, feature_node, module_path
from unstride.graph.capture import capture


@dataclass(frozen=True)
class Features:
    """Where features end and the head begins: the op that makes the last map, and its size if it lies on a grid."""

    op: str
    map: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.op}, {by(self.map)} cells" if self.map else f"{self.op}, not on a grid"


@dataclass(frozen=True)
class Report:
    """What a model throws away. `print(report)` shows it; `report.to_json()` gives plain data."""

    layers: tuple[SubsamplingLayer, ...]
    left_out: tuple[SkippedOp, ...]
    unknown: tuple[str, ...]
    features: Features | None
    macs: int
    image: tuple[int, ...]

    @property
    def states(self) -> int:
        """How many states the network has; a forward pass of the base model uses one of them."""
        return math.prod(r for layer in self.layers for r in layer.rate)

    def to_json(self) -> dict[str, Any]:
        return {
            "image": list(self.image),
            "macs": self.macs,
            "states": self.states,
            "layers": [
                {
                    "index": layer.index,
                    "rate": list(layer.rate),
                    "ops": [{"path": path, "kind": kind} for path, kind in layer.ops],
                    "stride": list(layer.stride),
                    "map": list(layer.map),
                    "cost": layer.cost,
                    "sides": [list(s) for s in layer.sides],
                }
                for layer in self.layers
            ],
            "left_out": [{"op": x.op, "reason": x.reason} for x in self.left_out],
            "unknown": list(self.unknown),
            "features": None
            if self.features is None
            else {"op": self.features.op, "map": list(self.features.map) if self.features.map else None},
        }

    def __str__(self) -> str:
        what = f"{len(self.layers)} subsampling layers, {self.states} states, {self.macs / 1e9:.2f} GMACs"
        lines = [f"{what} at {by(self.image)}"]
        lines += [f"  {layer}" for layer in self.layers]
        lines += [f"  features end at {self.features}"] if self.features else []
        lines += [f"  left out: {x.op}: {x.reason}" for x in self.left_out]
        lines += [f"  unknown: {u}; strided ops after it may be left out" for u in self.unknown]
        return "\n".join(lines)


def inspect(model: nn.Module, example: Tensor) -> Report:
    """What `model` subsamples at the example's image size; NothingToSubsample where that is nothing.

    Example: `print(unstride.inspect(model, torch.randn(1, 3, 224, 224)))`.
    """
    graph = capture(model, example)
    found = find_layers(graph)
    found.require_layers()
    leaf = next(leaf for leaf in graph.leaf_nodes if leaf in graph.from_image)
    node = feature_node(graph, found, leaf)
    grid = found.grid(node) if node is not None else None
    features = None if node is None else Features(module_path(node), grid.size if grid is not None else None)
    return Report(
        layers=found.layers,
        left_out=found.left_out,
        unknown=found.unknown,
        features=features,
        macs=sum(found.trace.macs.values()),
        image=graph.size,
    )
