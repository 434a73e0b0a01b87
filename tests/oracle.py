"""An independent referee: runs the user's eager model from the image for one state, moving strided ops by itself.

It knows nothing of graphs. It watches the ops of an ordinary forward pass, and computes each op that is told to move as
the stride-1 op followed by `[R n + s]`, for any number of axes and for s below 0, too. It remembers which layer has
moved every map, and how far in image pixels, so that a map that was moved less goes along where the two meet (skips of
a U-Net).
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
Selection = tuple[int, ...]
Place = tuple[str, str, int]  # module path, kind of op, how many such ops ran in that module before


class NoOracle(Exception):
    """The referee does not know how to move this op."""


@dataclass
class Moved:
    """How far each layer has moved a map (pixels) and how far its cells lie apart, per axis."""

    spacing: tuple[float, ...]
    by: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def on(self, layer: int | None, s: Selection, rate: Sequence[float]) -> "Moved":
        """Where a map lies that was read s cells later and thinned out."""
        spacing = tuple(t * r for t, r in zip(self.spacing, rate, strict=True))
        if layer is None:
            return Moved(spacing, self.by)
        before = self.by.get(layer, (0.0,) * len(s))
        here = tuple(b + k * t for b, k, t in zip(before, s, self.spacing, strict=True))
        return Moved(spacing, {**self.by, layer: here})


@dataclass
class Modules:
    """Keeps the path of the module that is running."""

    model: nn.Module
    stack: list[str] = field(default_factory=lambda: [""])

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        handles = []
        for path, module in self.model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(lambda m, a, path=path: self.stack.append(path)))
                handles.append(module.register_forward_hook(lambda m, a, o: self._pop(), always_call=True))
        try:
            yield
        finally:
            for h in handles:
                h.remove()

    def _pop(self) -> None:
        self.stack.pop()


class Pads(TorchFunctionMode):
    """Remembers what F.pad padded with values of the map itself, for such a pad goes on beyond its own end."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.pad or func is torch.nn.functional.pad:
            bound = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
            if bound.get("mode", "constant") != "constant":
                self.known[out] = (bound["input"], tuple(bound["pad"]), bound["mode"])
        return out


def move(x: Tensor, s: Sequence[int], dims: Sequence[int], edge: bool = False) -> Tensor:
    """x[n + s], zeros (or the edge) where that is beyond an end."""
    for d, k in zip(dims, s, strict=True):
        if k:
            size = x.shape[d]
            last = size - 1 if k > 0 else 0
            fill = x.narrow(d, last, 1) if edge else torch.zeros_like(x.narrow(d, 0, 1))
            index = torch.arange(size) + k
            inside = (index >= 0) & (index < size)
            shape = [-1 if i == d else 1 for i in range(x.ndim)]
            x = torch.where(inside.view(shape), x.index_select(d, index.clamp(0, size - 1)), fill)
    return x


