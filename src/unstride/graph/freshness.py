"""Whether a model is still the one that was captured.

A captured graph reads the live parameters and buffers, so new numbers in them need no new capture. What changes the
structure is noticed at the next call, by comparing identities and plain values:

- another module, parameter, buffer or tensor attribute, and another shape, dtype or device of one;
- hooks of the model's modules, and global forward hooks;
- another class of a module; any method or attribute of its class or of a parent class (of torch's classes: `forward`);
- a function put on a module, and what the closures of the model's functions and methods contain;
- attributes: numbers, strings and tuples by value, the items of lists, dicts and sets, the attributes of small config
  objects (also in slots), everything else by identity;
- globals that the methods of the model's own classes name, numbers by value and everything else by identity.

The mode (training or evaluation) does not count: every model runs as in evaluation.

Not noticed, so call `better.refresh()` after such a change: the inside of other objects, what helper functions outside
the model's classes read, the code of torch and of other libraries, the environment, files, and a number that the model
reads from a floating-point tensor in an `if` or with `.item()` where it was written behind torch's back (by numpy).
A form that keeps copies of the weights (`execution="frozen"` or `"compile"`) compares versions, addresses and three
sampled values of every tensor; a write that leaves all of them as they were is not noticed either.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from unstride.graph.evaluation import PLAIN, cell_content, contents

_VALUES = methodcaller("values")
_REGISTERS = ("_parameters", "_buffers", "_modules")  # their items are known by the module's own name
_IDLE = {"training", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook", "_state_dict_hooks"}
_IDLE |= {"_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
_IDLE |= {"_non_persistent_buffers_set", "_forward_hooks_always_called", "__slotnames__"}  # idle: no forward needs it


class _Place:
    """A dict, list or set of the model, and what it contained."""

    def __init__(self, name: str, read: Callable[[], Any], by_item: bool) -> None:
        self.name, self.read, self.by_item = name, read, by_item
        self.keys, self.values = self._now()
        thing = read()
        is_kept = isinstance(thing, types.MappingProxyType) or (isinstance(thing, dict) and thing is read())
        self.dict: Any = thing if is_kept else None  # what stays the same object and can be asked directly

    def _now(self) -> tuple[list[Any], list[Any]]:
        thing = self.read()
        if isinstance(thing, dict | types.MappingProxyType):
            return list(thing), list(thing.values())
        values = list(thing)
        return list(range(len(values))), values

    def changes(self) -> Iterator[str]:
        """Names of what is not as it was. Nearly always the very same objects are there, which is soon known."""
        keys, values = self._now()
        if len(values) == len(self.values) and all(map(is_, values, self.values)) and keys == self.keys:
            return
        before, after = dict(zip(self.keys, self.values, strict=True)), dict(zip(keys, values, strict=True))
        for key in {**before, **after}:
            if key not in _IDLE and (key not in before or key not in after or not _alike(before[key], after[key])):
                yield join(self.name, key) if self.by_item else self.name


class Freshness:
    """`seen = Freshness(model)`; later `seen.change()` names something that is no longer as it was, or is None.

    `numbers`: also compare the numbers in tensors, by versions, addresses and samples. `besides`: names of what the
    model itself changes whenever it runs.
    """

    def __init__(self, model: nn.Module, numbers: bool = False, besides: Iterable[str] = ()) -> None:
        self.besides = frozenset(besides)
        self.places: list[_Place] = []
        self.empty: list[tuple[str, Any]] = []  # most containers of a module are
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self.functions: list[Any] = []
        self._visited: dict[int, Any] = {}  # keeps everything alive, so that no id is used twice
        self._visit("", model)
        self._visit("global hooks", torch.nn.modules.module._global_forward_hooks)
        self._visit("global hooks", torch.nn.modules.module._global_forward_pre_hooks)
        self._empty_things = [thing for _, thing in self.empty]
        self._visit_classes()
        self._visit_functions()
        dicts = [place for place in self.places if place.dict is not None]
        self._others = [place for place in self.places if place.dict is None]
        self._dicts = [place.dict for place in dicts]
        self._sizes = [len(place.keys) for place in dicts]
        self._keys = [key for place in dicts for key in place.keys]
        self._values = [value for place in dicts for value in place.values]
        self.forms = list(map(_form, self.tensors.values()))
        self.numbers = _Numbers(self.tensors if numbers else {})

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Compare the numbers of these, too: the capture itself depends on them."""
        names = {id(t): name for name, t in self.tensors.items()}
        self.numbers = _Numbers(self.numbers.tensors | {names.get(id(t), f"constant {id(t)}"): t for t in tensors})

    def change(self) -> str | None:
        """The name of the first thing that changed."""
        return next((name for name in self.changes() if name not in self.besides), None)

    def changes(self) -> Iterator[str]:
        """Names of everything that changed."""
        if any(self._empty_things):
            yield from (name for name, thing in self.empty if thing)
        places = self._others if self._same_dicts() else self.places
        yield from chain.from_iterable(place.changes() for place in places)
        if list(map(_form, self.tensors.values())) != self.forms:
            now = zip(self.tensors.items(), self.forms, strict=True)
            yield from (name for (name, t), form in now if _form(t) != form)
        yield from self.numbers.changes()

    def _same_dicts(self) -> bool:
        """Whether the very same objects are in all dicts: nearly always so, and one pass over all of them is fast."""
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(is_, chain.from_iterable(map(_VALUES, self._dicts)), self._values))
            and all(map(is_, chain.from_iterable(self._dicts), self._keys))
        )

    def _visit(self, name: str, value: Any, register: bool = False) -> None:
        if isinstance(value, PLAIN) or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors[name] = value
        function = getattr(value, "__func__", value)  # of a bound method
        if isinstance(function, types.FunctionType):
            self.functions.append(function)
        inside = contents(value)
        if inside is None:
            return
        is_module = isinstance(value, nn.Module)
        if is_module:
            self.modules[name] = value
        if not inside and not is_module:
            if not isinstance(value, tuple | frozenset):
                self.empty.append((name, inside))
            return
        if not isinstance(value, tuple | frozenset):
            self.places.append(_Place(name, lambda: contents(value), register or is_module))
        for key, item in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
            if key not in _IDLE:
                self._visit(join(name, key), item, key in _REGISTERS)

    def _visit_classes(self) -> None:
        modules = list(self.modules.values())
        self.places.append(_Place("the class of a module", lambda: map(type, modules), False))
        kinds = dict.fromkeys(kind for m in modules for kind in type(m).__mro__ if kind is not object)
        torchs = [kind for kind in kinds if kind.__module__.partition(".")[0] == "torch"]
        self.places.append(_Place("a forward of torch", lambda: [getattr(k, "forward", None) for k in torchs], False))
        for kind in kinds.keys() - set(torchs):
            self.places.append(_Place(kind.__qualname__, partial(vars, kind), True))
            for value in vars(kind).values():
                f = getattr(value, "fget", None) or getattr(value, "__func__", value)
                self.functions += [f] if isinstance(f, types.FunctionType) else []

    def _visit_functions(self) -> None:
        cells = [c for f in self.functions for c in f.__closure__ or () if not isinstance(cell_content(c), type)]
        self.places.append(_Place("a closure", lambda: map(cell_content, cells), False))
        named: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for f in self.functions:
            names = {name for name in f.__code__.co_names if name in f.__globals__}
            named.setdefault(id(f.__globals__), (f.__globals__, set()))[1].update(names)
        for everything, names in named.values():
            where = str(everything.get("__name__", "globals"))
            self.places.append(_Place(where, partial(_items, everything, sorted(names)), True))


