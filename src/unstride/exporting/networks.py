"""Each network as an ONNX graph: once for all sizes where it can be, else once for each size; int8 on request."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.enhanced import Enhanced
from unstride.errors import CaptureError
from unstride.execution.executors import ModelExecutor, Network
from unstride.execution.padding import MULTIPLE, Crop, cropped_output
from unstride.exporting.builder import OPSET, extra
from unstride.exporting.passes import ExportPass, separate
from unstride.exporting.states import StatesModule
from unstride.graph.evaluation import evaluation_copy
from unstride.tasks.tasks import TASKS, Task

Size = tuple[int, ...]
CLOSE = 1e-4  # of the largest output, between torch and onnxruntime


class NetworkModule(nn.Module):
    """Images (B, C, H, W) -> for each combined output (B, 1, ...), in the order of the base network's classes."""

    def __init__(self, network: Network, task: Task, example: Tensor) -> None:
        super().__init__()
        passes = ModelExecutor(network, task).start(example[:1])
        self.model, self.targets = network.model, passes.targets
        self.crop: Crop = passes.crop
        self.classes = network.classes
        self.base_classes = network.base_classes

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if self.crop is not None:
            more = [side for n in reversed(images.shape[2:]) for side in (0, -n % MULTIPLE)]
            images = F.pad(images, more, mode="replicate" if min(images.shape[2:]) > 1 else "constant")
        leaves = pytree.tree_leaves(self.model(images))
        outputs = [self.base_classes(cropped_output(leaves[t], self.crop)) for t in self.targets]
        return tuple(output.unsqueeze(1) for output in outputs)


@dataclass(eq=False)
class Unit:
    """A module that takes some passes of the recipe, and what was made of it.

    Attributes:
        examples: images of each size that it takes (1, C, H, W).
        weights: bytes of its parameters and buffers.
        model: its ONNX graph, or None before `to_onnx`.
    """

    name: str
    module: nn.Module
    network: str
    examples: tuple[Tensor, ...]
    weights: int
    model: Any = None


def units_for(better: Enhanced, passes: Sequence[ExportPass], images: Sequence[Tensor]) -> list[Unit]:
    """The unit of each pass. `images`: of each pass, an image in its view, prepared for its network.

    Passes of a network without states share a unit; those in states have one for each list of states and size.
    """
    task, chosen = TASKS[better.recipe.task], dict[int, Unit]()  # by the number of the pass
    plain: dict[str, list[int]] = {}
    for k, p in enumerate(passes):
        network = _on_cpu(better.networks[p.network])
        if p.states:
            same = [j for j in range(k) if _same_states(passes[j], p, images[j], images[k])]
            if same:
                chosen[k] = chosen[same[0]]
                continue
            live = Network(network.name, network.model, network.preprocess, "auto", network.classes)
            each = separate(p.stage, better.recipe)
            module: nn.Module = StatesModule(live, task, p.stage, p.states, images[k], each)
            name = f"{p.network} in {len(p.states)} states, {p.view}"
            chosen[k] = Unit(name, module, p.network, (images[k],), weight_bytes(network.model))
        else:
            plain.setdefault(p.network, []).append(k)
    for name, own in plain.items():
        network = _on_cpu(better.networks[name])
        examples = {tuple(images[k].shape[2:]): images[k] for k in own}
        module = NetworkModule(network, task, images[own[0]])
        unit = Unit(name, module, name, tuple(examples.values()), weight_bytes(network.model))
        chosen |= dict.fromkeys(own, unit)
    return [chosen[k] for k in range(len(passes))]


def _same_states(a: ExportPass, b: ExportPass, x: Tensor, y: Tensor) -> bool:
    like = ("network", "aggregate", "align", "space", "border", "edges")
    same = all(getattr(a.stage, name) == getattr(b.stage, name) for name in like)
    return a.states == b.states and same and x.shape == y.shape


