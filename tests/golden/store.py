"""The golden files: tensors in golden.safetensors, lists in golden.json, both by the name of the case."""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, LISTS = Path(__file__).with_name("golden.safetensors"), Path(__file__).with_name("golden.json")
STEP = 5  # of large maps, every fifth row and column is kept
LARGE = 32
Result = tuple[dict[str, Tensor], dict[str, Any]]


def thinned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with only some pixels of large maps."""
    large = {k for k, v in tensors.items() if v.ndim > 2 and min(v.shape[-2:]) >= LARGE}
    return {k: v[..., ::STEP, ::STEP] if k in large else v for k, v in tensors.items()}


def write(results: dict[str, Result]) -> None:
    tensors = {
        f"{case}/{name}": value.float().contiguous()
        for case, (found, _) in results.items()
        for name, value in thinned(found).items()
    }
    save_file(tensors, TENSORS)
    lines = [f"{json.dumps(case)}: {json.dumps(lists, separators=(',', ':'))}" for case, (_, lists) in results.items()]
    LISTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read() -> dict[str, Result]:
    lists: dict[str, Any] = json.loads(LISTS.read_text(encoding="utf-8"))
    for own in lists.values():  # the base state has one name, however many layers there are
        own["passes"] = [
            [[view, "" if set(state) <= set("0, ") else state] for view, state in p] for p in own["passes"]
        ]
    results: dict[str, Result] = {case: ({}, own) for case, own in lists.items()}
    for key, value in load_file(TENSORS).items():
        case, _, name = key.partition("/")
        results[case][0][name] = value
    return results


def without(named: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in names}


def differences(result: Result, golden: Result, besides: Set[str] = frozenset()) -> list[str]:
    """What differs: lists must be equal, tensors to 1e-5 of themselves or of their largest value."""
    tensors, lists = thinned(without(result[0], besides)), without(result[1], besides)
    golden = without(golden[0], besides), without(golden[1], besides)
    names = [name for name in lists | golden[1] if lists.get(name) != golden[1].get(name)]
    found = [f"{name}: {lists.get(name)} != {golden[1].get(name)}" for name in names]
    if set(tensors) != set(golden[0]):
        return [*found, f"tensors: {sorted(set(tensors) ^ set(golden[0]))} are only on one side"]
    for name, expected in golden[0].items():
        actual = tensors[name].float()
        if actual.shape != expected.shape:
            found.append(f"{name}: shape {tuple(actual.shape)} != {tuple(expected.shape)}")
            continue
        largest = float(expected.nan_to_num().abs().max())
        close = torch.isclose(actual, expected, rtol=1e-5, atol=max(1e-6, 1e-5 * largest), equal_nan=True)
        if not close.all():
            apart = (actual - expected).nan_to_num(torch.inf).abs().max()
            found.append(f"{name}: {int((~close).sum())} of {close.numel()} differ, at most {float(apart):.2g}")
    return found
