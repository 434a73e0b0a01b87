"""`export(model, "net.onnx", recipe="best.toml")`: one file for the whole recipe, checked before it is there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import InputError, OptionError
from unstride.execution.independence import warn_of_batch_dependence
from unstride.exporting.builder import extra
from unstride.exporting.checking import Agreement, check, noise_images, noise_photos, same_class
from unstride.exporting.int8 import quantized_units, with_units
from unstride.exporting.loop import GraphPlan, recipe_graph
from unstride.exporting.networks import Unit, onnx_units, units_for
from unstride.exporting.passes import ExportPass, check_exportable, listed_passes
from unstride.exporting.pixels import check_pixels
from unstride.exporting.plan import check_tensors, graph_plan
from unstride.exporting.program import FixedRecipe, check_program, program_bytes
from unstride.pipeline import Pipeline, open_pipeline
from unstride.recipe.files import plain_figures, write
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN
from unstride.storage import files
from unstride.storage.artefacts import write_file
from unstride.storage.provenance import provenance
from unstride.views.images import find_images, image_size, open_image
from unstride.views.source import PILImages, Source, as_source, check_images, for_network

FORMATS = (".onnx", ".pt2")
CHECKED = 256  # images, by default
LARGEST = (1 << 31) - (1 << 20)  # bytes of an ONNX file that holds its weights
PREFIX = "unstride."  # of the names of metadata


@dataclass(frozen=True)
class ExportedFile:
    """What `export` wrote. `print` shows the input, the outputs, the size and the check.

    Attributes:
        size: bytes of the file.
        weights: bytes of the networks' weights, each network once.
        copies: networks whose weights are in the file once more, and why.
        int8: of a quantised file, the share of the images with the same class as in float32.
    """

    path: Path
    input: str
    outputs: tuple[str, ...]
    size: int
    weights: int
    copies: tuple[str, ...]
    agreement: Agreement
    int8: float | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {_megabytes(self.size)} (the networks' weights: {_megabytes(self.weights)})",
            f"  takes images: {self.input}",
            f"  returns {', '.join(self.outputs)}",
            *(f"  the weights are in the file once more: {copy}" for copy in self.copies),
            f"  {self.agreement}",
        ]
        if self.int8 is not None:
            lines.append(f"  int8: same class as float32 for {self.int8:.1%} of these images")
        return "\n".join(lines)


def export(
    model: Any,
    path: str | Path,
    *,
    example: Tensor | int | tuple[int, int] | None = None,
    recipe: str | Path | Recipe = "default",
    from_pixels: bool = False,
    quantize: str | None = None,
    images: Any = None,
    checked: int = CHECKED,
    **changes: Any,
) -> ExportedFile:
    """Write one file that runs the whole recipe without unstride and torch, for any batch size.

    Args:
        model: what `enhance` returns, a model, several, a SPEC such as "timm:resnet18", or a Pipeline.
        path: `.onnx`; or `.pt2`, a torch.export program, for recipes without gates.
        example: images as the base network takes them, or their height and width; by default the network's own size.
        recipe: a name, a file or a Recipe; of an enhanced model its own by default.
        from_pixels: the file takes uint8 images (B, H, W, 3) of one size, and resizes, crops and normalises them for
            each network.
        quantize: "int8" quantises each network, calibrated with `images`.
        images: to check the file, and to calibrate int8: a folder, paths, PIL images or tensors. By default the file
            is checked with generated ones.
        checked: how many images are checked at most.
        changes: fields of the recipe, as in `enhance`.

    Raises:
        ArtefactError: the file does not do what the recipe does. It is not written.

    Example: `print(unstride.export(better, "better.onnx"))`
    """
    path = files.as_path(path, "path")
    files.check_file(path, "export", FORMATS)
    _check_options(path, from_pixels, quantize, images)
    _check_images(example, images, checked)
    pipeline = _pipeline(model, recipe, changes)
    better = pipeline.better
    check_exportable(better.recipe)
    if from_pixels:
        for name in better.recipe.networks:
            check_pixels(better.networks[name].preprocess or better.preprocess, name)
    else:
        check_tensors(better)
    given = _images(pipeline, images, example, from_pixels, checked)
    source = as_source(given[:1] if from_pixels else given[0][None], better.preprocess)
    with torch.no_grad():
        warn_of_batch_dependence(better.networks, source.render(PLAIN))
        passes = listed_passes(better, source)
        rendered = _rendered(better, passes, source)
        units = units_for(better, passes, rendered)
        if path.suffix == ".pt2":
            return _write_program(
                path, better, FixedRecipe(better, passes, units, rendered, given[0][None]), given, units
            )
        exported = _Exported(pipeline, passes, rendered, source, given, from_pixels, quantize)
        return exported.written(path, onnx_units(units, rendered))


@dataclass(frozen=True, eq=False)
class _Exported:
    """An export to ONNX under way."""

    pipeline: Pipeline
    passes: Sequence[ExportPass]
    rendered: Sequence[Tensor]
    source: Source
    images: list[Any]
    from_pixels: bool
    quantize: str | None

    def written(self, path: Path, units: list[Unit]) -> ExportedFile:
        better, oracle = self.pipeline.better, self.pipeline.better
        if self.quantize is not None:
            images = self.images if self.from_pixels else torch.stack(self.images)
            units = quantized_units(better, self.passes, units, as_source(images, better.preprocess))
            oracle = with_units(better, self.passes, units, self.rendered)
        plan = graph_plan(better, self.passes, units, self.rendered, self.source, self.from_pixels)
        graph = recipe_graph(plan, self.metadata(path))
        if graph.ByteSize() > LARGEST:
            raise OptionError(f"export: the file would take {_megabytes(graph.ByteSize())}; an ONNX file holds 2 GB.")
        agreement = check(graph, oracle, self.images, plan.names, not (self.from_pixels or self.quantize))
        int8 = None if self.quantize is None else self._same_as_float32(oracle)
        size = write_file(path, graph.SerializeToString()).stat().st_size
        names = tuple(output.name for output in graph.graph.output)
        weights, copies = _weights(units)
        return ExportedFile(path, _shown(plan), names, size, weights, copies, agreement, int8)

    def metadata(self, path: Path) -> dict[str, str]:
        """What the file says of itself: the recipe as TOML, everything else as JSON."""
        pipeline, stored = self.pipeline, self.pipeline.stored
        figures = {} if stored is None else stored.figures
        networks = pipeline.stored_networks()
        with tempfile.TemporaryDirectory() as folder:
            recipe = write(Path(folder) / "recipe.toml", pipeline.better.recipe, networks, figures).read_text()
        entries = {
            "networks": {name: {"spec": n.spec, "fingerprint": n.fingerprint} for name, n in networks.items()},
            "classes": list(pipeline.classes),
            "figures": plain_figures(figures),
            "provenance": provenance(),
            "input": "pixels" if self.from_pixels else "tensor",
            "preprocess": None if pipeline.better.preprocess is None else pipeline.better.preprocess.to_json(),
            "task": pipeline.task,
            "quantize": self.quantize,
        }
        return {f"{PREFIX}recipe": recipe, **{PREFIX + k: json.dumps(v) for k, v in entries.items()}}

    def _same_as_float32(self, int8: Enhanced) -> float:
        better, same = self.pipeline.better, list[Tensor]()
        for k in range(0, len(self.images), 16):
            some = self.images[k : k + 16]
            images = some if self.from_pixels else torch.stack(some)
            same.append(same_class(int8.run(images).output.numpy(), better.run(images).output, better).flatten())
        return float(torch.cat(same).mean())


def _write_program(
    path: Path, better: Enhanced, module: FixedRecipe, images: list[Tensor], units: Sequence[Unit]
) -> ExportedFile:
    data = program_bytes(module, images[0][None])
    agreement = Agreement(len(images), check_program(data, better, images), 1.0)
    size = write_file(path, data).stat().st_size
    shown = f"float32 ({', '.join(map(str, ('batch', *images[0].shape)))})"
    return ExportedFile(path, shown, ("output",), size, *_weights(units), agreement)


def _check_options(path: Path, from_pixels: bool, quantize: str | None, images: Any) -> None:
    if quantize not in (None, "int8"):
        raise OptionError(f"export: quantize: got {quantize!r}, expected 'int8' or None.")
    if quantize and images is None:
        raise OptionError("export: quantize='int8' needs images to calibrate with. Pass images=FOLDER (--images).")
    if path.suffix == ".onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            extra(module)
    elif from_pixels or quantize:
        raise OptionError("export: from_pixels and quantize are for .onnx files.")


def _check_images(example: Any, images: Any, checked: Any) -> None:
    if type(checked) is not int or not 1 <= checked < 1e9:
        raise OptionError(f"checked: got {checked!r:.60}, expected a whole number of images, at least 1.")
    if isinstance(example, Tensor):
        check_images(example, "example", axes=None)
    elif example is not None:
        image_size("example", example)
    if isinstance(images, Tensor) and images.is_floating_point():
        check_images(images, axes=None)
    if isinstance(images, list | tuple | str) and not images:
        raise InputError(f"images: got {images!r}, expected a folder, paths, PIL images or a tensor.")


def _pipeline(model: Any, recipe: str | Path | Recipe, changes: dict[str, Any]) -> Pipeline:
    if isinstance(model, Pipeline):
        other = None if recipe == "default" else recipe
        return model.with_recipe(other, **changes) if other is not None or changes else model
    return open_pipeline(model, recipe=recipe, execution="auto", **changes)


def _rendered(better: Enhanced, passes: Sequence[ExportPass], source: Source) -> list[Tensor]:
    """Of each pass, one image as its network takes it."""
    return [for_network(source, better.networks[p.network].preprocess).render(p.view).cpu() for p in passes]


def _images(pipeline: Pipeline, images: Any, example: Any, from_pixels: bool, count: int) -> list[Any]:
    """The images to check: PIL images for pixels, else prepared tensors (C, H, W)."""
    better = pipeline.better
    if isinstance(images, str | Path) or (isinstance(images, list | tuple) and isinstance(images[0], str | Path)):
        images = [open_image(path) for path in find_images(images)[:count]]
    if isinstance(images, Tensor) and images.is_floating_point():
        if from_pixels:
            raise InputError(
                "images: got prepared tensors, expected PIL images, files or uint8 tensors for from_pixels."
            )
        return list(images[:count])
    if images is not None:
        source = as_source(images, better.preprocess)
        if not isinstance(source, PILImages):
            raise InputError(f"images: got {type(images).__name__}, expected a folder, paths, PIL images or a tensor.")
        photos = list(source.images)[:count]
        return photos if from_pixels else [source.rows([k]).render(PLAIN)[0] for k in range(len(photos))]
    if from_pixels:
        sizes = [p.size for net in better.networks.values() if (p := net.preprocess or better.preprocess) is not None]
        return list(noise_photos(max(size for size in sizes if size is not None), count))
    shape = example.shape[1:] if isinstance(example, Tensor) else pipeline.base.example(example).shape[1:]
    return noise_images(tuple(shape), count)


def _weights(units: Sequence[Unit]) -> tuple[int, tuple[str, ...]]:
    """Bytes of the networks' weights, each once, and which units hold them once more."""
    own: dict[str, int] = {}
    copies = []
    for unit in dict.fromkeys(units):
        if unit.network in own:
            copies.append(f"{unit.name} ({_megabytes(unit.weights)})")
        own.setdefault(unit.network, unit.weights)
    return sum(own.values()), tuple(copies)


def _shown(plan: GraphPlan) -> str:
    dtype, shape = plan.image
    return f"{ {'UINT8': 'uint8', 'FLOAT': 'float32'}[dtype] } ({', '.join(map(str, shape))})"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
