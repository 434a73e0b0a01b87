"""Train the embedded networks and write the embedded test samples, all from Fashion-MNIST.

    apt-get install dataset-fashion-mnist
    python -m benchmarks.train_sample                    # about an hour and a half on one core
    python -m benchmarks.train_sample --only samples     # the test samples alone, in seconds

The last 5,000 training images are never trained on. The test images are read once, at the end, to measure the networks.
One thread and fixed seeds: the same machine and versions give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.fashion import FashionMNIST, load_fashion_mnist
from benchmarks.scenes import compose_scenes
from unstride import sample
from unstride.sample.data import CLASSIFICATION_FILE, SCENE_CLASSES, SEGMENTATION_FILE, Bytes, Labels
from unstride.sample.nets import Classifier, LargeClassifier, SampleSegmenter

SEED = 1
TEST_IMAGES = 5000  # the first of the official test set
TEST_SCENES, TEST_SCENE_SEED = 240, 7  # composed from the whole official test set
TRAIN_SCENES, TRAIN_SCENE_SEED = 16000, 1  # composed from the training images
FILES = Path(sample.__file__).parent / "files"

Batch = Callable[[Labels, float], tuple[Tensor, Tensor]]  # of these examples, at this part of the training


def write_samples(data: FashionMNIST, out: Path) -> None:
    images, labels = data.test_images[:TEST_IMAGES], data.test_labels[:TEST_IMAGES]
    np.savez_compressed(out / CLASSIFICATION_FILE, images=images, labels=labels.astype(np.uint8))
    scenes, masks = compose_scenes(data.test_images, data.test_labels, TEST_SCENES, TEST_SCENE_SEED)
    np.savez_compressed(out / SEGMENTATION_FILE, images=scenes, labels=masks)
    print(f"samples: {len(images)} test images, {len(scenes)} test scenes", flush=True)


def train_small(data: FashionMNIST, out: Path, epochs: int = 12) -> None:
    """Flips, and shifts by up to an eighth of the image."""
    rng = _seeded()
    model = Classifier()

    def batch(chosen: Labels, _: float) -> tuple[Tensor, Tensor]:
        images = flip_and_shift(sample.preprocess_classification(data.train_images[chosen]), rng, reach=8)
        return images, torch.from_numpy(data.train_labels[chosen])

    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)
    train(model, optimizer, rng, batch, len(data.train_images), _one_cycle(epochs, len(data.train_images) // 128), 128)
    _save(model, out / sample.CLASSIFIER_FILE, _accuracies(model, data))


def train_large(data: FashionMNIST, out: Path, epochs: int = 26) -> None:
    """As the small one, with erased squares, in bfloat16, with images of 48 pixels at first; weights are averaged."""
    rng = _seeded()
    model = LargeClassifier()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998), use_buffers=True)

    def batch(chosen: Labels, progress: float) -> tuple[Tensor, Tensor]:
        images = sample.preprocess_classification(data.train_images[chosen])
        if progress < 0.6:
            images = F.interpolate(images, size=(48, 48), mode="bilinear", align_corners=False, antialias=True)
        images = flip_and_shift(images, rng, reach=images.shape[-1] // 8)
        return erase_squares(images, rng), torch.from_numpy(data.train_labels[chosen])

    optimizer = torch.optim.SGD(model.parameters(), 0.15, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = _one_cycle(epochs, len(data.train_images) // 128)
    train(model, optimizer, rng, batch, len(data.train_images), schedule, 128, bfloat16=True, mean=mean)
    model = mean.module
    _save(model, out / sample.LARGE_CLASSIFIER_FILE, _accuracies(model, data), half=True)


def train_segmentation(data: FashionMNIST, out: Path, epochs: int = 12) -> None:
    rng = _seeded()
    scenes, masks = compose_scenes(data.train_images, data.train_labels, TRAIN_SCENES, TRAIN_SCENE_SEED)
    model = SampleSegmenter()

    def batch(chosen: Labels, _: float) -> tuple[Tensor, Tensor]:
        flip = torch.from_numpy(rng.random(len(chosen)) < 0.5)[:, None, None]
        images = sample.preprocess_segmentation(scenes[chosen]).squeeze(1)
        labels = torch.from_numpy(masks[chosen]).long()
        images = torch.where(flip, images.flip(-1), images).unsqueeze(1)
        return images, torch.where(flip, labels.flip(-1), labels)

    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, weight_decay=0.02)
    train(model, optimizer, rng, batch, len(scenes), _one_cycle(epochs, len(scenes) // 32), 32)
    held_out = compose_scenes(data.fit_images, data.fit_labels, TEST_SCENES, TRAIN_SCENE_SEED)
    test = compose_scenes(data.test_images, data.test_labels, TEST_SCENES, TEST_SCENE_SEED)
    figures = {"held_out_miou": _mean_iou(model, *held_out), "test_miou": _mean_iou(model, *test)}
    _save(model, out / sample.SEGMENTER_FILE, figures)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: np.random.Generator,
    batch: Batch,
    examples: int,
    schedule: Iterator[tuple[float, float]],
    batch_size: int,
    bfloat16: bool = False,
    mean: AveragedModel | None = None,
) -> None:
    """Minimise the cross-entropy until the schedule ends; print a line per epoch."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    peak, per_epoch, total, epoch, start = optimizer.param_groups[0]["lr"], examples // batch_size, 0.0, 0, 0.0
    order: list[Labels] = []
    for progress, rate in schedule:
        if not order:
            order = list(rng.permutation(examples)[: per_epoch * batch_size].reshape(per_epoch, batch_size))
            if epoch:
                took = time.monotonic() - start
                print(f"epoch {epoch} ({progress:.0%}): loss {total / per_epoch:.4f}, {took:.0f} s", flush=True)
            epoch, total, start = epoch + 1, 0.0, time.monotonic()
        model.train()
        optimizer.param_groups[0]["lr"] = peak * rate
        images, labels = batch(order.pop(), progress)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            logits = model(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if mean is not None:
            mean.update_parameters(model)
        total += loss.item()
    model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]


