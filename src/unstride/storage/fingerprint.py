"""What identifies a model or a set of tensors: a hash of names, shapes, types and bytes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from unstride.errors import ArtefactError


def digest(tensors: Mapping[str, Tensor]) -> str:
    """`digest({"w": w})`: sha256 over sorted names, shapes, dtypes and bytes; device and order do not count."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        if tensor.numel():
            sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """`fingerprint(model)`: the sha256 of its parameters and buffers (the tensors of its state dict)."""
    return digest({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})


def check_model(path: str | Path | None, made_for: object, model: nn.Module) -> None:
    """Refuse a file that was made for another network: `made_for` is the fingerprint in it."""
    if made_for != (mine := fingerprint(model)):
        raise ArtefactError(
            f"{path} was made for a model with fingerprint {str(made_for)[:12]}, this has {mine[:12]}. "
            "Give the model, with the weights, that it was made for, or make the file again."
        )
