"""A neutral case -> unstride's interface -> a neutral result. Only this file knows how unstride is called.

The golden files were recorded before the rebuild. What changed on purpose is named here: `recorded_otherwise`.
"""

import re
from functools import cache
from typing import Any

import torch
from golden import networks
from torch import Tensor

import unstride
from unstride.enhanced import Enhanced
from unstride.execution.prediction import ForwardPass, Prediction
from unstride.execution.record import Record
from unstride.geometry.states import State
from unstride.method.attention import Attention
from unstride.recipe.presets import get
from unstride.recipe.stage import Gate, Near, Search, Stage
from unstride.tasks import TASKS

Case = dict[str, Any]
Result = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and lists that JSON can hold
STOPPED = {"budget": "budget", "no states left": "exhausted"}


def recorded_otherwise(case: Case) -> set[str]:
    """Names of what is meant to differ from the recording.

    Passes of a search over maps are reported aligned with the base view, as their aggregate is; they were reported on
    their own grid.
    """
    stages = case["recipe"].get("stages", [])
    changed = set()
    if TASKS[case["task"]].maps:
        changed |= {"spread", "agreement", "pass output"}
    if any(stage.get("edges") == "zeros" for stage in stages):
        changed |= {"criterion"}  # a list of states has none
    if TASKS[case["task"]].classes and not is_search(case["recipe"]):
        changed |= {"output aux"}  # further maps are combined, too
    return changed


def replay(case: Case, noise: int | None = None, execution: str = "frozen") -> Result:
    """What the case gives: outputs and numbers as tensors; passes, MACs, gates and reasons as lists.

    `noise`, a seed, changes the pixels by about 3e-5 of themselves: no order of passes should depend on that.
    """
    pixels = networks.images(**case["images"])
    if noise is not None:
        pixels *= 1 + 3e-5 * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(noise))
    source = unstride.Canvas(pixels, crop=case["images"]["size"]) if case["images"]["margin"] else pixels
    better = enhanced(case, execution)
    result = better.run(source, details=True)
    predictions, record = result.predictions(), result.record
    searched = is_search(case["recipe"]) or better.recipe.search is not None
    tensors = outputs(better, source)
    lists: dict[str, Any] = {
        "macs": record.macs,
        "base_macs": record.base_macs,
        "stopped": [reason(p.stopped, searched, better) for p in predictions],
    }
    tensors["agreement"] = torch.tensor([p.agreement for p in predictions])
    tensors["spread"] = torch.stack([p.spread.float().mean() for p in predictions])
    if predictions[0].output.ndim < 2:
        tensors["base"] = torch.stack([p.base for p in predictions])
    if not searched:
        record_gates(better, source, lists, tensors)
    record_passes([written_passes(p, searched) for p in predictions], searched, lists, tensors)
    if "budgets" in case:
        for budget, (output, cost) in better.curve(pixels, case["budgets"]).items():
            tensors[f"budget {budget} output"] = output
            tensors[f"budget {budget} cost"] = torch.tensor(cost)
    return tensors, lists


# ---------------------------------------------------------------- the request
@cache
def captured(network: str, execution: str) -> Enhanced:
    """One capture for all cases of a network."""
    return unstride.enhance(networks.build(network), task="classification", execution=execution)


def enhanced(case: Case, execution: str) -> Enhanced:
    base = captured(case["network"], execution)
    better = Enhanced(base.networks, to_recipe(case["task"], case["recipe"]))
    if "attention" in case:
        better.attention = to_attention(networks.attention(**case["attention"]))
    return better


def to_recipe(task: str, recipe: dict[str, Any]) -> unstride.Recipe:
    if "preset" in recipe:
        return get({"paper": "paper-refined"}.get(recipe["preset"], recipe["preset"]), task)
    tiles = any("tile" in stage.get("gate", {}) for stage in recipe["stages"])
    # Near(1) is the base state in the graph, whose stride is known: windows are those that were recorded.
    stages = tuple(
        to_stage({**s, "states": {"near": 1}} if tiles and not s["states"] else s, task) for s in recipe["stages"]
    )
    return unstride.Recipe(stages, task, recipe.get("combine", ""), recipe.get("temperature", 1.0))


def is_search(recipe: dict[str, Any]) -> bool:
    first = recipe.get("stages", [{"states": None}])[0]
    return first.get("edges") == "zeros" or (isinstance(first["states"], dict) and "search" in first["states"])


