"""Exported recipes in ONNX Runtime: answers, bytes, and time over the sum of their passes. docs/results/exported.md.

    python -m benchmarks.exported --assets DIR      # DIR: see benchmarks/nets.py; writes the rows and the page
    python -m benchmarks.exported                   # the page again, from the rows

Each file is checked on 256 validation images by `unstride export` itself, gates as they are and forced both ways. The
parts are the networks alone, each exported by torch.onnx.export and run at the batch sizes at which the recipe runs it.
One thread, CPU time; file and parts run in turns, and `time` is the median of their ratios.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from PIL import Image
from torch import Tensor

import unstride
from benchmarks import nets
from unstride import Gate, Recipe, Stage
from unstride.exporting.loop import ALWAYS, NEVER, forced
from unstride.exporting.networks import exported, session
from unstride.models import LoadedModel
from unstride.pipeline import open_pipeline

ROWS = nets.ROOT / "docs/results/exported.csv"
BATCHES, SHARES = (1, 8, 32), (0.0, 0.25, 1.0)
IMAGES = 256
ROUNDS = 5
GOAL = 1.1  # of time and size


@dataclass(frozen=True)
class Study:
    """A recipe to export."""

    title: str
    networks: tuple[str, ...]
    recipe: Recipe
    options: dict[str, Any]

    @property
    def pixels(self) -> bool:
        return "from_pixels" in self.options


@dataclass(frozen=True)
class ExportRow:
    """A file at one batch size and share of images that pass the gates.

    Attributes:
        time: over the sum of the recipe's passes.
        size: over the networks' weights in float32.
        difference: the largest of the answers of 256 images, relative to the largest answer.
        same_class: as the recipe gives, the share of the 256 images; of int8 as it gives in float32.
    """

    recipe: str
    batch: int
    share: float
    time: float
    size: float
    difference: float
    same_class: float


def studies() -> list[Study]:
    gate = Gate(below=0.5)
    flip = Recipe((Stage(), Stage(("flip",), gate=gate)))
    larger = (Stage(network="net2", gate=gate, join="replace"), Stage(("flip",), network="net2", gate=gate))
    return [
        Study("MobileNetV2, gated flip", ("mobilenetv2",), flip, {}),
        Study(
            "Lite0, gated Lite2 and its flip, from pixels",
            ("lite0", "lite2"),
            Recipe((Stage(), *larger)),
            {"from_pixels": True},
        ),
        Study("MobileNetV2, gated Lite0 and its flip", ("mobilenetv2", "lite0"), Recipe((Stage(), *larger)), {}),
        Study("MobileNetV2, gated flip, int8", ("mobilenetv2",), flip, {"quantize": "int8"}),
    ]


def validation(assets: Path) -> list[Image.Image]:
    """Validation images, spread over the classes."""
    return [item.read()[0] for item in nets.spread(nets.imagenet(assets), IMAGES)]


def prepared(loaded: LoadedModel, photos: Sequence[Image.Image]) -> Tensor:
    return torch.stack([loaded.preprocess(photo) for photo in photos])


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def run_all(sessions: Sequence[Any], inputs: Sequence[Any]) -> None:
    for opened, x in zip(sessions, inputs, strict=True):
        opened.run(None, {opened.get_inputs()[0].name: x})


def measured(study: Study, assets: Path, folder: Path) -> Iterator[ExportRow]:
    networks = [nets.loaded(assets, name) for name in study.networks]
    pipeline = open_pipeline(networks, recipe=study.recipe, execution="auto")
    photos = validation(assets)
    file = unstride.export(pipeline, folder / "net.onnx", images=photos, checked=IMAGES, **study.options)
    print(file, flush=True)
    model, agreement = onnx.load(file.path), file.agreement
    by_name = dict(zip(pipeline.networks, networks, strict=True))
    stages = [by_name[stage.network] for stage in study.recipe.stages]
    alone = {n.spec: session(exported(n.model, prepared(n, photos[:1]))) for n in networks}
    for batch in BATCHES:
        own = photos[:batch]
        images = np.stack([np.asarray(photo) for photo in own]) if study.pixels else prepared(networks[0], own).numpy()
        confidences = pipeline.better.run(own, open_gates=True).record.confidences[0].sort().values
        for share in SHARES if batch > 1 else (0.0, 1.0):
            passing = round(share * batch)
            between = [NEVER, *((confidences[1:] + confidences[:-1]) / 2).tolist(), ALWAYS]
            whole = session(forced(model, between[passing]))
            taken = whole.run(["pass_count"], {"images": images})[0]
            counts = [int((taken > k).sum()) for k in range(len(stages))]  # images of each pass
            parts = [
                (alone[n.spec], prepared(n, own[:rows]).numpy()) for n, rows in zip(stages, counts, strict=True) if rows
            ]
            calls = partial(run_all, [whole], [images]), partial(run_all, *zip(*parts, strict=True))
            ratios = [seconds(calls[0]) / seconds(calls[1]) for _ in range(1 + ROUNDS)][1:]  # the first one warms up
            size = file.size / file.weights
            ratio = statistics.median(ratios)
            same = agreement.same_class if file.int8 is None else file.int8
            yield ExportRow(study.title, batch, counts[1] / batch, ratio, size, agreement.difference, same)


# ------------------------------------------------------------------------------------------------ the page


def page(rows: Sequence[ExportRow]) -> str:
    goal = [r for r in rows if "int8" not in r.recipe]
    slow = sum(r.time > GOAL for r in goal)
    tensors = [r for r in goal if "pixels" not in r.recipe]
    pixels = [r for r in goal if "pixels" in r.recipe]
    int8 = [r for r in rows if "int8" in r.recipe]
    size, difference = max(r.size for r in goal), max(r.difference for r in tensors)
    same = f"; from pixels {min(r.same_class for r in pixels):.1%} have the same class" if pixels else ""
    lines = [
        "# Exported files",
        "",
        f"**{len(goal) - slow} of {len(goal)} measurements take at most {GOAL:g} times the sum of the recipe's "
        f"passes** in ONNX Runtime. Files take at most {size:.2f} times the networks' weights. On {IMAGES} validation "
        f"images, answers differ by at most {difference:.1e} of the largest answer{same}.",
        "",
        "Command: `python -m benchmarks.exported --assets DIR`. Real weights, one thread, CPU time, the median of "
        f"{ROUNDS} ratios; file and parts run in turns. The parts are the networks alone, exported by "
        "torch.onnx.export. "
        + "Files from pixels also resize, crop and normalise, which the parts do not. " * bool(pixels)
        + "Of int8, size, time and class are compared with float32. " * bool(int8)
        + "Gates are checked as they are, and forced open and shut, on the same images. A cell is the time over the "
        "sum of the passes. All rows: [exported.csv](exported.csv).",
        "",
        "| recipe | images at once | none goes on | about 25 % go on | all go on | size | difference | same class |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe, batch in dict.fromkeys((r.recipe, r.batch) for r in rows):
        own = {min(SHARES, key=lambda s: abs(s - r.share)): r for r in rows if (r.recipe, r.batch) == (recipe, batch)}
        cells = [f"{own[share].time:.2f}" if share in own else "" for share in SHARES]
        first = next(iter(own.values()))
        cells += [f"{first.size:.2f}", f"{first.difference:.1e}", f"{first.same_class:.1%}"]
        lines.append(f"| {recipe} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def read() -> list[ExportRow]:
    kinds = {"recipe": str, "batch": int}
    with ROWS.open(newline="") as file:
        return [ExportRow(**{k: kinds.get(k, float)(v) for k, v in row.items()}) for row in csv.DictReader(file)]


def write(rows: Sequence[dict[str, Any]]) -> None:
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="the folder with the weights and images")
    assets = parser.parse_args().assets
    if assets is not None:
        torch.set_num_threads(1)
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for study in studies():
                for row in measured(study, assets, Path(folder)):
                    print(row, flush=True)
                    rows.append({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
                write(rows)  # what is measured stays, also if a later study fails
    ROWS.with_suffix(".md").write_text(page(read()))


if __name__ == "__main__":
    main()
