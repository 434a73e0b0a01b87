"""What bfloat16 autocast does to the answers and to the time: `python -m benchmarks.precision --assets DIR`.

Real networks and labelled images (see benchmarks/nets.py), plain and with 10 states, in float32 and under
`torch.autocast`. On a processor without bfloat16 units autocast is slower; the table says so.
"""

import argparse
import time
from pathlib import Path

import torch

import unstride
from benchmarks.nets import Bench, cifar, imagenet

NETS = ["cifar20", "cifar56", "mobilenetv2", "efficientnet-lite0"]


def rows(bench: Bench, limit: int, budget: int, batch: int) -> list[str]:
    better = unstride.enhance(bench.model, bench.test[0][:1], budget)
    out = []
    for name, module in (("plain", bench.model), (f"B = {budget}", better)):
        answers: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        seconds = {False: 0.0, True: 0.0}
        for x in bench.test[0][:limit].split(batch):
            for cast in (False, True):
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    started = time.perf_counter()
                    answers[cast].append(module(x).float())
                    seconds[cast] += time.perf_counter() - started
        exact, cast_ = torch.cat(answers[False]), torch.cat(answers[True])
        labels = bench.test[1][: len(exact)]
        right = [float((a.argmax(1) == labels).float().mean()) * 100 for a in (exact, cast_)]
        same = float((exact.argmax(1) == cast_.argmax(1)).float().mean()) * 100
        far = float((exact - cast_).abs().max() / exact.abs().max())
        out.append(
            f"| {bench.name} (n = {len(exact)}) | {name} | {right[0]:.2f} | {right[1]:.2f} | {same:.1f} | {far:.1e} | "
            f"{seconds[True] / seconds[False]:.2f} |"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=NETS)
    parser.add_argument("--limit", type=int, default=500, help="images of each network")
    parser.add_argument("--budget", type=int, default=10)
    options = parser.parse_args()
    print("| network | | float32 top-1 % | bfloat16 top-1 % | same answer % | largest difference | time / float32 |")
    print("|---|---|---|---|---|---|---|")
    for net in options.nets:
        small = net.startswith("cifar")
        bench = cifar(options.assets, int(net[5:])) if small else imagenet(options.assets, net, options.limit)
        print("\n".join(rows(bench, options.limit, options.budget, 64 if small else 8)), flush=True)


if __name__ == "__main__":
    main()
