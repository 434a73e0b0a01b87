"""What training did, epoch by epoch: the report that `fit` returns."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images; epoch 0 is the untrained module, which is the mean. Accuracies from 0 to 1.

    Validation is of the weights that would be kept.
    """

    epoch: int
    lr: float
    loss: float | None  # over the training images
    val_accuracy: float
    val_nll: float


@dataclass(frozen=True)
class FitReport:
    """What training did: every epoch, which one was kept, and validation accuracy of the plain network beside it."""

    epochs: tuple[Epoch, ...]
    best: int
    plain: float
    train_images: int
    val_images: int
    budget: int
    states: int  # most states of any training image: less than the budget in a small space
    channels: int
    seed: int
    familiar: bool  # accuracies are those on images made unfamiliar
    cached: bool  # maps were computed once, not in every epoch
    resumed: int  # epochs taken over from an earlier, ended run
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.epochs[self.best].val_accuracy

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy}

    def __str__(self) -> str:
        start = self.epochs[0].val_accuracy
        return (
            f"epoch {self.best} of {len(self.epochs) - 1} kept: validation accuracy {self.accuracy:.2%} "
            f"(plain {self.plain:.2%}, mean {start:.2%}; {self.val_images} {'unfamiliar ' * self.familiar}images), "
            f"negative log-likelihood {self.epochs[self.best].val_nll:.4f} (mean {self.epochs[0].val_nll:.4f}), "
            f"{self.seconds:.0f} s"
        )
