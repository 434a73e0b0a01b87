"""Runs a graph for many states of many images: a prefix is computed once, suffixes run together in bounded batches."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from unstride.engine.movers import Batch, Rows
from unstride.engine.segments import Cutter, Segment, batch_of, tensor_bytes, unchanged
from unstride.errors import CaptureError, LessAtOnce, OptionError, is_out_of_memory
from unstride.geometry.layers import Subsampling
from unstride.geometry.states import Selection, State
from unstride.graph.capture import Graph, run_nodes
from unstride.graph.verify import gap, tolerance

CHUNK, TENSOR = 32 << 20, 20 << 20  # on a CPU larger ones are slower: pages are given back and fetched at every op
UNBOUNDED = 1 << 62  # bytes
TOGETHER = 512 << 20  # bytes that images which run together may take
Request = tuple[int, State]  # (image, state)
Key = tuple[int, tuple[Selection, ...]]  # image and the selections up to a level: a node of the prefix trie


class Engine:
    """`engine.start(images)` runs the base model once; `run.add([(image, state), ...])` continues from there.

    `taps` are the nodes whose values are wanted for every state, `plain` those wanted for the base model only.
    `pinned`: the edges of large maps stay where they are, see `geometry.edges`. The engine bounds its chunks itself
    and halves them when memory runs out; results do not depend on it.
    """

    def __init__(
        self,
        graph: Graph,
        found: Subsampling,
        taps: Sequence[Node],
        plain: Sequence[Node] = (),
        run_segment: Callable[[nn.Module], nn.Module] = unchanged,
        pinned: bool = False,
    ) -> None:
        self.graph, self.found, self.taps, self.plain = graph, found, tuple(taps), tuple(plain)
        on_cpu = graph.device.type == "cpu"
        self.chunk_bytes, self.tensor_bytes = (CHUNK, TENSOR) if on_cpu else (UNBOUNDED, UNBOUNDED)
        self.cutter = Cutter(graph, found, run_segment, pinned=pinned)
        self.depth = len(found.layers)
        levels = range(self.depth + 1)
        self.as_trained = [self.cutter.segment(k, [*taps, *plain], moved=False) for k in levels]
        self.moved = self.as_trained if not self.depth else [self.cutter.segment(k, taps, moved=True) for k in levels]
        # Rows that a level does not move need no new layout of operands, if the plain variant reads and gives alike.
        alike = [
            (a.inputs, a.outputs) == (m.inputs, m.outputs) for a, m in zip(self.as_trained, self.moved, strict=True)
        ]
        moves = [{k for s in found.shifts if found.level[s.node] == at for a in s.steps for k in a} for at in levels]
        self.moved_by = [layers if same else None for layers, same in zip(moves, alike, strict=True)]
        self.limit: dict[int, int] = {}  # rows of each level that fit, once memory ran out
        self.plain_bytes = max(s.bytes_as_cut for s in self.as_trained)
        sizes = [[tensor_bytes(self.cutter.shape(n), graph.dtype) for n in s.outputs] for s in self.moved]
        self.stored_bytes = [sum(level) for level in sizes]  # of one prefix at each level
        stored = [n for s in [*self.as_trained, *self.moved] for n in [*s.inputs, *s.outputs]]
        self.batches = {n: batch_of(n) for n in dict.fromkeys([*stored, *taps, *plain])}

        self._check_rows()
        self.roots = sorted({found.level[tap] for tap in taps})
        self.needs = [sorted({found.level[n] for n in s.inputs if n is not graph.image}) for s in self.moved]

        last = [max((j for j, low in enumerate(self.needs) if k in low), default=k) for k in levels]
        self.last_read_by = [{k for k in levels if last[k] == j and k not in self.roots} for j in levels]

    def _check_rows(self) -> None:
        """A stored value must have image after image along its batch dimension; where that is not obvious, test it."""
        unclear = {n: b for n, b in self.batches.items() if b != Batch(0, 1)}
        if not unclear:
            return
        graph = self.graph
        noise = torch.randn(2, graph.channels, *graph.size, generator=torch.Generator().manual_seed(0))
        images = noise.to(graph.device, graph.dtype)
        with torch.no_grad():
            both = {n: value for n, value in run_nodes(graph, images) if n in unclear}
            for n, value in run_nodes(graph, images[1:]):
                if n in unclear:
                    b = unclear[n]
                    second = both[n].narrow(b.dim, b.factor, b.factor)
                    if not gap(second, value) <= 50 * tolerance(value.dtype):
                        raise CaptureError(
                            f"{n.name} lies where a layer is cut, and mixes the images of a batch in dimension {b.dim} "
                            f"of {tuple(value.shape)}: the model cannot be cut there. Leave that layer out, or rewrite "
                            "the op so that each image keeps its rows together."
                        )

    def with_pinned_edges(self) -> "Engine":
        """The same, where the edges of large maps stay."""
        return Engine(self.graph, self.found, self.taps, self.plain, self.cutter.run_segment, pinned=True)

    def uncut(self) -> "Engine":
        """The same for the base model alone, in one piece, a few images at a time."""
        return Engine(self.graph, self.found.uncut(), self.taps, self.plain, self.cutter.run_segment)

    def closed(self, levels: Iterable[int]) -> set[int]:
        """`levels`, and those that later levels read besides them (the skips of a U-Net)."""
        kept = set(levels)
        return kept | {low for k in kept for later in self.needs[k + 1 :] for low in later if low <= k}

    def read_once(self, level: int) -> bool:
        """Whether only the next level reads this one: no skip, and nothing that the caller wants."""
        return level not in self.roots and not any(level in needs for needs in self.needs[level + 2 :])

    def variant(self, level: int, states: Iterable[State]) -> Segment:
        """What computes these states at this level: the base model's ops where the states move nothing there."""
        layers = self.moved_by[level]
        still = layers is not None and not any(any(s.selections[k - 1]) for s in states for k in layers)
        return (self.as_trained if still else self.moved)[level]

    def variants(self, level: int) -> tuple[Segment, ...]:
        """Whatever may compute states of this level."""
        return (self.moved[level],) if self.moved_by[level] is None else (self.moved[level], self.as_trained[level])

    def batch(self, node: Node) -> Batch:
        return self.batches[node]

    def start(self, images: Tensor) -> "EngineRun":
        return EngineRun(self, images)

    def prefix_bytes(self, layers: Iterable[int], budget: int) -> int:
        """About the most that the stored prefixes of one image take in a search of these layers."""
        layers = sorted(layers)

        def most(at: int, prefixes: int) -> int:
            """From layer `layers[at]` on; a prefix is forgotten once it has all its children."""
            if at == len(layers):
                return 0
            more = math.prod(self.found.layers[layers[at] - 1].rate) - 1
            all_that_fit = min(prefixes, -(-(budget - prefixes) // max(1, more)))
            return max(
                (prefixes - spread) * self.stored_bytes[layers[at] - 1]
                + most(at + 1, min(budget, prefixes + more * spread))
                for spread in {0, all_that_fit}
            )

        return most(0, 1)

    def images_at_once(self, layers: Iterable[int], budget: int, count: int | None = None) -> int:
        """How many images may be searched together: what they store is bounded, and takes at most twice what the base
        model needs for all `count` images.
        """
        stored = self.prefix_bytes(layers, budget)
        bound = TOGETHER if count is None else min(TOGETHER, 2 * count * self.plain_bytes)
        return max(1, bound // (stored + self.plain_bytes), (bound - self.chunk_bytes) // max(1, stored))

    def level_macs(self, level: int) -> int:
        """MACs of one more prefix at this level: the weight of a trie node."""
        return self.moved[level].macs

    def trie_macs(self, states: Iterable[State]) -> int:
        """MACs of a set of states of one image by its prefix trie: the floor, counted without running anything."""
        states = list(states)
        return sum(len({s.selections[:k] for s in states}) * self.level_macs(k) for k in range(self.depth + 1))


@dataclass(eq=False)
class EngineRun:
    """What has been computed so far for a batch of images. `macs` counts the work of each image."""

    engine: Engine
    images: Tensor
    macs: list[int] = field(default_factory=list)
    plain: dict[Node, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine, n, depth = self.engine, self.images.shape[0], self.engine.depth
        self.macs = [0] * n
        # A chunk takes no more than the base model needs for these images: memory does not grow with the states. Of
        # volumes it may take two: torch has only a slow kernel for one.
        least = 2 if len(engine.graph.size) == 3 else 1
        self.chunk_bytes = min(engine.chunk_bytes, max(n, least) * engine.plain_bytes)
        self.store = Store(depth, engine.batches)
        self.children: dict[Key, set[Key]] = {}
        zero = State.zero(depth, len(engine.graph.size))
        for level in range(depth + 1):
            keys: list[Key] = [(i, zero.selections[:level]) for i in range(n)]
            self._level(level, keys, [zero] * n, plain=True)
        self._count_children((i, zero.selections[:k]) for i in range(n) for k in range(1, depth + 1))
        for v in dict.fromkeys([*engine.taps, *engine.plain]):
            self.plain[v] = self._rows(v, [(i, zero) for i in range(n)]).gather()

    def keep(self, levels: Iterable[int]) -> None:
        """Forget stored prefixes of other levels: only what follows a kept level can go on without recomputing."""
        kept = self.engine.closed(levels)
        for level in range(1, self.engine.depth + 1):
            if level not in kept:
                self.store.forget(level, list(self.store.levels[level]))

    def add(self, requests: Sequence[Request], keep: Iterable[int] | None = None) -> tuple[Tensor, ...]:
        """Values of the taps for each (image, state), in order: one tensor (len(requests), ...) per tap.

        `keep`: levels whose prefixes later requests will start from (all by default).
        """
        engine = self.engine
        for image, state in requests:
            if not 0 <= image < len(self.macs):
                raise OptionError(f"image {image}: this run has {len(self.macs)} images")
            if engine.depth:
                engine.found.space.parse(state)
            elif not state.plain:
                raise OptionError(f"state {state}: this engine computes only the base model")
        passing = set() if keep is None else {*range(1, engine.depth + 1)} - engine.closed(keep)
        todo = self._missing(requests)
        for level in range(1, engine.depth + 1):
            keys = sorted(todo[level], key=lambda key: (key[1], key[0]))  # rows that move alike lie together
            if keys:
                self._level(level, keys, [todo[level][k] for k in keys])
            for done in passing & engine.last_read_by[level]:
                self.store.forget(done, todo[done])
            if keep is not None:
                self._forget_parents(level - 1, keys)
        out = tuple(self._rows(tap, requests).gather() for tap in engine.taps)
        for level in passing:
            self.store.forget(level, todo[level])
        return out

    def _missing(self, requests: Sequence[Request]) -> list[dict[Key, State]]:
        """What must be computed at each level."""
        todo: list[dict[Key, State]] = [{} for _ in range(self.engine.depth + 1)]
        for image, state in requests:
            open_levels = list(self.engine.roots)
            while open_levels:
                level = open_levels.pop()
                key = (image, state.selections[:level])
                if (level, key) not in self.store and key not in todo[level]:
                    todo[level][key] = state
                    open_levels += self.engine.needs[level]
        return todo

    def _count_children(self, made: Iterable[Key]) -> None:
        for image, path in made:
            self.children.setdefault((image, path[:-1]), set()).add((image, path))

    def _forget_parents(self, level: int, children: list[Key]) -> None:
        """A prefix that has had all its children will not be read again."""
        self._count_children(children)
        if level > 0 and self.engine.read_once(level):
            count = math.prod(self.engine.found.layers[level].rate)
            parents = dict.fromkeys((image, path[:level]) for image, path in children)
            self.store.forget(level, [p for p in parents if len(self.children[p]) == count])

    # -- one level
    def _rows_at_once(self, variants: Sequence[Segment]) -> int:
        fit = self.chunk_bytes // max(s.bytes for s in variants)
        return max(1, min(fit, self.engine.tensor_bytes // max(1, *(s.largest for s in variants))))

    def _level(self, level: int, keys: list[Key], states: list[State], plain: bool = False) -> None:
        variants = (self.engine.as_trained[level],) if plain else self.engine.variants(level)
        for image, _ in keys:
            self.macs[image] += variants[0].macs
        done = 0
        limit = self.engine.limit
        chunk = limit.get(level) or self._rows_at_once(variants)
        while done < len(keys):
            part = slice(done, done + chunk)
            requests = [(image, state) for (image, _), state in zip(keys[part], states[part], strict=True)]
            variant = variants[0] if plain else self.engine.variant(level, states[part])
            rows = {n: self._rows(n, requests) for n in variant.inputs}
            if variant is self.engine.as_trained[level]:
                together = min((r.together for r in rows.values()), default=len(requests))
                if together * variant.largest >= self.engine.tensor_bytes // 3:  # enough rows: rather fewer than a copy
                    requests = requests[:together]
                elif together < len(requests) and not plain:
                    variant = self.engine.moved[level]  # copies too, but frees each operand after its use
            try:
                outputs = self._chunk(requests, rows, variant)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or len(requests) == 1:
                    raise
                if not limit:  # said once
                    what = (
                        f"out of memory on {self.images.device} with {len(requests)} rows at once; goes on with fewer"
                    )
                    warnings.warn(LessAtOnce(what), stacklevel=2)
                chunk = limit[level] = max(1, len(requests) // 2)
                continue
            end = done + len(requests)
            self.store.put(level, keys[done:end], dict(zip(variant.outputs, outputs, strict=True)))
            del outputs
            done = end

    def _chunk(self, requests: list[Request], rows: dict[Node, Rows], segment: Segment) -> tuple[Tensor, ...]:
        some = {n: Rows(r.places[: len(requests)], r.batch) for n, r in rows.items()}
        values = [some[n] if n in segment.lazy else some[n].gather() for n in segment.inputs]
        with torch.no_grad():
            return segment.module(len(requests), [state for _, state in requests], *values)

    def _rows(self, n: Node, requests: Sequence[Request]) -> Rows:
        engine = self.engine
        if n is engine.graph.image:
            return Rows(tuple((self.images, image) for image, _ in requests), engine.batch(n))
        level = engine.found.level[n]
        places = (self.store.place(level, (image, state.selections[:level]), n) for image, state in requests)
        return Rows(tuple(places), engine.batch(n))


@dataclass(eq=False)
class _Block:
    """Values of some trie nodes of one level; `keys` names the row of each that is still wanted."""

    values: dict[Node, Tensor]
    keys: dict[Key, int]
    rows: int


class Store:
    """`store.put(level, keys, values)`, then `store.place(level, key, node)` -> (tensor, row).

    Rows that were computed together are not forgotten together, so a tensor is copied into a smaller one when half of
    its rows are.
    """

    def __init__(self, depth: int, batches: dict[Node, Batch]) -> None:
        self.levels: list[dict[Key, _Block]] = [{} for _ in range(depth + 1)]
        self.batches = batches

    def __contains__(self, at: tuple[int, Key]) -> bool:
        return at[1] in self.levels[at[0]]

    def put(self, level: int, keys: list[Key], values: dict[Node, Tensor]) -> None:
        block = _Block(values, {key: row for row, key in enumerate(keys)}, len(keys))
        self.levels[level].update(dict.fromkeys(keys, block))

    def place(self, level: int, key: Key, node: Node) -> tuple[Tensor, int]:
        block = self.levels[level][key]
        return block.values[node], block.keys[key]

    def forget(self, level: int, keys: Iterable[Key]) -> None:
        touched: dict[int, _Block] = {}
        for key in keys:
            block = self.levels[level].pop(key, None)
            if block is not None:
                del block.keys[key]
                touched[id(block)] = block
        for block in touched.values():
            if block.keys and len(block.keys) * 2 <= block.rows:
                self.put(level, list(block.keys), self._some(block, block.keys.values()))

    def _some(self, block: _Block, rows: Iterable[int]) -> dict[Node, Tensor]:
        out = {}
        for node, value in block.values.items():
            dim, m = self.batches[node].dim, self.batches[node].factor
            out[node] = torch.cat([value.narrow(dim, row * m, m) for row in rows], dim)
        return out


__all__ = ["Engine", "EngineRun", "Request", "Store"]
