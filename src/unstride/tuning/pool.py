"""Everything a network says about some images, in every look, computed once: recipes are simulated from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unstride.geometry.states import State
from unstride.procedure.gates import Stage
from unstride.procedure.looks import Look
from unstride.tasks.tasks import TASKS, Task
from unstride.procedure.tasks import Plan
from unstride.recipe.view import PLAIN, View


@dataclass(frozen=True)
class Work:
    """MACs of a network at one size: of a prefix at each level, of its head, and the state space it was counted for."""

    levels: tuple[int, ...]
    head: int
    near: tuple[State, ...]  # its nearest states, as many as may be asked for

    @classmethod
    def of(cls, plan: Plan, count: int) -> Work:
        levels = tuple(plan.engine.level_macs(k) for k in range(plan.engine.depth + 1))
        head = sum(t.head.macs for t in plan.targets if t.head is not None)
        return cls(levels, head, plan.found.space.nearest(count))

    def macs(self, states: Sequence[State]) -> int:
        """Of these states together: the prefix trie, and the head for each."""
        trie = sum(len({s.selections[:k] for s in states}) * m for k, m in enumerate(self.levels))
        return trie + self.head * len(states)


@dataclass(frozen=True, eq=False)
class Pool:
    """Outputs (L, N, E) of N images in L looks, the plain one first; labels (N,) or (N, ...) where there are any.

    Of maps, E known pixels of each image are kept, and NaN is the label where there are fewer; `stands` (N,) is how
    many are known. `size` (N,) says which images do `work`, 0, and which that of a size of their own, in `others`.
    """

    looks: tuple[Look, ...]
    logits: Tensor
    labels: Tensor | None
    work: dict[View, Work]
    task: str = "classification"
    stands: Tensor | None = None
    others: tuple[dict[View, Work], ...] = ()
    size: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {look: i for i, look in enumerate(self.looks)})

    index: dict[Look, int] = None  # type: ignore[assignment]

    @property
    def meaning(self) -> Task:
        return TASKS[self.task]

    def __len__(self) -> int:
        return int(self.logits.shape[1])

    @property
    def plain(self) -> Tensor:
        return self.logits[0]

    def rows(self, chosen: Tensor | Sequence[int]) -> Pool:
        """The same for some of the images."""
        at = torch.as_tensor(chosen)
        labels, stands, size = (v if v is None else v[at] for v in (self.labels, self.stands, self.size))
        return replace(self, logits=self.logits[:, at], labels=labels, stands=stands, size=size)

    def states(self, stage: Stage, view: View) -> tuple[State, ...]:
        """A stage's states in a view, as `Stage.chosen` has them for the network at that size."""
        if stage.states == "plain":
            return self.work[view].near[:1]
        if isinstance(stage.states, str):
            return self.work[view].near[: int(stage.states.partition(":")[2])]
        return tuple(State(tuple(tuple(s) for s in state)) for state in stage.states)

    def cost(self, looks: Iterable[Look]) -> float:
        """Of these looks together, in plain forwards: states of one view share prefixes."""
        return _cost(self.work, looks)

    def costs(self, looks: Iterable[Look]) -> Tensor:
        """The same of each image, (N,)."""
        if self.size is None or not self.others:
            return torch.full((len(self),), self.cost(looks), dtype=torch.float64)
        looks = list(looks)
        return torch.tensor([_cost(w, looks) for w in (self.work, *self.others)], dtype=torch.float64)[self.size]


def _cost(work: dict[View, Work], looks: Iterable[Look]) -> float:
    by_view: dict[View, list[State]] = {}
    for look in dict.fromkeys(looks):
        by_view.setdefault(look.view, []).append(look.state)
    plain = work[PLAIN].macs(work[PLAIN].near[:1])
    return sum(work[v].macs(_with_plain(work[v], s)) for v, s in by_view.items()) / plain


def _with_plain(work: Work, states: list[State]) -> list[State]:
    """The engine always begins with the plain state of a view."""
    return states if work.near[0] in states else [work.near[0], *states]
