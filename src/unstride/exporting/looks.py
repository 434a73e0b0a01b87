"""Fixed looks as one module: views by constant gathers and products, states by unrolled copies, one weighted mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.procedure.gates import Stage
from unstride.procedure.static import EachState, Fixed
from unstride.recipe.view import PLAIN, View
from unstride.views.source import PLACING, Block, Canvas, back, flip_axes, other_ops

_ROWS = 32  # basis images at once, when a view is turned into numbers


class Axis(nn.Module):
    """What a view does to rows or columns: a gather, or a product with a constant matrix (out, in)."""

    def __init__(self, matrix: Tensor, dim: int) -> None:
        super().__init__()
        self.dim = dim
        hard = bool(((matrix - 1).abs().lt(1e-6).sum(1) == 1).all())
        self.still = (
            hard and matrix.shape[0] == matrix.shape[1] and torch.equal(matrix.argmax(1), torch.arange(len(matrix)))
        )
        self.index: Tensor | None
        self.matrix: Tensor | None
        self.register_buffer("index", matrix.argmax(1) if hard else None, persistent=False)
        self.register_buffer("matrix", None if hard else matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.still:
            return x
        if self.index is not None:
            return x.index_select(self.dim, self.index)
        assert self.matrix is not None
        matrix = self.matrix.to(x)
        return matrix @ x if self.dim == 2 else x @ matrix.T


class StaticView(nn.Module):
    """`as_source(images).render(view)` for images, volumes or signals of one size."""

    def __init__(self, view: View, size: tuple[int, ...]) -> None:
        super().__init__()
        if other_ops(view) is not None:
            raise OptionError(
                f"view {view} changes more than where the network looks, and a graph has no op for it: export flips, "
                "sizes, fields, shifts and corners"
            )
        self.flips = [2 + len(size) + axis for axis in flip_axes(view)]
        moved = View(tuple(op for op in view.ops if op.name in PLACING) or PLAIN.ops)
        if len(size) != 2:
            Block(torch.empty(1, 1, *size)).render(view)  # refuses what only images are seen in
        self.moves = nn.Sequential(*(Axis(_matrix(moved, size, dim), dim) for dim in (2, 3) if len(size) == 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.moves(x)
        return x.flip(self.flips) if self.flips else x


def _matrix(view: View, size: tuple[int, ...], dim: int) -> Tensor:
    """Views are separable and linear: what they make of images with one bright row (column) says everything."""
    extent, found = size[dim - 2], []
    for start in range(0, extent, _ROWS):
        basis = torch.eye(extent)[start : start + _ROWS]
        images = basis[:, None, :, None] if dim == 2 else basis[:, None, None, :]
        seen = Canvas(images.expand(-1, 1, *size)).render(view)[:, 0]
        found.append(seen[:, :, 0] if dim == 2 else seen[:, 0, :])
    return torch.cat(found).T.contiguous()


class FixedLooks(nn.Module):
    """The looks of some stages, all of them for every image: (B, C, H, W) -> their weighted mean.

    `finished`: logits, as `better` gives them; otherwise the mean as it is merged with that of other stages.
    """

    def __init__(
        self,
        better: Enhanced,
        example: Tensor,
        stages: Sequence[Stage],
        finished: bool = True,
        taken: Sequence[Stage] = (),
    ) -> None:
        super().__init__()
        self.merge, self.finished, self.temperature = better.recipe.merge, finished, better.recipe.temperature
        size = tuple(int(n) for n in example.shape[2:])
        before = {(v, s) for stage in taken for v, s in _looks(better, stage)}
        self.weight = 0.0
        self.parts = nn.ModuleList()
        for stage in stages:
            for view in stage.views:
                states = [s for v, s in _looks(better, stage) if v == view and (v, s) not in before]
                before |= {(view, s) for s in states}
                if states:
                    part = _Part(better, example[:1], size, stage, view, states)
                    self.parts.append(part)
                    self.weight += part.weight * len(states)
        if not self.parts:
            raise OptionError("a stage has only looks that were taken before it; remove it")

    def forward(self, images: Tensor) -> Tensor:
        total = torch.stack([part(images) for part in self.parts]).sum(0) / self.weight
        if not self.finished:
            return total
        if self.merge == "probabilities":
            total = total.clamp(1e-7, 1 - 1e-7).logit() if total.shape[1] == 1 else total.clamp(min=1e-12).log()
        return total / self.temperature


def _looks(better: Enhanced, stage: Stage) -> list[tuple[View, State]]:
    return [(view, state) for view in stage.views for state in stage.chosen(better.plan.found.space)]


class _Part(nn.Module):
    """One view in its states: the sum of what they say, times their weight."""

    def __init__(
        self, better: Enhanced, example: Tensor, size: tuple[int, ...], stage: Stage, view: View, states: list[State]
    ) -> None:
        super().__init__()
        self.view, self.seen = view, StaticView(view, size)
        self.weight, self.temperature = stage.weight(view), stage.temperature(view)
        self.merge, self.maps, self.count = better.recipe.merge, better.task == "segmentation", len(states)
        shown = self.seen(example)
        _, plan, crop = better.fitted(shown)
        if crop is not None:
            raise OptionError(f"the network takes no images of {tuple(shown.shape[2:])} without padding (view {view})")
        options = replace(better.options(plan), aggregate="mean", align=True, border="renormalise", attention=None)
        self.size, self.leaf = size, plan.graph.index(plan.targets[0].leaf)
        plain = better.fitted(example)[1]
        shape = plain.found.trace.shapes[plain.targets[0].leaf]
        self.out_size = tuple(int(n) for n in shape[2:]) if self.maps else ()
        self.body = (
            Fixed(plan, states, options, pinned=True).body if self.maps else EachState(plan, states, options).body
        )

    def forward(self, images: Tensor) -> Tensor:
        found = self.body(self.seen(images))
        if self.maps:
            return self._merged(back(self.view, found[self.leaf], self.size, self.out_size)) * self.count
        return torch.stack([self._merged(logits) for logits in found]).sum(0)

    def _merged(self, logits: Tensor) -> Tensor:
        logits = logits.float() / self.temperature
        if self.merge == "probabilities":
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
        return logits * self.weight
