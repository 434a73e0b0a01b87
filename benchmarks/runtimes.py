"""Which runtimes run exported files, and how exactly: docs/results/runtimes.md.

    python -m benchmarks.runtimes --web node_modules/onnxruntime-web      # runs them all, and writes rows and page
    python -m benchmarks.runtimes                                         # the page again, from the rows

Small networks with random weights. Every file is written by `unstride.export`, and run on the same images by
onnxruntime, OpenVINO (`pip install 'unstride[openvino]'`), onnxruntime-web in Chromium (`npm install onnxruntime-web`),
and, of recipes without gates, by torch.export and AOTInductor (which needs a C++ compiler).
"""

from __future__ import annotations

import argparse
import csv
import functools
import http.server
import importlib
import json
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import unstride
from unstride import Gate, Near, Recipe, Stage
from unstride.errors import OptionError
from unstride.exporting.checking import noise_images, noise_photos
from unstride.exporting.networks import session

ROWS = Path(__file__).parent.parent / "docs/results/runtimes.csv"
IMAGES = 8
LIMIT = {False: 1e-4, True: 5e-3}  # of the difference, of tensors and of pixels, which runtimes resize differently
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
)
Runner = Callable[[Path, str, Any], Any]  # (file, output, images) -> values
PAGE = """<!doctype html>
<script type="module">
const send = (answer) => fetch("answer", { method: "POST", body: JSON.stringify(answer) });
try {
  const ort = await import("./ort/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1;
  const { dims, type, output } = await (await fetch("job.json")).json();
  const values = await (await fetch("images")).arrayBuffer();
  const data = type === "uint8" ? new Uint8Array(values) : new Float32Array(values);
  const session = await ort.InferenceSession.create("net.onnx");
  const outputs = await session.run({ images: new ort.Tensor(type, data, dims) });
  await send({ values: Array.from(outputs[output].data) });
} catch (error) {
  await send({ error: String(error) });
}
</script>
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

    @property
    def gated(self) -> bool:
        return any(stage.gate is not None for stage in self.recipe.stages)


@dataclass(frozen=True)
class RuntimeRow:
    """The largest difference to the recipe in Python, relative to the largest output; or what failed."""

    recipe: str
    runtime: str
    version: str
    pixels: bool
    difference: float | None
    error: str

    @property
    def cell(self) -> str:
        return f"fails: {self.error}" if self.error else f"{self.difference:.0e}"

    @property
    def exact(self) -> bool:
        return self.difference is not None and self.difference <= LIMIT[self.pixels]


def cases() -> list[Case]:
    gate, flip = Gate(below=0.3), Stage(("flip",), gate=Gate(below=0.3))
    one, both = SmallNet(8).eval(), {"small": SmallNet(8).eval(), "large": SmallNet(24).eval()}
    calibration = {"quantize": "int8", "images": torch.stack(noise_images((3, 32, 32), IMAGES))}
    segment = Recipe((Stage(("plain", "flip")),), task="segmentation")
    return [
        Case("one pass", one, Recipe(), {}),
        Case("flip for all images", one, Recipe((Stage(("plain", "flip")),)), {}),
        Case("near states", one, Recipe((Stage(states=Near(3)),)), {}),
        Case("segmentation, flip", SmallNet(8, maps=True).eval(), segment, {}),
        Case("gated flip", one, Recipe((Stage(), flip)), {}),
        Case("gated larger view", one, Recipe((Stage(), Stage(("1.5x",), gate=gate))), {}),
        Case("gated near states", one, Recipe((Stage(), Stage(states=Near(3), gate=gate))), {}),
        Case("two networks", both, Recipe((Stage(), Stage(network="large", gate=gate, join="replace"))), {}),
        Case("gated flip, from pixels", one, Recipe((Stage(), flip)), {"from_pixels": True}),
        Case("gated flip, int8", one, Recipe((Stage(), flip)), calibration),
    ]


# ------------------------------------------------------------------------------------------------ runtimes


def onnxruntime(file: Path, output: str, images: Any) -> Any:
    return session(file).run([output], {"images": images})[0]


def openvino(file: Path, output: str, images: Any) -> Any:
    core = importlib.import_module("openvino").Core()
    compiled = core.compile_model(core.read_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled({"images": images})[output]


def in_chromium(package: Path) -> Runner:
    """onnxruntime-web's WebAssembly, on a page that gets the file and the images and sends the values back."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))

    def run(file: Path, output: str, images: Any) -> Any:
        with tempfile.TemporaryDirectory() as name:
            site, profile = Path(name) / "site", Path(name) / "profile"
            shutil.copytree(package / "dist", site / "ort")
            shutil.copy(file, site / "net.onnx")
            (site / "index.html").write_text(PAGE)
            (site / "images").write_bytes(np.ascontiguousarray(images).tobytes())
            job = {"dims": images.shape, "type": str(images.dtype), "output": output}
            (site / "job.json").write_text(json.dumps(job))
            with served(site) as (address, answers):
                command = [str(browser), *FLAGS, f"--user-data-dir={profile}", address]
                with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                    try:
                        answer = answers.get(timeout=120)
                    finally:
                        process.terminate()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return np.array(answer["values"], np.float32)

    return run


@contextmanager
def served(site: Path) -> Iterator[tuple[str, queue.Queue[Any]]]:
    """A folder on a local address, and what its page posts."""
    answers: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", answers
        server.shutdown()


