"""Where the states disagree: the mutual information between state and class, place by place, as states come in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.geometry.states import State
from unstride.tasks.confidence import two_class
from unstride.procedure.align import align_covered, overlap
from unstride.procedure.tasks import Plan

CELLS = 14  # per axis: finer maps are averaged down to this before their cells are asked one by one
HEAD_MACS = 30e9  # what asking all cells of all states may cost


class Disagreement:
    """`add(p)` for each state's probabilities (K, ...) gives the disagreement so far (...), in nats.

    `shift` (rows, columns): a state (K, H, W) that lies that far beyond the first is counted where it belongs, and
    places that it does not cover are decided by the others.
    """

    def __init__(self) -> None:
        self.total = self.within = self.count = torch.zeros(0)

    def add(self, p: Tensor, shift: Sequence[int] | None = None) -> Tensor:
        if len(self.total) == 0:
            self.total, self.within, self.count = torch.zeros_like(p), torch.zeros_like(p[0]), torch.zeros_like(p[0])
        total, within, count = self.total, self.within, self.count
        if shift is not None:
            place, source = overlap(p.shape[1:], shift)
            p = p[source]
            total, within, count = (t[place] for t in (total, within, count))
        total += p
        within += _entropy(p)
        count += 1
        return (_entropy(self.total / self.count) - self.within / self.count).clamp(min=0)


def evidence(plan: Plan, x: Tensor, states: Sequence[State]) -> Tensor | None:
    """Disagreement about each place of one image (1, C, H, W) after each state: (B, h, w). None: no grid, or too dear.

    Each cell of a state's aligned feature map is shown to the network's own head as if the whole map were like it
    (for pooling and a linear layer that is the class activation map): what the state sees there.
    """
    target = plan.targets[0]
    if target.grid is None or target.head is None:
        return None
    height, width = target.grid.size
    small = (min(height, CELLS), min(width, CELLS))
    if target.head.macs * small[0] * small[1] * len(states) > HEAD_MACS:
        return None
    so_far, out = Disagreement(), []
    with torch.no_grad():
        run = plan.engine.start(x)
        values = [run.plain[target.tap]]
        if len(states) > 1:
            values += run.add([(0, s) for s in states[1:]], keep=())[0].split(1)
        for state, value in zip(states, values, strict=True):
            f = plan.maps(value, target)[0].float()
            offset = plan.offset(state, target)
            f = f if offset is None else align_covered(f, offset)
            cells = F.adaptive_avg_pool2d(f, small).flatten(1).T
            whole = cells[:, :, None, None].expand(-1, -1, height, width)
            logits = target.finish(plan.unmap(whole, value, target))
            p = two_class(logits.float()).softmax(1)
            out.append(so_far.add(p.T.unflatten(1, small)))
    return torch.stack(out)


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-12).log()).sum(0)