def _one_cycle(epochs: int, per_epoch: int) -> Iterator[tuple[float, float]]:
    """The learning rate rises for 15 % of the steps from 4 % of its peak, then falls to nothing, by cosines."""
    steps = epochs * per_epoch
    for step in range(steps):
        rise = 0.15 * steps
        part = (step - rise) / (steps - rise) if step > rise else 1 - step / rise
        yield (
            step / steps,
            (0.5 + 0.5 * math.cos(math.pi * part)) * (1 if step > rise else 0.96) + 0.04 * (step <= rise),
        )


def flip_and_shift(images: Tensor, rng: np.random.Generator, reach: int) -> Tensor:
    """Each image of (B, 1, H, W) flipped or not, and moved by up to `reach` pixels per axis, its border repeated."""
    batch, _, height, width = images.shape
    flip = rng.random((batch, 1)) < 0.5
    down, right = rng.integers(0, 2 * reach + 1, (2, batch, 1))
    rows = torch.from_numpy(np.arange(height) + down)
    columns = torch.from_numpy(np.where(flip, np.arange(width)[::-1], np.arange(width)) + right)
    padded = F.pad(images, (reach, reach, reach, reach), mode="replicate")
    return padded[torch.arange(batch)[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def erase_squares(images: Tensor, rng: np.random.Generator) -> Tensor:
    """In half of the images a square of 1/8 to 3/8 of the side, anywhere, set to the mean."""
    batch, _, side, _ = images.shape
    length = rng.integers(side // 8, 3 * side // 8 + 1, batch) * (rng.random(batch) < 0.5)
    top, left = rng.integers(0, side, (2, batch)) - length // 2
    axis = np.arange(side)
    rows = (axis >= top[:, None]) & (axis < (top + length)[:, None])
    columns = (axis >= left[:, None]) & (axis < (left + length)[:, None])
    inside = torch.from_numpy(rows[:, None, :, None] & columns[:, None, None, :])
    return images.masked_fill(inside, 0.0)


def _seeded() -> np.random.Generator:
    torch.manual_seed(SEED)
    return np.random.default_rng(SEED)


def _accuracies(model: nn.Module, data: FashionMNIST) -> dict[str, float]:
    return {
        "held_out_accuracy": _accuracy(model, data.fit_images, data.fit_labels),
        "test_accuracy": _accuracy(model, data.test_images, data.test_labels),
    }


@torch.no_grad()
def _accuracy(model: nn.Module, images: Bytes, labels: Labels) -> float:
    model.eval()
    parts = np.array_split(np.arange(len(images)), max(1, len(images) // 500))
    predicted = [model(sample.preprocess_classification(images[part])).argmax(1).numpy() for part in parts]
    return float((np.concatenate(predicted) == labels).mean())


@torch.no_grad()
def _mean_iou(model: nn.Module, scenes: Bytes, masks: Bytes) -> float:
    """From one confusion matrix over all scenes."""
    classes = len(SCENE_CLASSES)
    counts: NDArray[np.int64] = np.zeros(classes * classes, np.int64)
    for at in range(0, len(scenes), 60):
        predicted = model(sample.preprocess_segmentation(scenes[at : at + 60])).argmax(1).numpy()
        counts += np.bincount((masks[at : at + 60] * classes + predicted).ravel(), minlength=classes**2)
    table = counts.reshape(classes, classes)
    return float(np.mean(np.diag(table) / (table.sum(0) + table.sum(1) - np.diag(table))))


def _save(model: nn.Module, path: Path, figures: dict[str, float], half: bool = False) -> None:
    metadata = {name: f"{value:.4f}" for name, value in figures.items()}
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if half:
        state = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    save_file(state, path, metadata)
    print(f"{path.name}: {metadata}", flush=True)


STEPS: dict[str, Callable[[FashionMNIST, Path], None]] = {
    "samples": write_samples,
    "classification": train_small,
    "classification-large": train_large,
    "segmentation": train_segmentation,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_sample", description="Make the embedded files.")
    parser.add_argument("--data", type=Path, help="folder of the Fashion-MNIST files (default: where Debian puts them)")
    parser.add_argument("--out", type=Path, default=FILES, help="where to write (default: the package)")
    parser.add_argument("--only", choices=STEPS, help="one step only")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the order of sums depends on it
    torch.use_deterministic_algorithms(True)
    data = load_fashion_mnist(options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, step in STEPS.items():
        if options.only in (None, name):
            step(data, options.out)


if __name__ == "__main__":
    main()
