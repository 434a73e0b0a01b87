"""Trains networks on CamVid, to measure on images that they have not seen.

    python -m benchmarks.camvid --assets DIR --out DIR --net mobilenet    # three quarters of an hour on one core

`mobilenet` starts from a third party's weights for Pascal VOC (DIR/voc), `deeplab` and `unet` from scratch.
DIR/camvid/camvid_240x180.zip holds {train,val,test}/images/*.jpg and {train,val,test}/masks/*.png of 240x180 pixels
with 11 classes; 11 is void. CamVid is CC BY-NC: neither it nor these networks are part of unstride. Writes
`NET.safetensors` (the epoch that is best on val) for `build(NET)` below, and `NET.json` with the base model's mIoU.
A killed run goes on from its last epoch, with the same result; test images play no part in training or choosing.
"""

from __future__ import annotations

import argparse
import io
import json
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import unstride  # noqa: F401  (torchvision is importable after it)
from benchmarks.nets import DeepLabVOC

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
VOID = 11
BATCH = 8
SEED = 1


def _conv(wide_in: int, wide_out: int, size: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(wide_in, wide_out, size, stride, dilation * (size // 2), dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(wide_out))


class Block(nn.Module):
    def __init__(self, wide_in: int, wide_out: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(wide_in, wide_out, 3, stride, dilation)
        self.conv2 = _conv(wide_out, wide_out, 3, 1, dilation)
        same = stride == 1 and wide_in == wide_out
        self.downsample = nn.Identity() if same else _conv(wide_in, wide_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.downsample(x))


class DeepLab(nn.Module):
    """(B, 3, H, W) -> (B, 11, H, W): a narrow ResNet of output stride 8, pyramid pooling by dilation, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 32, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.layer1 = nn.Sequential(Block(32, 32), Block(32, 32))
        self.layer2 = nn.Sequential(Block(32, 64, 2), Block(64, 64))
        self.layer3 = nn.Sequential(Block(64, 96, dilation=2), Block(96, 96, dilation=2))
        self.branches = nn.ModuleList([_conv(96, 48, 1), _conv(96, 48, 3, dilation=4), _conv(96, 48, 3, dilation=8)])
        self.scene = nn.Conv2d(96, 48, 1)
        self.project = _conv(4 * 48, 64, 1)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Conv2d(64, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer3(self.layer2(self.layer1(self.stem(x))))
        scene = self.scene(F.adaptive_avg_pool2d(h, 1)).expand(-1, -1, *h.shape[-2:])
        h = F.relu(torch.cat([branch(h) for branch in self.branches] + [scene], 1))
        cells = self.classifier(self.dropout(F.relu(self.project(h))))
        return F.interpolate(cells, size=x.shape[-2:], mode="bilinear", align_corners=False)


class UNet(nn.Module):
    """(B, 3, H, W) -> (B, 11, H, W): a ResNet encoder of stride 16, a decoder with skips up to stride 2, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 16, 3, 2), nn.ReLU())
        self.layer1 = nn.Sequential(nn.MaxPool2d(3, 2, 1), Block(16, 32), Block(32, 32))
        self.layer2 = nn.Sequential(Block(32, 64, 2), Block(64, 64))
        self.layer3 = nn.Sequential(Block(64, 128, 2), Block(128, 128))
        self.up2 = Block(128 + 64, 64)
        self.up1 = Block(64 + 32, 32)
        self.up0 = nn.Sequential(_conv(32 + 16, 24, 3), nn.ReLU())
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Conv2d(24, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.layer1(a)
        c = self.layer2(b)
        y = self.layer3(c)
        for skip, block in ((c, self.up2), (b, self.up1), (a, self.up0)):
            y = block(torch.cat([F.interpolate(y, size=skip.shape[-2:], mode="nearest"), skip], 1))
        return F.interpolate(self.classifier(self.dropout(y)), size=x.shape[-2:], mode="bilinear", align_corners=False)


def voc_mobilenet() -> nn.Module:
    """(B, 3, H, W) -> (B, 11, H, W): DeepLabV3 on a MobileNetV2 of output stride 8, with a new last layer."""
    model = DeepLabVOC()
    model.cls = nn.Conv2d(256, len(CLASSES), 1)
    return model


@dataclass(frozen=True)
class Recipe:
    """How a network is trained and fed. Frames of 180x240 are padded to a size whose strides come out even."""

    make: Callable[[], nn.Module]
    padding: tuple[int, int, int, int]
    crop: tuple[int, int]
    epochs: int
    rate: float
    mean: tuple[float, float, float] = (0.41, 0.42, 0.43)
    std: tuple[float, float, float] = (0.30, 0.30, 0.30)
    start: str | None = None  # weights under --assets, for all layers but the last
    slow: float = 1.0  # learning rate of the layers that have those weights / `rate`

    def normalise(self, pixels: Tensor) -> Tensor:
        """(..., 3, H, W) of 0..1, normalised."""
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.mean, self.std))
        return (pixels - mean) / std


VOC = "voc/deeplabv3_mobilenet_v2_os8.safetensors"
HALF = (0.5, 0.5, 0.5)
NETS: dict[str, Recipe] = {
    "deeplab": Recipe(DeepLab, (0, 0, 0, 12), (160, 208), 28, 3e-3),
    "unet": Recipe(UNet, (0, 0, 0, 12), (160, 208), 28, 3e-3),
    # its upsampling lays the corner cells on the corner pixels: sizes of 8 n + 1
    "mobilenet": Recipe(voc_mobilenet, (0, 1, 0, 5), (161, 209), 20, 2e-3, HALF, HALF, VOC, 0.1),
}


def build(net: str) -> nn.Module:
    """The untrained network; `NET.safetensors` has its weights."""
    return NETS[net].make()


def preprocess(images: Tensor, net: str) -> Tensor:
    """uint8 (..., 3, 180, 240) -> what the network takes; `pad_mask` goes with it."""
    return F.pad(NETS[net].normalise(images.float() / 255), NETS[net].padding)


def pad_mask(masks: Tensor, net: str) -> Tensor:
    """(..., 180, 240) -> int64 of the padded size, void where nothing is."""
    return F.pad(masks.long(), NETS[net].padding, value=VOID)


def load_split(archive: Path, split: str) -> tuple[Tensor, Tensor]:
    """uint8 images (N, 3, 180, 240) and masks (N, 180, 240) of one split, by file name."""
    images, masks = [], []
    with zipfile.ZipFile(archive) as files:
        names = sorted(n for n in files.namelist() if n.startswith(f"{split}/images/") and n.endswith(".jpg"))
        for name in names:
            mask = name.replace("/images/", "/masks/").replace(".jpg", ".png")
            images.append(np.asarray(Image.open(io.BytesIO(files.read(name))).convert("RGB")))
            masks.append(np.asarray(Image.open(io.BytesIO(files.read(mask)))))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(np.stack(masks))


def augment(image: Tensor, mask: Tensor, rng: np.random.Generator, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """One image (3, H, W) and mask (H, W): scaled, cropped (void where nothing is left), flipped, recoloured."""
    scale = float(np.exp(rng.uniform(np.log(0.7), np.log(1.8))))
    size = [round(side * scale) for side in mask.shape]
    pixels = F.interpolate(image[None].float() / 255, size=size, mode="bilinear", align_corners=False)[0]
    labels = F.interpolate(mask[None, None].float(), size=size, mode="nearest-exact")[0, 0].long()
    contrast, colour = rng.uniform(0.6, 1.4), torch.from_numpy(rng.uniform(-0.12, 0.12, 3) + rng.uniform(-0.15, 0.15))
    pixels = ((pixels - 0.42) * contrast + 0.42 + colour.float().view(3, 1, 1)).clamp(0, 1)
    pixels = recipe.normalise(pixels)
    crop = recipe.crop
    missing = [max(0, want - have) for want, have in zip(crop, size, strict=True)]
    pixels = F.pad(pixels, (0, missing[1], 0, missing[0]))
    labels = F.pad(labels, (0, missing[1], 0, missing[0]), value=VOID)
    top, left = (int(rng.integers(0, have - want + 1)) for want, have in zip(crop, labels.shape, strict=True))
    pixels, labels = (part[..., top : top + crop[0], left : left + crop[1]] for part in (pixels, labels))
    if rng.random() < 0.5:
        pixels, labels = pixels.flip(-1), labels.flip(-1)
    return pixels, labels


@torch.no_grad()
def confusion(model: nn.Module, net: str, images: Tensor, masks: Tensor) -> NDArray[np.int64]:
    """(11, 11) pixel counts over the whole split, rows the truth; void left out."""
    classes = len(CLASSES)
    table = torch.zeros(classes * classes, dtype=torch.int64)
    for at in range(0, len(images), BATCH):
        guess = model(preprocess(images[at : at + BATCH], net)).argmax(1)
        truth = pad_mask(masks[at : at + BATCH], net)
        known = truth != VOID
        table += torch.bincount(truth[known] * classes + guess[known], minlength=classes**2)
    return table.view(classes, classes).numpy()


def figures(table: NDArray[np.int64]) -> dict[str, object]:
    right = np.diag(table)
    iou = right / np.maximum(table.sum(0) + table.sum(1) - right, 1)
    return {
        "miou": float(iou.mean()),
        "aacc": float(right.sum() / table.sum()),
        "iou": dict(zip(CLASSES, iou.tolist(), strict=True)),
    }


def prepare(net: str, assets: Path) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The network to train, and its groups of parameters: layers that know something already learn slowly."""
    recipe = NETS[net]
    torch.manual_seed(SEED)
    model = build(net).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if recipe.start is None:
        return model, [{"params": list(model.parameters()), "lr": recipe.rate}]
    known = load_file(assets / recipe.start)
    fresh = [name for name, tensor in model.state_dict().items() if tensor.shape != known[name].shape]
    model.load_state_dict({name: tensor for name, tensor in known.items() if name not in fresh}, strict=False)
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in fresh) == new], "lr": rate}
        for new, rate in ((True, recipe.rate), (False, recipe.rate * recipe.slow))
    ]
    return model, groups


def train_mode(model: nn.Module, net: str) -> None:
    """Batch norm of pretrained weights stays as it is: small batches know less of it than they do."""
    model.train()
    if NETS[net].start is not None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


def train(assets: Path, archive: Path, net: str, epochs: int, out: Path) -> None:
    """Leaves `NET.safetensors`, the epoch best on val, in `out`; `NET.last.pt` is where a killed run goes on."""
    images, masks = load_split(archive, "train")
    held_images, held_masks = load_split(archive, "val")
    share = torch.bincount(masks.flatten().long(), minlength=VOID + 1)[:VOID].double()
    weight = (share.sum() / share).pow(0.35)  # rare things count in mIoU as much as the road
    weight = (weight / weight.mean()).float()

    model, groups = prepare(net, assets)
    steps = len(images) // BATCH
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=epochs * steps, pct_start=0.1)
    last, first, best = out / f"{net}.last.pt", 0, 0.0
    if last.exists():
        saved = torch.load(last, weights_only=True)
        if saved["epochs"] != epochs:
            raise SystemExit(f"{last} is of a run of {saved['epochs']} epochs, not {epochs}: remove it to start anew")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first, best = saved["done"], saved["best"]
    start = time.monotonic()
    for epoch in range(first, epochs):
        torch.manual_seed(SEED + epoch)  # each epoch has its own numbers, wherever the run began
        rng = np.random.default_rng([SEED, epoch])
        train_mode(model, net)
        total = 0.0
        for chosen in rng.permutation(len(images))[: steps * BATCH].reshape(steps, BATCH):
            pairs = [augment(images[i], masks[i], rng, NETS[net]) for i in chosen]
            pixels = torch.stack([pair[0] for pair in pairs]).contiguous(memory_format=torch.channels_last)
            labels = torch.stack([pair[1] for pair in pairs])
            loss = F.cross_entropy(model(pixels), labels, weight, ignore_index=VOID)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        model.eval()
        line = f"{net} epoch {epoch + 1}/{epochs}: loss {total / steps:.4f}, {time.monotonic() - start:.0f} s"
        if (epoch + 1) % 5 == 0 or epoch + 1 == epochs:
            reached = float(figures(confusion(model, net, held_images, held_masks))["miou"])  # type: ignore[arg-type]
            line += f", val mIoU {100 * reached:.2f}"
            if reached > best:
                best = reached
                save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, weights(out, net))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**state, "done": epoch + 1, "best": best, "epochs": epochs}, last.with_suffix(".tmp"))
        last.with_suffix(".tmp").rename(last)
        print(line, flush=True)


def weights(out: Path, net: str) -> Path:
    return out / f"{net}.safetensors"


def load(out: Path, net: str) -> nn.Module:
    """The trained network that `main` left in a folder."""
    model = build(net)
    model.load_state_dict(load_file(weights(out, net)))
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network on CamVid.")
    parser.add_argument("--assets", type=Path, required=True, help="folder with camvid/camvid_240x180.zip")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and the plain figures")
    parser.add_argument("--net", choices=sorted(NETS), default="deeplab")
    parser.add_argument("--epochs", type=int, default=None)
    options = parser.parse_args()
    archive = options.assets / "camvid" / "camvid_240x180.zip"
    if not archive.is_file():
        parser.error(f"{archive} does not exist")
    torch.set_num_threads(1)  # sums have one order, so the weights come out the same
    options.out.mkdir(parents=True, exist_ok=True)
    train(options.assets, archive, options.net, options.epochs or NETS[options.net].epochs, options.out)
    model = load(options.out, options.net)
    result = {split: figures(confusion(model, options.net, *load_split(archive, split))) for split in ("val", "test")}
    (options.out / f"{options.net}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
