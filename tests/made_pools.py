"""Pools of made-up outputs, and tiny networks with images, for the tests of tuning."""

from pathlib import Path

import numpy as np
import torch
from tiny import PREPROCESS
from torch import Tensor, nn

from unstride.evaluation.scoring import scoring_for
from unstride.models import LoadedModel
from unstride.recipe.view import parse_view
from unstride.tuning.candidates import PassGroup, SearchSpace
from unstride.tuning.choose import Chooser
from unstride.tuning.objectives import Outcomes
from unstride.tuning.pool import Pool

CLASSES = 6


def made_pool(
    count: int,
    seed: int,
    networks: dict[str, tuple[float, float]],
    flip: float = 0.15,
    classes: int = CLASSES,
    sharper: dict[str, float] | None = None,
) -> Pool:
    """Logits of networks that share a part of their errors.

    Args:
        networks: by name, (cost in forward passes of the first, noise).
        flip: how much of a network's noise its flip has anew.
        sharper: what a network's logits are multiplied by.
    """
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=g)
    truth = 3.0 * torch.nn.functional.one_hot(labels, classes)
    groups, outputs, macs = [], [], []
    for name, (cost, noise) in networks.items():
        own = noise * torch.randn(count, classes, generator=g)
        other = noise * torch.randn(count, classes, generator=g)
        scale = (sharper or {}).get(name, 1.0)
        groups += [PassGroup(name), PassGroup(name, parse_view("flip"))]
        outputs += [scale * (truth + own), scale * (truth + (1 - flip) * own + flip * other)]
        macs += [1000.0 * cost] * 2
    return Pool(
        task="classification",
        groups=tuple(groups),
        counts=(1,) * len(groups),
        outputs=torch.stack(outputs),
        macs=torch.tensor(macs, dtype=torch.float64)[:, None].expand(-1, count),
        seconds=torch.tensor(macs, dtype=torch.float64) / 1e6,
        targets=labels,
        keys=tuple(f"{seed}-{k}" for k in range(count)),
        rows=tuple(range(count)),
    )


def chooser(pool: Pool, objective: str = "nll", **options: object) -> Chooser:
    outcomes = Outcomes(pool, scoring_for(pool.task, classes=CLASSES), objective)
    return Chooser(outcomes, SearchSpace(pool.groups), np.arange(len(pool)), **options)  # type: ignore[arg-type]


def accuracy(pool: Pool, outputs: Tensor) -> float:
    return float((outputs.argmax(1) == pool.targets).double().mean())


class Template(nn.Module):
    """(B, 3, 16, 16) -> (B, 6): how well each of six fixed patterns fits; `blur` makes it less exact, `work` slower."""

    def __init__(self, blur: float, work: int, maps: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, work, 3, 2, 1)
        self.wide = nn.Conv2d(work, work, 3, 1, 1)
        self.register_buffer("patterns", patterns() + blur * torch.randn(6, 3, 16, 16, generator=seeded(work)))
        self.scale, self.maps = 8.0 / 768, maps

    def forward(self, x: Tensor) -> Tensor:
        idle = 1e-6 * self.wide(self.stem(x).relu()).mean((1, 2, 3))
        size = x.shape[-2:]
        pattern = nn.functional.interpolate(self.patterns, size, mode="bilinear") if size != (16, 16) else self.patterns
        if self.maps:
            return self.scale * 96 * torch.einsum("bchw,kchw->bkhw", x, pattern) + idle[:, None, None, None]
        factor = 768 / (3 * size[0] * size[1])
        return factor * self.scale * torch.einsum("bchw,kchw->bk", x, pattern) + idle[:, None]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patterns() -> Tensor:
    return torch.randn(6, 3, 16, 16, generator=seeded(7))


def loaded(blur: float, work: int, spec: str) -> LoadedModel:
    with torch.random.fork_rng():
        torch.manual_seed(work)
        return LoadedModel(spec, Template(blur, work).eval(), PREPROCESS, "classification")


def pair() -> list[LoadedModel]:
    """A cheap network, and one that is better and costs about six times as much."""
    return [loaded(3.0, 4, "small"), loaded(0.5, 16, "large")]


def images(count: int, noise: float = 5.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (N, 16, 16, 3): a pattern with noise; and which one it is."""
    g = seeded(seed)
    labels = torch.randint(6, (count,), generator=g)
    x = patterns()[labels] + noise * torch.randn(count, 3, 16, 16, generator=g)
    pixels = ((0.25 * 0.35 * x + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous().numpy(), labels.numpy()


def npz(folder: Path, count: int, seed: int = 0) -> str:
    x, y = images(count, seed=seed)
    np.savez(folder / f"images{count}-{seed}.npz", x=x, y=y)
    return f"npz:{folder / f'images{count}-{seed}.npz'}"
