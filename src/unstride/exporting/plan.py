"""From passes and their networks to what the graph is made of: how each pass prepares its input, names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.execution.executors import Network
from unstride.exporting.builder import OnnxBuilder
from unstride.exporting.loop import RESERVED, GraphPass, GraphPlan, Step
from unstride.exporting.networks import Unit
from unstride.exporting.passes import ExportPass
from unstride.exporting.pixels import check_pixels, prepared
from unstride.exporting.views import fixed_back, fixed_view
from unstride.recipe.view import PLAIN
from unstride.views.images import Preprocess
from unstride.views.source import Source


def graph_plan(
    better: Enhanced,
    passes: Sequence[ExportPass],
    units: Sequence[Unit],
    rendered: Sequence[Tensor],
    source: Source,
    from_pixels: bool,
) -> GraphPlan:
    """`units`, `rendered`: of each pass, its network as ONNX, and one image as that takes it."""
    result = better.run(source)
    frame, combined = result.record.frame, [tuple(part.value().shape[1:]) for part in result.combined.parts]
    names, shapes = _named_outputs(result.returned(), result.record.structure[0].targets[: len(combined)])
    chosen = list(dict.fromkeys(units))
    made = []
    for p, unit, x in zip(passes, units, rendered, strict=True):
        network = better.networks[p.network]
        if from_pixels:
            step, key = _from_pixels(p, check_pixels(network.preprocess or better.preprocess, p.network))
        else:
            step, key = _from_tensors(p, network, better.preprocess, tuple(source.size))
        back, back_key = _back(p, unit, x, None if frame is None else (frame.size, frame.out_sizes))
        count = len(combined)
        made.append(GraphPass(p, chosen.index(unit), step, back or (_unchanged,) * count, key, back_key))
    size: list[int | str | None] = ["batch", "height", "width", 3]
    if not from_pixels:
        size = ["batch", *map(int, source.rows([0]).render(PLAIN).shape[1:])]
    image = ("UINT8" if from_pixels else "FLOAT", size)
    return GraphPlan(better.recipe, made, [u.model for u in chosen], names, shapes, combined, image)


def _unchanged(b: OnnxBuilder, x: str) -> str:
    return x


def _from_pixels(p: ExportPass, preprocess: Preprocess) -> tuple[Step, Any]:
    def step(b: OnnxBuilder, rows: str) -> str:
        return prepared(b, rows, p.view, preprocess)

    return step, (p.view, preprocess)


def _from_tensors(p: ExportPass, network: Network, base: Preprocess | None, size: tuple[int, ...]) -> tuple[Step, Any]:
    """A view of tensors that are prepared for the base network; another network may want another normalisation."""
    own = network.preprocess
    view = fixed_view(p.view, size)
    same = own is None or own == base

    def step(b: OnnxBuilder, rows: str) -> str:
        if not same:
            assert own is not None and base is not None
            scale, shift = (np.array(v, np.float32).reshape(1, -1, *[1] * len(size)) for v in _affine(base, own))
            rows = b.op("Add", b.op("Mul", rows, b.constant(scale)), b.constant(shift))
        return view.on_graph(b, rows)

    return step, (p.view, None if same else own)


def check_tensors(better: Enhanced) -> None:
    """An OptionError where networks need other pixels than a prepared tensor has."""
    base = better.preprocess
    for name in better.recipe.networks:
        own = better.networks[name].preprocess
        if own not in (None, base) and (base is None or own.geometry != base.geometry):
            raise OptionError(
                f"export: network {name!r} wants other preprocessing ({own}) than the base network ({base}). Pass "
                "from_pixels=True (--from-pixels): the file then prepares the image for each network."
            )


def _affine(old: Preprocess, new: Preprocess) -> tuple[list[float], list[float]]:
    """From values that one preprocessing normalised to those of another."""
    each = list(zip(old.mean, old.std, new.mean, new.std, strict=True))
    return [s / t for _, s, _, t in each], [(m - n) / t for m, _, n, t in each]


def _back(p: ExportPass, unit: Unit, x: Tensor, frame: Any) -> tuple[tuple[Step, ...], Any]:
    """How the maps of a view come back over the base view; nothing for what has no place on the image."""
    if frame is None:
        return (), None
    size, out_sizes = frame
    axes = len(size)
    shown = [tuple(v.shape[-axes:]) for v in unit.module(x)]
    moves = [fixed_back(p.view, size, s, wanted) for s, wanted in zip(shown, out_sizes, strict=False)]
    return tuple(move.on_graph for move in moves), (p.view, tuple(shown))


def _named_outputs(returned: Any, targets: Sequence[int]) -> tuple[list[str], list[tuple[int, ...]]]:
    """The model's own keys, or output, output2, ..."""
    leaves = pytree.tree_flatten_with_path(returned)[0]
    names, shapes = [], []
    for k, target in enumerate(targets):
        path, leaf = leaves[target]
        key = str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""
        usual = "output" if k == 0 else f"output{k + 1}"
        name = key if key and not key.isdigit() else usual
        names.append(f"model_{name}" if name in (*RESERVED, "images") else name)
        shapes.append(tuple(leaf.shape[1:]))
    return names, shapes
