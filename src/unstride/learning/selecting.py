"""One set of states for every image, chosen on labelled images: no search at test time, and it can be exported."""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unstride.data.batches import reusable
from unstride.data.items import check_labels
from unstride.enhanced import Enhanced, enhance
from unstride.errors import InputError, OptionError
from unstride.geometry.states import State, StateSpace
from unstride.learning.pools import Pool, batches, draw_pools, finish, image_key
from unstride.models.weights import place
from unstride.procedure.align import coverage
from unstride.procedure.options import Options
from unstride.procedure.static import Fixed
from unstride.procedure.tasks import Plan
from unstride.storage.cache import Cache, RunKey
from unstride.storage.fingerprint import computation_key
from unstride.storage.progress import progress
from unstride.storage.provenance import versions

BY = ("accuracy", "likelihood")
GROUP = 64  # images whose candidates are in memory together
MOST = 64  # candidates: all states of three layers of rate 2; each costs a state per image here, and memory for its map


@dataclass(frozen=True)
class Choice:
    """One step of the greedy choice: the state that was taken, and the scores of the set with it."""

    state: State
    accuracy: float
    log_likelihood: float


@dataclass(frozen=True, eq=False)
class FixedStates:
    """The chosen states, the plain network's first; `history` goes on to the budget, `states` ends at the best score.

    Example: `torch.export.export(chosen.module(), (images,))`
    """

    states: tuple[State, ...]
    history: tuple[Choice, ...]
    by: str
    images: int
    candidates: int
    better: Enhanced  # runs these states through the engine, in bounded memory
    example: Tensor

    def module(self) -> Fixed:
        """The network with these states, of constant shape."""
        return _fixed(self.better, self.example)

    def to_json(self) -> dict[str, Any]:
        steps = [{**asdict(h), "state": h.state.selections} for h in self.history]
        states = [s.selections for s in self.states]
        return {"states": states, "history": steps, "by": self.by, "images": self.images, "candidates": self.candidates}

    def __repr__(self) -> str:
        rows = [f"  {h.state}: accuracy {h.accuracy:.2%}, log-likelihood {h.log_likelihood:.4f}" for h in self.history]
        return f"FixedStates({len(self.states)} states by {self.by} on {self.images} images\n" + "\n".join(rows) + "\n)"


def fixed(model: nn.Module, example: Tensor, states: Iterable[State | Sequence[Any]], **options: Any) -> Fixed:
    """`enhance(model, example, states=states, **options)` as a module of constant shape, to be exported.

    Example: `torch.onnx.export(unstride.fixed(model, images, states), (images,), "net.onnx", dynamo=True)`
    """
    return _fixed(enhance(model, example, states=states, **options), example)


def _fixed(better: Enhanced, example: Tensor) -> Fixed:
    plan = better.prepare(example)
    options = better.options(plan)
    assert options.states is not None
    return Fixed(plan, list(dict.fromkeys([plan.found.space.zero, *options.states])), options)


def select_states(
    model: nn.Module,
    loader: Iterable[Any],
    budget: int = 10,
    *,
    by: str = "accuracy",
    candidates: Iterable[State | Sequence[Any]] | None = None,
    cache_dir: str | Path | None = None,
    show: bool = True,
) -> FixedStates:
    """Choose at most `budget` states for all images, greedily, on labelled images; the plain network is always in.

    Example: `chosen = unstride.select_states(model, [(images, labels)], budget=4); chosen.module()(images)`

    `model`: a network, or an Enhanced one, whose layers and aggregation (mean or entropy) are kept. At each step the
    candidate that makes the set best is taken: by accuracy (ties: likelihood) or by likelihood. Candidates are, by
    default, all states of the searched layers, the least moved 64 where there are more. Their maps are kept in memory,
    or in files in `cache_dir`.
    """
    if by not in BY:
        raise OptionError(f"by: got {by!r}, wanted one of {', '.join(map(repr, BY))}")
    reusable(loader, "loader")
    first, _ = next(batches(loader, "loader"))
    better = model if isinstance(model, Enhanced) else enhance(model, first[:1], aggregate="entropy")
    better = better.with_options(budget=budget, states=None, stop=None)
    if better.task != "classification":
        raise OptionError(f"task={better.task!r}: states are chosen for classification")
    plan = better.prepare(first)
    options = better.options(plan)
    if options.aggregate not in ("mean", "entropy"):
        raise OptionError(f"aggregate={options.aggregate!r}: states are chosen for 'mean' or 'entropy'")
    space = plan.found.space
    pool = _default(space, options.layers) if candidates is None else [space.parse(s) for s in candidates]
    pool = list(dict.fromkeys([space.zero, *pool]))
    store = Cache.open(None if cache_dir is None else Path(cache_dir), _run_key(better, first, options, pool))
    keys = _draw(better, plan, options, loader, pool, store, show)
    groups = [_Group(plan, options, pool, store, keys[i : i + GROUP]) for i in range(0, len(keys), GROUP)]
    history = _greedy(pool, groups, budget, by, len(keys), show)
    best = max(range(len(history)), key=lambda i: (_rank(history[i], by), -i))
    states = tuple(h.state for h in history[: best + 1])
    chosen = better.with_options(states=states)
    return FixedStates(states, tuple(history), by, len(keys), len(pool), chosen, first[:1])


