"""Runs a graph for many states of many images: a prefix is computed once, suffixes run together in bounded batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from unstride.capture import Graph, run_nodes, tolerance
from unstride.errors import CaptureError, OptionError
from unstride.movers import Batch, Rows
from unstride.segments import Cutter, Segment, _bytes, as_it_is, batch_of
from unstride.states import Selection, State
from unstride.subsampling import Subsampling

CHUNK = 32 << 20  # on a CPU larger chunks are slower: pages of big tensors are given back and fetched at every op
Request = tuple[int, State]  # (image, state)
Key = tuple[int, tuple[Selection, ...]]  # image and the selections up to a level: a node of the prefix trie


class Engine:
    """`engine.start(images)` runs the plain network once; `run.add([(image, state), ...])` goes on from there.

    `taps` are the nodes whose values are wanted for every state, `plain` those wanted for the plain network only.
    `max_bytes` bounds the working memory of a chunk of rows; results do not depend on it.
    """

    def __init__(
        self,
        graph: Graph,
        found: Subsampling,
        taps: Sequence[Node],
        plain: Sequence[Node] = (),
        max_bytes: int = 256 << 20,
        run_segment: Callable[[nn.Module], nn.Module] = as_it_is,
    ) -> None:
        if max_bytes < 1:
            raise OptionError(f"max_bytes: got {max_bytes}, wanted a positive number of bytes")
        self.graph, self.found, self.taps, self.plain = graph, found, tuple(taps), tuple(plain)
        self.chunk_bytes = min(max_bytes, CHUNK) if graph.device.type == "cpu" else max_bytes
        self.cutter = Cutter(graph, found, run_segment)
        self.depth = len(found.layers)
        levels = range(self.depth + 1)
        self.as_trained = [self.cutter.segment(k, [*taps, *plain], moved=False) for k in levels]
        self.moved = [self.cutter.segment(k, taps, moved=True) for k in levels]
        self.plain_bytes = max(s.bytes for s in self.as_trained)
        kept = [n for s in [*self.as_trained, *self.moved] for n in [*s.inputs, *s.outputs]]
        self.batches = {n: batch_of(n) for n in dict.fromkeys([*kept, *taps, *plain])}

        self._check_rows()
        self.roots = sorted({found.level[tap] for tap in taps})
        self.needs = [sorted({found.level[n] for n in s.inputs if n is not graph.image}) for s in self.moved]

    def _check_rows(self) -> None:
        """A kept value must hold image after image along its batch dimension; where that is not plain, look."""
        doubtful = {n: b for n, b in self.batches.items() if b != Batch(0, 1)}
        if not doubtful:
            return
        graph = self.graph
        noise = torch.randn(2, graph.channels, *graph.size, generator=torch.Generator().manual_seed(0))
        images = noise.to(graph.device, graph.dtype)
        with torch.no_grad():
            both = {n: value for n, value in run_nodes(graph, images) if n in doubtful}
            for n, value in run_nodes(graph, images[1:]):
                if n in doubtful:
                    b = doubtful[n]
                    second = both[n].narrow(b.dim, b.factor, b.factor)
                    scale = value.abs().amax().clamp(min=1e-6)
                    if not (second - value).abs().amax() <= 50 * tolerance(value.dtype) * scale:
                        raise CaptureError(
                            f"{n.name} lies where a layer is cut, and mixes the images of a batch in dimension {b.dim} "
                            f"of {tuple(value.shape)}: the model cannot be cut there. Leave that layer out, or rewrite "
                            "the op so that each image keeps its rows together."
                        )

    def closed(self, levels: Iterable[int]) -> set[int]:
        """`levels`, and those that later levels read besides them (the skips of a U-Net)."""
        kept = set(levels)
        return kept | {low for k in kept for later in self.needs[k + 1 :] for low in later if low <= k}

    def read_once(self, level: int) -> bool:
        """Whether only the next level reads this one: no skip, and nothing that the caller wants."""
        return level not in self.roots and not any(level in needs for needs in self.needs[level + 2 :])

    def batch(self, node: Node) -> Batch:
        return self.batches[node]

    def start(self, images: Tensor) -> "Run":
        return Run(self, images)

    def prefix_bytes(self, layers: Iterable[int], budget: int) -> int:
        """The most that the stored prefixes of one image take in a search of these layers."""
        layers, total, prefixes = set(layers), 0, 1
        for level in range(self.depth):
            if level in layers:
                rate = self.found.layers[level - 1].rate
                prefixes = min(budget, prefixes * rate[0] * rate[1])
            if level + 1 in layers:
                shapes = [self.found.trace.shapes[n] for n in self.moved[level].outputs]
                total += prefixes * sum(_bytes(shape, self.graph.dtype) for shape in shapes)
        return total

    def level_macs(self, level: int) -> int:
        """MACs of one more prefix at this level: the weight of a trie node."""
        return self.moved[level].macs

    def trie_macs(self, states: Iterable[State]) -> int:
        """MACs of a set of states of one image by its prefix trie: the floor, counted without running anything."""
        states = list(states)
        return sum(len({s.selections[:k] for s in states}) * self.level_macs(k) for k in range(self.depth + 1))


@dataclass(eq=False)
class Block:
    """Values of one chunk of trie nodes at one level."""

    values: dict[Node, Tensor]


@dataclass(eq=False)
class Run:
    """What has been computed so far for a batch of images. `macs` counts the work of each image."""

    engine: Engine
    images: Tensor
    macs: list[int] = field(default_factory=list)
    plain: dict[Node, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, depth = self.images.shape[0], self.engine.depth
        self.macs = [0] * n
        self.stored: list[dict[Key, tuple[Block, int]]] = [{} for _ in range(depth + 1)]
        self.limit: dict[int, int] = {}
        zero = State.zero(depth)
        self.children = [dict.fromkeys([(i, zero.selections[:k]) for i in range(n)], 1) for k in range(depth)]
        for level in range(depth + 1):
            keys: list[Key] = [(i, zero.selections[:level]) for i in range(n)]
            self._level(level, keys, [zero] * n, self.engine.as_trained[level])
        for v in dict.fromkeys([*self.engine.taps, *self.engine.plain]):
            level = self.engine.found.level[v]
            places = tuple(self._place(v, level, (i, zero.selections[:level])) for i in range(n))
            self.plain[v] = Rows(places, self.engine.batch(v)).gather()

    def keep(self, levels: Iterable[int]) -> None:
        """Forget stored prefixes of other levels: only what follows a kept level can go on without recomputing."""
        kept = self.engine.closed(levels)
        for level in range(1, len(self.stored)):
            if level not in kept:
                self.stored[level].clear()

    def add(self, requests: Sequence[Request], keep: Iterable[int] | None = None) -> tuple[Tensor, ...]:
        """Values of the taps for each (image, state), in order: one tensor (len(requests), ...) per tap.

        `keep`: levels whose prefixes later requests will start from (all by default).
        """
        engine, depth = self.engine, self.engine.depth
        kept = set(range(depth + 1)) if keep is None else engine.closed(keep)
        todo: list[dict[Key, State]] = [{} for _ in range(depth + 1)]
        for image, state in requests:
            if not 0 <= image < len(self.macs):
                raise OptionError(f"image {image}: this run has {len(self.macs)} images")
            engine.found.space.parse(state)
            open_levels = list(engine.roots)
            while open_levels:
                level = open_levels.pop()
                key = (image, state.selections[:level])
                if key not in self.stored[level] and key not in todo[level]:
                    todo[level][key] = state
                    open_levels += engine.needs[level]
        for level in range(1, depth + 1):
            keys = sorted(todo[level], key=lambda key: (key[1], key[0]))  # rows that move alike lie together
            if keys:
                self._level(level, keys, [todo[level][k] for k in keys], engine.moved[level])
        out = []
        for tap in engine.taps:
            level = engine.found.level[tap]
            places = tuple(self._place(tap, level, (image, state.selections[:level])) for image, state in requests)
            out.append(Rows(places, engine.batch(tap)).gather())
        for level in range(1, depth + 1):
            if level not in kept:
                for key in todo[level]:
                    self.stored[level].pop(key, None)
        if keep is not None:
            self._forget_parents(todo)
        return tuple(out)

    def _forget_parents(self, todo: list[dict[Key, State]]) -> None:
        """A prefix that has had all its children will not be read again."""
        for level in range(1, self.engine.depth):
            rate = self.engine.found.layers[level].rate
            for image, path in todo[level + 1]:
                parent = (image, path[:level])
                count = self.children[level][parent] = self.children[level].get(parent, 0) + 1
                if count == rate[0] * rate[1] and self.engine.read_once(level):
                    self.stored[level].pop(parent, None)

    # -- one level
    def _level(self, level: int, keys: list[Key], states: list[State], segment: Segment) -> None:
        for image, _ in keys:
            self.macs[image] += segment.macs
        done = 0
        # No more than the plain network needs for these images, so that memory does not grow with the states.
        room = min(self.engine.chunk_bytes, len(self.macs) * self.engine.plain_bytes)
        chunk = self.limit.get(level) or max(1, room // segment.bytes)
        while done < len(keys):
            part = slice(done, min(done + chunk, len(keys)))
            try:
                outputs = self._chunk(level, keys[part], states[part], segment)
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error) or chunk == 1:
                    raise
                chunk = self.limit[level] = max(1, min(chunk, len(keys) - done) // 2)
                continue
            block = Block(dict(zip(segment.outputs, outputs, strict=True)))
            for row, key in enumerate(keys[part]):
                self.stored[level][key] = (block, row)
            done = part.stop

    def _chunk(self, level: int, keys: list[Key], states: list[State], segment: Segment) -> tuple[Tensor, ...]:
        values: list[Tensor | Rows] = []
        for n in segment.inputs:
            source_level = self.engine.found.level[n]
            places = tuple(self._place(n, source_level, (image, path[:source_level])) for image, path in keys)
            rows = Rows(places, self.engine.batch(n))
            values.append(rows if n in segment.lazy else rows.gather())
        with torch.no_grad():
            return segment(len(keys), states, values)

    def _place(self, n: Node, level: int, key: Key) -> tuple[Tensor, int]:
        if n is self.engine.graph.image:
            return self.images, key[0]
        block, row = self.stored[level][key]
        return block.values[n], row


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "out of memory" in text or "allocate memory" in text or "defaultcpuallocator" in text
    )


__all__ = ["Engine", "Request", "Run"]
