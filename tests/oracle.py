"""An independent referee: runs the user's eager model from the image for one state, moving strided ops by itself.

It knows nothing of graphs. It watches the ops of an ordinary forward pass, and computes each op that is told to move as
the stride-1 op followed by `[R n + s]`. It remembers how far every map has been moved, in image pixels, so that a map
that was moved less goes along where the two meet (skips of a U-Net).
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
Place = tuple[str, str, int]  # module path, kind of op, how many such ops ran in that module before


class NoOracle(Exception):
    """The referee does not know how to move this op."""


@dataclass
class Moved:
    """How far a map has been moved (pixels) and how far its cells lie apart, per axis."""

    by: tuple[float, float] = (0.0, 0.0)
    spacing: tuple[float, float] = (1.0, 1.0)


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
            if bound.get("mode", "constant") != "constant" and len(bound["pad"]) == 4:
                self.known[out] = (bound["input"], tuple(bound["pad"]), bound["mode"])
        return out


def move(x: Tensor, s: tuple[int, int], dims: tuple[int, int], edge: bool = False) -> Tensor:
    """x[n + s], zeros (or the edge) beyond the far end."""
    for d, k in zip(dims, s, strict=True):
        if k:
            kept = x.narrow(d, min(k, x.shape[d]), max(x.shape[d] - k, 0))
            fill = x.narrow(d, x.shape[d] - 1, 1) if edge else torch.zeros_like(x.narrow(d, 0, 1))
            x = torch.cat([kept, *[fill] * (x.shape[d] - kept.shape[d])], d)
    return x


class Mover(TorchDispatchMode):
    def __init__(self, modules: Modules, pads: Pads, layer_of: dict[Place, int], state: Any) -> None:
        super().__init__()
        self.modules, self.pads, self.layer_of, self.state = modules, pads, layer_of, state
        self.seen: Counter[tuple[str, str]] = Counter()
        self.used: set[Place] = set()
        self.moved: Any = WeakIdKeyDictionary()
        self.batch, self.hooked = 1, set[str]()  # paths of modules whose input is moved, see moving_inputs
        self.last_slice = (-1, -1)

    # -- which selection an op has
    def pick(self, kind: str) -> tuple[int, int] | None:
        path = self.modules.stack[-1]
        place = (path, kind, self.seen[path, kind])
        self.seen[path, kind] += 1
        if place not in self.layer_of:
            return None
        self.used.add(place)
        y, x = self.state.selections[self.layer_of[place] - 1]
        return y, x

    def where(self, x: Any) -> Moved:
        return self.moved.get(x) or Moved()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        special = {
            aten.convolution: self.conv,
            aten.max_pool2d_with_indices: self.max_pool,
            aten.max_pool2d: self.max_pool,
            aten.avg_pool2d: self.avg_pool,
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
        """A result lies where the input lies that was moved farthest; a value without an extent lies nowhere."""
        known = [self.moved[t] for t in _tensors(args) if t in self.moved]
        best = max(known, key=lambda m: sum(m.by), default=None)
        for t in _tensors([out]):
            if best is not None and self.extends(t):
                self.moved[t] = best

    def extends(self, t: Tensor) -> bool:
        """Not a vector per image; (B * N, C) is what a linear layer makes of tokens (B, N, C)."""
        if t.ndim == 2:
            return t.shape[0] > self.batch
        return t.ndim > 2 and not (t.ndim == 4 and t.shape[2] == t.shape[3] == 1)

    def meet(self, args: Any) -> Any:
        maps = [t for t in _tensors(args) if t in self.moved and t.ndim == 4]
        if len(maps) < 2 or len({(t.shape[2], t.shape[3]) for t in maps}) > 1:
            return args
        far = tuple(max(self.where(t).by[a] for t in maps) for a in (0, 1))
        swap: Any = WeakIdKeyDictionary()
        for t in maps:
            here = self.where(t)
            cells = tuple((far[a] - here.by[a]) / here.spacing[a] for a in (0, 1))
            if any(cells):
                if any(c != round(c) for c in cells):
                    raise NoOracle(f"maps that meet are {cells} cells apart")
                swap[t] = move(t, (round(cells[0]), round(cells[1])), (2, 3))
                self.moved[swap[t]] = Moved((far[0], far[1]), here.spacing)
        return _swap(args, swap)

    def place(self, out: Tensor, x: Tensor, s: tuple[int, int], rate: tuple[float, float]) -> None:
        if x not in self.moved:  # where it lies was lost on the way, so it cannot be said to lie elsewhere than others
            return
        here = self.where(x)
        by = tuple(here.by[a] + s[a] * here.spacing[a] for a in (0, 1))
        if out.ndim != 4 or (out.shape[2] == 1 and out.shape[3] == 1 and max(rate) > 1):
            return
        self.moved[out] = Moved((by[0], by[1]), (here.spacing[0] * rate[0], here.spacing[1] * rate[1]))

    # -- op by op
    def conv(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, weight, bias, stride, padding, dilation, transposed, extra, groups = args
        if x.ndim != 4 or transposed:
            out = func(*args, **kwargs)
            if x.ndim == 4:
                self.place(out, x, (0, 0), (1 / stride[0], 1 / stride[1]))
            else:
                self.inherit(out, args[:1])
            return out
        s = self.pick("conv") if max(stride) > 1 else None
        out = func(*args, **kwargs)
        if s is not None and s != (0, 0):
            size = out.shape[2:]
            if x in self.pads.known:
                source, (left, right, top, bottom), mode = self.pads.known[x]
                wide = (left, right + stride[1] - 1, top, bottom + stride[0] - 1)
                x_far = far_pad(source, wide, mode)
            else:
                x_far = F.pad(x, (0, stride[1] - 1, 0, stride[0] - 1))
            dense = func(x_far, weight, bias, [1, 1], padding, dilation, transposed, extra, groups)
            # contiguous, as an op's result is: views of it must be views in the model, too
            out = dense[:, :, s[0] :: stride[0], s[1] :: stride[1]][:, :, : size[0], : size[1]].contiguous()
            assert out.shape[2:] == size
        self.place(out, x, s or (0, 0), tuple(stride))
        return out

    def max_pool(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, size, stride, padding, dilation, _ = _defaults(args, [None, None, [], [0, 0], [1, 1], False])
        size, padding, dilation = _pair(size), _pair(padding), _pair(dilation)
        stride = _pair(stride or size)
        out = func(*args, **kwargs)
        s = self.pick("max_pool") if max(stride) > 1 else None
        first = out[0] if isinstance(out, tuple) else out
        if s is not None and s != (0, 0):
            cells = first.shape[2:]
            more = [(cells[a] - 1) * stride[a] + stride[a] + dilation[a] * (size[a] - 1) for a in (0, 1)]
            y, z = (max(more[a] - x.shape[2 + a] - padding[a], 0) for a in (0, 1))
            dense = F.max_pool2d(
                F.pad(x, (padding[1], z, padding[0], y), value=float("-inf")), size, 1, 0, tuple(dilation)
            )
            first = dense[:, :, s[0] :: stride[0], s[1] :: stride[1]][:, :, : cells[0], : cells[1]].contiguous()
            assert first.shape[2:] == cells
            out = (first, out[1]) if isinstance(out, tuple) else first
        self.place(first, x, s or (0, 0), tuple(stride))
        return out

    def avg_pool(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, size, stride, padding, _, counted, divisor = _defaults(args, [None, None, [], [0, 0], False, True, None])
        size, padding = _pair(size), _pair(padding)
        stride = _pair(stride or size)
        out = func(*args, **kwargs)
        s = self.pick("avg_pool") if max(stride) > 1 else None
        if s is not None and s != (0, 0):
            rows, columns = (
                axis_windows(x.shape[2 + a], out.shape[2 + a], size[a], stride[a], padding[a], s[a], counted)
                for a in (0, 1)
            )
            out = torch.zeros_like(out)
            for i, ((a, b), height) in enumerate(rows):
                for j, ((c, d), width) in enumerate(columns):
                    total = x[:, :, a:b, c:d].sum((2, 3))
                    out[:, :, i, j] = total / (divisor or height * width)
        self.place(out, x, s or (0, 0), tuple(stride))
        return out

    def slice(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, dim, _, _, step = _defaults(args, [None, 0, None, None, 1])
        if step == 1:
            out = func(*args, **kwargs)
            self.inherit(out, args)
            return out
        s = self.pick("slice")
        dim %= x.ndim
        axis = 1 if dim == 3 or (dim == 2 and self.last_slice == (1, x.ndim)) else 0
        self.last_slice = (dim, x.ndim)
        amount = [0, 0]
        if s is not None and s[axis]:
            amount[axis] = s[axis]
            args = (move(x, (s[axis], 0), (dim, dim)), *args[1:])
        out = func(*args, **kwargs)
        self.place(out, x, (amount[0], amount[1]), (step, 1) if axis == 0 else (1, step))
        return out

    def split(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view (B, C, H, W) -> (B, C, H / k, k, W / k, k), or with channels last: patches are merged here."""
        x, shape = args[0], [int(v) for v in args[1]]
        path = self.modules.stack[-1]
        out = func(*args, **kwargs)
        self.inherit(out, args)
        if (path, "merge", self.seen[path, "merge"]) not in self.layer_of or path in self.hooked:
            return out
        for y in (1, 2):
            if (
                x.ndim == 4
                and len(shape) == 6
                and out.shape == (*x.shape[:y], *out.shape[y : y + 4], *x.shape[y + 2 :])
            ):
                s = self.pick("merge") or (0, 0)
                out = func(move(x, s, (y, y + 1)).contiguous(), *args[1:], **kwargs)
                here = self.where(x)
                by = (here.by[0] + s[0] * here.spacing[0], here.by[1] + s[1] * here.spacing[1])
                spacing = (here.spacing[0] * out.shape[y + 1], here.spacing[1] * out.shape[y + 3])
                self.moved[out] = Moved(by, spacing)
                break
        return out

    def unshuffle(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, r = args
        s = self.pick("merge") or (0, 0)
        out = func(move(x, s, (2, 3)), r)
        self.place(out, x, s, (r, r))
        return out

    def resize(self, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        s = self.pick("resize") or (0, 0)
        out = func(move(x, s, (2, 3), edge=True), *args[1:], **kwargs)
        ratio = [x.shape[2 + a] / out.shape[2 + a] for a in (0, 1)]
        ratio = [round(r) if r >= 1 else 1 / round(1 / r) for r in ratio]
        self.place(out, x, s, (ratio[0], ratio[1]))
        return out


def far_pad(x: Tensor, pads: tuple[int, ...], mode: str) -> Tensor:
    """F.pad that may reflect (wrap) more than it is allowed to: by index, one by one."""
    left, right, top, bottom = pads
    for d, low, high in ((2, top, bottom), (3, left, right)):
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
        count = min(end, n + padding + s) - start if counted else inside[1] - inside[0]
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


def _pair(v: Any) -> list[int]:
    v = [v] if isinstance(v, int) else list(v)
    return [v[0], v[-1]]


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
            here = mover.where(args[0])
            by = (here.by[0] + s[0] * here.spacing[0], here.by[1] + s[1] * here.spacing[1])
            after[m] = Moved(by, here.spacing), args[0].shape
            return (move(args[0], s, dims), *args[1:])

        def lies(m: nn.Module, args: Any, out: Any, dims: Any = dims) -> None:
            moved, before = after.pop(m)
            for t in _tensors([out]):
                if t.ndim == len(before):  # tokens lie where they lie; only maps are ever moved along
                    y, x = (moved.spacing[a] * -(-before[dims[a]] // t.shape[dims[a]]) for a in (0, 1))
                    moved = Moved(moved.by, (y, x))
                mover.moved[t] = moved

        handles += [module.register_forward_pre_hook(hook), module.register_forward_hook(lies)]
    try:
        yield
    finally:
        for h in handles:
            h.remove()


def merging_dims(module: nn.Module) -> tuple[int, int] | None:
    """Rows and columns of the input of modules that merge patches by a reshape."""
    name = type(module).__name__
    if name == "PatchMerging":  # timm's Swin: (B, H, W, C)
        return (1, 2)
    if name in ("SpaceToDepth", "Unfold"):
        return (2, 3)
    return getattr(module, "merges", None)  # toys say it themselves


def run(model: nn.Module, images: Tensor, state: Any, layer_of: dict[Place, int]) -> Any:
    """What the model returns for `state`, where `layer_of` says which strided ops belong to which layer."""
    modules, pads = Modules(model), Pads()
    mover = Mover(modules, pads, layer_of, state)
    with torch.no_grad(), moving_inputs(model, layer_of, state, mover), modules.watch(), pads, mover:
        mover.moved[images] = Moved()
        mover.batch = images.shape[0]
        out = model(images)
    missing = set(layer_of) - mover.used
    if missing:
        raise NoOracle(f"ops that the referee did not meet: {sorted(missing)[:3]}")
    return out
