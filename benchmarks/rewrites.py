"""What each exact rewriting of the graph is worth: B states with it, as a multiple of the plain eager forward.

    python -m benchmarks.rewrites --nets resnet18,mobilenet_v2 --batch 1,8

Random weights, 224 px; all ways run in turns, medians. Each column has the rewritings of those before it, but for the
last, which compiles the segments instead of packing the convolutions. Compiling is not in the time; its seconds are
printed beside it. Nets that are not mostly convolutions are neither laid out channels last nor packed.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import unstride
from benchmarks.speed import NETS
from unstride import models
from unstride.engine.compiled import compile_segment
from unstride.engine.fused import Fuser
from unstride.engine.packing import available
from unstride.engine.segments import as_it_is
from unstride.evaluation.benching import interleaved
from unstride.geometry.find import find_layers
from unstride.graph.capture import Graph, capture
from unstride.graph.optimise import channels_last, optimise
from unstride.procedure.tasks import Plan, make_plan

WAYS = ("as captured", "folded", "channels last", "packed", "compiled")


def rewritten(model: nn.Module, example: Tensor, budget: int, way: str) -> unstride.Enhanced:
    """The enhanced model with the rewritings up to `way`, whatever `optimise=True` would choose."""

    def plan(images: Tensor) -> Plan:
        graph: Graph = capture(model, images)
        run_segment: Callable[[nn.Module], nn.Module] = as_it_is
        graph = graph if way == "as captured" else optimise(graph)
        found = find_layers(graph)
        if way in WAYS[2:] and found.mostly_convolutions:
            graph = channels_last(graph)
            run_segment = Fuser(found.layers) if way == "packed" and available(graph.device, graph.dtype) else as_it_is
        run_segment = compile_segment if way == "compiled" else run_segment
        return make_plan(graph, found, better.task, better.recipe.space, better.max_bytes, run_segment)

    better = unstride.enhance(model, example, budget, optimise=False)
    better.plans.clear()
    better.plans._plan = plan  # type: ignore[method-assign]
    return better


def measure(net: str, batch: int, budget: int, repeats: int) -> str:
    model = models.load(NETS[net], weights=None).model
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], Any]] = {}
    seconds = 0.0
    for way in WAYS:
        better = rewritten(model, images[:1], budget, way)
        start = time.perf_counter()
        with torch.no_grad():
            better(images)
        seconds = time.perf_counter() - start
        calls[way] = lambda better=better: better(images)  # type: ignore[misc]
    with torch.no_grad():
        _, times = interleaved(lambda: model(images), calls, repeats)
    cells = [f"{times[way]:.2f}" for way in WAYS]
    return f"| {net} | {batch} | " + " | ".join(cells) + f" | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--budget", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("| network | batch | " + " | ".join(WAYS) + " | seconds to compile |")
    print("|" + " --- |" * (len(WAYS) + 3), flush=True)
    for net in given.nets.split(","):
        for batch in given.batch.split(","):
            print(measure(net, int(batch), given.budget, given.repeats), flush=True)


if __name__ == "__main__":
    main()