class Mover(TorchDispatchMode):
    def __init__(self, modules: Modules, pads: Pads, layer_of: dict[Place, int], state: Any) -> None:
        super().__init__()
        self.modules, self.pads, self.layer_of, self.state = modules, pads, layer_of, state
        self.seen: Counter[tuple[str, str]] = Counter()
        self.used: set[Place] = set()
        self.moved: Any = WeakIdKeyDictionary()
        self.batch, self.axes, self.hooked = 1, 2, set[str]()  # hooked: modules whose input is moved, see moving_inputs
        self.size: tuple[int, ...] = ()  # of the image

    # -- which selection an op has
    def pick(self, kind: str, stride: Sequence[int] = ()) -> tuple[int | None, Selection]:
        """The layer of the op that is about to run, None if it has none, and its selection there: nothing along axes
        that the op itself does not thin out.
        """
        path = self.modules.stack[-1]
        place = (path, kind, self.seen[path, kind])
        self.seen[path, kind] += 1
        if place not in self.layer_of:
            return None, (0,) * self.axes
        self.used.add(place)
        layer = self.layer_of[place]
        s = self.state.selections[layer - 1]
        thins = [r > 1 for r in list(stride)[-len(s) :]] or [True] * len(s)
        return layer, tuple(k if on else 0 for k, on in zip(s, thins, strict=True))

    def where(self, x: Any) -> Moved:
        return self.moved.get(x) or Moved((1.0,) * self.axes)

    @property
    def dims(self) -> range:
        return range(2, 2 + self.axes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        special = {
            aten.convolution: self.conv,
            aten.max_pool2d_with_indices: self.max_pool,
            aten.max_pool2d: self.max_pool,
            aten.max_pool3d_with_indices: self.max_pool,
            aten.max_pool3d: self.max_pool,
            aten.avg_pool2d: self.avg_pool,
            aten.avg_pool3d: self.avg_pool,
            aten.slice: self.slice,
            aten.pixel_unshuffle: self.unshuffle,
            aten.view: self.split,
            aten._unsafe_view: self.split,
        }
        if packet in special:
            return special[packet](func, args, kwargs)
        if "upsample" in str(packet):
            return self.resize(func, args, kwargs)
        if packet in (
            aten.add,
            aten.add_,
            aten.mul,
            aten.mul_,
            aten.sub,
            aten.cat,
            aten.stack,
            aten.maximum,
            aten.minimum,
        ):
            args = self.meet(args)
        out = func(*args, **kwargs)
        self.inherit(out, args)
        return out

    def inherit(self, out: Any, args: Any) -> None:
        """A result lies where the input lies that most layers have moved; a value without an extent lies nowhere."""
        known = [self.moved[t] for t in _tensors(args) if t in self.moved]
        best = max(known, key=lambda m: len(m.by), default=None)
        for t in _tensors([out]):
            if best is not None and self.extends(t):
                self.moved[t] = best

    def extends(self, t: Tensor) -> bool:
        """Not a vector per image; (B * N, C) is what a linear layer makes of tokens (B, N, C)."""
        if t.ndim == 2:
            return t.shape[0] > self.batch
        return t.ndim > 2 and not (t.ndim == 2 + self.axes and set(t.shape[2:]) == {1})

    def meet(self, args: Any) -> Any:
        maps = [t for t in _tensors(args) if t in self.moved and t.ndim == 2 + self.axes]
        if len({t.shape[2:] for t in maps}) > 1:
            return args
        if not maps:  # levels of a pyramid, one after the other in a sequence
            maps = [t for t in _tensors(args) if t in self.moved and t.ndim == 3 and self.cells(t)]
        if len(maps) < 2:
            return args
        union = {layer: by for t in maps for layer, by in self.where(t).by.items()}
        swap: Any = WeakIdKeyDictionary()
        for t in maps:
            here = self.where(t)
            missing = [by for layer, by in union.items() if layer not in here.by]
            cells = [sum(by[a] for by in missing) / here.spacing[a] for a in range(self.axes)]
            if any(cells):
                if any(c != round(c) for c in cells):
                    raise NoOracle(f"maps that meet are {cells} cells apart")
                swap[t] = self.along(t, [round(c) for c in cells])
                self.moved[swap[t]] = Moved(here.spacing, union)
        return _swap(args, swap)

    def cells(self, t: Tensor) -> tuple[int, ...] | None:
        """How many cells tokens (B, N, C) are along each axis, if they are a whole map, row by row."""
        size = tuple(round(n / r) for n, r in zip(self.size, self.where(t).spacing, strict=True))
        return size if math.prod(size) == t.shape[1] else None

    def along(self, t: Tensor, s: Sequence[int]) -> Tensor:
        """A map, or tokens, moved by whole cells."""
        if t.ndim == 2 + self.axes:
            return move(t, s, self.dims)
        return move(t.unflatten(1, self.cells(t)), s, range(1, 1 + self.axes)).flatten(1, self.axes)

    def place(self, out: Tensor, x: Tensor, layer: int | None, s: Selection, rate: Sequence[float]) -> None:
        if x not in self.moved:  # where it lies was lost on the way, so it cannot be said to lie elsewhere than others
            return
        if out.ndim < 2 + self.axes or (set(out.shape[2:]) == {1} and max(rate) > 1):
            return
        self.moved[out] = self.where(x).on(layer, s, rate)

    # -- op by op
    def conv(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, weight, bias, stride, padding, dilation, transposed, extra, groups = args
        if x.ndim != 2 + self.axes or transposed:
            out = func(*args, **kwargs)
            if x.ndim == 2 + self.axes:
                self.place(out, x, None, (0,) * self.axes, [1 / r for r in stride])
            else:
                self.inherit(out, args[:1])
            return out
        layer, s = self.pick("conv", stride) if max(stride) > 1 else (None, (0,) * self.axes)
        out = func(*args, **kwargs)
        if any(s):
            more = [r - 1 for r in stride]
            source, pads, mode = self.pads.known[x] if x in self.pads.known else (x, [0] * 2 * self.axes, "constant")
            lows, highs = list(pads[-2::-2]), list(pads[-1::-2])
            wide = [(low + m, high + m) for low, high, m in zip(lows, highs, more, strict=True)]
            far = far_pad(source, wide, mode)
            dense = func(far, weight, bias, [1] * self.axes, padding, dilation, transposed, extra, groups)
            # contiguous, as an op's result is: views of it must be views in the model, too
            out = thinned(dense, [m + k for m, k in zip(more, s, strict=True)], stride, out.shape[2:])
        self.place(out, x, layer, s, stride)
        return out

    def _along(self, x: Tensor, s: Selection) -> Selection:
        """A selection for the dims of a pool: on signals, torch pools (B, C, 1, L)."""
        return (*[0] * (x.ndim - 2 - len(s)), *s)

    def max_pool(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, size, stride, padding, dilation, _ = _defaults(args, [None, None, [], 0, 1, False])
        n = x.ndim - 2
        size, padding, dilation = _each(size, n), _each(padding, n), _each(dilation, n)
        stride = _each(stride or size, n)
        out = func(*args, **kwargs)
        layer, s = self.pick("max_pool", stride) if max(stride) > 1 else (None, (0,) * self.axes)
        first = out[0] if isinstance(out, tuple) else out
        if any(s):
            wide = []
            for a in range(n):
                end = first.shape[2 + a] * stride[a] + stride[a] + dilation[a] * (size[a] - 1)
                wide.append((padding[a] + stride[a] - 1, max(end - x.shape[2 + a] - padding[a], 0)))
            sides = [side for pair in reversed(wide) for side in pair]
            # a window beyond the map says what the nearest cell does, all others do not see the difference
            far = F.pad(x, sides, mode="replicate") if set(dilation) == {1} else F.pad(x, sides, value=float("-inf"))
            pool: Any = F.max_pool2d if n == 2 else F.max_pool3d
            dense = pool(far, size, 1, 0, dilation)
            starts = [r - 1 + k for r, k in zip(stride, self._along(x, s), strict=True)]
            first = thinned(dense, starts, stride, first.shape[2:])
            out = (first, out[1]) if isinstance(out, tuple) else first
        self.place(first, x, layer, s, stride[-self.axes :])
        return out

    def avg_pool(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, size, stride, padding, _, counted, divisor = _defaults(args, [None, None, [], 0, False, True, None])
        n = x.ndim - 2
        size, padding = _each(size, n), _each(padding, n)
        stride = _each(stride or size, n)
        out = func(*args, **kwargs)
        layer, s = self.pick("avg_pool", stride) if max(stride) > 1 else (None, (0,) * self.axes)
        if any(s):
            along = self._along(x, s)
            axes = [
                axis_windows(x.shape[2 + a], out.shape[2 + a], size[a], stride[a], padding[a], along[a], counted)
                for a in range(n)
            ]
            out = torch.zeros_like(out)
            for cell in itertools.product(*(range(k) for k in out.shape[2:])):
                windows = [axes[a][i] for a, i in enumerate(cell)]
                total = x[(..., *(slice(*inside) for inside, _ in windows))].flatten(2).sum(2)
                out[(..., *cell)] = total / (divisor or math.prod(count for _, count in windows))
        self.place(out, x, layer, s, stride[-self.axes :])
        return out

    def slice(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, dim, _, _, step = _defaults(args, [None, 0, None, None, 1])
        if step == 1:
            out = func(*args, **kwargs)
            self.inherit(out, args)
            return out
        layer, s = self.pick("slice")
        axis = self.axis_of(x, dim % x.ndim)
        amount = tuple(k if a == axis else 0 for a, k in enumerate(s))
        args = (move(x, amount[axis : axis + 1], (dim,)), *args[1:])
        out = func(*args, **kwargs)
        self.place(out, x, layer, amount, [step if a == axis else 1 for a in range(self.axes)])
        return out

    def axis_of(self, x: Tensor, dim: int) -> int:
        """Which axis a dimension is: of channels first or last, whichever looks more like the image."""
        cells = [n / t for n, t in zip(self.size, self.where(x).spacing, strict=True)]
        firsts = [k for k in (2, 1) if 0 <= dim - k < self.axes and k + self.axes <= x.ndim]
        return dim - min(firsts, key=lambda k: sum(abs(x.shape[k + a] - n) for a, n in enumerate(cells)), default=dim)

    def split(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view (B, C, H, W) -> (B, C, H / k, k, W / k, k), or with channels last: patches are merged here."""
        x, shape = args[0], [int(v) for v in args[1]]
        path = self.modules.stack[-1]
        out = func(*args, **kwargs)
        self.inherit(out, args)
        if (path, "merge", self.seen[path, "merge"]) not in self.layer_of or path in self.hooked:
            return out
        n = self.axes
        for y in (1, 2):  # where the spatial dims begin
            cut, rest = out.shape[y : y + 2 * n], x.shape[y + n :]
            if x.ndim == 2 + n and len(shape) == 2 + 2 * n and out.shape == (*x.shape[:y], *cut, *rest):
                layer, s = self.pick("merge")
                out = func(move(x, s, range(y, y + n)).contiguous(), *args[1:], **kwargs)
                self.moved[out] = self.where(x).on(layer, s, cut[1::2])
                break
        return out

    def unshuffle(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, r = args
        layer, s = self.pick("merge")
        out = func(move(x, s, self.dims), r)
        self.place(out, x, layer, s, [r] * self.axes)
        return out

    def resize(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        layer, s = self.pick("resize")
        out = func(move(x, s, self.dims, edge=True), *args[1:], **kwargs)
        ratio = [x.shape[d] / out.shape[d] for d in self.dims]
        self.place(out, x, layer, s, [round(r) if r >= 1 else 1 / round(1 / r) for r in ratio])
        return out


def thinned(dense: Tensor, starts: Sequence[int], stride: Sequence[int], size: Sequence[int]) -> Tensor:
    """dense[start + R n] for as many cells as the op gives."""
    for d, (start, r, count) in enumerate(zip(starts, stride, size, strict=True), 2):
        index = start + r * torch.arange(count)
        assert int(index[-1]) < dense.shape[d]
        dense = dense.index_select(d, index)
    return dense.contiguous()


def far_pad(x: Tensor, pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """F.pad that may reflect (wrap) more than it is allowed to: by index, one by one."""
    if mode == "constant":
        return F.pad(x, [side for pair in reversed(pads) for side in pair])
    for d, (low, high) in enumerate(pads, 2):
        n = x.shape[d]
        index = []
        for i in range(-low, n + high):
            if mode == "circular":
                i %= n
            elif mode == "reflect" and n > 1:
                i = abs(i)
                i = 2 * (n - 1) - i if i >= n else i
            index.append(min(max(i, 0), n - 1))
        x = x.index_select(d, torch.tensor(index))
    return x


def axis_windows(
    n: int, out: int, size: int, stride: int, padding: int, s: int, counted: bool
) -> list[tuple[tuple[int, int], int]]:
    """For each output cell: the range of real elements in its window, and how many elements its mean is over."""
    found = []
    for i in range(out):
        start = i * stride - padding + s
        end = start + size
        inside = (min(max(start, 0), n), max(min(end, n), 0))
        # the far border moves with the state, so that s = 0 is torch's rule
        count = min(end, n + padding + max(s, 0)) - start if counted else inside[1] - inside[0]
        found.append(((inside[0], max(inside)), max(count, 1)))
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _swap(value: Any, swap: Any) -> Any:
    if isinstance(value, Tensor):
        return swap.get(value, value)
    if isinstance(value, list | tuple):
        return type(value)(_swap(v, swap) for v in value)
    return value


def _defaults(args: Any, defaults: list[Any]) -> list[Any]:
    return [*args, *defaults[len(args) :]]


def _each(v: Any, n: int) -> list[int]:
    v = [v] if isinstance(v, int) else list(v)
    return v * n if len(v) == 1 else v


@contextlib.contextmanager
def moving_inputs(model: nn.Module, layer_of: dict[Place, int], state: Any, mover: "Mover") -> Iterator[None]:
    """Modules that merge 2x2 patches by reshaping: their input is moved, zeros at the far end."""
    handles: list[Any] = []
    after: dict[nn.Module, tuple[Moved, Any]] = {}
    modules = dict(model.named_modules())
    for place, layer in layer_of.items():
        path, kind, nth = place
        if kind != "merge" or path not in modules:
            continue
        module = modules[path]
        dims = merging_dims(module)
        if dims is None:
            continue
        mover.hooked.add(path)
        if nth:
            raise NoOracle(f"{path} merges patches {nth + 1} times")

        def hook(m: nn.Module, args: Any, place: Place = place, layer: int = layer, dims: Any = dims) -> Any:
            mover.used.add(place)
            s = state.selections[layer - 1]
            x = args[0]
            after[m] = mover.where(x).on(layer, s, [1] * mover.axes), x.shape
            return (move(even(x, dims), s, dims), *args[1:])

        def lies(m: nn.Module, args: Any, out: Any, dims: Any = dims) -> None:
            moved, before = after.pop(m)
            for t in _tensors([out]):
                if t.ndim == len(before):  # tokens lie where they lie; only maps are ever moved along
                    moved = moved.on(None, (), [-(-before[d] // t.shape[d]) for d in dims])
                mover.moved[t] = moved

        handles += [module.register_forward_pre_hook(hook), module.register_forward_hook(lies)]
    try:
        yield
    finally:
        for h in handles:
            h.remove()


def even(x: Tensor, dims: Sequence[int]) -> Tensor:
    """As the module would pad it by itself: what is moved back has its place there."""
    for d in dims:
        if x.shape[d] % 2:
            x = torch.cat([x, torch.zeros_like(x.narrow(d, 0, 1))], d)
    return x


def merging_dims(module: nn.Module) -> tuple[int, ...] | None:
    """The spatial dims of the input of modules that merge patches by a reshape."""
    name = type(module).__name__
    if name == "PatchMerging":  # timm's Swin: (B, H, W, C)
        return (1, 2)
    if name in ("SpaceToDepth", "Unfold"):
        return (2, 3)
    return getattr(module, "merges", None)  # toys say it themselves


def by_first_name(model: nn.Module, layer_of: dict[Place, int]) -> dict[Place, int]:
    """Modules that are registered twice (MONAI's DynUNet) by the name under which they are watched."""
    first: dict[int, str] = {}
    names = {path: first.setdefault(id(m), path) for path, m in model.named_modules(remove_duplicate=False)}
    found = {(names.get(path, path), kind, nth): layer for (path, kind, nth), layer in layer_of.items()}
    if len(found) < len(layer_of):
        raise NoOracle("a module has two names, and runs under both")
    return found


def run(model: nn.Module, images: Tensor, state: Any, layer_of: dict[Place, int]) -> Any:
    """What the model returns for `state`, where `layer_of` says which strided ops belong to which layer."""
    modules, pads, layer_of = Modules(model), Pads(), by_first_name(model, layer_of)
    mover = Mover(modules, pads, layer_of, state)
    with torch.no_grad(), moving_inputs(model, layer_of, state, mover), modules.watch(), pads, mover:
        mover.batch, mover.axes, mover.size = images.shape[0], images.ndim - 2, tuple(images.shape[2:])
        mover.moved[images] = Moved((1.0,) * mover.axes)
        out = model(images)
    missing = set(layer_of) - mover.used
    if missing:
        raise NoOracle(f"ops that the referee did not meet: {sorted(missing)[:3]}")
    return out
