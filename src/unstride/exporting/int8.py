"""Networks with int8 weights and activations, by onnxruntime's static quantisation, and the recipe that runs them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.execution.executors import Network
from unstride.exporting.builder import extra
from unstride.exporting.networks import Unit, quiet, session, stripped
from unstride.exporting.passes import ExportPass
from unstride.views.source import Source, for_network

CALIBRATION = 64  # images


def quantized_units(
    better: Enhanced, passes: Sequence[ExportPass], units: Sequence[Unit], images: Source
) -> list[Unit]:
    """Each network quantised with these images, in the views that it takes."""
    if any(p.states for p in passes):
        raise OptionError("export: quantize='int8' is for recipes without states. Leave states or quantize out.")
    made: dict[int, Unit] = {}
    for unit in dict.fromkeys(units):
        own = [p for p, u in zip(passes, units, strict=True) if u is unit]
        samples = []
        for k in range(min(CALIBRATION, len(images))):
            p = own[k % len(own)]
            prepared = for_network(images.rows([k]), better.networks[p.network].preprocess)
            samples.append(prepared.render(p.view).cpu())
        made[id(unit)] = replace(unit, model=quantized(unit.model, samples))
    return [made[id(unit)] for unit in units]


class OnnxModule(nn.Module):
    """ONNX graphs of a network as a torch module, by the size of the images."""

    def __init__(self, models: dict[tuple[int, ...], Any]) -> None:
        super().__init__()
        opened = {id(model): session(model) for model in models.values()}
        self.sessions = {size: opened[id(model)] for size, model in models.items()}

    def forward(self, images: Tensor) -> Any:
        own = self.sessions[tuple(images.shape[2:])]
        outputs = own.run(None, {own.get_inputs()[0].name: images.cpu().numpy()})
        values = tuple(torch.from_numpy(v).squeeze(1) for v in outputs)
        return values[0] if len(values) == 1 else values


def with_units(
    better: Enhanced, passes: Sequence[ExportPass], units: Sequence[Unit], rendered: Sequence[Tensor]
) -> Enhanced:
    """The same recipe, run by `enhance` with these networks: what a file of them is compared with."""
    models: dict[str, dict[tuple[int, ...], Any]] = {}
    for p, unit, x in zip(passes, units, rendered, strict=True):
        models.setdefault(p.network, {})[tuple(x.shape[2:])] = unit.model
    networks = {name: Network(name, OnnxModule(own), better.networks[name].preprocess) for name, own in models.items()}
    first = next(iter(networks.values()))
    return Enhanced(
        {"base": first, **networks}, better.recipe, None, better.preprocess, better.assumed, better.view_weights
    )


class _Images:
    """What onnxruntime's calibration reads, one image after the other."""

    def __init__(self, name: str, images: Sequence[Tensor]) -> None:
        self.feeds = iter([{name: x.numpy()} for x in images])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.feeds, None)


def quantized(model: Any, images: Sequence[Tensor]) -> Any:
    """The model with int8 weights and activations, by onnxruntime's static quantisation on prepared images."""
    onnx, q = extra("onnx"), extra("onnxruntime.quantization")
    with tempfile.TemporaryDirectory() as folder, quiet():
        plain, ready, small = (str(Path(folder) / name) for name in ("plain.onnx", "ready.onnx", "int8.onnx"))
        onnx.save(model, plain)
        extra("onnxruntime.quantization.shape_inference").quant_pre_process(plain, ready, skip_symbolic_shape=True)
        reader = _Images(model.graph.input[0].name, images)
        kinds = {"activation_type": q.QuantType.QUInt8, "weight_type": q.QuantType.QInt8}
        q.quantize_static(ready, small, reader, quant_format=q.QuantFormat.QDQ, per_channel=True, **kinds)
        return stripped(onnx.load(small))
