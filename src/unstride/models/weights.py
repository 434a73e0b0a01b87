"""Weights from a file into a model: never unpickled, checked name by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unstride.errors import ArtefactError, SpecError
from unstride.storage.files import check_inflation

# What trainers put around the weights, and what wrappers put before their names.
_ENVELOPES = ("state_dict", "model_state_dict", "model")
_INFLATES = 4  # torch writes tensors as they are; an archive that grows more than this was made to
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")


def place(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model is, and of which type it wants its images."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.float32


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """The same random weights each time, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file by name. A file that would have to be unpickled is refused."""
    path = Path(path)
    if not path.is_file():
        raise SpecError(f"weights {str(path)!r}: no such file; expected default, random or the path of a weights file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        check_inflation(path, _INFLATES)
    except ValueError as error:
        raise ArtefactError(f"{path}: {error}; it was not opened") from error
    except SafetensorError as error:
        raise ArtefactError(f"{path}: damaged, or not a safetensors file ({error})") from error
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises nearly anything on a file that is not its own
        raise ArtefactError(
            f"{path}: it cannot be read as plain tensors ({type(error).__name__}); it is damaged, or holds Python "
            "objects, which are never executed here: save model.state_dict() alone, best as safetensors"
        ) from error
    for envelope in _ENVELOPES:
        if isinstance(content, Mapping) and isinstance(content.get(envelope), Mapping):
            content = content[envelope]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ArtefactError(f"{path}: expected tensors by name, as model.state_dict() gives; it holds something else")
    for key, value in content.items():
        if value.layout != torch.strided or value.is_meta or value.untyped_storage().nbytes() < value.nbytes:
            raise ArtefactError(f"{path}: {key} claims {tuple(value.shape)} values that are not in the file")
    return {str(key): value for key, value in content.items()}


def build_for(build: Callable[..., nn.Module], state: Mapping[str, Tensor]) -> tuple[nn.Module, bool]:
    """A model with as many classes as the weights have, and whether that is the number it has by itself."""
    with seeded():
        model = build(names=state)
    own = model.state_dict()
    given = _renamed(state, own)
    # A head of another size shows as tensors that differ in their first dimension only, all in the same way.
    heads = {
        len(tensor)
        for name, tensor in given.items()
        if name in own and tensor.ndim and tensor.shape != own[name].shape and tensor.shape[1:] == own[name].shape[1:]
    }
    if len(heads) != 1:
        return model, True
    with seeded():
        return build(classes=heads.pop(), names=state), False


def fit(model: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Load weights that must fit: every name there, none left over, every shape right."""
    own = model.state_dict()
    given = _renamed(state, own)
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in given if name not in own]
    shapes = [
        f"{name} is {tuple(given[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    if missing or unexpected or shapes:
        parts = [
            f"{len(found)} {kind} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
            for kind, found in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
            if found
        ]
        raise ArtefactError(
            f"{origin}: these weights are not for {type(model).__name__}: of {len(own)} tensors, {'; '.join(parts)}. "
            "Check the model's name, or build the model in a file.py:function"
        )
    broken = [name for name, tensor in given.items() if tensor.is_floating_point() and bool(tensor.isnan().any())]
    if broken:
        raise ArtefactError(
            f"{origin}: {len(broken)} of {len(own)} tensors hold NaN ({', '.join(broken[:3])}), and so would every "
            "answer. Take the weights of an earlier epoch"
        )
    extra: dict[str, Any] = {name: own[name] for name in own if name not in given}
    model.load_state_dict({**given, **extra})


def _renamed(state: Mapping[str, Tensor], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """Without the prefixes that wrappers add, as far as that brings the names nearer to the model's."""
    best = dict(state)
    current = best
    while prefix := next((p for p in _PREFIXES if current and all(name.startswith(p) for name in current)), None):
        current = {name.removeprefix(prefix): tensor for name, tensor in current.items()}
        if len(current.keys() & own.keys()) > len(best.keys() & own.keys()):
            best = current
    return best


def under_model(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a wrapper of `model` loads weights: those with the model's own names (nnU-Net's folds) are its."""
    own = wrapper.get_submodule("model").state_dict().keys()
    prefixed = {key: key.removeprefix(prefix) for key in state if key.startswith(prefix)}
    if set(prefixed.values()) <= own:
        state.update({f"{prefix}model.{name}": state.pop(key) for key, name in prefixed.items()})
