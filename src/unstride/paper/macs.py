"""Exhibits that need no data: MACs as we count and as the paper does, the policies, the layers of ResNet18."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean

import torch
from torch import nn

from unstride import models
from unstride.enhanced import enhance
from unstride.geometry.find import find_layers
from unstride.geometry.layers import feature_node
from unstride.geometry.report import inspect
from unstride.graph.capture import capture
from unstride.graph.ops import op_name
from unstride.method.search import default_layers
from unstride.paper.exhibits import Exhibit, Value
from unstride.recipe import policies

SPECS = {"ResNet18": "torchvision:resnet18", "MobileNetV2": "torchvision:mobilenet_v2"}
GPS_VIEWS = 3
_NORM = 4  # MACs per element of a batch norm: inferred, with it the paper's plain figures come out to the digit
_IMAGES = 1  # of noise; the search takes nearly the same way on all of them


@dataclass(frozen=True)
class Work:
    """MACs of one 224 px image: ours by budget, and the paper's count of a level of the network (0: before layer 1)."""

    base: int
    ours: dict[int, float]
    levels: tuple[int, ...]
    layers: tuple[int, ...]
    rates: tuple[int, ...]  # R_y x R_x by layer, from layer 1

    def as_paper(self, budget: int) -> tuple[float, float]:
        """Least and most MACs of a search to `budget` as the paper counts: all R x R neighbours of an expansion anew.

        The first expansion is at the first searched layer and shares what lies before it; where the others are
        depends on the image, so they lie between the last and the first searched layer.
        """
        whole = sum(self.levels)
        if budget == 1:
            return float(whole), float(whole)
        first, last = self.layers[0], self.layers[-1]
        after = {layer: sum(self.levels[layer:]) for layer in (first, last)}
        rate = self.rates[first - 1]
        start = whole - after[first] + rate * after[first]
        more = math.ceil((budget - 1) / (rate - 1)) - 1
        return start + more * self.rates[last - 1] * after[last], start + more * rate * after[first]