def torch_export(file: Path, output: str, images: Any) -> Any:
    return torch.export.load(file).module()(torch.from_numpy(images)).detach().numpy()


def aot_inductor(file: Path, output: str, images: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        package = str(Path(folder) / "compiled.pt2")
        torch._inductor.aoti_compile_and_package(torch.export.load(file), package_path=package)
        return torch._inductor.aoti_load_package(package)(torch.from_numpy(images)).numpy()


# ------------------------------------------------------------------------------------------------ measuring


def row(case: Case, runtime: tuple[str, str], run: Callable[[], Any], wanted: Any) -> RuntimeRow:
    pixels = "from_pixels" in case.options
    try:
        got = np.asarray(run()).reshape(wanted.shape)
    except Exception as error:  # each runtime has errors of its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return RuntimeRow(case.name, *runtime, pixels, None, (lines[-1] if lines else type(error).__name__)[:120])
    difference = float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max()))
    return RuntimeRow(case.name, *runtime, pixels, float(f"{difference:.2g}"), "")


def measured(runners: dict[tuple[str, str], Runner]) -> Iterator[RuntimeRow]:
    preprocess = unstride.Preprocess(40, (32, 32))
    for case in cases():
        better = unstride.enhance(case.models, recipe=case.recipe, task=case.recipe.task, preprocess=preprocess)
        photos = noise_photos((32, 32), 2 * IMAGES)[:IMAGES]
        images = torch.stack(noise_images((3, 32, 32), IMAGES)).numpy()
        if "from_pixels" in case.options:
            images = np.stack([np.asarray(photo) for photo in photos])
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file = unstride.export(better, folder / "net.onnx", example=32, checked=IMAGES, **case.options)
            wanted = onnxruntime(file.path, file.outputs[0], images)  # of int8: what the file itself is
            if "quantize" not in case.options:
                wanted = better(photos if "from_pixels" in case.options else torch.from_numpy(images)).numpy()
            for runtime, runner in runners.items():
                yield row(case, runtime, lambda: runner(file.path, file.outputs[0], images), wanted)  # noqa: B023
            if case.gated or case.options:
                continue
            program = unstride.export(better, folder / "net.pt2", example=32, checked=IMAGES).path
            for named, run in (("torch.export", torch_export), ("AOTInductor", aot_inductor)):
                version = torch.__version__.split("+")[0]
                yield row(case, (named, version), lambda: run(program, "", images), wanted)  # noqa: B023


def runners(web: Path | None) -> dict[tuple[str, str], Runner]:
    """Those that are installed."""
    available: dict[tuple[str, str], Runner] = {}
    for name, run in (("onnxruntime", onnxruntime), ("openvino", openvino)):
        try:
            version = importlib.import_module(name).__version__.split("-")[0]
        except ImportError as error:
            extra = "onnx" if run is onnxruntime else name
            raise OptionError(f"{name} is not installed. Run: pip install 'unstride[{extra}]'") from error
        available["OpenVINO" if run is openvino else name, version] = run
    if web is not None:
        version = json.loads((web / "package.json").read_text())["version"]
        available["onnxruntime-web in Chromium", version] = in_chromium(web)
    return available


# ------------------------------------------------------------------------------------------------ the page


def page(rows: list[RuntimeRow]) -> str:
    runtimes = list(dict.fromkeys(r.runtime for r in rows))
    versions = {r.runtime: r.version for r in rows}
    exact, failed = sum(r.exact for r in rows), [r for r in rows if r.error]
    cells = {(r.recipe, r.runtime): r.cell for r in rows}
    lines = [
        "# Runtimes",
        "",
        f"**{exact} of {len(rows)} exported files give the recipe's answers in their runtime.** {len(failed)} fail; "
        f"{len(rows) - exact - len(failed)} differ by more than {LIMIT[False]:g}, or {LIMIT[True]:g} from pixels.",
        "",
        "Command: `python -m benchmarks.runtimes --web node_modules/onnxruntime-web`. Small networks with random "
        f"weights, {IMAGES} images. A cell is the largest difference to the recipe in "
        "Python, relative to the largest output. From pixels, runtimes resize and round to 8 bits each in its own way. "
        "`.pt2` files hold recipes without gates. All rows: [runtimes.csv](runtimes.csv).",
        "",
        f"| recipe | {' | '.join(f'{name} {versions[name]}' for name in runtimes)} |",
        f"|---|{'---|' * len(runtimes)}",
    ]
    for recipe in dict.fromkeys(r.recipe for r in rows):
        lines.append(f"| {recipe} | {' | '.join(cells.get((recipe, name), '') for name in runtimes)} |")
    return "\n".join(lines) + "\n"


def read() -> list[RuntimeRow]:
    with ROWS.open(newline="") as file:
        return [
            RuntimeRow(
                r["recipe"],
                r["runtime"],
                r["version"],
                r["pixels"] == "True",
                float(r["difference"]) if r["difference"] else None,
                r["error"],
            )
            for r in csv.DictReader(file)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--web", type=Path, help="the folder of the npm package onnxruntime-web")
    options = parser.parse_args()
    if options.web is not None:
        rows = []
        for r in measured(runners(options.web)):
            print(r, flush=True)
            rows.append(r)
        with ROWS.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    ROWS.with_suffix(".md").write_text(page(read()))


if __name__ == "__main__":
    main()
