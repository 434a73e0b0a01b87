"""Makes the models and images of "Your own model in five minutes", runs the page's commands, and keeps their output.

python docs/_tools/first_models.py FOLDER        # writes the output into docs/quick-start.md

Everything is small and made from the images inside the package: a network of timm, one of a model.py, a U-Net of smp
and a classifier of transformers, each trained for about a minute. Other images are for the commands.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from unstride import data, models, sample
from unstride.compat import import_torchvision

PAGE = Path(__file__).parents[1] / "quick-start.md"
SECTIONS = re.compile(r"^### (?P<title>.+)\n(?P<text>(?:(?!^##).*\n?)*)", re.MULTILINE)
OUTPUT = re.compile(
    r"^```(?P<kind>bash|python)\n(?P<code>(?:(?!```).*\n)+)```\n\n```text\n(?:(?!```).*\n)*```\n", re.MULTILINE
)
WIDTH = 110
MODEL_FILE = '''"""A model of your own: a function that returns the module, its preprocessing and its classes."""

import torch
from torch import nn

import unstride

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
PREPARE = unstride.Preprocess(resize=32, crop=32, mean=(0.3,), std=(0.35,), channels="L")


def net():
    layers = []
    for a, b in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def garment_net():
    model = net()
    model.load_state_dict(torch.load("own.pt", weights_only=True))
    return model.eval(), PREPARE, CLASSES
'''
NOTEBOOK = """
from torch.utils.data import DataLoader
from model import garment_net
from unstride import data