@lru_cache(maxsize=8)
def work(model: str, budgets: tuple[int, ...] = (3, 10, 15)) -> Work:
    """`work("ResNet18").ours[10]`: with random weights, on noise. Which states a search visits changes it a little."""
    loaded = models.load(SPECS[model], weights=None)
    images = torch.randn(_IMAGES, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    better = enhance(loaded.model, recipe="paper", budget=max(budgets), task="classification")
    curve = better.curve(images, budgets)
    graph = capture(loaded.model, images)
    found = find_layers(graph)
    levels = [0] * (len(found.layers) + 1)
    for node in graph.nodes:
        if node in found.level:
            levels[found.level[node]] += found.trace.macs.get(node, 0)
            if "batch_norm" in op_name(node):
                levels[found.level[node]] += _NORM * math.prod(found.trace.shapes[node][1:])
    if any(isinstance(module, nn.AdaptiveAvgPool2d) for module in loaded.model.modules()):
        # The paper's counter counts this pool as a module, and does not count it as a function.
        tap = feature_node(graph, found, next(leaf for leaf in graph.leaf_nodes if leaf in graph.from_image))
        assert tap is not None
        levels[-1] += math.prod(found.trace.shapes[tap][1:]) + found.trace.shapes[tap][1]
    base = sum(found.trace.macs.values())
    ours = {1: float(base)} | {b: mean(curve[b][1]) * base for b in budgets}
    rates = tuple(ry * rx for ry, rx in found.space.rates)
    return Work(base, ours, tuple(levels), default_layers(found.space, maps=False), rates)


# Per augmented image: the table's totals over the number of images, as exactly as it prints them.
PAPER = {
    ("ResNet18", 1): 273.6 / 150, ("ResNet18", 3): 6.93, ("ResNet18", 10): 16.77, ("ResNet18", 15): 25.36,
    ("MobileNetV2", 1): 49.1 / 150, ("MobileNetV2", 3): 1.16, ("MobileNetV2", 10): 3.07, ("MobileNetV2", 15): 4.86,
}  # fmt: skip


def _macs() -> list[Value]:
    values = []
    for (model, budget), paper in PAPER.items():
        counted = work(model)
        row = (model, str(budget))
        low, high = (m / 1e9 for m in counted.as_paper(budget))
        as_paper = f"{low:.3f}" if math.isclose(low, high) else f"{low:.2f} to {high:.2f}"
        values += [
            Value(row, "", "GMACs", counted.ours[budget] / 1e9, paper),
            Value(row, "", "x base", counted.ours[budget] / counted.base, paper / PAPER[model, 1]),
            Value(row, "", "GMACs as the paper counts", as_paper),
        ]
    return values


# Rows of the paper's two policy tables: augmentation, how many values.
STANDARD = {"FlipLR": 2, "Scale": 19, "FiveCrop": 5}
NEUTRAL = {"FlipLR": "False", "Scale": "1.0", "FiveCrop": "Center"}  # of a view of that policy which does not name it
EXPANDED = {
    "Identity": 1, "FlipLR": 1, "FlipUD": 1, "Invert": 1, "PIL_Blur": 1, "PIL_Smooth": 1, "AutoContrast": 1,
    "Equalize": 1, "Posterize": 4, "Rotate": 10, "CropBilinear": 10, "Solarize": 10, "Contrast": 10, "Saturation": 10,
    "Brightness": 10, "Sharpness": 10, "ShearX": 10, "ShearY": 10, "TranslateX": 10, "TranslateY": 10, "Cutout": 10,
}  # fmt: skip


def _policy(name: str, rows: dict[str, int], total: int) -> list[Value]:
    policy = policies.get(name)
    found: dict[str, dict[str, None]] = {op: {} for op in rows}
    for view in policy:
        values_of = {op.name: str(op.value) for op in view.ops}
        if name == "standard":
            values_of = {op: values_of.get(op, neutral) for op, neutral in NEUTRAL.items()}
            values_of["FlipLR"] = str(values_of["FlipLR"] != "False")  # a flip has no value of its own
        for op, text in values_of.items():
            found.setdefault(op, {})[text] = None
    values = []
    for row, texts in found.items():
        numeric = all(_is_number(text) for text in texts)
        shown = sorted(texts, key=float) if numeric and name != "standard" else list(texts)
        span = ", ".join(f"{float(t):g}" if numeric else t for t in shown)
        values.append(Value((row,), "", "values", float(len(texts)), float(rows[row]) if row in rows else None))
        values.append(Value((row,), "", "range", "--" if span == "None" else span))
    values.append(Value(("all views",), "", "values", float(len(policy)), float(total)))
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


RESNET18_LAYERS = ("conv1", "maxpool", "layer2.0.conv1, layer2.0.downsample.0", "layer3.0.conv1, layer3.0.downsample.0",
                   "layer4.0.conv1, layer4.0.downsample.0")  # fmt: skip


def _layers() -> list[Value]:
    report = inspect(models.load(SPECS["ResNet18"], weights=None).model, torch.zeros(1, 3, 224, 224))
    values = []
    for layer, paper in zip(report.layers, RESNET18_LAYERS, strict=True):
        row = (str(layer.index),)
        values.append(Value(row, "", "ops", ", ".join(path for path, _ in layer.ops), paper))
        values.append(Value(row, "", "R", float(layer.rate[0]), 2.0))
    return values


WITHOUT_DATA = (
    Exhibit(
        "macs",
        "Tables A4 and A5, MACs of one augmented image",
        "MACs of one 224 px image by budget",
        ("model", "B_ours"),
        make=_macs,
        notes=("docs/paper.md explains both ways of counting and each difference.",),
    ),
    Exhibit(
        "policy-standard",
        "Table A9",
        "The standard policy",
        ("augmentation",),
        make=lambda: _policy("standard", STANDARD, 190),
    ),
    Exhibit(
        "policy-expanded",
        "Table A10",
        "The expanded policy",
        ("augmentation",),
        make=lambda: _policy("expanded", EXPANDED, 8778),
        notes=("The rows add up to 132; the text's 131 is a slip: 132 + 132 x 131 / 2 = 8778.",),
    ),
    Exhibit("layers-resnet18", "Table A11", "Subsampling layers of ResNet18", ("layer",), make=_layers),
)
