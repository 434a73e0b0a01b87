"""What a model computes, as lines of text: its modules, their attributes, and the code that they run.

Two models that give the same lines, weights and outputs on a probe are taken for the same computation. Nothing here
depends on addresses, paths or comments, so that the lines are the same in another process.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_LIBRARIES = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib")]
_OWN = Path(__file__).resolve().parents[1]
_RECORDS = {"types", "argparse", "__main__"}  # simple namespaces
_DEEPEST = 24  # containers and objects inside each other
# Attributes of nn.Module on which no forward pass depends, or that are described elsewhere.
_SKIPPED = {"training", "_parameters", "_buffers", "_modules", "_backward_pre_hooks", "_backward_hooks"}
_SKIPPED |= {"_is_full_backward_hook", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"}
_SKIPPED |= {"_load_state_dict_post_hooks", "_forward_hooks_always_called", "_non_persistent_buffers_set"}


def describe_computation(model: nn.Module) -> Iterator[str]:
    """One line for each module, attribute, function, class and source file that takes part in the forward pass."""
    walk = _Walk()
    yield from walk.value(model)
    for hooks in (torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks):
        yield from walk.value(hooks)
    yield from walk.sources()


class _Walk:
    """Goes once through everything that a value refers to."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # objects made on the way, so that no two share an id
        self.files: set[Path] = set()
        self.packages: set[str] = set()
        self.depth = 0

    def sources(self) -> Iterator[str]:
        """The contents of the user's files, and the installed packages by version."""
        yield from sorted("file " + hashlib.sha256(path.read_bytes()).hexdigest() for path in self.files)
        yield from sorted(f"package {name} {_version(name)}" for name in self.packages)

    def value(self, value: Any) -> Iterator[str]:
        if isinstance(value, enum.Enum):
            yield f"enum {type(value).__qualname__}.{value.name}"
            yield from self.value(value.value)
        elif isinstance(value, _PLAIN):
            yield f"{type(value).__name__} {value!r}"
        elif id(value) in self.seen:
            yield f"again {self.seen[id(value)]}"
        elif self.depth > _DEEPEST:
            yield f"deep {type(value).__qualname__}"
        else:
            self.seen[id(value)] = len(self.seen)
            self.alive.append(value)
            self.depth += 1
            yield from self._object(value)
            self.depth -= 1

    def _object(self, value: Any) -> Iterator[str]:
        if isinstance(value, Tensor):
            yield from self._tensor(value)
        elif isinstance(value, Mapping):
            yield f"{type(value).__name__} of {len(value)}"
            for key, inner in list(value.items()):
                yield from self.value(key)
                yield from self.value(inner)
        elif isinstance(value, list | tuple):
            yield f"{type(value).__name__} of {len(value)}"
            for inner in list(value):
                yield from self.value(inner)
        elif isinstance(value, set | frozenset):
            yield f"set {sorted(repr(v) if isinstance(v, _PLAIN) else type(v).__qualname__ for v in value)}"
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, _FUNCTIONS):
            yield from self._function(value)
        elif isinstance(value, types.ModuleType):
            yield from self._module(value)
        else:
            yield from self._instance(value)

    def _tensor(self, value: Tensor) -> Iterator[str]:
        yield f"tensor {tuple(value.shape)} {value.dtype}"
        if value.device.type != "meta" and value.layout is torch.strided and not value.is_quantized:
            data = value.detach().cpu().contiguous().reshape(-1)
            yield hashlib.sha256(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"").hexdigest()

    def _instance(self, value: Any) -> Iterator[str]:
        kind = type(value)
        if isinstance(value, PurePath | re.Pattern | np.generic):
            yield f"{kind.__name__} {value!r}"
            return
        if isinstance(value, np.ndarray):
            yield f"array {value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
            return
        yield from self.value(kind)
        if hasattr(value, "__wrapped__"):  # functools.cache and other decorators
            yield from self.value(value.__wrapped__)
        if isinstance(value, torch.jit.ScriptModule):
            yield f"script {value.code if hasattr(value, 'forward') else ''}"
            return
        package = kind.__module__.partition(".")[0]
        if not isinstance(value, nn.Module) and (package == "torch" or package in sys.stdlib_module_names - _RECORDS):
            return  # loggers, locks, generators: nothing that a result depends on
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        held |= getattr(value, "__dict__", {})
        for name, inner in held.items():
            if not (isinstance(value, nn.Module) and name in _SKIPPED):
                yield f".{name}"
                yield from self.value(inner)
        if isinstance(value, nn.Module):  # the weights have a digest of their own
            for name, part in value.named_parameters(recurse=False):
                yield f".{name} {tuple(part.shape)} {part.dtype}"
            for name, buffer in value.named_buffers(recurse=False):  # also those that no state dict has
                yield f".{name}"
                yield from self._tensor(buffer)
            for name, child in held["_modules"].items():
                yield f"module {name}"
                yield from self.value(child)

    def _class(self, kind: type) -> Iterator[str]:
        if kind.__module__ == "builtins":
            yield f"class {kind.__qualname__}"
            return
        for base in kind.__mro__[:-1]:
            if base is not kind and id(base) in self.seen:
                yield f"again {self.seen[id(base)]}"
                continue
            self.seen.setdefault(id(base), len(self.seen))
            installed = self._origin(base.__module__, _file_of(base))
            yield f"class {'' if not installed else base.__module__}.{base.__qualname__}"
            for name, member in list(vars(base).items()):
                member = getattr(member, "__func__", member)
                parts = [member.fget, member.fset] if isinstance(member, property) else [member]
                for part in parts:
                    if installed and not _replaced(part, base, name):
                        continue
                    if name.startswith("__") and not isinstance(part, types.FunctionType):
                        continue  # __doc__, __module__, __dict__, ...
                    yield f"{base.__qualname__}.{name}"
                    yield from self.value(part)

    def _function(self, function: Any) -> Iterator[str]:
        if isinstance(function, functools.partial):
            yield "partial"
            for part in (function.func, function.args, function.keywords):
                yield from self.value(part)
            return
        if isinstance(function, types.MethodType):
            yield "method"
            yield from self.value(function.__self__)
            yield from self.value(function.__func__)
            return
        if isinstance(function, types.BuiltinFunctionType):
            yield f"builtin {function.__module__}.{function.__qualname__}"
            return
        if self._origin(function.__module__ or "", function.__code__.co_filename):
            yield f"function {function.__module__}.{function.__qualname__}"
        else:
            yield f"function {function.__qualname__}"
            yield from self._code(function.__code__, function.__globals__)
        for part in (function.__defaults__, function.__kwdefaults__):
            yield from self.value(part)
        for cell in function.__closure__ or ():
            try:
                yield from self.value(cell.cell_contents)
            except ValueError:
                yield "empty cell"

    def _code(self, code: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
        yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant, names)
            else:
                yield from self.value(constant)
        for name in code.co_names:
            if name in names:
                yield f"global {name}"
                yield from self.value(names[name])

    def _module(self, module: types.ModuleType) -> Iterator[str]:
        installed = self._origin(module.__name__, getattr(module, "__file__", None))
        yield f"import {module.__name__ if installed else ''}"
        if not installed:  # which of its functions are called cannot be known: all of them count
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    yield f"{name} of the module"
                    yield from self.value(value)

    def _origin(self, module: str, file: str | None) -> bool:
        """Whether something comes from an installed package. The package, or else the file, is remembered."""
        package = module.partition(".")[0]
        if file is None or file.startswith("<"):  # compiled, or made by exec: the package says where it belongs
            file = getattr(sys.modules.get(package), "__file__", None)
            if file is None:
                return package in sys.stdlib_module_names and package != "__main__"
        path = Path(file)
        if _installed(path):
            self.packages.add(package)
            return True
        if path.is_file():
            self.files.add(path)
        return False


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


@functools.cache
def _installed(path: Path) -> bool:
    path = path.resolve()
    return any(path.is_relative_to(folder) for folder in (*_LIBRARIES, _OWN))


def _replaced(member: Any, kind: type, name: str) -> bool:
    """Whether a member of an installed class is a function of the user's that was not defined there: a patch.

    Libraries add methods to nn.Module when they are imported. The outputs on the probe show those that matter.
    """
    if not isinstance(member, types.FunctionType) or _installed(Path(member.__code__.co_filename)):
        return False
    return member.__module__ != kind.__module__ or member.__qualname__ != f"{kind.__qualname__}.{name}"


def _file_of(kind: type) -> str | None:
    """The file of a class: that of its module, or of one of its functions."""
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):
        codes = [getattr(member, "__code__", None) for member in vars(kind).values()]
        return next((code.co_filename for code in codes if code is not None), None)


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package)  # slow: it reads all that is installed
        return importlib.metadata.version(names[0]) if names else ""
