"""A recipe without gates as a torch.export program (.pt2): every pass of every image."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unstride.enhanced import Enhanced
from unstride.errors import CaptureError, OptionError
from unstride.execution.record import median
from unstride.exporting.checking import check_difference
from unstride.exporting.networks import Unit, quiet
from unstride.exporting.passes import ExportPass
from unstride.exporting.views import FixedView, fixed_back, fixed_view
from unstride.tasks.tasks import TASKS


class FixedRecipe(nn.Module):
    """Images (B, C, H, W) -> the combined outputs, as a tensor, or as a tuple of several."""

    def __init__(
        self,
        better: Enhanced,
        passes: Sequence[ExportPass],
        units: Sequence[Unit],
        rendered: Sequence[Tensor],
        example: Tensor,
    ) -> None:
        super().__init__()
        if any(p.gate is not None for p in passes):
            raise OptionError(
                "export: a .pt2 file holds no gates. Write an .onnx file, or take a recipe without gates."
            )
        self.recipe, self.passes = better.recipe, tuple(passes)
        self.task = TASKS[better.recipe.task]
        record = better.run(example).record
        self.shapes = [tuple(record.structure[0].leaves[t].shape[1:]) for t in record.structure[0].targets]
        self.modules_of_passes = nn.ModuleList(unit.module for unit in units)
        self.views = [fixed_view(p.view, tuple(example.shape[2:])) for p in passes]
        self.back: list[list[FixedView]] = []
        for p, unit, x in zip(passes, units, rendered, strict=True):
            frame = record.frame
            shown = [] if frame is None else [tuple(v.shape[-len(frame.size) :]) for v in unit.module(x)]
            pairs = [] if frame is None else list(zip(shown, frame.out_sizes, strict=False))
            self.back.append([fixed_back(p.view, example.shape[2:], s, wanted) for s, wanted in pairs])

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs: list[list[tuple[Tensor, Tensor]]] = []
        for p, module, view, back in zip(self.passes, self.modules_of_passes, self.views, self.back, strict=True):
            values = [v / p.stage.temperature(p.view) for v in module(view.on_tensor(images))]
            values = [move.on_tensor(v) for move, v in zip(back, values, strict=True)] if back else values
            weight = torch.tensor(p.weight)
            added = [[(v[:, s], weight) for s in range(v.shape[1])] for v in values]
            outputs = added if p.starts or not outputs else [a + b for a, b in zip(outputs, added, strict=True)]
        made = [self._combined(o).reshape(-1, *shape) for o, shape in zip(outputs, self.shapes, strict=False)]
        made[0] = made[0] / self.recipe.temperature
        return made[0] if len(made) == 1 else tuple(made)

    def _combined(self, outputs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        combine = self.recipe.combine
        if combine == "median":
            return median([v for v, _ in outputs])
        encoded = [self.task.encode(v, combine) for v, _ in outputs]
        if combine == "max":
            return torch.stack(encoded).amax(0)
        weights = [w.view(1, -1, *[1] * (encoded[0].ndim - 2)) for _, w in outputs]
        total = torch.stack([e * w for e, w in zip(encoded, weights, strict=True)]).sum(0)
        return self.task.decode(total / torch.stack(weights).sum(0), combine)


def program_bytes(module: FixedRecipe, example: Tensor) -> bytes:
    """The module as a file."""
    both = torch.cat([example, example.flip(-1)])
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(module, (both,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
            stream = io.BytesIO()
            torch.export.save(program, stream)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(f"export: torch.export cannot export this recipe ({reason}).") from error
    return stream.getvalue()


def check_program(data: bytes, better: Enhanced, images: Sequence[Tensor]) -> float:
    """The largest difference of an output, relative to the largest output, checked."""
    run, largest = torch.export.load(io.BytesIO(data)).module(), 0.0
    for start in range(0, len(images), 8):
        batch = torch.stack(list(images[start : start + 8]))
        wanted = better.run(batch).output
        got = run(batch)
        main = (got if isinstance(got, Tensor) else got[0]).reshape(wanted.shape)
        largest = max(largest, float((main - wanted).abs().max()) / max(1.0, float(wanted.abs().max())))
    check_difference(largest)
    return largest
