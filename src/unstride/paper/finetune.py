"""Fine-tuning on Flowers102, which the paper's Table 2 rests on: `unstride reproduce flowers102-finetune`.

Printed (section 5.1): ImageNet weights of torchvision are fine-tuned on the official training split; images are resized
to 256 px and cropped to 224. Not printed, and chosen here: SGD with momentum 0.9, lr 0.01 with cosine annealing, weight
decay 1e-4, 30 epochs, batches of 32, random crops and flips; the epoch with the best accuracy on the official
validation split is kept. Every epoch leaves a checkpoint, so that a killed run continues where it was.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from unstride.compat import import_torchvision
from unstride.data import Dataset
from unstride.data import load as load_data
from unstride.errors import ArtefactError, DataError, SpecError
from unstride.models.libraries import close_to
from unstride.models.weights import read_weights, seeded
from unstride.paper.numbers import FOUR
from unstride.paper.sources import FIRST, LAYOUTS, TORCHVISION, first_weights, weights_name
from unstride.storage.artefacts import read_artefact, write_artefact, write_file
from unstride.storage.fingerprint import text_digest
from unstride.storage.progress import progress as show_progress
from unstride.views.images import Preprocess

NETWORKS = FOUR
CLASSES = 102
PREPROCESS = Preprocess()  # resized to 256 px, cropped to 224, as every image of the paper
KIND = "flowers102-finetune"
EPOCHS, BATCH = 30, 32
LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4
_BEST, _NOW, _SPEED = "best.", "now.", "speed."  # prefixes of a checkpoint's tensors


@dataclass(frozen=True)
class FineTuned:
    """What a fine-tuning gave. Accuracies are from 0 to 1."""

    model: str
    file: str
    epochs: int
    kept: int
    validation: float
    test: float
    test_images: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.model}: test accuracy {self.test:.2%} ({self.test_images:,} images), validation accuracy "
            f"{self.validation:.2%}, epoch {self.kept} of {self.epochs}\nwrote {self.file}"
        )


def finetune(
    model: str,
    root: Path,
    *,
    epochs: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> FineTuned:
    """Train one of the paper's networks on Flowers102, and write `weights/flowers102-MODEL.safetensors` below `root`.

    Args:
        limit: use so many images of each split.
    """
    if model not in TORCHVISION:
        raise SpecError(f"--network: got {model!r}, expected one of {', '.join(NETWORKS)}{close_to(model, NETWORKS)}")
    if not (root / LAYOUTS["flowers102"].folder).is_dir():
        raise DataError(f"{root}: this is missing:\n  flowers102: {LAYOUTS['flowers102'].words}")
    parts = [load_data(f"flowers102:{root}", PREPROCESS, s, limit, classes=CLASSES) for s in ("train", "val", "test")]
    network = starting_network(model, root)
    file = root / "weights" / f"{weights_name(model, 'flowers102')}.safetensors"
    settings = [model, epochs or EPOCHS, limit, seed, *(part.fingerprint() for part in parts)]
    training = FineTuning(network, parts[0], parts[1], epochs or EPOCHS, seed, file, text_digest(settings))
    best = training.run(progress)
    network.load_state_dict(best)
    test = accuracy(network, parts[2], "test images", progress)
    write_file(file, save({name: tensor.contiguous() for name, tensor in {**best, **training.unused}.items()}))
    training.checkpoint.unlink(missing_ok=True)
    return FineTuned(model, str(file), training.epochs, training.kept, training.accuracy, test, len(parts[2]))


def starting_network(model: str, root: Path) -> nn.Module:
    """A network with ImageNet weights (from weights/imagenet-MODEL.pth, or fetched) and a new head for the flowers."""
    import_torchvision()
    from torchvision.models import get_model

    name = TORCHVISION[model]
    own = [
        root / "weights" / f"imagenet-{stem}{end}" for stem in (name, model.lower()) for end in (".pth", ".safetensors")
    ]
    file = next((path for path in own if path.is_file()), None)
    state = first_weights(f"torchvision:{name}").model.state_dict() if file is None else read_weights(file)
    settings = {"init_weights": True} if name == "inception_v3" else {}
    with seeded():
        network: nn.Module = get_model(name, weights=None, num_classes=CLASSES, **settings)
    new = network.state_dict()
    kept = {key: value for key, value in state.items() if key in new and value.shape == new[key].shape}
    if len(kept) < len(new) / 2:
        raise ArtefactError(
            f"{file or FIRST}: these weights are not for {model}: {len(kept)} of {len(new)} tensors fit."
        )
    network.load_state_dict({**new, **kept})
    if hasattr(network, "transform_input"):  # Inception's released weights were trained with it
        network.transform_input = True  # type: ignore[assignment]
    return network


class FineTuning:
    """Training with a checkpoint after each epoch. The images of an epoch depend on the seed and its number alone."""

    def __init__(
        self, network: nn.Module, train: Dataset, validation: Dataset, epochs: int, seed: int, file: Path, run: str
    ) -> None:
        self.network, self.train, self.validation = network, train, validation
        self.epochs, self.seed, self.run_digest = epochs, seed, run
        self.checkpoint = file.with_name(f"{file.stem}.partial.safetensors")
        self.unused: dict[str, Tensor] = {}
        if isinstance(aux := getattr(network, "AuxLogits", None), nn.Module):  # too large for images of 224 px
            self.unused = {f"AuxLogits.{name}": value for name, value in aux.state_dict().items()}
            network.AuxLogits = None  # type: ignore[assignment]
        self.optimiser = torch.optim.SGD(network.parameters(), LR, MOMENTUM, weight_decay=DECAY)
        self.done, self.kept, self.accuracy = 0, 0, -1.0
        self.best: dict[str, Tensor] = {}

    def run(self, show: bool) -> dict[str, Tensor]:
        """The tensors of the epoch with the best validation accuracy; of equal ones, the last."""
        self._continue()
        with show_progress("epochs", self.epochs, show) as advance:
            advance(self.done, "")
            while self.done < self.epochs:
                self._epoch(self.done)
                self.done += 1
                found = accuracy(self.network, self.validation)
                if found >= self.accuracy:
                    self.accuracy, self.kept = found, self.done
                    self.best = {name: value.detach().clone() for name, value in self.network.state_dict().items()}
                self._write()
                advance(1, f"validation accuracy {found:.2%}")
        return self.best

    def _epoch(self, number: int) -> None:
        self.network.train()
        order = random.Random(f"{self.seed} {number}").sample(range(len(self.train)), len(self.train))
        batches = [order[k : k + BATCH] for k in range(0, len(order), BATCH)]
        for step, rows in enumerate(batches):
            share = (number + step / len(batches)) / self.epochs
            self.optimiser.param_groups[0]["lr"] = LR * (1 + torch.cos(torch.tensor(torch.pi * share)).item()) / 2
            if len(rows) == 1 and len(batches) > 1:  # batch norm needs two
                continue
            pairs = [self._augmented(row, number) for row in rows]
            output = self.network(torch.stack([image for image, _ in pairs]))
            loss = cross_entropy(output, torch.tensor([label for _, label in pairs]))
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()

    def _augmented(self, row: int, epoch: int) -> tuple[Tensor, int]:
        """A random crop, flipped or not."""
        draw = random.Random(f"{self.seed} {epoch} {row}")
        opened, label = self.train[row].read()
        preprocess = self.train.preprocess
        image = replace(preprocess, crop=None)(opened)
        height, width = preprocess.size or (image.shape[1], image.shape[2])
        image = pad(image, (0, max(0, width - image.shape[2]), 0, max(0, height - image.shape[1])))
        top, left = draw.randint(0, image.shape[1] - height), draw.randint(0, image.shape[2] - width)
        image = image[:, top : top + height, left : left + width]
        assert isinstance(label, int)
        return image.flip(-1) if draw.random() < 0.5 else image, label

    # -- checkpoints
    def _write(self) -> None:
        speed = {str(k): s["momentum_buffer"] for k, s in self.optimiser.state_dict()["state"].items()}
        groups = ((_BEST, self.best), (_NOW, self.network.state_dict()), (_SPEED, speed))
        tensors = {prefix + name: value.clone() for prefix, own in groups for name, value in own.items()}
        about = {"run": self.run_digest, "done": self.done, "kept": self.kept, "accuracy": self.accuracy}
        write_artefact(self.checkpoint, tensors, {"kind": KIND, **about})

    def _continue(self) -> None:
        """Take over the epochs of an earlier run with the same settings and images."""
        if not self.checkpoint.is_file():
            return
        try:
            tensors, about = read_artefact(self.checkpoint, KIND)
        except ArtefactError:
            return  # damaged: its epochs are trained again
        if about.get("run") != self.run_digest:
            return
        parts = {p: {n[len(p) :]: v for n, v in tensors.items() if n.startswith(p)} for p in (_BEST, _NOW, _SPEED)}
        self.network.load_state_dict(parts[_NOW])
        state = self.optimiser.state_dict()
        state["state"] = {int(k): {"momentum_buffer": value} for k, value in parts[_SPEED].items()}
        self.optimiser.load_state_dict(state)
        self.best, self.done, self.kept = parts[_BEST], int(about["done"]), int(about["kept"])
        self.accuracy = float(about["accuracy"])


@torch.no_grad()
def accuracy(network: nn.Module, images: Dataset, label: str = "", show: bool = False) -> float:
    """The share of images whose class is right."""
    network.eval()
    right = 0
    with show_progress(label, len(images), show) as advance:
        for start in range(0, len(images), BATCH):
            pairs = [images.tensors(i) for i in range(start, min(start + BATCH, len(images)))]
            output = network(torch.stack([image for image, _ in pairs])).argmax(1).tolist()
            right += sum(int(answer == label) for answer, (_, label) in zip(output, pairs, strict=True))
            advance(len(pairs), "")
    return right / len(images)
