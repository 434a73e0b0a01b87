"""Speed on volumes: MONAI's UNet, one patch, random weights; `python -m benchmarks.speed_volumes` writes a page.

    python -m benchmarks.speed_volumes --side 64 --threads 2 --repeats 5 --out docs/results-speed-3d.md
    python -m benchmarks.speed_volumes --side 96 --no-compile

Everything takes turns within one run, so that a busy machine slows it all alike:

    time      seconds as a multiple of the plain eager forward
    floor     MACs of the looks, prefixes shared, as a multiple of a plain forward's
    fastest   the fastest exact plain forward (eager, channels last, folded, packed by unstride, its engine with
              nothing around it, compiled and frozen), over eager
    over      time / (floor x fastest): 1 means that nothing but the network's own ops costs anything
    memory    the most bytes of tensors alive beyond the weights, as a multiple of a plain forward's
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unstride
from benchmarks.speed import exact_plains
from unstride import Enhanced, Recipe, Stage
from unstride.evaluation.benching import interleaved, peak_bytes
from unstride.views.policies import parse_view

GOAL = 1.2  # over, of 4 and of 8 near looks
MOST = 2.5  # memory
COLUMNS = ("setting", "looks", "time", "floor", "over", "memory")


def network() -> nn.Module:
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    wide = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2)}  # as in MONAI's tutorials
    return UNet(spatial_dims=3, in_channels=1, out_channels=2, **wide, num_res_units=2).eval()


def settings(model: nn.Module, example: Tensor) -> dict[str, tuple[int, Enhanced]]:
    better = unstride.enhance(model, example, recipe="plain", task="segmentation")

    def looks(*stages: Stage) -> Enhanced:
        return better.with_options(recipe=Recipe("", "segmentation", stages, merge="probabilities"))

    turns = [c for k in range(4) for c in itertools.combinations(("FlipLR", "FlipUD", "FlipFB"), k)]
    mirrors = tuple(parse_view(" + ".join(c) or "plain") for c in turns)
    found = {f"{n} near states": (n, looks(Stage(states=f"near:{n}"))) for n in (4, 8)}
    found |= {f"the paper's search, {n}": (n, better.with_options(recipe="paper", budget=n)) for n in (4, 8)}
    found["8 mirrors, by a recipe"] = 8, looks(Stage(mirrors))
    bound = int(1.9 * peak_bytes(lambda: better.plans.plain(example)))
    tight = better.with_options(recipe=found["8 near states"][1].recipe, max_bytes=bound)
    found["8 near states, max_bytes at 1.9 x plain"] = 8, tight
    return found


def engine(better: Enhanced, images: Tensor) -> Callable[[], Any]:
    """The plain network through the engine alone: nothing is checked, aligned or merged."""
    plan = better.prepare(images)
    target = plan.targets[0]

    def call() -> Any:
        with torch.no_grad():
            return target.finish(plan.engine.start(images).plain[target.tap])

    return call


def eight_forwards(model: nn.Module, images: Tensor) -> Callable[[], Any]:
    """What people run: every mirror through the network, one after the other, the mean of what they say."""
    dims = [c for k in range(4) for c in itertools.combinations((2, 3, 4), k)]

    def call() -> Any:
        with torch.no_grad():
            total = model(images).softmax(1)
            for d in dims[1:]:
                total += model(images.flip(d)).softmax(1).flip(d)
            return total / len(dims)

    return call


def measured(side: int, repeats: int, compiled: bool) -> tuple[list[dict[str, Any]], str]:
    model, images = network(), torch.randn(1, 1, side, side, side, generator=torch.Generator().manual_seed(0))
    asked = settings(model, images)

    def plain() -> Any:
        with torch.no_grad():
            return model(images)

    ways = exact_plains(model, images, compiled, "segmentation")
    ways["engine"] = engine(asked["8 near states"][1], images)
    assert torch.allclose(ways["engine"](), plain(), rtol=1e-3, atol=1e-3)
    calls: dict[str, Callable[[], Any]] = {f"plain {name}": call for name, call in ways.items()}
    calls |= {name: (lambda one=one: one(images)) for name, (_, one) in asked.items()}
    calls["8 mirrored forwards, by hand"] = eight_forwards(model, images)
    seconds, times = interleaved(plain, calls, repeats)
    plains = {"eager": 1.0} | {name: times[f"plain {name}"] for name in ways}
    way = min(plains, key=lambda name: plains[name])
    base = peak_bytes(plain)
    rows = []
    for name, (looks, one) in asked.items():
        floor = one.explain(images)[0].cost
        memory = peak_bytes(calls[name]) / base
        over = times[name] / (floor * plains[way])
        rows.append({"setting": name, "looks": looks, "time": times[name], "floor": floor, "over": over})
        rows[-1]["memory"] = memory
    hand = "8 mirrored forwards, by hand"
    rows.append({"setting": hand, "looks": 8, "time": times[hand], "floor": 8.0, "over": times[hand] / 8 / plains[way]})
    rows[-1]["memory"] = peak_bytes(calls[hand]) / base
    told = (
        f"A plain eager forward takes {1e3 * seconds:.0f} ms; the fastest exact one, {way}, {plains[way]:.2f} of that "
    )
    told += f"({', '.join(f'{n} {t:.2f}' for n, t in plains.items())})."
    return rows, told


def answer(rows: list[dict[str, Any]]) -> str:
    """What the table says, in three sentences."""
    near = [r for r in rows if "near states" in r["setting"]]
    hand = next(r for r in rows if r["setting"].startswith("8 mirrored"))
    unbound = [r for r in near if "max_bytes" not in r["setting"]]
    overs = " and ".join(f"{r['over']:.2f}" for r in unbound)
    counts = " and ".join(str(r["looks"]) for r in unbound)
    met = all(r["over"] <= GOAL for r in unbound)
    eight = next(r for r in unbound if r["looks"] == 8)
    most = max(r["memory"] for r in near)
    told = f"{counts} near looks take {overs} times their MACs on the fastest exact plain forward: the goal, {GOAL} at "
    told += f"the most, is {'met' if met else 'missed'}. Eight near looks take {eight['time'] / hand['time']:.2f} of "
    told += (
        f"the time of eight mirrored forwards, {eight['time']:.1f} times that of a plain eager one. Near looks have "
    )
    told += f"at most {most:.2f} times the memory of a plain forward ({'within' if most <= MOST else 'beyond'} {MOST})."
    return told


def page(rows: list[dict[str, Any]], told: str, how: str) -> str:
    text = [line[4:] for line in str(__doc__).splitlines() if line.startswith("    ") and "python -m" not in line]
    lines = ["# Speed on volumes", "", answer(rows), "", f"{how} {told}", "", "```text", *text, "```", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [f"{v:.2f}" if isinstance(v := row[key], float) else str(v) for key in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out of the plain forwards")
    parser.add_argument("--out", type=Path, help="also write the page there")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows, told = measured(given.side, given.repeats, not given.no_compile)
    how = f"Made by `python -m benchmarks.speed_volumes`: MONAI's UNet, one patch of {given.side}^3, random weights, "
    how += f"torch {torch.__version__}, {given.threads} threads, {given.repeats} rounds"
    text = page(rows, told, how + (", not compiled." if given.no_compile else "."))
    print(text)
    if given.out is not None:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
