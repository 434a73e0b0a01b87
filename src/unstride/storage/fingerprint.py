"""Digests that identify tensors, plain values and models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unstride.errors import ArtefactError
from unstride.storage.computation import describe_computation

_PROJECTIONS = 4  # numbers that stand for the outputs on the probe


def digest(tensors: Mapping[str, Tensor]) -> str:
    """`digest({"w": w})`: sha256 over sorted names, shapes, dtypes and bytes; device and order do not count."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        tensor = (
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        )  # in parts on several devices (FSDP)
        tensor = tensor.cpu().contiguous()
        sha.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        if tensor.numel():
            sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def text_digest(value: Any) -> str:
    """The sha256 of plain values (numbers, texts, lists, tables), whatever the order of a table's keys.

    Anything else is a TypeError: the text of an object may differ from process to process.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def fingerprint(model: nn.Module) -> str:
    """`fingerprint(model)`: the sha256 of its parameters and buffers (the tensors of its state dict)."""
    return digest({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})


def check_model(path: str | Path | None, made_for: object, model: nn.Module) -> None:
    """Raise an ArtefactError if a file was made for another model. `made_for` is the fingerprint in the file."""
    if made_for != (own := fingerprint(model)):
        raise ArtefactError(
            f"{path} was made for a model with fingerprint {str(made_for)[:12]}, this has {own[:12]}. "
            "Give the model, with the weights, that it was made for, or make the file again."
        )


# ------------------------------------------------------------------------------------------- what a model computes


def computation_key(model: nn.Module, probe: Tensor | None = None) -> str:
    """The sha256 of what a model computes: weights, buffers, modules with their attributes, code, and probe outputs.

    Code is what the model's classes, functions and closures run, as it is loaded, and the content of the files that
    they come from; installed packages count by name and version. `probe` is an example input: noise of its shape is
    passed through the model, so that also what no code shows (a file that is read, a compiled extension) counts.
    """
    sha = hashlib.sha256(fingerprint(model).encode())
    for line in describe_computation(model):
        sha.update(line.encode(errors="surrogateescape") + b"\n")
    if probe is not None:
        sha.update(repr(_probe_outputs(model, probe)).encode())
    return sha.hexdigest()


def _probe_outputs(model: nn.Module, probe: Tensor) -> list[list[int]] | str:
    """The outputs on two images of noise, as a few coarse numbers that do not depend on which kernels computed them."""
    if any(module.training for module in model.modules()):
        return "training"  # running statistics must not change
    noise = torch.randn(2, *probe.shape[1:], generator=torch.Generator().manual_seed(0)).to(probe)
    devices = [probe.device] if probe.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        try:
            outputs = model(noise)
        except Exception as error:  # the run itself will say what is wrong
            return type(error).__name__
    return [_projected(leaf) for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _projected(output: Tensor) -> list[int]:
    """Some random projections of a tensor, in thousandths of its size: far coarser than differences of rounding."""
    values = output.detach().flatten().cpu()
    step = max(1e-3, 16 * torch.finfo(values.dtype).eps) if values.is_floating_point() else 1e-3
    values = values.double() if not values.is_complex() else torch.view_as_real(values).flatten().double()
    size = float(values.norm())
    if not values.numel() or not 0 < size < float("inf"):
        return [values.numel()]
    signs = torch.randint(2, (_PROJECTIONS, len(values)), generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    return [values.numel(), *((signs @ (values / size)) / step).round().long().tolist()]
