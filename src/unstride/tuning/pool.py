"""Everything a network says about some pictures, in every look, computed once: recipes are simulated from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unstride.geometry.states import State
from unstride.procedure.gates import Stage
from unstride.procedure.looks import Look
from unstride.procedure.tasks import Plan
from unstride.views.policies import IDENTITY, View


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
    """Logits (L, N, K) of N pictures in L looks, the plain one first; labels (N,) where there are any."""

    looks: tuple[Look, ...]
    logits: Tensor
    labels: Tensor | None
    work: dict[View, Work]

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {look: i for i, look in enumerate(self.looks)})

    index: dict[Look, int] = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return int(self.logits.shape[1])

    @property
    def plain(self) -> Tensor:
        return self.logits[0]

    def rows(self, chosen: Tensor | Sequence[int]) -> Pool:
        """The same for some of the pictures."""
        at = torch.as_tensor(chosen)
        return replace(self, logits=self.logits[:, at], labels=None if self.labels is None else self.labels[at])

    def states(self, stage: Stage, view: View) -> tuple[State, ...]:
        """A stage's states in a view, as `Stage.chosen` has them for the network at that size."""
        if stage.states == "plain":
            return self.work[view].near[:1]
        if isinstance(stage.states, str):
            return self.work[view].near[: int(stage.states.partition(":")[2])]
        return tuple(State(tuple(tuple(s) for s in state)) for state in stage.states)

    def cost(self, looks: Iterable[Look]) -> float:
        """Of these looks together, in plain forwards: states of one view share prefixes."""
        by_view: dict[View, list[State]] = {}
        for look in dict.fromkeys(looks):
            by_view.setdefault(look.view, []).append(look.state)
        plain = self.work[IDENTITY].macs(self.work[IDENTITY].near[:1])
        return sum(self.work[v].macs(self._with_plain(v, s)) for v, s in by_view.items()) / plain

    def _with_plain(self, view: View, states: list[State]) -> list[State]:
        """The engine always begins with the plain state of a view."""
        zero = self.work[view].near[0]
        return states if zero in states else [zero, *states]
