"""Fits the weights of a method on cached logits, keeps the best by validation, and reports what happened."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unstride.tta.cache import Rows
from unstride.tta.methods import GPS, ClassTTA, MaxTTA, MeanTTA, Method, merge, select_gps


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images; epoch 0 is the plain mean that training starts from."""

    epoch: int
    loss: float
    train: float
    val: float


@dataclass(frozen=True)
class Step:
    """One step of a greedy search: the view it took and the loss it reached."""

    view: str
    loss: float


@dataclass(frozen=True)
class Fit:
    """Accuracy of a method, fitted with the first `budget` views. `last_*` are those of the last epoch, kept or not."""

    budget: int
    train: float
    val: float
    last_train: float
    last_val: float


@dataclass(frozen=True)
class ClassRow:
    """Accuracy on one class: `images` of it in validation, the first view alone, and the fitted merge."""

    label: int
    images: int
    plain: float
    train: float
    val: float


@dataclass(frozen=True)
class FitReport:
    """What a fit found. `plain` is the first view alone; accuracies are fractions of images."""

    method: str
    space: str
    budget: int
    images: int
    val_images: int
    computed: int  # view-batches that were run, and that were already in the cache
    cached: int
    train: float
    val: float
    plain: float
    mean: float
    maximum: float
    corrected: int  # validation images that plain gets wrong and the fit right, and the other way round
    corrupted: int
    best_epoch: int
    epochs: tuple[Epoch, ...]
    steps: tuple[Step, ...]
    by_budget: tuple[Fit, ...]
    by_class: tuple[ClassRow, ...]

    @property
    def advice(self) -> str:
        """`on`, `mean` or `off`: validation speaks for the fit, for the plain mean of the views, or for neither."""
        gain, noise = self.corrected - self.corrupted, 1.96 * (self.corrected + self.corrupted) ** 0.5
        if gain <= noise:
            return "off"
        return "mean" if self.mean >= self.val else "on"

    @property
    def collapsed(self) -> int:
        """Classes of validation that the fit gets less than half as often right as the first view alone."""
        return sum(row.images > 0 and row.val < 0.5 * row.plain for row in self.by_class)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "advice": self.advice, "collapsed": self.collapsed}

    def __str__(self) -> str:
        lines = [
            f"{self.method} (merges {self.space}), {self.budget} views,"
            f" fitted on {self.images} images, validated on {self.val_images}",
            f"  validation: plain {self.plain:.2%}  mean {self.mean:.2%}  max {self.maximum:.2%}  fitted {self.val:.2%}"
            f"  (training {self.train:.2%})",
            f"  corrected {self.corrected}, corrupted {self.corrupted}; best epoch {self.best_epoch};"
            f" advice: {self.advice}",
            f"  {self.computed} view-batches computed, {self.cached} from the cache",
        ]
        for row in self.by_budget:
            lines.append(
                f"  budget {row.budget:4d}: training {row.train:.2%}, validation {row.val:.2%}"
                f"; last epoch {row.last_train:.2%}, {row.last_val:.2%}"
            )
        if self.collapsed:
            lines.append(f"  {self.collapsed} classes lost more than half of their accuracy")
        return "\n".join(lines)


@dataclass(frozen=True)
class Fitted:
    """The weights of a method, and how they came about."""

    weights: Tensor  # (V,) or (V, K)
    epochs: tuple[Epoch, ...] = ()
    steps: tuple[tuple[int, float], ...] = ()
    best_epoch: int = 0


def fit(
    method: Method, train: Rows, val: Rows, epochs: int, lr: float, seed: int, tick: Callable[[str], None]
) -> Fitted:
    """The weights of a learned method from logits: greedy search, or gradient descent."""
    if isinstance(method, GPS):
        taken, scores = select_gps(train, method, method.length or train.views)
        weights = torch.bincount(torch.tensor(taken), minlength=train.views) / len(taken)
        return Fitted(weights.float(), steps=tuple(zip(taken, scores, strict=True)))
    return _descend(method, train, val, epochs, lr, seed, tick)


def normalise(weights: Tensor) -> Tensor:
    """Non-negative weights that add up to 1 over the views; a column of zeros becomes uniform."""
    weights = weights.clamp(min=0)
    total = weights.sum(0, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-12), torch.full_like(weights, 1 / len(weights)))


