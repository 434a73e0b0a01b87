"""A model in evaluation mode without touching it: modules of its own, the very same weights, buffers and hooks.

To switch the user's model to evaluation and back is seen by everybody who uses it at that moment, and export puts
stand-ins in place of its weights while it traces. So what needs another mode, and every capture, works on a twin.
"""

import copy
import functools
import types
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from unstride.errors import InputError
from unstride.graph.snapshot import holds

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def evaluating(model: nn.Module) -> nn.Module:
    """The model itself where all of it is in evaluation mode, else its twin. Example: `evaluating(model)(images)`."""
    return twin(model) if any(m.training for m in model.modules()) else model


def twin(model: nn.Module) -> nn.Module:
    """The same function in evaluation mode. What it stores in its attributes stays with it; weights are shared."""
    return _Copier()(model)


def own_module(model: Any) -> nn.Module:
    """The user's own network: out of `torch.compile` or `DataParallel`; in Python, and not enhanced already."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: got {type(model).__name__}, wanted a torch.nn.Module")
    if any(getattr(m, "is_enhanced", False) for m in model.modules()):
        raise InputError(
            "model: it is enhanced already; pass the inner module (better.model), or change what it does with "
            "better.with_options(...)"
        )
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise InputError("model: it is a TorchScript module; pass the Python module that it was scripted from")
    return unwrapped(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module within `torch.compile(...)`, `DataParallel` and its like: they compute the same."""
    compiled = type(model).__name__ == "OptimizedModule"  # named, because torch's compiler takes a second to import
    if compiled or isinstance(model, _PARALLEL):
        return unwrapped(model.get_submodule("_orig_mod" if compiled else "module"))
    return model


class _Copier:
    """Copies modules and the containers and small objects that hold them; everything else is shared."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self.made:
            self.made[id(value)] = value  # unless there is more to say; something may hold itself
            self.made[id(value)] = self._copy(value)
        return self.made[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _ordinary(value) if value.is_inference() else value
        if isinstance(value, nn.Module):
            return self._module(value) if unwrapped(value) is value else self(unwrapped(value))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self(value.__self__)) if _module(value.__self__) else value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return functools.partial(self(value.func), *map(self, value.args), **self._dict(value.keywords))
        if isinstance(value, tuple):
            items = [self(v) for v in value]
            return value if all(map(is_, items, value)) else _tuple(value, items)
        inside = holds(value)
        if inside is None or isinstance(value, set | frozenset):
            return copy.copy(value) if isinstance(value, set) else value
        new = self.made[id(value)] = copy.copy(value)
        if isinstance(value, list):
            new[:] = [self(v) for v in value]
        else:
            (new if isinstance(value, dict) else new.__dict__).update(self._dict(inside))
        return new

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        return {k: self(v) for k, v in value.items()}

    def _module(self, module: nn.Module) -> nn.Module:
        new = self.made[id(module)] = object.__new__(type(module))
        new.__dict__.update(self._dict(module.__dict__))
        new.__dict__["training"] = False
        if new.__dict__.get("_compiled_call_impl") is not None:  # model.compile(): compiled for the other modules
            new.__dict__["_compiled_call_impl"] = None
        return new

    def _function(self, f: types.FunctionType) -> types.FunctionType:
        """A function that has a module in its closure calls that module's twin."""
        cells = f.__closure__ or ()
        if not any(_module(c) for c in map(_content, cells)):
            return f
        closure = tuple(types.CellType(self(_content(c))) if _module(_content(c)) else c for c in cells)
        new = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, closure)
        new.__kwdefaults__ = f.__kwdefaults__
        return new


def _ordinary(t: Tensor) -> Tensor:
    """A tensor of inference mode as one that can be traced."""
    with torch.inference_mode(False):
        new = t.clone()
        return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new


def _tuple(like: tuple[Any, ...], items: list[Any]) -> Any:
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