class _Numbers:
    """What tells that the numbers in tensors changed: versions, addresses, and three samples of each."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.places = self._places()
        self.samples = {name: _sample(t) for name, t in tensors.items()}
        groups: dict[Any, list[Tensor]] = {}
        for sample in self.samples.values():
            groups.setdefault((sample.dtype, sample.device), []).append(sample)
        self.groups = list(groups.values())
        self.bytes = self._bytes()
        self.each = {name: _bytes(sample) for name, sample in self.samples.items()}

    def _places(self) -> list[Any]:
        return [(_version(t), _address(t)) for t in self.tensors.values()]

    def _bytes(self) -> list[bytes]:
        return [_bytes(torch.cat(group)) for group in self.groups]

    def changes(self) -> Iterator[str]:
        places = self._places()
        if places != self.places:
            now = zip(self.tensors, places, self.places, strict=True)
            yield from (name for name, place, before in now if place != before)
        if self._bytes() != self.bytes:
            yield from (name for name, sample in self.samples.items() if _bytes(sample) != self.each[name])


def join(path: str, key: Any) -> str:
    """A name within a model. Example: `join("layer1.0", "stride")`."""
    return path if key in _REGISTERS else f"{path}.{key}" if path else str(key)


def _items(everything: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: everything.get(name) for name in names}


def _alike(before: Any, after: Any) -> bool:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_alike, before, after))
    return before is after or (isinstance(before, PLAIN) and type(before) is type(after) and before == after)


def _form(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device


def _version(t: Tensor) -> int:
    """How often torch wrote to it; not counted for tensors of inference mode."""
    return 0 if t.is_inference() else t._version


def _address(t: Tensor) -> int | None:
    try:
        return t.data_ptr()
    except RuntimeError:  # no memory of its own: sparse, or a subclass
        return None


def _sample(t: Tensor) -> Tensor:
    """The first, the last and a middle number, in the tensor's own memory."""
    none = torch.empty(0)
    if t.layout is not torch.strided or t.numel() == 0 or not _address(t):
        return none
    span = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    try:
        sample = t.detach().as_strided((min(3, span + 1),), (max(1, span // 2),))
        return sample if _bytes(torch.cat([sample])) else none
    except (RuntimeError, TypeError):  # a kind of tensor that cannot be read so: quantised, or a subclass
        return none


def _bytes(t: Tensor) -> bytes:
    return t.cpu().contiguous().view(torch.uint8).numpy().tobytes()
