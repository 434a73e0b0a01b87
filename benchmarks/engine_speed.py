"""Time of the paper's search, as ratios: live weights to the eager model, frozen weights to another version.

    git worktree add /somewhere COMMIT
    python -m benchmarks.engine_speed --against /somewhere/src

`auto` is the time of B states with live weights, over their MACs at the rate of the user's eager model: 1.0 is as fast
per MAC as the model itself. `frozen` is the same for frozen weights; `frozen / other` compares their time with that of
the other source tree. Random weights, 224 px, one thread, CPU time; calls run in turns; medians of ratios.
"""

import argparse
import contextlib
import inspect
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


@cache
def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(batch))


@cache
def network(name: str) -> nn.Module:
    from torchvision.models import get_model

    torch.manual_seed(0)
    model: nn.Module = get_model(name, weights=None).eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return model


@cache
def enhanced(name: str, budget: int, execution: str) -> Any:
    import unstride

    options: dict[str, Any] = {"execution": execution, "recipe": "paper-refined"}
    if "optimise" in inspect.signature(unstride.enhance).parameters:  # version 0.1
        options = {"optimise": execution == "frozen", "recipe": "paper"}
    return unstride.enhance(network(name), images(1), budget=budget, **options)


def seconds(call: Callable[[Tensor], Any], x: Tensor) -> float:
    with torch.no_grad():
        start = time.process_time()
        call(x)
        return time.process_time() - start


def other_version(source: str) -> Callable[[str, int, int], float]:
    """The same program in another process, with another source tree: (network, states, batch) -> seconds."""
    command, own = [sys.executable, __file__, "--worker"], {**os.environ, "PYTHONPATH": source}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, env=own)  # type: ignore[call-overload]

    def ask(name: str, budget: int, batch: int) -> float:
        print(name, budget, batch, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    return ask


def work() -> None:
    """The other process: times of what it is asked for."""
    with contextlib.suppress(ImportError):  # versions without it repair torchvision when they are imported
        from unstride.compat import import_torchvision

        import_torchvision()
    for line in sys.stdin:
        name, budget, batch = line.split()
        print(seconds(enhanced(name, int(budget), "frozen"), images(int(batch))), flush=True)


def measure(name: str, batch: int, budget: int, repeats: int, other: Callable[[str, int, int], float] | None) -> str:
    x, model = images(batch), network(name)
    auto, frozen = (enhanced(name, budget, execution) for execution in ("auto", "frozen"))
    macs = statistics.mean(p.cost for p in auto.explain(x))
    ratios = []
    for _ in range(repeats + 2):
        eager = (seconds(model, x) + seconds(model, x)) / 2
        live, copied = seconds(auto, x), seconds(frozen, x)
        theirs = other(name, budget, batch) if other is not None else float("nan")
        ratios.append((live / eager / macs, copied / eager / macs, copied / theirs))
    medians = map(statistics.median, zip(*ratios[2:], strict=True))  # the first calls pack weights and ask for memory
    cells = " | ".join(f"{median:.2f}" for median in medians)
    return f"| {name} | {batch} | {budget} | {macs:.2f} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["resnet18", "resnet50", "mobilenet_v2"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--budgets", nargs="+", type=int, default=[4, 10])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--against", metavar="SRC", help="source folder of another version")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        work()
        return
    other = other_version(args.against) if args.against else None
    print("| network | batch | states | MACs | auto / MACs | frozen / MACs | frozen / other |\n|" + " --- |" * 7)
    for name in args.nets:
        for batch in args.batch:
            for budget in args.budgets:
                print(measure(name, batch, budget, args.repeats, other), flush=True)


if __name__ == "__main__":
    main()
