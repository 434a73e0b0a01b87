"""A copy of a model in evaluation mode: modules of its own, the very same weights, buffers and hooks.

Switching the user's model to evaluation mode and back would be visible to every other thread that uses it, and export
replaces its weights while it traces. So everything that needs another mode, and every capture, works on a copy.
"""

import copy
import enum
import functools
import types
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from unstride.errors import CaptureError, InputError

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")  # by name, because importing them takes long
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_CODE = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def evaluating(model: nn.Module) -> nn.Module:
    """The model itself if all of it is in evaluation mode, else a copy. Example: `evaluating(model)(images)`."""
    return evaluation_copy(model) if any(m.training for m in modules_of(model)) else model


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """As `model.modules()`, in no order and faster: it is asked at every call."""
    seen, left = set[int](), [model]
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            left += module.children()


def evaluation_copy(model: nn.Module) -> nn.Module:
    """The same function in evaluation mode. Attributes that it writes are its own; weights are shared."""
    return copied(model)[0]


def copied(model: nn.Module) -> tuple[nn.Module, dict[int, Tensor]]:
    """An evaluation copy, and the user's own tensor for each one that could not be shared, by the id of its copy."""
    copier = _Copier()
    return copier(model), copier.originals


def checked_module(model: Any) -> nn.Module:
    """The model as it is; an InputError if it is no module, or enhanced already."""
    if not isinstance(model, nn.Module):
        hint = " A model by its name is loaded first: unstride.models.load(...)." if isinstance(model, str) else ""
        raise InputError(f"model: got {type(model).__name__}, expected a torch.nn.Module.{hint}")
    if any(getattr(type(m), "is_enhanced", False) for m in modules_of(model)):
        raise InputError(
            "model: it is enhanced already. Pass the inner module (better.model), or change the recipe with "
            "better.replace(...)."
        )
    return model


def own_module(model: Any) -> nn.Module:
    """The user's own network, taken out of `torch.compile` or `DataParallel`, for a capture."""
    model = checked_module(model)
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise CaptureError(
            "model: a TorchScript module cannot be captured, and states need a graph. Pass the Python module that it "
            "was made from, or a recipe without states, such as recipe='flip'."
        )
    if any(kind.__name__ in _SHARDED for m in model.modules() for kind in type(m).__mro__):
        raise CaptureError(
            "model: its weights lie in parts on several devices (FSDP), and states need a graph, which needs them "
            "whole. Use a recipe without states, such as recipe='flip', or the model before it was sharded."
        )
    return unwrapped(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module within `torch.compile(...)`, `DataParallel` and the like, which compute the same."""
    compiled = type(model).__name__ == "OptimizedModule"  # by name, because torch's compiler takes a second to import
    if compiled or isinstance(model, _PARALLEL):
        return unwrapped(model.get_submodule("_orig_mod" if compiled else "module"))
    return model


def contents(value: Any) -> Any:
    """What a value consists of, if its contents count: a dict, list, tuple or set; None if it is not.

    Modules and builtin containers are, and small objects such as a config, whose attributes are plain values, enums,
    functions, tensors or modules. Other objects (a logger, a trainer) count only by their identity.
    """
    if isinstance(value, nn.Module):
        return value.__dict__
    if isinstance(value, dict | list | tuple | set | frozenset):
        return value
    if isinstance(value, (*PLAIN, *_CODE, Tensor, functools.partial)):
        return None
    attributes = _attributes(value)
    return attributes if attributes and all(map(_is_simple, attributes.values())) else None


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots included."""
    own = getattr(value, "__dict__", {})
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    if not slots:
        return own if isinstance(own, dict) else {}
    return {**own, **{name: getattr(value, name) for name in slots if hasattr(value, name) and name[:2] != "__"}}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_simple, value))
    return isinstance(value, (*PLAIN, *_CODE, Tensor, nn.Module))


class _Copier:
    """Copies modules and the containers and small objects that hold them; everything else is shared."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.originals: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self.made:
            self.made[id(value)] = value  # replaced below; a value may contain itself
            self.made[id(value)] = self._copy(value)
        return self.made[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._ordinary(value) if value.is_inference() else value
        if isinstance(value, nn.Module):
            return self._module(value) if unwrapped(value) is value else self(unwrapped(value))
        if isinstance(value, types.MethodType):
            of_module = isinstance(value.__self__, nn.Module)
            return types.MethodType(value.__func__, self(value.__self__)) if of_module else value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return functools.partial(self(value.func), *map(self, value.args), **self._dict(value.keywords))
        if isinstance(value, tuple):
            items = [self(v) for v in value]
            if all(map(is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return self._container(value)

    def _container(self, value: Any) -> Any:
        inside = contents(value)
        if inside is None or isinstance(value, set | frozenset):
            return copy.copy(value) if isinstance(value, set) else value
        new = self.made[id(value)] = copy.copy(value)
        if isinstance(value, list):
            new[:] = [self(v) for v in value]
        elif isinstance(value, dict):
            new.update(self._dict(inside))
        else:
            for name, attribute in inside.items():
                object.__setattr__(new, name, self(attribute))
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
        """A function that has a module in its closure: a copy that calls the module's copy."""
        cells = f.__closure__ or ()
        if not any(isinstance(c, nn.Module) for c in map(cell_content, cells)):
            return f
        copies = {id(c): self(cell_content(c)) for c in cells if isinstance(cell_content(c), nn.Module)}
        closure = tuple(types.CellType(copies[id(c)]) if id(c) in copies else c for c in cells)
        new = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, closure)
        new.__kwdefaults__ = f.__kwdefaults__
        return new

    def _ordinary(self, t: Tensor) -> Tensor:
        """A tensor of inference mode as one that can be traced."""
        with torch.inference_mode(False):
            new = t.clone()
            new = nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
        self.originals[id(new)] = t
        return new


def cell_content(cell: types.CellType) -> Any:
    """What a closure's cell holds; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
