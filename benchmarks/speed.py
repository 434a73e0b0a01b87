"""How fast the procedure is against its floor, its rivals and its budget: a table and JSON.

    python -m benchmarks.speed --out speed.json
    python -m benchmarks.speed --nets resnet18 --batch 1 --budget 4,10 --repeats 3
    python -m benchmarks.speed --nets mobilenet_v2 --batch "" --gates 1,8,32

For each network (random weights, 224 px), batch and budget, learning-free and learned, all within one run and in turns:

    mode      free, learned, or bounded: learning-free with `max_bytes` set to 1.9 times what a plain forward has alive,
              where it would take more than twice that; or a gate, over 32 images in batches: the plain look, then a
              mirror or a larger one of the least sure 30 %, or both where their mean cost is 1.5 (B counts the looks);
              settled: inside `with better.unchanged()`, where not every call looks for changes of the model
    time      seconds as a multiple of the plain eager forward of the same batch
    floor     MACs of the prefix trie of the visited states as a multiple of a plain forward's
    fastest   the fastest exact plain forward (eager, channels last, folded batch norm, packed by unstride, compiled and
              frozen), over eager
    over      time / (floor x fastest): 1 means that search, align, aggregation and batching cost nothing
    tta       flips and crops with as many views, as a multiple of plain (up to 10: it grows with the views)
    memory    the most bytes of tensors alive, beyond the weights, as a multiple of a plain forward's
    reference the reference implementation, measured separately on 2 CPU cores: time over its own plain forward
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

import unstride
from unstride import models
from unstride.evaluation.benching import BenchRow, interleaved, measure
from unstride.procedure.gates import Gate, Stage
from unstride.views.policies import parse_view

NETS = {"resnet18": "torchvision:resnet18", "resnet50": "torchvision:resnet50",
        "mobilenet_v2": "torchvision:mobilenet_v2", "swin_t": "torchvision:swin_t"}  # fmt: skip
# (net, batch, B) -> time over plain. Reference implementation, measured separately (learning-free).
REFERENCE = {
    **{("resnet18", 1, b): t for b, t in ((4, 4.3), (10, 12.1), (15, 16.8), (30, 31.1))},
    **{("resnet18", 8, b): t for b, t in ((4, 5.7), (10, 14.3), (15, 22.9), (30, 48.8))},
    **{("mobilenet_v2", 1, b): t for b, t in ((4, 16.0), (10, 35.0), (15, 46.0), (30, 91.0))},
}
# mode -> views that only the least sure images have, and their share, or the mean cost that decides it
GATED: dict[str, tuple[tuple[str, ...], float | None, float | None]] = {
    "gate, mirror": (("mirror",), 0.3, None),
    "gate, 1.3x": (("1.3x",), 0.3, None),
    "gate, cost 1.5": (("mirror", "1.3x"), None, 1.5),
}
SETTLED = ", settled"  # after the mode
IMAGES = 32  # that a gate is measured over
TOLERANCE = 1e-4  # of the largest logit: a rewriting beyond it is not exact


def exact_plains(
    model: nn.Module, images: Tensor, compiled: bool, task: str = "classification"
) -> dict[str, Callable[[], Any]]:
    """Ways to run the plain forward that give its logits to float rounding."""
    layout = torch.channels_last if images.ndim == 4 else torch.channels_last_3d
    last = images.to(memory_format=layout)
    with torch.no_grad():
        expected = model(images)
    ways: dict[str, tuple[nn.Module, Tensor]] = {
        "channels last": (copy.deepcopy(model).to(memory_format=layout), last)  # type: ignore[call-overload]
    }
    folded = _folded(model)
    if folded is not None:
        ways["folded"] = (folded, images)
        ways["folded, channels last"] = (copy.deepcopy(folded).to(memory_format=layout), last)  # type: ignore[call-overload]
    zero = unstride.enhance(model, images[:1], 2, task=task)
    ways["packed"] = (zero.with_options(states=[zero.prepare(images).found.space.zero]), images)
    if compiled:
        torch._inductor.config.freezing = True  # weights packed at compile time: the fastest it can do
        torch.compiler.reset()
        ways["compiled"] = (torch.compile(copy.deepcopy(model)), images)  # type: ignore[assignment]
    calls: dict[str, Callable[[], Any]] = {}
    for name, (module, x) in ways.items():
        try:
            with torch.no_grad():
                far = float((module(x) - expected).abs().max() / expected.abs().max())
        except Exception as error:  # a compiler that is not there is a way less, not the end
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
            continue
        if far < TOLERANCE:
            calls[name] = _call(module, x)
        else:
            print(f"{name}: differs by {far:.1e}, left out", file=sys.stderr)
    return calls


def _folded(model: nn.Module) -> nn.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.fx.experimental.optimization import fuse

            return fuse(copy.deepcopy(model).eval())
    except Exception:  # no symbolic trace: nothing to compare with
        return None


def _call(module: nn.Module, images: Tensor) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return module(images)

    return call


def speed(
    net: str, batches: list[int], gates: list[int], budgets: list[int], repeats: int, compiled: bool
) -> list[dict[str, Any]]:
    model = _settled(models.load(NETS[net], weights=None).model)
    start = time.perf_counter()
    unstride.enhance(model, torch.zeros(1, 3, 224, 224))
    capture = time.perf_counter() - start
    rows = []
    for batch in batches:
        images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        some = _batch(net, model, images, sorted(budgets), repeats, compiled)
        rows += [{**row, "capture_seconds": capture} for row in some]
    images = torch.randn(IMAGES, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    plain = unstride.enhance(model, images[:1], recipe="plain")
    enhanced = {mode: _gated(plain, images, *asked) for mode, asked in GATED.items()} if gates else {}
    for batch in gates:
        rows += _gates(net, model, list(images.split(batch)), enhanced, repeats, compiled)
    return rows


def _settled(model: nn.Module) -> nn.Module:
    """Batch norms that know such noise, as trained ones know images: else all answers are alike, whatever is seen."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean of what it sees, not a moving one
    model.train()
    with torch.no_grad():
        model(torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(1)))
    return model.eval()