model, prepare, classes = garment_net()
photos = data.load("csv:labels.csv", prepare, classes=classes)
val_loader = DataLoader([photos.tensors(k) for k in range(len(photos))], batch_size=64)
"""


@dataclass(frozen=True)
class Sizes:
    """Images to train on, passes over them, and images for the commands."""

    training: int = 1200
    scenes: int = 80
    epochs: int = 4
    labelled: int = 300
    labelled_scenes: int = 40
    new: int = 4


def prepare(folder: Path, sizes: Sizes) -> None:
    """Images, masks, weights and model.py, as a user has them."""
    import_torchvision()
    images, labels = sample.classification_sample()
    for name, chosen in (("train", range(sizes.training)), ("photos", range(5000 - sizes.labelled, 5000))):
        for k in chosen:
            path = folder / name / sample.CLASSES[labels[k]] / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[k]).save(path)
    for name in sample.CLASSES:  # a class of which no image was drawn is a folder, too
        for part in ("train", "photos"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
    with (folder / "labels.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("path", "label"))
        rows.writerows((path.relative_to(folder), path.parent.name) for path in sorted(folder.glob("photos/*/*.png")))
    (folder / "new_photos").mkdir(exist_ok=True)
    for k in range(sizes.training, sizes.training + sizes.new):
        Image.fromarray(images[k]).save(folder / "new_photos" / f"{k}.png")
    _timm(folder, sizes)
    _own(folder, sizes)
    _transformers(folder, sizes)
    _segmenter(folder, sizes)


def _timm(folder: Path, sizes: Sizes) -> None:
    import timm

    model = timm.create_model("test_resnet", num_classes=10)
    _train(model, _pairs(folder, models.load("timm:test_resnet", weights="random").preprocess), sizes)
    save_file(model.state_dict(), folder / "resnet.safetensors")


def _own(folder: Path, sizes: Sizes) -> None:
    (folder / "model.py").write_text(MODEL_FILE, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(MODEL_FILE, names)
    model = names["net"]()
    own = data.load(f"folder:{folder / 'train'}", names["PREPARE"], classes=names["CLASSES"])
    _train(model, [own.tensors(k) for k in range(len(own))], sizes)
    torch.save(model.state_dict(), folder / "own.pt")


def _transformers(folder: Path, sizes: Sizes) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

    names = sorted(sample.CLASSES)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1], layer_type="basic")
    config.id2label, config.label2id = dict(enumerate(names)), {name: k for k, name in enumerate(names)}
    model = ResNetForImageClassification(config)
    processor = ViTImageProcessor(size={"height": 64, "width": 64})
    model.save_pretrained(folder / "garments")
    processor.save_pretrained(folder / "garments")
    loaded = models.load(f"hf:{folder / 'garments'}")
    _train(model, _pairs(folder, loaded.preprocess), sizes, lambda net, x: net(x).logits)
    model.save_pretrained(folder / "garments")


def _segmenter(folder: Path, sizes: Sizes) -> None:
    import segmentation_models_pytorch as smp

    scenes, masks = sample.segmentation_sample()
    masks = (masks > 0).astype(np.uint8)  # background and garment: quickly learned
    for k in range(len(scenes) - sizes.labelled_scenes, len(scenes)):
        for name, pixels in (("images", scenes[k]), ("masks", masks[k])):
            (folder / "scenes" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / "scenes" / name / f"{k}.png")
    (folder / "scenes" / "classes.txt").write_text("background\ngarment\n", encoding="utf-8")
    model = smp.create_model("Unet", "mobilenet_v2", encoder_weights=None, classes=2)
    prepare = models.load("smp:Unet:mobilenet_v2", weights="random").preprocess
    pairs = [
        (prepare(Image.fromarray(scene).convert("RGB")), torch.from_numpy(mask.astype(np.int64)))
        for scene, mask in zip(scenes[: sizes.scenes], masks[: sizes.scenes], strict=True)
    ]
    _train(model, pairs, sizes, epochs=2 * sizes.epochs, batch=8, rate=2e-3)
    save_file(model.state_dict(), folder / "unet.safetensors")


def _pairs(folder: Path, prepare: Any) -> list[tuple[Tensor, int]]:
    images = data.load(f"folder:{folder / 'train'}", prepare)
    return [images.tensors(k) for k in range(len(images))]


def _train(
    model: nn.Module,
    pairs: list[Any],
    sizes: Sizes,
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda net, x: net(x),
    epochs: int | None = None,
    batch: int = 64,
    rate: float = 4e-3,
) -> None:
    """Adam with one cycle of the rate; half of the images are flipped."""
    generator = torch.Generator().manual_seed(0)
    epochs = epochs or sizes.epochs
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    steps = epochs * len(range(0, len(pairs), batch))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps + 1)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(pairs), generator=generator).split(batch):
            x = torch.stack([pairs[k][0] for k in chosen])
            y = torch.stack([torch.as_tensor(pairs[k][1]) for k in chosen])
            if torch.rand((), generator=generator) < 0.5:
                x, y = x.flip(-1), y.flip(-1) if y.ndim > 1 else y
            optimiser.zero_grad()
            F.cross_entropy(logits(model, x), y).backward()
            optimiser.step()
            schedule.step()
    model.eval()


def outputs(folder: Path, text: str) -> str:
    """The page, with what its commands print now."""

    def section(found: re.Match[str]) -> str:
        return OUTPUT.sub(block, found[0])

    def block(found: re.Match[str]) -> str:
        printed = run(folder, found["kind"], found["code"])
        return f"```{found['kind']}\n{found['code']}```\n\n```text\n{printed}```\n"

    return SECTIONS.sub(section, text)


def run(folder: Path, kind: str, code: str) -> str:
    """What a terminal shows of one block. An error ends the program."""
    if kind == "python":
        return _ran(folder, [sys.executable, "-c", NOTEBOOK + code])
    lines = [line for line in code.replace("\\\n", " ").splitlines() if line.startswith("unstride ")]
    printed = [f"$ {line}\n{_ran(folder, line)}" for line in lines]
    return "\n".join(printed) if len(lines) > 1 else printed[0].partition("\n")[2]


def _ran(folder: Path, command: str | list[str]) -> str:
    if isinstance(command, str):
        command = [sys.executable, "-m", "unstride", *command.split("#")[0].split()[1:]]
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")
    shown = [line.rstrip() for line in done.stdout.replace(f"{folder.resolve()}{os.sep}", "").splitlines()]
    return "\n".join(line for k, line in enumerate(shown) if not _passing(line, shown[k + 1 :])) + "\n"


def _passing(line: str, after: list[str]) -> bool:
    """Whether a line of progress is followed by another: a terminal shows the last."""
    label = line.partition(":")[0]
    return line.endswith(" s left") and bool(after) and after[0].startswith(f"{label}:")


if __name__ == "__main__":
    torch.manual_seed(0)
    place = Path(sys.argv[1])
    if not (place / "unet.safetensors").exists():
        prepare(place, Sizes())
    PAGE.write_text(outputs(place, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
