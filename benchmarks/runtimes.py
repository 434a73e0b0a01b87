"""Which runtimes run exported files, and how exactly: docs/results/runtimes.md.

    python -m benchmarks.runtimes [--web node_modules/onnxruntime-web] [--out runtimes.md]

Small networks with random weights. Every file is written by `unstride.export`, and run on the same images by
onnxruntime, OpenVINO (`pip install openvino`) and onnxruntime-web's WebAssembly (`npm install onnxruntime-web`, in
Node). A cell is the largest difference to the recipe in Python, relative to the largest output, or what failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import unstride
from unstride import Gate, Near, Recipe, Stage
from unstride.exporting.checking import noise_images, noise_photos
from unstride.exporting.networks import session

IMAGES = 8
Runner = Callable[[Path, str, Any], Any]  # (file, output, images) -> values
SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
const [ort, file, input, output, dims, type] = process.argv.slice(2);
const { InferenceSession, Tensor } = await import(ort);
const bytes = readFileSync(input);
const values = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
const data = type === "uint8" ? new Uint8Array(values) : new Float32Array(values);
const session = await InferenceSession.create(new Uint8Array(readFileSync(file)));
const outputs = await session.run({ images: new Tensor(type, data, JSON.parse(dims)) });
writeFileSync(input, JSON.stringify(Array.from(outputs[output].data)));
process.exit(0);
"""


class SmallNet(nn.Module):
    def __init__(self, width: int, maps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.a, self.b = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.norm, self.head, self.maps = nn.BatchNorm2d(width), nn.Conv2d(width, 6, 1), maps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 8 * self.head(self.norm(self.b(self.a(x).relu()).relu()))
        return nn.functional.interpolate(y, x.shape[-2:], mode="bilinear") if self.maps else y.mean((2, 3))


@dataclass(frozen=True)
class Case:
    """A file to write."""

    name: str
    models: Any
    recipe: Recipe
    options: dict[str, Any]


def cases() -> list[Case]:
    gate, flip = Gate(below=0.3), Stage(("flip",), gate=Gate(below=0.3))
    one, both = SmallNet(8).eval(), {"small": SmallNet(8).eval(), "large": SmallNet(24).eval()}
    segment = Recipe((Stage(("plain", "flip")),), task="segmentation")
    return [
        Case("one pass", one, Recipe(), {}),
        Case("flip for all images", one, Recipe((Stage(("plain", "flip")),)), {}),
        Case("gated flip", one, Recipe((Stage(), flip)), {}),
        Case("gated larger view", one, Recipe((Stage(), Stage(("1.5x",), gate=gate))), {}),
        Case("gated near states", one, Recipe((Stage(), Stage(states=Near(3), gate=gate))), {}),
        Case("two networks", both, Recipe((Stage(), Stage(network="large", gate=gate, join="replace"))), {}),
        Case("gated flip, from pixels", one, Recipe((Stage(), flip)), {"from_pixels": True}),
        Case("gated flip, int8", one, Recipe((Stage(), flip)), {"quantize": "int8"}),
        Case("segmentation, flip", SmallNet(8, maps=True).eval(), segment, {}),
    ]


def onnxruntime(file: Path, output: str, images: Any) -> Any:
    return session(file).run([output], {"images": images})[0]


def openvino(file: Path, output: str, images: Any) -> Any:
    core = importlib.import_module("openvino").Core()
    return core.compile_model(core.read_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({"images": images})[
        output
    ]


def in_node(package: Path) -> Runner:
    def run(file: Path, output: str, images: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            script, given = Path(folder) / "run.mjs", Path(folder) / "images"
            script.write_text(SCRIPT)
            given.write_bytes(np.ascontiguousarray(images).tobytes())
            module = str((package / "dist" / "ort.node.min.mjs").resolve())
            dims = json.dumps(list(images.shape))
            arguments = [module, str(file), str(given), output, dims, str(images.dtype)]
            done = subprocess.run(["node", str(script), *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "rror" in line]
                raise RuntimeError(errors[0] if errors else done.stderr[:200])
            return np.array(json.loads(given.read_text()), np.float32)

    return run


def cell(runner: Runner, file: Path, output: str, images: Any, wanted: Any) -> str:
    """The largest difference, or the first line of the error."""
    try:
        got = np.asarray(runner(file, output, images)).reshape(wanted.shape)
    except Exception as error:  # each runtime has errors of its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"fails: {(lines[-1] if lines else type(error).__name__)[:120]}"
    return f"{float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max())):.0e}"


def table(runners: dict[str, Runner]) -> list[str]:
    lines = [f"| file | {' | '.join(runners)} |", f"|---|{'---|' * len(runners)}"]
    preprocess = unstride.Preprocess(40, (32, 32))
    for case in cases():
        better = unstride.enhance(case.models, recipe=case.recipe, task=case.recipe.task, preprocess=preprocess)
        with tempfile.TemporaryDirectory() as folder:
            file = unstride.export(better, Path(folder) / "net.onnx", example=32, checked=IMAGES, **case.options)
            photos = noise_photos((32, 32), 2 * IMAGES)[:IMAGES]
            images = torch.stack(noise_images((3, 32, 32), IMAGES)).numpy()
            if "from_pixels" in case.options:
                images = np.stack([np.asarray(photo) for photo in photos])
            wanted = onnxruntime(file.path, file.outputs[0], images)
            if "quantize" not in case.options:
                wanted = better(photos if "from_pixels" in case.options else torch.from_numpy(images)).numpy()
            cells = [cell(run, file.path, file.outputs[0], images, wanted) for run in runners.values()]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--web", type=Path, help="the folder of the npm package onnxruntime-web")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    runners: dict[str, Runner] = {f"onnxruntime {importlib.import_module('onnxruntime').__version__}": onnxruntime}
    if importlib.util.find_spec("openvino"):
        runners[f"OpenVINO {importlib.import_module('openvino').__version__.split('-')[0]}"] = openvino
    if options.web is not None:
        version = json.loads((options.web / "package.json").read_text())["version"]
        runners[f"onnxruntime-web {version}"] = in_node(options.web)
    lines = table(runners)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