def _descend(
    method: Method, train: Rows, val: Rows, epochs: int, lr: float, seed: int, tick: Callable[[str], None]
) -> Fitted:
    """SGD with momentum and weight decay, clamped at 0 after each step (Shanmugam et al.); best epoch by validation."""
    views, classes = train.views, train[0][0].shape[-1]
    raw = torch.full((views, classes) if isinstance(method, ClassTTA) else (views,), 1.0 / views, requires_grad=True)
    optimiser = torch.optim.SGD([raw], lr=lr, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator().manual_seed(seed)
    rows: list[Epoch] = []
    best = (-1.0, -float("inf"))
    kept, best_epoch = normalise(raw.detach()), 0
    for epoch in range(epochs + 1):
        if epoch:
            for index in torch.randperm(len(train), generator=order).tolist():
                logits, labels = train[index]
                with torch.enable_grad():
                    loss = cross_entropy(combine(logits, normalise(raw), method), labels)
                    optimiser.zero_grad()
                    loss.backward()
                optimiser.step()
                with torch.no_grad():
                    raw.copy_(
                        torch.where(
                            raw.clamp(min=0).sum(0, keepdim=True) > 0, raw.clamp(min=0), torch.full_like(raw, 1 / views)
                        )
                    )
        weights = normalise(raw.detach())
        train_acc, train_loss = score(train, weights, method)
        val_acc, val_loss = score(val, weights, method)
        rows.append(Epoch(epoch, train_loss, train_acc, val_acc))
        if (val_acc, -val_loss) > best:
            best, kept, best_epoch = (val_acc, -val_loss), weights.clone(), epoch
        tick(f"validation {val_acc:.2%}")
    return Fitted(kept, epochs=tuple(rows), best_epoch=best_epoch)


def combine(logits: Tensor, weights: Tensor, method: Method) -> Tensor:
    """The merge of (V, n, K) with gradients for the weights (V,) or (V, K)."""
    values = logits if method.space == "logits" else logits.softmax(-1)
    if weights.ndim == 1:
        merged = torch.einsum("vnk,v->nk", values, weights)
    else:  # view by view: einsum, or one product of the whole block, was measured several times slower
        merged = torch.zeros_like(values[0])
        for value, weight in zip(values, weights, strict=True):
            merged = torch.addcmul(merged, value, weight)
    return merged if method.space == "logits" else merged.clamp(min=1e-30).log()


@torch.no_grad()
def score(rows: Rows, weights: Tensor, method: Method) -> tuple[float, float]:
    """Accuracy and mean loss."""
    right, loss = 0, 0.0
    for logits, labels in rows:
        merged = combine(logits, weights, method)
        right += int((merged.argmax(-1) == labels).sum())
        loss += float(cross_entropy(merged, labels, reduction="sum"))
    return right / rows.images, loss / rows.images


@torch.no_grad()
def predictions(rows: Rows, method: Method, weights: Tensor | None) -> Tensor:
    """The predicted labels, (N,)."""
    return torch.cat([merge(logits, method, weights).argmax(-1) for logits, _ in rows])


def at_budget(method: Method, budget: int, fitted: Fitted, train: Rows, val: Rows) -> Fit:
    """How good the weights of the first `budget` views are, as kept and after the last epoch."""
    kept = [score(part.first(budget), fitted.weights, method)[0] for part in (train, val)]
    last = (fitted.epochs[-1].train, fitted.epochs[-1].val) if fitted.epochs else kept
    return Fit(budget, *kept, *last)


def report(
    method: Method,
    fitted: Fitted,
    train: Rows,
    val: Rows,
    names: list[str],
    by_budget: tuple[Fit, ...],
    computed: int,
    cached: int,
) -> FitReport:
    """Everything about a fit, measured on both parts."""
    truth, train_truth = torch.cat([y for _, y in val]), torch.cat([y for _, y in train])
    ours, plain = predictions(val, method, fitted.weights), predictions(val.first(1), MeanTTA(), None)
    trained = predictions(train, method, fitted.weights)
    right, was_right, right_in_training = ours == truth, plain == truth, trained == train_truth
    return FitReport(
        method=method.name,
        space=method.space,
        budget=train.views,
        images=train.images,
        val_images=val.images,
        computed=computed,
        cached=cached,
        train=float(right_in_training.float().mean()),
        val=float(right.float().mean()),
        plain=float(was_right.float().mean()),
        mean=float((predictions(val, MeanTTA(), None) == truth).float().mean()),
        maximum=float((predictions(val, MaxTTA(), None) == truth).float().mean()),
        corrected=int((right & ~was_right).sum()),
        corrupted=int((was_right & ~right).sum()),
        best_epoch=fitted.best_epoch,
        epochs=fitted.epochs,
        steps=tuple(Step(names[view], loss) for view, loss in fitted.steps),
        by_budget=by_budget,
        by_class=_by_class(truth, was_right, right, train_truth, right_in_training),
    )


def _by_class(
    truth: Tensor, was_right: Tensor, right: Tensor, train_truth: Tensor, right_in_training: Tensor
) -> tuple[ClassRow, ...]:
    def share(hits: Tensor, labels: Tensor, label: int) -> float:
        mine = labels == label
        return float(hits[mine].float().mean()) if mine.any() else float("nan")

    return tuple(
        ClassRow(
            label,
            int((truth == label).sum()),
            share(was_right, truth, label),
            share(right_in_training, train_truth, label),
            share(right, truth, label),
        )
        for label in range(int(torch.cat([truth, train_truth]).max()) + 1)
    )
