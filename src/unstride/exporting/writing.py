"""`export(better, example, "net.onnx")`: the graph, checked against the model, then written whole or not at all."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, OptionError
from unstride.exporting.driver import VERSION, Stages, open_graph
from unstride.exporting.looks import FixedLooks
from unstride.procedure.gates import Gate, Stage
from unstride.procedure.static import Fixed
from unstride.recipe.files import to_data
from unstride.storage import files, strict_json
from unstride.storage.artefacts import write_file
from unstride.views.images import Preprocess

FORMATS = (".onnx", ".pt2")
CLOSE = 1e-3  # of the largest logit: kernels add in another order, and nothing else


def export(better: Enhanced, example: Tensor, path: str | Path) -> list[Path]:
    """`export(unstride.enhance(model, images, recipe="flip"), images, "net.onnx")` -> the files that were written.

    One graph (B, C, H, W) -> logits for images of the example's size and any batch. A recipe with gates becomes
    `net.stage1.onnx`, `net.stage2.onnx`, ... and `net.stages.json`, which `unstride.exporting.run_stages` drives. What
    decides image by image (a search) cannot be one graph, and is refused.
    """
    path = Path(path)
    files.check_file(path, "export", FORMATS)
    if path.suffix == ".onnx" and importlib.util.find_spec("onnxscript") is None:
        raise OptionError(".onnx needs onnx and onnxscript: pip install 'unstride[onnx]', or write a .pt2 file")
    _refuse(better)
    own = better.with_options(execution="auto")  # the network's own weights; runtimes fold what they like
    own.fitted(example[:1])
    probes = [_noise(example, count) for count in (3, 1)]
    if not any(stage.gate for stage in better.recipe.stages):
        module = _whole(own, example)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            made = _written(module, probes[0], Path(folder) / path.name)
            _check(made, [(x, _main(better, x)) for x in probes], path)
            made.replace(path)
        return [path]
    return _stages(own, better, example, path, probes)


def _refuse(better: Enhanced) -> None:
    if not isinstance(better, Enhanced):
        raise OptionError(f"export takes what unstride.enhance gives, not {type(better).__name__}")
    recipe = better.recipe
    if recipe.precision is not None:
        raise OptionError(
            f"precision {recipe.precision!r} casts while it runs, and a graph computes as its weights are: export "
            "better.with_options(precision=None), or a recipe file without it"
        )
    if better.task not in ("classification", "segmentation"):
        raise OptionError(f"export writes classification and segmentation so far; this is {better.task}")
    if recipe.searches and recipe.states is None:
        raise OptionError(
            "this recipe searches: which states are looked at depends on each image, so there is no one graph. Give "
            "a recipe of looks (flip, multiscale-flip, a tuned one), or fixed states (unstride.select_states)"
        )
    for stage in recipe.stages:
        if stage.gate is not None and stage.gate.below is None:
            raise OptionError(f"the gate {stage.gate} has no threshold yet: call better.calibrate(images) first")
        if stage.gate is not None and stage.gate.by == "agreement":
            raise OptionError("a gate by agreement needs the answer of each look, which exported stages do not give")
    if any(stage.gate for stage in recipe.stages) and better.task == "segmentation":
        raise OptionError("gates are for classification; export a segmentation recipe without them")


def _whole(better: Enhanced, example: Tensor) -> nn.Module:
    if better.recipe.stages:
        return FixedLooks(better, example, better.recipe.stages)
    plan = better.prepare(example[:1])
    options = better.options(plan)
    states = list(dict.fromkeys([plan.found.space.zero, *(options.states or ())]))
    return _Main(Fixed(plan, states, options), plan.graph.index(plan.targets[0].leaf), better.recipe.temperature)


class _Main(nn.Module):
    """Of everything that a network returns, the logits."""

    def __init__(self, fixed: Fixed, leaf: int, temperature: float) -> None:
        super().__init__()
        self.body, self.leaf, self.temperature = fixed.body, leaf, temperature

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)[self.leaf]
        return logits if self.temperature == 1 else logits / self.temperature


def _stages(own: Enhanced, better: Enhanced, example: Tensor, path: Path, probes: Sequence[Tensor]) -> list[Path]:
    """A graph for what comes before each gate, and the text that says how they belong together."""
    groups: list[list[Stage]] = []
    for stage in better.recipe.stages:
        if stage.gate is not None or not groups:
            groups.append([])
        groups[-1].append(stage)
    written, told = [], []
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        for number, group in enumerate(groups):
            taken = [stage for before in groups[:number] for stage in before]
            module = FixedLooks(own, example, group, finished=False, taken=taken)
            name = f"{path.stem}.stage{number + 1}{path.suffix}"
            written.append(_written(module, probes[0], Path(folder) / name))
            gate = group[0].gate
            told.append({"file": name, "weight": module.weight, "gate": None if gate is None else _plain(gate)})
        recipe = better.recipe
        text = {"version": VERSION, "merge": recipe.merge, "temperature": recipe.temperature, "stages": told}
        text |= {"recipe": to_data(recipe), "preprocess": _told(better.preprocess)}
        driver = Path(folder) / f"{path.stem}.stages.json"
        write_file(driver, (strict_json.dumps(text) + "\n").encode())
        written.append(driver)
        _check_stages(better, driver, path, probes)
        for file in written:
            file.replace(path.parent / file.name)
    return [path.parent / file.name for file in written]


def _plain(gate: Gate) -> dict[str, Any]:
    return {"by": gate.by, "below": gate.below}


def _told(preprocess: Preprocess | None) -> dict[str, Any] | None:
    return None if preprocess is None else asdict(preprocess)


def _written(module: nn.Module, example: Tensor, path: Path) -> Path:
    batch = ({0: torch.export.Dim.DYNAMIC},)
    with _quiet():
        if path.suffix == ".pt2":
            torch.export.save(torch.export.export(module, (example,), dynamic_shapes=batch), path)
            return path
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "verbose": False}
        program: Any = torch.onnx.export(module, (example,), dynamo=True, dynamic_shapes=batch, **names)
        common = importlib.import_module("onnx_ir.passes.common")
        # Each size has a capture of its own, and brings the weights again.
        common.DeduplicateInitializersPass(size_limit=1 << 40)(program.model)
        program.save(str(path), external_data=False)
    return path


def _check(file: Path, pairs: Sequence[tuple[Tensor, Tensor]], path: Path) -> None:
    """The written graph against the model, in onnxruntime where it is installed."""
    if file.suffix == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
        warnings.warn(f"{path.name} was not checked: onnxruntime is not installed", stacklevel=3)
        return
    call = open_graph(file)
    for x, wanted in pairs:
        _same(call(x.cpu()), wanted, path)


def _check_stages(better: Enhanced, driver: Path, path: Path, probes: Sequence[Tensor]) -> None:
    if path.suffix == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
        warnings.warn(f"{path.name} was not checked: onnxruntime is not installed", stacklevel=3)
        return
    stages = Stages(driver)
    always = tuple(replace(stage, gate=None) for stage in better.recipe.stages)
    ungated = better.with_options(recipe=better.recipe.changed(stages=always))
    for x in probes:
        _same(stages(x.cpu(), gated=False), _main(ungated, x), path)


def _same(found: Tensor, wanted: Tensor, path: Path) -> None:
    scale = max(1.0, float(wanted.abs().max()))
    apart = float((found.cpu() - wanted.cpu()).abs().max()) if found.shape == wanted.shape else float("nan")
    if not apart <= CLOSE * scale:
        raise ArtefactError(
            f"{path} was not written: the graph and the model differ by {apart:.2g} (logits to {scale:.2g}). Please "
            "report the network; meanwhile export the other format, or fixed states"
        )


def _main(better: Enhanced, x: Tensor) -> Tensor:
    if better.recipe.stages:
        return better.looks(x)[0]
    _, plan, _ = better.fitted(x)
    leaves = torch.utils._pytree.tree_leaves(better(x))
    logits: Tensor = leaves[plan.graph.index(plan.targets[0].leaf)]
    return logits


def _noise(example: Tensor, count: int) -> Tensor:
    seed = torch.Generator().manual_seed(count)
    return torch.randn(count, *example.shape[1:], generator=seed).to(example)


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters tell of every op that they pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