def _default(space: StateSpace, layers: Sequence[int]) -> list[State]:
    """States that differ from 0 at few layers first, then those that lie nearest."""
    moved = lambda s: sum(any(x) for x in s.selections)  # noqa: E731
    near = sorted(space.states(layers), key=lambda s: (moved(s), sum(space.displacement(s)), s))
    return near[:MOST]


def _run_key(better: Enhanced, images: Tensor, options: Options, pool: Sequence[State]) -> RunKey:
    states = [state.selections for state in pool]
    model = computation_key(better.model, images[:1].to(*place(better.model)))
    settings = {"model": model, "space": better.recipe.space, "align": options.align, "border": options.border}
    return RunKey("candidates", {**settings, "states": states, "versions": versions()})


def _draw(
    better: Enhanced, plan: Plan, options: Options, loader: Iterable[Any], pool: list[State], store: Cache, show: bool
) -> list[str]:
    """Maps of all candidates of all images, once; the images' keys."""
    keys: list[str] = []
    at_once = better.images_at_once(plan, replace(options, budget=len(pool)))
    total = len(loader) if isinstance(loader, Sized) else None
    with progress("maps of the candidates", total, show) as advance:
        for images, labels in batches(loader, "loader"):
            if tuple(images.shape[2:]) != plan.graph.size:
                raise InputError(f"loader: images {tuple(images.shape[2:])} after {plan.graph.size}; wanted one size")
            check_labels([f"loader, image {len(keys) + i}" for i in range(len(labels))], labels, plan.classes)
            for i in range(0, len(labels), at_once):
                x, y = images[i : i + at_once], labels[i : i + at_once]
                mine = [image_key(*pair) for pair in zip(x, y, strict=True)]
                keys += mine
                fresh = [k for k, key in enumerate(mine) if key not in store]
                if fresh:
                    pools = draw_pools(plan, x[fresh], [y[k] for k in fresh], lambda key: pool, options)
                    store.put({mine[k]: p.values() for k, p in zip(fresh, pools, strict=True)})
            advance(1, "")
    return keys


@dataclass(eq=False)
class _Group:
    """Some images, and the running sums of the states that were taken so far."""

    plan: Plan
    options: Options
    pool: list[State]
    store: Cache
    keys: list[str]

    def __post_init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.weight: Tensor | float = 0.0

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted maps (P, n, C, H, W), weights (P, n, 1, H, W), labels (n,)."""
        pools = [Pool.cached(self.store, k) for k in self.keys]
        maps = torch.stack([p.maps for p in pools], 1).float()
        w = torch.stack([p.criteria for p in pools], 1)
        w = (1.0 - w).clamp(min=1e-6) if self.options.aggregate == "entropy" else torch.ones_like(w)
        w = w.view(*w.shape, *[1] * (maps.ndim - 2)).to(maps)
        if maps.ndim == 5 and self.options.align and self.options.border == "renormalise":
            target = self.plan.targets[0]
            offsets = [self.plan.offset(s, target) for s in self.pool]
            w = w * torch.stack([coverage((maps.shape[3], maps.shape[4]), o, maps) for o in offsets if o])[:, None]
        labels = torch.tensor([p.label for p in pools], device=maps.device)
        return maps * w, w, labels

    def scores(self, waiting: Sequence[int]) -> Tensor:
        """Right answers and log-likelihood, summed over the images, with each of the waiting candidates: (W, 2)."""
        maps, w, labels = self.load()
        out = []
        for i in waiting:
            with torch.no_grad():
                logits = finish(self.plan, (self.total + maps[i]) / (self.weight + w[i]).clamp(min=1e-12)).double()
            right = (logits.argmax(1) == labels).sum().double()
            out.append(torch.stack([right, -cross_entropy(logits, labels, reduction="sum")]).cpu())
        return torch.stack(out)

    def take(self, i: int) -> None:
        maps, w, _ = self.load()
        self.total, self.weight = self.total + maps[i], self.weight + w[i]


def _greedy(pool: list[State], groups: list[_Group], budget: int, by: str, images: int, show: bool) -> list[Choice]:
    waiting = list(range(len(pool)))
    history: list[Choice] = []
    with progress("states", min(budget, len(pool)), show) as advance:
        while waiting and len(history) < budget:
            tried = waiting[:1] if not history else waiting  # the plain network is always in
            scores = torch.stack([g.scores(tried) for g in groups]).sum(0) / images
            choices = [Choice(pool[i], *map(float, row)) for i, row in zip(tried, scores, strict=True)]
            best = max(range(len(tried)), key=lambda k: (_rank(choices[k], by), -k))
            history.append(choices[best])
            taken = tried[best]
            waiting.remove(taken)
            for g in groups:
                g.take(taken)
            advance(1, f"accuracy {choices[best].accuracy:.2%}")
    return history


def _rank(choice: Choice, by: str) -> tuple[float, float]:
    return (choice.accuracy, choice.log_likelihood) if by == "accuracy" else (choice.log_likelihood, choice.accuracy)