def _gated(
    plain: unstride.Enhanced, images: Tensor, views: tuple[str, ...], share: float | None, cost: float | None
) -> unstride.Enhanced:
    """The plain look, and these views of the images that are least sure."""
    again = Stage(tuple(map(parse_view, views)), gate=Gate("margin", share=share if share is not None else 1.0))
    better = plain.with_options(recipe=unstride.Recipe("gated", stages=(Stage(), again)))
    better.calibrate(images, cost)
    return better


def _gates(
    net: str,
    model: nn.Module,
    parts: list[Tensor],
    enhanced: dict[str, unstride.Enhanced],
    repeats: int,
    compiled: bool,
) -> list[dict[str, Any]]:
    """Each over all images, batch by batch, beside plain forwards of one batch."""
    calls = {f"plain {name}": call for name, call in exact_plains(model, parts[0], compiled).items()}

    def through(better: unstride.Enhanced, settled: bool) -> Callable[[], Any]:
        def call() -> Any:
            with better.unchanged() if settled else contextlib.nullcontext():
                return [better(part) for part in parts]

        return call

    modes = {mode: (better, False) for mode, better in enhanced.items()}
    modes |= {mode + SETTLED: (better, True) for mode, better in enhanced.items()}
    calls |= {mode: through(*asked) for mode, asked in modes.items()}
    seconds, times = interleaved(_call(model, parts[0]), calls, repeats)
    plains = {name.removeprefix("plain "): t for name, t in times.items() if name.startswith("plain ")}
    rows = []
    for mode, (better, _) in modes.items():
        costs = [cost for part in parts for cost in better.looks(part)[1]]
        looks = sum(len(stage.views) for stage in better.recipe.stages)
        found = _against(times[mode] / len(parts), sum(costs) / len(costs), {**plains, "eager": 1.0})
        rows.append({"net": net, "batch": len(parts[0]), "budget": looks, "mode": mode, **found})
        rows[-1] |= dict.fromkeys(("tta", "memory", "reference")) | {"plain_ms": seconds * 1e3}
        print(_line(rows[-1]), flush=True)
    return rows


def _batch(
    net: str, model: nn.Module, images: Tensor, budgets: list[int], repeats: int, compiled: bool
) -> list[dict[str, Any]]:
    ways = exact_plains(model, images, compiled)
    _, plains = interleaved(_call(model, images), ways, max(5, repeats))
    # What eager costs depends on what the allocator has seen, so the fastest ways take turns with every measurement.
    fast = {name: ways[name] for name, ratio in plains.items() if ratio < 1.25 * min(plains.values())}
    rows: list[dict[str, Any]] = []

    def take(mode: str, better: unstride.Enhanced, some: list[int], tta: bool = False) -> None:
        for row in measure(better, images, some, tta=tta, repeats=repeats, beside=fast) if some else []:
            rows.append(_row(net, row, mode))
            print(_line(rows[-1]), flush=True)

    few, many, most = [b for b in budgets if b <= 10], [b for b in budgets if b > 10], max(budgets)
    free = unstride.enhance(model, images[:1], most)
    take("free", free, few, tta=True)
    take("free", free, many)
    if rows[-1]["memory"] > 2:
        bound = int(1.9 * rows[-1]["plain_bytes"])
        take("bounded", unstride.enhance(model, images[:1], most, max_bytes=bound), [most])
    learned = unstride.enhance(model, images[:1], most, criterion="learned", aggregate="attention")
    take("learned", learned, few)
    take("learned", learned, many)
    return rows


def _row(net: str, row: BenchRow, mode: str) -> dict[str, Any]:
    reference = REFERENCE.get((net, row.batch, row.budget)) if mode == "free" else None
    return {
        "net": net,
        "batch": row.batch,
        "budget": row.budget,
        "mode": mode,
        **_against(row.time, row.macs, {**row.beside, "eager": 1.0}),
        "tta": row.tta,
        "memory": row.memory,
        "plain_ms": row.plain_ms,
        "plain_bytes": row.plain_bytes,
        "reference": reference,
        "times_faster_than_reference": None if reference is None else reference / row.time,
    }


