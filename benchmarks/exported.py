"""Exported recipes in ONNX Runtime: time over the sum of their passes, and bytes over the networks' weights.

    python -m benchmarks.exported [--out exported.csv]

Random weights, 224 px, one thread, CPU time. The parts are the networks alone, each exported by torch.onnx.export and
run at the batch sizes at which the recipe runs it; file and parts run in turns, and `time` is the median of ratios.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unstride
from unstride import Gate, Recipe, Stage
from unstride.exporting.checking import noise_images
from unstride.exporting.networks import exported, session

BATCHES, SHARES = (1, 8, 32), (0.0, 0.25, 1.0)
ROUNDS = 7


@dataclass(frozen=True)
class ExportRow:
    recipe: str
    batch: int
    share: float  # of the images that pass the gate
    time: float  # over the sum of its passes
    size: float  # over the networks' weights


def network(name: str) -> nn.Module:
    from torchvision.models import get_model

    torch.manual_seed(0)
    model: nn.Module = get_model(name, weights=None).eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return model


def recipes() -> dict[str, tuple[dict[str, nn.Module], Recipe]]:
    gate = Gate(below=0.5)
    resnet, mobile = network("resnet18"), network("mobilenet_v2")
    flip = Recipe((Stage(), Stage(("flip",), gate=gate)))
    cascade = Recipe((Stage(), Stage(network="large", gate=gate)))
    return {
        "resnet18, gated flip": ({"base": resnet}, flip),
        "mobilenet_v2, gated flip": ({"base": mobile}, flip),
        "mobilenet_v2, gated resnet18": ({"base": mobile, "large": resnet}, cascade),
    }


def with_share(recipe: Recipe, better: unstride.Enhanced, x: Tensor, share: float) -> Recipe:
    """The gate that this share of the images passes."""
    below = 0.0 if share == 0 else 1.000001
    if 0 < share < 1:
        confidences = better.run(x, open_gates=True).record.confidences[0].sort().values
        passing = max(1, round(share * len(x)))
        below = float(confidences[min(passing, len(x) - 1)])
    stages = [s if s.gate is None else replace(s, gate=replace(s.gate, below=below)) for s in recipe.stages]
    return recipe.changed(stages=tuple(stages))


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, models: dict[str, nn.Module], recipe: Recipe, folder: Path) -> list[ExportRow]:
    x = torch.stack(noise_images((3, 224, 224), max(BATCHES)))
    alone = {n: session(exported(_Rows(model), x[:1])) for n, model in models.items()}
    rows = []
    for batch in BATCHES:
        for share in SHARES:
            if batch == 1 and 0 < share < 1:
                continue
            better = unstride.enhance(models, recipe=recipe, task="classification")
            better = better.replace(with_share(recipe, better, x[:batch], share))
            file = unstride.export(better, folder / "net.onnx", example=x[:1], checked=1)
            whole, count = session(file.path), sum(c > 1 for c in better.run(x[:batch]).record.pass_counts)
            second = recipe.stages[1].network
            feed = {"images": x[:batch].numpy()}
            first_feed, second_feed = {"images": x[:batch].numpy()}, {"images": x[:count].numpy()}

            def parts() -> None:
                alone["base"].run(None, first_feed)  # noqa: B023
                if count:  # noqa: B023
                    alone[second].run(None, second_feed)  # noqa: B023

            parts(), whole.run(None, feed)
            ratios = [seconds(lambda: whole.run(None, feed)) / seconds(parts) for _ in range(ROUNDS)]  # noqa: B023
            rows.append(ExportRow(name, batch, count / batch, statistics.median(ratios), file.size / file.weights))
            print(rows[-1], flush=True)
    return rows


class _Rows(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return self.model(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a CSV file; otherwise only printed")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (models, recipe) in recipes().items():
            rows += measure(name, models, recipe, Path(folder))
    with out.open("w", newline="") if out else sys.stdout as stream:
        writer = csv.DictWriter(stream, list(vars(rows[0])))
        writer.writeheader()
        writer.writerows({k: round(v, 3) if isinstance(v, float) else v for k, v in vars(row).items()} for row in rows)


if __name__ == "__main__":
    main()
