"""Methods: how the outputs of the views become one. Pure functions on logits (V, N, K), and the same as a stream.

Every method is a weighted mean, of logits or of probabilities (its `space`), or the maximum. A probability result is
returned as its logarithm, so that softmax gives it back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unstride.errors import InputError, OptionError

Space = Literal["logits", "probabilities"]


@dataclass(frozen=True)
class Method:
    """A way to merge views: its name, the space it merges in, and whether it must be fitted."""

    space: Space = "logits"
    name = ""
    learned = False

    def __post_init__(self) -> None:
        if self.space not in ("logits", "probabilities"):
            raise OptionError(f'space {self.space!r} is not "logits" or "probabilities".')


@dataclass(frozen=True)
class MeanTTA(Method):
    """The mean over the views (the paper: of logits)."""

    name = "mean"


@dataclass(frozen=True)
class MaxTTA(Method):
    """The highest logit per class over the views."""

    name = "max"


@dataclass(frozen=True)
class GPS(Method):
    """Greedy policy search as first published (Lyzhov et al., 2020).

    Each step adds, with replacement, the view with the best log-likelihood of the running mean of probabilities, each
    candidate calibrated by its own temperature. `length` steps, by default the budget; a view chosen twice is run once.
    """

    space: Space = "probabilities"
    length: int | None = None
    replacement: bool = True
    calibrate: Literal["candidate", "first"] = "candidate"
    learned = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return "gps" if self.replacement else "gps-shanmugam"


def gps_shanmugam() -> GPS:
    """Shanmugam et al.'s variant (the paper's baseline): 3 different views, one temperature, the mean of logits."""
    return GPS(space="logits", length=3, replacement=False, calibrate="first")


@dataclass(frozen=True)
class AugTTA(Method):
    """One learned weight per view, non-negative, adding up to 1."""

    name = "augtta"
    learned = True


@dataclass(frozen=True)
class ClassTTA(Method):
    """One learned weight per view and class, non-negative, adding up to 1 for each class."""

    name = "classtta"
    learned = True


METHODS: dict[str, Callable[[], Method]] = {
    "mean": MeanTTA,
    "max": MaxTTA,
    "gps": GPS,
    "gps-shanmugam": gps_shanmugam,
    "augtta": AugTTA,
    "classtta": ClassTTA,
}


def get(method: str | Method) -> Method:
    """`get("augtta")`, or a Method as it is."""
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise OptionError(f"unknown TTA method {method!r}: there are {', '.join(METHODS)}.")
    return METHODS[method]()


def uniform(views: int) -> Tensor:
    """The weights of a mean, (V,)."""
    return torch.full((views,), 1.0 / views)


def merge(logits: Tensor, method: str | Method, weights: Tensor | None = None) -> Tensor:
    """`merge(logits, "mean")`: (V, N, K) -> (N, K). Learned methods need their weights, (V,) or (V, K)."""
    method = get(method)
    if logits.ndim < 3:
        raise InputError(f"logits of the views must be (V, N, K), not {tuple(logits.shape)}.")
    merger = Merger(method, len(logits), weights)
    for index, one in enumerate(logits):
        merger.add(index, one)
    return merger.result()


class Merger:
    """The same merge with one view at a time: `add(0, logits)`, `add(1, logits)`, `result()`. Never holds two views.

    Logits are (N, K) or (N, K, H, W); `valid` (broadcastable bool) leaves out where a view did not see the image.
    """

    def __init__(self, method: Method, views: int, weights: Tensor | None = None) -> None:
        self.method = method
        self.maximum = isinstance(method, MaxTTA)
        if weights is None:
            if method.learned:
                raise OptionError(
                    f"{method.name} has no weights yet. Fit it with tta.fit(loader), or use TTA.load(path, model)."
                )
            weights = uniform(views)
        if len(weights) != views:
            raise InputError(
                f"there are {len(weights)} weights for {views} views. Fit again with this policy and budget."
            )
        self.weights = weights
        self.dtype: torch.dtype | None = None
        self.total: Tensor | None = None
        self.plain: Tensor | None = None  # the same without regard to valid regions, for places that no view saw
        self.added: Tensor | None = None  # the weight that was added, everywhere or place by place

    def add(self, index: int, logits: Tensor, valid: Tensor | None = None) -> None:
        """Add view `index`."""
        self.dtype = logits.dtype
        value = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if self.method.space == "probabilities":
            value = value.softmax(1)
        if valid is not None and self.plain is None:
            self.plain = self.total  # until here every view was valid everywhere
        if self.maximum:
            seen = value if valid is None else value.masked_fill(~valid, -torch.inf)
            self.total = seen if self.total is None else torch.maximum(self.total, seen)
            if self.plain is not None or valid is not None:
                self.plain = value if self.plain is None else torch.maximum(self.plain, value)
            return
        weight = self.weights[index].to(value)
        weight = weight.reshape(1, -1, *[1] * (value.ndim - 2))
        kept = weight if valid is None else weight * valid
        self.total = kept * value if self.total is None else self.total + kept * value
        self.added = kept if self.added is None else self.added + kept
        if self.plain is not None or valid is not None:
            self.plain = weight * value if self.plain is None else self.plain + weight * value

    def result(self) -> Tensor:
        """The merged logits, (N, K) or (N, K, H, W)."""
        if self.total is None or self.dtype is None:
            raise InputError("no view was added, there is nothing to merge.")
        total = self.total
        if self.plain is not None and self.maximum:
            total = torch.where(total == -torch.inf, self.plain, total)
        elif self.plain is not None and self.added is not None:
            total = torch.where(self.added > 0, total / self.added.clamp(min=1e-12), self.plain)
        if self.method.space == "probabilities":
            total = total.clamp(min=torch.finfo(total.dtype).tiny).log()
        return total.to(self.dtype)


Blocks = Sequence[tuple[Tensor, Tensor]]
"""Logits (V, n, K) and labels (n,), block by block: a list of one pair, or what a cache reads from disk."""


def select_gps(blocks: Blocks, method: GPS, length: int) -> tuple[list[int], list[float]]:
    """The views that greedy search takes, in order, and the mean negative log-likelihood after each."""
    views, images = len(blocks[0][0]), sum(len(labels) for _, labels in blocks)
    if not method.replacement:
        length = min(length, views)
    inverse = torch.ones(views, dtype=torch.float64)
    first = 1.0
    if method.calibrate == "first":
        first = float(_calibrate(blocks, [0], [None] * len(blocks), 0, inverse[:1].clone(), 1.0, True)[1][0])
    taken: list[int] = []
    scores: list[float] = []
    running: list[Tensor | None] = [None] * len(blocks)  # log of the mean of the chosen views' probabilities
    for step in range(length):
        candidates = [v for v in range(views) if method.replacement or v not in taken]
        start = (
            inverse[candidates] if method.calibrate == "candidate" else torch.ones(len(candidates), dtype=torch.float64)
        )
        loss, found = _calibrate(blocks, candidates, running, step, start, first, method.calibrate == "candidate")
        inverse[candidates] = found
        best = int(loss.argmin())
        taken.append(candidates[best])
        scores.append(float(loss[best]) / images)
        for i, (logits, _) in enumerate(blocks):
            running[i] = _ensemble(logits[taken[-1:]] * first, running[i], step)[0]
    return taken, scores


def _ensemble(logits: Tensor, running: Tensor | None, step: int) -> Tensor:
    """The log-probabilities of the running mean of `step` views with each of (C, n, K) added."""
    new = logits.log_softmax(-1)
    if running is None or step == 0:
        return new
    return torch.logaddexp(new, running + torch.log(torch.tensor(float(step)))) - torch.log(torch.tensor(step + 1.0))


def _calibrate(
    blocks: Blocks,
    candidates: list[int],
    running: Sequence[Tensor | None],
    step: int,
    inverse: Tensor,
    scale: float,
    search: bool,
) -> tuple[Tensor, Tensor]:
    """The summed loss of each candidate ensemble at its best inverse temperature (Newton: the loss is convex in it)."""
    loss = torch.zeros_like(inverse)
    for _ in range(20):
        loss, slope, curve = (torch.zeros_like(inverse) for _ in range(3))
        for (logits, labels), mean in zip(blocks, running, strict=True):
            for lo in range(0, len(candidates), 16):  # bounds memory: 16 views of a block at a time
                part = slice(lo, lo + 16)
                logp = _ensemble(logits[candidates[part]].float() * scale, mean, step)
                tempered = (logp * inverse[part, None, None].to(logp)).log_softmax(-1)
                truth = labels.expand(len(logp), -1).unsqueeze(-1)
                loss[part] -= tempered.gather(-1, truth).double().sum((1, 2))
                if search:
                    q = tempered.exp()
                    mean_logp = (q * logp).sum(-1)
                    slope[part] += (mean_logp - logp.gather(-1, truth)[..., 0]).double().sum(1)
                    curve[part] += ((q * logp.square()).sum(-1) - mean_logp.square()).clamp(min=0).double().sum(1)
        if not search:
            break
        target = inverse - slope / curve.clamp(min=1e-9)
        moved = torch.minimum(torch.maximum(target, inverse / 2), inverse * 2).clamp(0.01, 100.0)
        if bool(((moved - inverse).abs() <= 1e-4 * inverse).all()):
            break
        inverse = moved
    return loss, inverse