def _against(time: float, macs: float, plains: dict[str, float]) -> dict[str, Any]:
    """A time in plain eager forwards against its MACs in the fastest ones."""
    way = min(plains, key=lambda name: plains[name])
    found: dict[str, Any] = {"time": time, "floor": macs, "fastest": plains[way], "fastest_way": way, "plains": plains}
    return {**found, "over": time / (macs * plains[way])}


MODES = ("free", "bounded", "learned", *GATED, *(mode + SETTLED for mode in GATED))
COLUMNS = ("net", "batch", "B", "mode", "time", "floor", "fastest", "over", "tta", "memory", "reference")


def _line(row: dict[str, Any]) -> str:
    def x(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cells = [row["net"], row["batch"], row["budget"], row["mode"], x(row["time"])]
    cells += [x(row["floor"]), f"{row['fastest']:.2f} {row['fastest_way']}", x(row["over"]), x(row["tta"])]
    cells += [x(row["memory"]), x(row["reference"])]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--gates", default="1,8,32", help="batches that gates are measured with")
    parser.add_argument("--budget", default="4,10,15,30")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out of the plain forwards")
    parser.add_argument("--out", type=Path, help="also write JSON there")
    given = parser.parse_args(arguments)
    nets = given.nets.split(",")
    if unknown := [net for net in nets if net not in NETS]:
        parser.error(f"unknown nets {', '.join(unknown)}; there are {', '.join(NETS)}")
    batches, gates, budgets = (
        [int(part) for part in text.split(",") if part] for text in (given.batch, given.gates, given.budget)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    try:
        print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
        compiled = not given.no_compile
        rows = [row for net in nets for row in speed(net, batches, gates, budgets, given.repeats, compiled)]
    finally:
        torch.set_num_threads(before)
    if given.out is not None:
        where = f"batch {given.batch or '-'}, gates {given.gates or '-'}"
        how = f"{', '.join(nets)}, {where}: torch {torch.__version__}, {given.threads} threads, "
        how += f"{given.repeats} repeats"
        write(given.out, rows, how + (", not compiled" if given.no_compile else ""))
    return rows


def write(out: Path, rows: list[dict[str, Any]], how: str) -> None:
    """JSON, and the same as a page beside it; rows of other nets and batches stay, so a suite runs in pieces."""
    kept = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    again = {(r["net"], r["batch"], r["mode"].startswith("gate")) for r in rows}
    merged = [r for r in kept if (r["net"], r["batch"], r["mode"].startswith("gate")) not in again]
    merged += [{**r, "how": how} for r in rows]
    merged.sort(key=lambda r: (list(NETS).index(r["net"]), r["batch"], MODES.index(r["mode"]), r["budget"]))
    out.write_text(json.dumps({"rows": merged}, indent=1) + "\n", encoding="utf-8")
    page = [
        "# Speed, measured",
        "",
        answer(merged),
        "",
        "Made by `make bench`: random weights, 224 px, medians over rounds in turns. Times are multiples of the plain",
        "eager forward of the same batch in the same round; the reference implementation was measured separately.",
    ]
    page += ["", "- " + "\n- ".join(dict.fromkeys(r["how"] for r in merged))]
    seconds = {r["net"]: r["capture_seconds"] for r in merged if "capture_seconds" in r}
    page += [f"- capture and analysis: {', '.join(f'{net} {s:.1f} s' for net, s in seconds.items())}", "", "```text"]
    page += [line[4:] for line in str(__doc__).splitlines() if line.startswith("    ") and "python -m" not in line]
    page += ["```", "", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *map(_line, merged), ""]
    out.with_suffix(".md").write_text("\n".join(page), encoding="utf-8")


def answer(rows: list[dict[str, Any]]) -> str:
    """What the table says, in three sentences."""
    whole, gated = ([r for r in rows if r["mode"].startswith("gate") == is_gate] for is_gate in (False, True))
    over = [r["over"] for r in whole]
    told = f"States cost what their MACs say: {statistics.median(over):.2f} times the prefix trie on the fastest exact "
    told += f"plain forward in the median of {len(over)} rows, {max(over):.2f} at the most."
    for batch in sorted({r["batch"] for r in gated}):
        mine = [r for r in gated if r["batch"] == batch and not r["mode"].endswith(SETTLED)]
        calm = [r["over"] for r in gated if r["batch"] == batch and r["mode"].endswith(SETTLED)]
        low, high = ([f(r[k] for r in mine) for k in ("over", "time")] for f in (min, max))
        told += f" Gated looks in batches of {batch}: {low[0]:.2f} to {high[0]:.2f} times their MACs"
        told += f" ({min(calm):.2f} to {max(calm):.2f} inside `better.unchanged()`)" if calm else ""
        told += f", {low[1]:.2f} to {high[1]:.2f} times the plain eager forward that one has today."
    return told + " Beside states stand flips and crops with as many views (tta), which share nothing."


if __name__ == "__main__":
    main()