def to_stage(stage: dict[str, Any], task: str) -> Stage:
    fields = {k: tuple(stage[k]) for k in ("weights", "temperatures") if k in stage}
    fields |= {k: stage[k] for k in ("aggregate", "align", "border", "space", "edges") if k in stage}
    if fields.get("aggregate") == "entropy" and not TASKS[task].maps:
        fields["aggregate"] = "entropy-unaligned"
    states = stage["states"]
    if isinstance(states, dict) and "near" in states:
        states = Near(states["near"])
    elif isinstance(states, dict):
        states = to_search(states["search"])
    elif states is not None and fields.get("edges") == "zeros":  # aggregated as a search is, with the base state
        states = [[0] * len(states[0]), *states]
        fields["space"] = fields["space"] or ("features" if task == "classification" else "")
    views = [view.replace("Field=", "Crop=") for view in stage["views"]]
    return Stage(views, states, gate=Gate(**stage["gate"]) if "gate" in stage else None, **fields)


def to_search(wanted: dict[str, Any]) -> Search:
    until = {k: v for k, v in wanted["until"].items() if k != "after"} if "until" in wanted else None
    return Search(
        wanted["budget"],
        {"entropy": "entropy-unaligned"}.get(wanted["criterion"], wanted["criterion"]),
        wanted.get("layers"),
        None if until is None else Gate(**until),
        seed=wanted.get("seed", 0),
    )


def to_attention(weights: dict[str, Tensor]) -> Attention:
    attention = Attention(len(weights["out"]))
    attention.query.weight.data = weights["query"][None]
    attention.query.bias.data = weights["query_bias"]
    attention.key.weight.data = weights["key"][None]
    attention.key.bias.data = weights["key_bias"]
    attention.out.data = weights["out"]
    return attention.requires_grad_(False)


# ---------------------------------------------------------------- the result
def outputs(better: Enhanced, source: Any) -> dict[str, Tensor]:
    """What the enhanced model returns, by name."""
    returned = better(source)
    if isinstance(returned, Tensor):
        return {"output": returned}
    named = returned.items() if isinstance(returned, dict) else enumerate(returned)
    return {f"output {name}": value for name, value in named}


def reason(text: str, searched: bool, better: Enhanced) -> str:
    if searched:
        return "states" if better.recipe.search is None else STOPPED.get(text, "until")
    return "all passes" if text.startswith("all passes") else f"gate by {text.split()[0]}"


def written(state: State) -> str:
    """Its selections, layer by layer: "0,0 1,0"; the base state is ""."""
    return "" if state.plain else selections(state)


def selections(state: State) -> str:
    return " ".join(",".join(map(str, selection)) for selection in state.selections)


def written_passes(prediction: Prediction, searched: bool) -> list[ForwardPass]:
    """In the order of the search; of stages sorted, since the order in which views are taken means nothing."""
    own = prediction.passes
    return list(own) if searched else sorted(own, key=lambda p: (str(p.view), selections(p.state)))


def record_gates(better: Enhanced, source: Any, lists: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Per gate the confidence of each image, or of its tiles, and whether it passed; NaN where it came to no gate."""
    gates = [stage.gate for stage in better.recipe.stages if stage.gate is not None]
    record: Record = better.run(source, open_gates=True).record
    reached = None
    for number, (gate, confidence) in enumerate(zip(gates, record.confidences, strict=True), 1):
        reached = torch.ones_like(confidence, dtype=torch.bool) if reached is None else reached
        tensors[f"gate {number} confidence"] = confidence.masked_fill(~reached, float("nan"))
        reached = reached & gate.passes(confidence)
        lists.setdefault("passed", []).append(reached.int().tolist())


def record_passes(
    passes: list[list[ForwardPass]], searched: bool, lists: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Views and states as lists; numbers as tensors (images, passes), filled up with NaN."""
    lists["passes"] = [[[re.sub(r"\bCrop=", "Field=", str(p.view)), written(p.state)] for p in own] for own in passes]
    vectors = passes[0][0].output.ndim < 2
    shape = (len(passes), max(map(len, passes)))
    tensors["weight"] = torch.full(shape, torch.nan)
    if searched and passes[0][0].criterion is not None:
        tensors["criterion"] = torch.full(shape, torch.nan)
    if vectors:
        tensors["pass output"] = torch.full((*shape, *passes[0][0].output.shape), torch.nan)
    for i, own in enumerate(passes):
        for k, p in enumerate(own):
            tensors["weight"][i, k] = p.weight
            if "criterion" in tensors:
                tensors["criterion"][i, k] = p.criterion
            if vectors:
                tensors["pass output"][i, k] = p.output