def _on_cpu(network: Network) -> Network:
    """The network in evaluation mode, on the CPU: the file's own weights."""
    model = network.model
    if any(t.device.type != "cpu" for t in (*model.parameters(), *model.buffers())):
        model = copy.deepcopy(model).cpu()
    if any(m.training for m in model.modules()):
        model = evaluation_copy(model)
    same = model is network.model
    return network if same else Network(network.name, model, network.preprocess, "auto", network.classes)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers, each once."""
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


# ---------------------------------------------------------------------------------------------------- to ONNX


def onnx_units(units: Sequence[Unit], rendered: Sequence[Tensor]) -> list[Unit]:
    """Of each pass, its unit with an ONNX graph for the size of that pass."""
    by_size = {id(unit): _by_size(unit) for unit in dict.fromkeys(units)}
    return [by_size[id(unit)][tuple(x.shape[2:])] for unit, x in zip(units, rendered, strict=True)]


def _by_size(unit: Unit) -> dict[Size, Unit]:
    """One graph for all sizes where the network can be exported so, else a copy for each."""
    sizes = [tuple(x.shape[2:]) for x in unit.examples]
    if len(sizes) > 1 and (shared := _with_any_size(unit)) is not None:
        return dict.fromkeys(sizes, replace(unit, model=shared))
    found = {}
    for size, x in zip(sizes, unit.examples, strict=True):
        name = unit.name if len(sizes) == 1 else f"{unit.name} at {'x'.join(map(str, size))}"
        found[size] = replace(unit, name=name, examples=(x,), model=exported(unit.module, x))
    return found


def _with_any_size(unit: Unit) -> Any | None:
    """A graph with dynamic height and width that agrees with the network at every size, or None."""
    axes = range(2, unit.examples[0].ndim)
    try:
        model = exported(unit.module, unit.examples[0], axes)
        for x in unit.examples:
            for got, wanted in zip(run(model, x), unit.module(x), strict=True):
                if got.shape != wanted.shape or not float((got - wanted).abs().max()) <= _bound(wanted):
                    return None
    except Exception:  # exporters and runtimes raise nearly anything where a size is fixed inside the network
        return None
    return model


def _bound(wanted: Tensor) -> float:
    return CLOSE * max(1.0, float(wanted.abs().max()))


def exported(module: nn.Module, example: Tensor, axes: Sequence[int] = ()) -> Any:
    """A module as an ONNX model whose batch, and these axes, are dynamic."""
    extra("onnxscript")
    both = torch.cat([example, example.flip(-1)]).cpu()
    dynamic = {0: torch.export.Dim.DYNAMIC, **dict.fromkeys(axes, torch.export.Dim.DYNAMIC)}
    options: dict[str, Any] = {"external_data": False, "verbose": False, "opset_version": OPSET}
    with quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(module, (both,), dynamo=True, dynamic_shapes=(dynamic,), **options)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CaptureError(
                f"export: torch.onnx.export cannot export {type(getattr(module, 'model', module)).__name__} ({reason})."
            ) from error
    assert program is not None
    return stripped(program.model_proto)


def stripped(model: Any) -> Any:
    """Without the exporter's notes on each op, which can be as large as the weights of a small network."""
    onnx = extra("onnx")
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    del model.graph.value_info[:]
    for entry in (*model.graph.node, *model.graph.initializer, *model.graph.input, *model.graph.output):
        entry.doc_string = ""
        if hasattr(entry, "metadata_props"):
            del entry.metadata_props[:]
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters report every op that they pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)


# ---------------------------------------------------------------------------------------------------- running


def session(model: Any) -> Any:
    """An onnxruntime session of a model or of a file."""
    runtime = extra("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    source = str(model) if isinstance(model, str | Path) else model.SerializeToString()
    return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: Any, x: Tensor) -> list[Tensor]:
    """The outputs of a model with one input."""
    opened = session(model)
    return [torch.from_numpy(v) for v in opened.run(None, {opened.get_inputs()[0].name: x.numpy()})]


__all__ = ["NetworkModule", "Unit", "onnx_units", "session", "units_for", "weight_bytes"]
