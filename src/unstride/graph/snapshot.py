"""What a model is at this moment: modules, weights, buffers, hooks and attributes. Was anything changed since?

Weights can be written without a trace (`p.data.copy_(...)`, a numpy view). Where the kernel watches their pages, it
tells; else every byte is read again at each look: a sum per column, at the speed of memory. A changed attribute is
found by going through what each module holds.
"""

import hashlib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import call, is_, itemgetter, methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unstride.graph.watch import LEAST, PAGE, Span, Watch, inner_pages

COLUMNS = 509  # a prime: weights that change places (a flipped kernel, other channels first) change columns
_REGISTERS = ("_parameters", "_buffers", "_modules")  # what they hold is known by the module's own name
_IDLE = {"training", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook", "_state_dict_hooks"}
_IDLE |= {"_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
_IDLE |= {"_non_persistent_buffers_set", "_forward_hooks_always_called"}  # nothing that a forward pass depends on
_VALUES = methodcaller("values")
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


@dataclass(frozen=True, eq=False)
class _Held:
    """A dict, list or set, and what it held."""

    path: str
    thing: Any
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    named: bool  # what it holds has names within the model; of another container it only counts that it changed

    def same(self) -> bool:
        """Whether it holds the very same objects: nearly always, and soon found out."""
        thing = self.thing
        if len(thing) != len(self.values):
            return False
        if self.keys:
            return all(map(is_, thing.values(), self.values)) and all(map(is_, thing, self.keys))
        return all(map(is_, thing, self.values))

    def changes(self) -> Iterator[str]:
        if isinstance(self.thing, dict):
            was, now = dict(zip(self.keys, self.values, strict=True)), dict(self.thing)
        else:
            was, now = dict(enumerate(self.values)), dict(enumerate(self.thing))
        for key in {**was, **now}:
            if key not in _IDLE and (key not in was or key not in now or not _alike(was[key], now[key])):
                yield join(self.path, key) if self.named else self.path


class _Classes:
    """The modules' classes, and what their calls run. There are many modules, and few classes."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.paths, self.modules = list(modules), list(modules.values())
        self.kinds = list(map(type, self.modules))
        self.forwards = {kind: getattr(kind, "forward", None) for kind in self.kinds}

    def changes(self) -> Iterator[str]:
        others = {kind for kind, run in self.forwards.items() if getattr(kind, "forward", None) is not run}
        if others or list(map(type, self.modules)) != self.kinds:
            for path, module, kind in zip(self.paths, self.modules, self.kinds, strict=True):
                if type(module) is not kind or kind in others:
                    yield path or "model"


class _Contents:
    """Tensors by name, and what was in them. Asked all at once, kind by kind: there are many, and most are short."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.paths, self.tensors = list(tensors), list(tensors.values())
        self.memory = [_memory(t) for t in self.tensors]  # their bytes, as they are now
        self.located = [t for t in self.tensors if _pointer(t) is not None]
        self.counted = [t for t in self.tensors if not t.is_inference()]
        spans = [_pages(m) for memory in self.memory for m in memory]
        self.watch = Watch(span for span in spans if span is not None)
        self.quiet = self.watch.writes()  # before the memory is read
        self.each = [
            (_place(t), list(map(_digest, memory))) for t, memory in zip(self.tensors, self.memory, strict=True)
        ]
        number = {span: k for k, span in enumerate(self.watch.spans)}
        self.short: list[Any] = []
        self.long: list[Any] = []  # read at every look, as sums
        self.asked: list[tuple[int, Any, bytes]] = []  # read where the kernel saw a write, but for their edges
        self.watched: list[Tensor] = []
        for t, memory, (_, digests) in zip(self.tensors, self.memory, self.each, strict=True):
            for m, digest in zip(memory, digests, strict=True):
                span = _pages(m)
                if span is not None and span in number:
                    self.asked.append((number[span], m, digest))
                    self.short += _edges(m, span)
                    self.watched.append(t)
                else:
                    (self.short if _short(m) else self.long).append(m)
        self.places, self.read = self._places(), self._read()

    def _places(self) -> list[Any]:
        """Where they lie; quick, and nothing is read that may no longer be there."""
        shapes = list(map(Tensor.size, self.tensors))
        return [list(map(Tensor.data_ptr, self.located)), [t._version for t in self.counted], shapes]

    def _read(self) -> list[Any]:
        return [b"".join(self.short), list(map(_sum, self.long))]

    def _same(self) -> bool:
        if self._places() != self.places or self._read() != self.read:
            return False
        was, now = self.quiet, None if _pinned(self.watched) else self.watch.writes()
        unsure = [part for part in self.asked if was is None or now is None or was[part[0]] != now[part[0]]]
        if any(_digest(m) != digest for _, m, digest in unsure):
            return False
        self.quiet = now
        return True

    def changes(self) -> Iterator[str]:
        if not self._same():
            for path, t, memory, (place, digests) in zip(self.paths, self.tensors, self.memory, self.each, strict=True):
                if _place(t) != place or list(map(_digest, memory)) != digests:
                    yield path


class _Registers:
    """The dicts among what is held, in which the very same objects lie nearly always: all of them in one go.

    Half of what a module's own dict holds is idle, and the rest is asked for by name; in other dicts the order counts.
    """

    def __init__(self, held: list[_Held], modules: Iterable[nn.Module]) -> None:
        own = {id(module.__dict__) for module in modules}
        self.held = held
        self.dicts = [part for part in held if id(part.thing) in own]
        self.rest = [part for part in held if id(part.thing) not in own]
        self.named = [[key for key in part.keys if key not in _IDLE] for part in self.dicts]
        self.asks = [itemgetter(*keys, *keys[:1]) for keys in self.named]
        self.own = [value for part, ask in zip(self.dicts, self.asks, strict=True) for value in ask(part.thing)]
        self.all = [part.thing for part in (*self.dicts, *self.rest)]
        self.sizes = list(map(len, self.all))
        self.things, self.others = self.all[: len(self.dicts)], self.all[len(self.dicts) :]
        self.keys = [key for part in self.rest for key in part.keys]
        self.values = [value for part in self.rest for value in part.values]

    def _same(self) -> bool:
        try:
            return (
                list(map(len, self.all)) == self.sizes
                and all(map(is_, chain.from_iterable(map(call, self.asks, self.things)), self.own))
                and all(map(is_, chain.from_iterable(map(_VALUES, self.others)), self.values))
                and all(map(is_, chain.from_iterable(self.others), self.keys))
            )
        except KeyError:  # something has another name
            return False

    def changes(self) -> Iterator[str]:
        if not self._same():
            yield from (path for part in self.held if not part.same() for path in part.changes())


class Snapshot:
    """`seen = Snapshot(model)`; later `seen.changed()` names something that is no longer as it was, or is None.

    A module's own mode (training or evaluation) does not count: unstride runs every model as in evaluation.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.held: list[_Held] = []
        self.empty: list[_Held] = []  # most are: a module has many registers
        self.tensors: dict[str, Tensor] = {}
        self._seen: dict[int, Any] = {}  # by address; kept, so that no address comes twice
        self._look("", model)
        self._look("global hooks", torch.nn.modules.module._global_forward_hooks)
        self._look("global hooks", torch.nn.modules.module._global_forward_pre_hooks)
        self._things = [part.thing for part in self.empty]
        self._classes = _Classes(self.modules)
        self._registers = _Registers([part for part in self.held if part.keys], self.modules.values())
        self._lists = [part for part in self.held if not part.keys]
        self._contents = _Contents(self.tensors)

    def changes(self) -> Iterator[str]:
        """What changed, by name."""
        yield from self._classes.changes()
        if any(self._things):
            yield from (path for part in self.empty for path in part.changes())
        yield from self._registers.changes()
        yield from (path for part in self._lists if not part.same() for path in part.changes())
        yield from self._contents.changes()

    def changed(self, besides: Iterable[str] = ()) -> str | None:
        """The first thing that changed, leaving out names that are known to change."""
        known = set(besides)
        return next((path for path in self.changes() if path not in known), None)

    def _look(self, path: str, value: Any, register: bool = False) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        inside = holds(value)
        if isinstance(value, Tensor):
            self.tensors[path] = value
        elif inside is None:
            return
        self._seen[id(value)] = value
        if inside is None:
            return
        if isinstance(value, nn.Module):
            self.modules[path] = value
        keys = tuple(inside) if isinstance(inside, dict) else ()
        values = tuple(inside.values() if isinstance(inside, dict) else inside)
        if not isinstance(value, tuple | frozenset):
            part = _Held(path, inside, keys, values, register or isinstance(value, nn.Module))
            (self.held if values else self.empty).append(part)
        for key, child in zip(keys or range(len(values)), values, strict=True):
            if key not in _IDLE:
                self._look(join(path, key), child, key in _REGISTERS)


def join(path: str, key: Any) -> str:
    """A name within a model. Example: `join("layer1.0", "stride")`."""
    return path if key in _REGISTERS else f"{path}.{key}" if path else str(key)


def holds(value: Any) -> Any:
    """What a value consists of, if it is worth looking into: a dict, or a list, tuple or set; None if it is not.

    Modules and builtin containers are, and small objects such as a config, whose attributes are plain values, tensors
    or modules. Of other objects (a logger, a trainer) it only counts which one it is.
    """
    if isinstance(value, nn.Module):
        return value.__dict__
    if isinstance(value, dict | list | tuple | set | frozenset):
        return value
    if isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType | Tensor):
        return None
    inside = getattr(value, "__dict__", None)
    return inside if isinstance(inside, dict) and all(map(_simple, inside.values())) else None


def _simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_simple, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_simple, value))
    return isinstance(value, (*_PLAIN, Tensor, nn.Module))


def _alike(was: Any, now: Any) -> bool:
    if isinstance(was, tuple) and isinstance(now, tuple):
        return len(was) == len(now) and all(map(_alike, was, now))
    return was is now or (isinstance(was, _PLAIN) and type(was) is type(now) and was == now)


def _place(t: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, how often torch saw it written, and its shape."""
    return _pointer(t), _version(t), t.size()


def _pointer(t: Tensor) -> int | None:
    try:
        return t.data_ptr()
    except RuntimeError:  # no memory of its own: sparse, or a subclass
        return None


def _version(t: Tensor) -> int:
    """How often torch saw it written; tensors of inference mode do not count."""
    return 0 if t.is_inference() else t._version


def _memory(t: Tensor) -> list[Any]:
    """Every byte between the first and the last element, in arrays that see later writes: (rows, columns), and a rest.

    Tensors without memory of their own have none: of them it counts which they are and how often they were written.
    """
    try:
        with torch.no_grad():
            span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            flat = torch.as_strided(t.detach(), (span if t.numel() else 0,), (1,)).view(torch.uint8)
    except (RuntimeError, TypeError):
        return []
    if flat.device.type != "cpu":
        whole = len(flat) // COLUMNS * COLUMNS
        return [flat[:whole].view(-1, COLUMNS), flat[whole:][None]]
    memory = flat.numpy()
    whole = memory.nbytes // (8 * COLUMNS) * (8 * COLUMNS)
    return [memory[:whole].view(np.int64).reshape(-1, COLUMNS), memory[whole:]] if whole else [memory]


def _short(m: Any) -> bool:
    """Whether an array is compared byte by byte: sooner done than a call for its sums."""
    return isinstance(m, np.ndarray) and (m.ndim == 1 or m.nbytes <= LEAST * PAGE)


def _pages(m: Any) -> Span | None:
    """The whole pages of a long array."""
    long = isinstance(m, np.ndarray) and m.ndim == 2
    return inner_pages(m.ctypes.data, m.ctypes.data + m.nbytes) if long else None


def _pinned(tensors: list[Tensor]) -> bool:
    """Whether a device may write them behind the kernel's back."""
    return torch.cuda.is_initialized() and any(t.is_pinned() for t in tensors)


def _edges(m: Any, pages: Span) -> list[Any]:
    """What lies before and behind an array's whole pages."""
    flat, start = m.reshape(-1).view(np.uint8), m.ctypes.data
    return [flat[: pages[0] - start], flat[pages[1] - start :]]


def _digest(m: Any) -> Any:
    """What an array holds, surely: read when something may have been written."""
    array: Any = m  # arrays are buffers, though their types do not say so
    return hashlib.sha256(array).digest() if isinstance(m, np.ndarray) else _sum(m)


def _sum(m: Any) -> Any:
    """A long array as the sums of its columns: at the speed of memory."""
    return np.add.reduce(m, axis=0).tobytes() if isinstance(m, np.ndarray) else m.sum(0).tolist()
