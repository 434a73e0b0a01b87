"""Makes everything in `files/` from Fashion-MNIST: both networks, the learned aggregation, and the test samples.

    apt-get install dataset-fashion-mnist
    python -m unstride.demo.train                  # about an hour on one core
    python -m unstride.demo.train --only samples   # the test samples alone, in seconds

One thread and fixed seeds: the same machine and versions give the same samples, byte for byte, and the same weights;
others come close.
The last 5,000 training images are never trained on; the test images are read once, at the end, to say how good the
networks are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from unstride.sample import (
    AGGREGATION_FILE,
    CLASSIFIER_FILE,
    SEGMENTER_FILE,
    preprocess_classification,
    preprocess_segmentation,
)
from unstride.sample.data import (
    CLASSIFICATION_FILE,
    SCENE_CLASSES,
    SEGMENTATION_FILE,
    Bytes,
    FashionMNIST,
    Labels,
    load_fashion_mnist,
)
from unstride.sample.nets import Classifier, SampleSegmenter
from unstride.sample.scenes import compose_scenes

SEED = 1
TEST_IMAGES = 5000  # the first of the official test set
TEST_SCENES, TEST_SCENE_SEED = 240, 7  # composed from the whole official test set
TRAIN_SCENES, TRAIN_SCENE_SEED = 16000, 1  # composed from the training images
STEPS = ("samples", "classification", "segmentation", "aggregation")
FIT_IMAGES = 3500  # of the images set aside; the others validate


def write_samples(data: FashionMNIST, out: Path) -> None:
    images, labels = data.test_images[:TEST_IMAGES], data.test_labels[:TEST_IMAGES]
    np.savez_compressed(out / CLASSIFICATION_FILE, images=images, labels=labels.astype(np.uint8))
    scenes, masks = compose_test_scenes(data)
    np.savez_compressed(out / SEGMENTATION_FILE, images=scenes, labels=masks)
    print(f"samples: {len(images)} test images, {len(scenes)} test scenes", flush=True)


def compose_test_scenes(data: FashionMNIST) -> tuple[Bytes, Bytes]:
    return compose_scenes(data.test_images, data.test_labels, TEST_SCENES, TEST_SCENE_SEED)


def train_classification(data: FashionMNIST, out: Path, epochs: int = 12) -> None:
    """Mirrored or not, and moved by up to an eighth of the frame: what everybody does for images of this size."""
    rng = _seeded()
    model = Classifier()

    def batch(chosen: Labels) -> tuple[Tensor, Tensor]:
        images = _flip_and_shift(preprocess_classification(data.train_images[chosen]), rng, reach=8)
        return images, torch.from_numpy(data.train_labels[chosen])

    def held_out() -> float:
        return _accuracy(model, data.fit_images, data.fit_labels)

    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)
    _train(model, optimizer, rng, batch, held_out, len(data.train_images), epochs, batch_size=128)
    test = _accuracy(model, data.test_images, data.test_labels)
    _save(model, out / CLASSIFIER_FILE, {"held_out_accuracy": held_out(), "test_accuracy": test})


def train_segmentation(data: FashionMNIST, out: Path, epochs: int = 12) -> None:
    rng = _seeded()
    scenes, masks = compose_scenes(data.train_images, data.train_labels, TRAIN_SCENES, TRAIN_SCENE_SEED)
    held_scenes, held_masks = compose_scenes(data.fit_images, data.fit_labels, TEST_SCENES, TRAIN_SCENE_SEED)
    model = SampleSegmenter()

    def batch(chosen: Labels) -> tuple[Tensor, Tensor]:
        flip = torch.from_numpy(rng.random(len(chosen)) < 0.5)[:, None, None]
        images = preprocess_segmentation(scenes[chosen]).squeeze(1)
        labels = torch.from_numpy(masks[chosen]).long()
        images = torch.where(flip, images.flip(-1), images).unsqueeze(1)
        return images, torch.where(flip, labels.flip(-1), labels)

    def held_out() -> float:
        return _mean_iou(model, held_scenes, held_masks)

    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, weight_decay=0.02)
    _train(model, optimizer, rng, batch, held_out, len(scenes), epochs, batch_size=32)
    _save(
        model,
        out / SEGMENTER_FILE,
        {"held_out_miou": held_out(), "test_miou": _mean_iou(model, *compose_test_scenes(data))},
    )


def fit_aggregation(data: FashionMNIST, out: Path, epochs: int = 20) -> None:
    """The learned aggregation of the classifier in `out`, fitted on images that the classifier has not seen."""
    import unstride

    model = Classifier()
    model.load_state_dict(load_file(out / CLASSIFIER_FILE))
    images, labels = data.fit_images, torch.from_numpy(data.fit_labels)

    def loader(part: slice) -> list[tuple[Tensor, Tensor]]:
        x, y = preprocess_classification(images[part]), labels[part]
        return list(zip(x.split(100), y.split(100), strict=True))

    better = unstride.enhance(model.eval(), loader(slice(0, 1))[0][0], budget=10)
    report = unstride.fit(
        better,
        loader(slice(0, FIT_IMAGES)),
        loader(slice(FIT_IMAGES, None)),
        familiar=False,
        epochs=epochs,
        seed=SEED,
        show=False,
    )
    better.with_options(aggregate="attention", criterion="learned").save(out / AGGREGATION_FILE)
    print(f"{AGGREGATION_FILE}: {report}", flush=True)


def _seeded() -> np.random.Generator:
    torch.manual_seed(SEED)
    return np.random.default_rng(SEED)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: np.random.Generator,
    batch: Callable[[Labels], tuple[Tensor, Tensor]],
    held_out: Callable[[], float],
    examples: int,
    epochs: int,
    batch_size: int,
) -> None:
    """Cross-entropy, one rise and fall of the learning rate; prints a line per epoch."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    per_epoch = examples // batch_size
    peak = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=epochs * per_epoch, pct_start=0.15)
    for epoch in range(epochs):
        start, total = time.monotonic(), 0.0
        model.train()
        for chosen in rng.permutation(examples)[: per_epoch * batch_size].reshape(per_epoch, batch_size):
            images, labels = batch(chosen)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        model.eval()
        took = time.monotonic() - start
        print(
            f"epoch {epoch + 1}/{epochs}: loss {total / per_epoch:.4f}, held out {held_out():.4f}, {took:.0f} s",
            flush=True,
        )
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def _flip_and_shift(images: Tensor, rng: np.random.Generator, reach: int) -> Tensor:
    """Each image of (B, 1, H, W) mirrored or not, and moved by up to `reach` pixels per axis, its border repeated."""
    batch, _, height, width = images.shape
    flip = rng.random((batch, 1)) < 0.5
    down, right = rng.integers(0, 2 * reach + 1, (2, batch, 1))
    rows = torch.from_numpy(np.arange(height) + down)
    columns = torch.from_numpy(np.where(flip, np.arange(width)[::-1], np.arange(width)) + right)
    padded = F.pad(images, (reach, reach, reach, reach), mode="replicate")
    return padded[torch.arange(batch)[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


@torch.no_grad()
def _accuracy(model: nn.Module, images: Bytes, labels: Labels) -> float:
    parts = np.array_split(np.arange(len(images)), max(1, len(images) // 500))
    guessed = [model(preprocess_classification(images[part])).argmax(1).numpy() for part in parts]
    return float((np.concatenate(guessed) == labels).mean())


@torch.no_grad()
def _mean_iou(model: nn.Module, scenes: Bytes, masks: Bytes) -> float:
    """From one confusion matrix over all scenes."""
    classes = len(SCENE_CLASSES)
    counts: NDArray[np.int64] = np.zeros(classes * classes, np.int64)
    for at in range(0, len(scenes), 60):
        guessed = model(preprocess_segmentation(scenes[at : at + 60])).argmax(1).numpy()
        counts += np.bincount((masks[at : at + 60] * classes + guessed).ravel(), minlength=classes**2)
    table = counts.reshape(classes, classes)
    return float(np.mean(np.diag(table) / (table.sum(0) + table.sum(1) - np.diag(table))))


def _save(model: nn.Module, path: Path, figures: dict[str, float]) -> None:
    metadata = {name: f"{value:.4f}" for name, value in figures.items()}
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path, metadata)
    print(f"{path.name}: {metadata}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m unstride.demo.train", description="Make the embedded default.")
    parser.add_argument("--data", type=Path, help="folder of the Fashion-MNIST files (default: where Debian puts them)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "files", help="where to write (default: the package)"
    )
    parser.add_argument("--only", choices=STEPS, help="one step only")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the order of sums depends on it
    torch.use_deterministic_algorithms(True)
    data = load_fashion_mnist(options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only in (None, "samples"):
        write_samples(data, options.out)
    if options.only in (None, "classification"):
        train_classification(data, options.out)
    if options.only in (None, "segmentation"):
        train_segmentation(data, options.out)
    if options.only in (None, "aggregation"):
        fit_aggregation(data, options.out)


if __name__ == "__main__":
    main()
