"""Runs a graph for many states of many images: a prefix is computed once, suffixes run together in bounded batches."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from unstride.engine.bounds import is_wild, wild_inside
from unstride.engine.movers import Batch, Rows
from unstride.engine.segments import Cutter, Segment, as_it_is, batch_of, tensor_bytes
from unstride.engine.store import Key, Store
from unstride.errors import CaptureError, OptionError
from unstride.geometry.layers import Subsampling
from unstride.geometry.states import State
from unstride.graph.capture import Graph, gap, run_nodes, tolerance
from unstride.graph.thin import Step, thinned

CHUNK, TENSOR = 32 << 20, 20 << 20  # on a CPU larger ones are slower: pages are given back and fetched at every op
UNBOUNDED = 1 << 62  # bytes
TOGETHER = 512 << 20  # bytes that images which run together may take
Request = tuple[int, State]  # (image, state)


class Engine:
    """`engine.start(images)` runs the plain network once; `run.add([(image, state), ...])` goes on from there.

    `taps` are the nodes whose values are wanted for every state, `plain` those wanted for the plain network only.
    `max_bytes` bounds stored prefixes and the chunk under way together (not below twice what the plain network needs
    for the images): where they exceed it, prefixes are forgotten and made again. Results do not depend on it.
    `held`: large maps are moved between their edges, as looks do it, see `geometry.natural`. `thin`: values that need
    not be computed whole where `found` is uncut, see `graph.thin`.
    """

    def __init__(
        self,
        graph: Graph,
        found: Subsampling,
        taps: Sequence[Node],
        plain: Sequence[Node] = (),
        max_bytes: int = UNBOUNDED,
        run_segment: Callable[[nn.Module], nn.Module] = as_it_is,
        held: bool = False,
        thin: Mapping[Node, Step] | None = None,
    ) -> None:
        if max_bytes < 1:
            raise OptionError(f"max_bytes: got {max_bytes}, wanted a positive number of bytes")
        self.graph, self.found, self.taps, self.plain = graph, found, tuple(taps), tuple(plain)
        on_cpu = graph.device.type == "cpu"
        self.chunk_bytes, self.tensor_bytes = (min(max_bytes, CHUNK), TENSOR) if on_cpu else (max_bytes, UNBOUNDED)
        self.cutter = Cutter(graph, found, run_segment, held=held, thin=thin or {})
        self.tamed = any(n.meta.get("tame") for n in graph.fx.nodes)  # by `mark_tame`
        self.depth = len(found.layers)
        levels = range(self.depth + 1)
        self.as_trained = [self.cutter.segment(k, [*taps, *plain], moved=False) for k in levels]
        self.moved = self.as_trained if not self.depth else [self.cutter.segment(k, taps, moved=True) for k in levels]
        # Rows that a level does not move need no new layout of operands, if the plain variant reads and gives alike.
        alike = [
            (a.inputs, a.outputs) == (m.inputs, m.outputs) for a, m in zip(self.as_trained, self.moved, strict=True)
        ]
        moves = [{k for s in found.shifts if found.level[s.node] == at for a in s.steps for k in a} for at in levels]
        self.moved_by = [layers if ok else None for layers, ok in zip(moves, alike, strict=True)]
        self.plain_bytes = max(s.bytes_as_cut for s in self.as_trained)
        self.max_bytes, self.bounded = max_bytes, max_bytes < UNBOUNDED
        sizes = [[tensor_bytes(self.cutter.shape(n), graph.dtype) for n in s.outputs] for s in self.moved]
        self.stored_bytes = [sum(level) for level in sizes]  # of one prefix at each level
        kept = [n for s in [*self.as_trained, *self.moved] for n in [*s.inputs, *s.outputs]]
        self.batches = {n: batch_of(n) for n in dict.fromkeys([*kept, *taps, *plain])}

        self._check_rows()
        self.roots = sorted({found.level[tap] for tap in taps})
        self.needs = [sorted({found.level[n] for n in s.inputs if n is not graph.image}) for s in self.moved]

        last = [max((j for j, low in enumerate(self.needs) if k in low), default=k) for k in levels]
        self.last_read_by = [{k for k in levels if last[k] == j and k not in self.roots} for j in levels]

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
                    if not gap(second, value) <= 50 * tolerance(value.dtype):
                        raise CaptureError(
                            f"{n.name} lies where a layer is cut, and mixes the images of a batch in dimension {b.dim} "
                            f"of {tuple(value.shape)}: the model cannot be cut there. Leave that layer out, or rewrite "
                            "the op so that each image keeps its rows together."
                        )

    def holding(self) -> "Engine":
        """The same, where the edges of large maps stay."""
        return Engine(self.graph, self.found, self.taps, self.plain, self.max_bytes, self.cutter.run_segment, True)

    def still(self) -> "Engine":
        """The same for the plain network alone: in one piece, a few images at a time, and only what is read."""
        run, found = self.cutter.run_segment, self.found.uncut()
        thin = thinned(self.graph, [*self.taps, *self.plain]) if run is not as_it_is else {}
        return Engine(self.graph, found, self.taps, self.plain, self.max_bytes, run, thin=thin)

    def closed(self, levels: Iterable[int]) -> set[int]:
        """`levels`, and those that later levels read besides them (the skips of a U-Net)."""
        kept = set(levels)
        return kept | {low for k in kept for later in self.needs[k + 1 :] for low in later if low <= k}

    def read_once(self, level: int) -> bool:
        """Whether only the next level reads this one: no skip, and nothing that the caller wants."""
        return level not in self.roots and not any(level in needs for needs in self.needs[level + 2 :])

    def variant(self, level: int, states: Iterable[State]) -> Segment:
        """What computes these states at this level: the plain network's ops where they move nothing there."""
        layers = self.moved_by[level]
        still = layers is not None and not any(any(s.selections[k - 1]) for s in states for k in layers)
        return (self.as_trained if still else self.moved)[level]

    def variants(self, level: int) -> tuple[Segment, ...]:
        """Whatever may compute states of this level."""
        return (self.moved[level],) if self.moved_by[level] is None else (self.moved[level], self.as_trained[level])

    def batch(self, node: Node) -> Batch:
        return self.batches[node]

    def start(self, images: Tensor) -> "Run":
        return Run(self, images)

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

    def images_at_once(
        self, layers: Iterable[int], budget: int, max_bytes: int | None, count: int | None = None
    ) -> int:
        """How many images may be under way together: what they hold must fit the memory bound, and not take more than
        twice what the plain network needs for all `count` images.
        """
        stored = self.prefix_bytes(layers, budget)
        bound = TOGETHER if max_bytes is None else max_bytes
        if count is not None:
            bound = min(bound, 2 * count * self.plain_bytes)
        return max(1, bound // (stored + self.plain_bytes), (bound - self.chunk_bytes) // max(1, stored))

    def parts(self, requests: list[Request]) -> list[list[Request]]:
        """Requests whose results are to be alive together: where memory is bounded, no more than a quarter of it."""
        one = sum(tensor_bytes(self.found.trace.shapes[tap], self.graph.dtype) for tap in self.taps)
        count = max(1, self.max_bytes // 4 // max(1, one))
        return [requests[i : i + count] for i in range(0, len(requests), count)]

    def level_macs(self, level: int) -> int:
        """MACs of one more prefix at this level: the weight of a trie node."""
        return self.moved[level].macs

    def trie_macs(self, states: Iterable[State]) -> int:
        """MACs of a set of states of one image by its prefix trie: the floor, counted without running anything."""
        states = list(states)
        return sum(len({s.selections[:k] for s in states}) * self.level_macs(k) for k in range(self.depth + 1))


@dataclass(eq=False)
class Run:
    """What has been computed so far for a batch of images. `macs` counts the work of each image."""

    engine: Engine
    images: Tensor
    macs: list[int] = field(default_factory=list)
    plain: dict[Node, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine, n, depth = self.engine, self.images.shape[0], self.engine.depth
        self.macs = [0] * n
        self.wild = engine.tamed and is_wild(self.images)
        # A chunk takes no more than the plain network needs for these images: memory does not grow with the states. Of
        # volumes it may take two: torch has only a slow way for one, and packed convolutions gain a little.
        least = 2 if len(engine.graph.size) == 3 else 1
        self.chunk_bytes = min(engine.chunk_bytes, max(n, least) * engine.plain_bytes)
        self.room = max(engine.max_bytes, 2 * n * engine.plain_bytes)
        self.store = Store(depth, engine.batches, apart=engine.bounded)
        self.ahead: dict[Key, int] = {}
        self.answered = 0  # bytes of results of the requests under way
        self.limit: dict[int, int] = {}
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

    def add(
        self, requests: Sequence[Request], keep: Iterable[int] | None = None, ahead: Iterable[Key] = ()
    ) -> tuple[Tensor, ...]:
        """Values of the taps for each (image, state), in order: one tensor (len(requests), ...) per tap.

        `keep`: levels whose prefixes later requests will start from (all by default). `ahead`: prefixes that are likely
        to be started from, the likeliest first: where memory is short they stay longest.
        """
        engine = self.engine
        for image, state in requests:
            if not 0 <= image < len(self.macs):
                raise OptionError(f"image {image}: this run has {len(self.macs)} images")
            if engine.depth:
                engine.found.space.parse(state)
            elif not state.plain:
                raise OptionError(f"state {state}: this engine computes only what the plain network reads")
        self.ahead, self.answered = {key: place for place, key in enumerate(ahead)}, 0
        if keep is None:
            return self._add(requests, set(), forget=False)
        passing = {*range(1, engine.depth + 1)} - engine.closed(keep)
        return self._add(requests, passing, forget=True)

    def _add(self, requests: Sequence[Request], passing: set[int], forget: bool) -> tuple[Tensor, ...]:
        """Compute what is missing, in parts where it would not fit. Levels that are `passing` need not be kept."""
        engine = self.engine
        todo, read = self._missing(requests)
        if engine.bounded and len(requests) > 1 and self.answered + self._most(todo, read) > self.room:
            half = len(requests) // 2
            parts = [self._add(part, passing, forget) for part in (requests[:half], requests[half:])]
            return tuple(
                torch.cat(values, engine.batch(tap).dim)
                for tap, values in zip(engine.taps, zip(*parts, strict=True), strict=True)
            )
        for level in range(1, engine.depth + 1):
            keys = sorted(todo[level], key=lambda key: (key[1], key[0]))  # rows that move alike lie together
            if keys:
                self._make_room(self._chunk_bytes(level, len(keys)), level, read, passing)
                self._level(level, keys, [todo[level][k] for k in keys])
            for done in passing & engine.last_read_by[level]:
                self.store.forget(done, todo[done])
            if forget:
                self._forget_parents(level - 1, keys)
        out = tuple(self._rows(tap, requests).gather() for tap in engine.taps)
        self.answered += sum(value.nbytes for value in out)
        for level in passing:
            self.store.forget(level, todo[level])
        return out

    def _missing(self, requests: Sequence[Request]) -> tuple[list[dict[Key, State]], dict[Key, int]]:
        """What must be computed at each level, and of every prefix that is read, stored or not, the level that reads
        it last.
        """
        depth = self.engine.depth
        todo: list[dict[Key, State]] = [{} for _ in range(depth + 1)]
        read: dict[Key, int] = {}
        for image, state in requests:
            open_levels = [(root, depth + 1) for root in self.engine.roots]
            while open_levels:
                level, reader = open_levels.pop()
                key = (image, state.selections[:level])
                read[key] = max(reader, read.get(key, 0))
                if (level, key) not in self.store and key not in todo[level]:
                    todo[level][key] = state
                    open_levels += [(low, level) for low in self.engine.needs[level]]
        return todo, read

    def _chunk_bytes(self, level: int, count: int) -> int:
        """What `count` prefixes of this level take when all are done and the last chunk is still under way."""
        variants, stored = self.engine.variants(level), self.engine.stored_bytes[level]
        together = min(count, self._rows_at_once(variants))
        one = max(s.bytes for s in variants)
        one = max(one, 2 * stored) if together > 1 else one  # several are put apart by copying
        return together * one + (count - together) * stored

    def _most(self, todo: list[dict[Key, State]], read: dict[Key, int]) -> int:
        """The most bytes that are alive at once on the way through the levels, if nothing is kept that is not read."""
        depth, sizes = self.engine.depth, self.engine.stored_bytes
        change = [0] * (depth + 3)
        for key, reader in read.items():
            level = len(key[1])
            change[level + 1 if key in todo[level] else 1] += sizes[level]
            change[reader + 1] -= sizes[level]
        alive = most = 0
        for level in range(1, depth + 1):
            alive += change[level]
            most = max(most, alive + (self._chunk_bytes(level, len(todo[level])) if todo[level] else 0))
        return most

    def _make_room(self, size: int, now: int, read: dict[Key, int], passing: set[int]) -> None:
        """Forget prefixes that no level from `now` on reads until `size` more bytes fit: passing levels first, then
        those where a byte holds little work, there the least likely. Who asks for one later has it computed again.
        """
        room = self.room - self.answered - size
        if self.store.bytes <= room:
            return
        engine = self.engine
        levels = [level for level in range(1, engine.depth + 1) if engine.stored_bytes[level]]
        for level in sorted(levels, key=lambda k: (k not in passing, engine.level_macs(k) / engine.stored_bytes[k])):
            unread = [key for key in self.store.levels[level] if read.get(key, 0) < now]
            for key in sorted(unread, key=lambda key: -self.ahead.get(key, len(self.ahead))):
                self.store.forget(level, [key])
                if self.store.bytes <= room:
                    return

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
        copied = 2 * self.engine.stored_bytes[variants[0].level] if self.store.apart else 0
        fit = self.chunk_bytes // max(copied, *(s.bytes for s in variants))
        return max(1, min(fit, self.engine.tensor_bytes // max(1, *(s.largest for s in variants))))

    def _level(self, level: int, keys: list[Key], states: list[State], plain: bool = False) -> None:
        variants = (self.engine.as_trained[level],) if plain else self.engine.variants(level)
        for image, _ in keys:
            self.macs[image] += variants[0].macs
        done = 0
        chunk = self.limit.get(level) or self._rows_at_once(variants)
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
                if not _out_of_memory(error) or chunk == 1:
                    raise
                chunk = self.limit[level] = max(1, len(requests) // 2)
                continue
            end = done + len(requests)
            self.store.put(level, keys[done:end], dict(zip(variant.outputs, outputs, strict=True)))
            del outputs  # where rows are put apart, the next chunk has its place
            done = end

    def _chunk(self, requests: list[Request], rows: dict[Node, Rows], segment: Segment) -> tuple[Tensor, ...]:
        some = {n: Rows(r.places[: len(requests)], r.batch) for n, r in rows.items()}
        values = [some[n] if n in segment.lazy else some[n].gather() for n in segment.inputs]
        with torch.no_grad(), wild_inside() if self.wild else nullcontext():
            return segment(len(requests), [state for _, state in requests], values)

    def _rows(self, n: Node, requests: Sequence[Request]) -> Rows:
        engine = self.engine
        if n is engine.graph.image:
            return Rows(tuple((self.images, image) for image, _ in requests), engine.batch(n))
        level = engine.found.level[n]
        places = (self.store.place(level, (image, state.selections[:level]), n) for image, state in requests)
        return Rows(tuple(places), engine.batch(n))


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "out of memory" in text or "allocate memory" in text or "defaultcpuallocator" in text
    )


__all__ = ["Engine", "Request", "Run"]
