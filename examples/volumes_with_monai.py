"""Segment a volume with MONAI: its LoadImage reads the file, its sliding windows call an enhanced 3-D network.

    pip install unstride monai nibabel
    python examples/volumes_with_monai.py [scan.nii.gz]

Without a file, a synthetic volume is written and read: noisy balls. The network is a small UNet that is
trained on such balls for a moment.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import unstride
from unstride import Gate, Near, Recipe, Stage

try:
    from monai.inferers import SlidingWindowInferer
    from monai.networks.nets import UNet
    from monai.transforms import LoadImage
except ImportError:
    sys.exit("skipped: this example needs MONAI (pip install monai)")

WINDOW = (16, 16, 16)


def balls(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A volume (D, H, W) with two noisy balls, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.meshgrid(*[torch.arange(size, dtype=torch.float32)] * 3, indexing="ij")
    mask = torch.zeros(size, size, size, dtype=torch.bool)
    for _ in range(2):
        centre, radius = torch.rand(3, generator=generator) * size, 2.5 + 2 * torch.rand(1, generator=generator)
        mask |= sum((axis - c) ** 2 for axis, c in zip(axes, centre, strict=True)) < radius**2
    return mask + 0.7 * torch.randn(mask.shape, generator=generator), mask.long()


def trained(steps: int = 40) -> nn.Module:
    torch.manual_seed(0)
    net = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(steps):
        volumes, masks = map(torch.stack, zip(*[balls(16, 1000 + 4 * step + k) for k in range(4)], strict=True))
        loss = nn.functional.cross_entropy(net(volumes[:, None]), masks, weight=torch.tensor([0.2, 0.8]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


UNCERTAIN = Gate("margin", below=0.95)  # the mean margin of a window; every window is decided by itself
RECIPES = {
    "base model": (Stage(),),
    "flips along each axis": (Stage(("plain", "flip", "FlipUD", "FlipFB")),),
    "four near states where a window is uncertain": (Stage(), Stage(states=Near(4), gate=UNCERTAIN)),
}


def main() -> None:
    mask = None
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
    else:
        path = Path(tempfile.mkdtemp()) / "balls.npy"
        values, mask = balls(40, seed=7)
        np.save(path, values.numpy())
    volume = LoadImage(image_only=True, ensure_channel_first=True)(path)[None]  # (1, C, D, H, W)
    net, infer = trained(), SlidingWindowInferer(roi_size=WINDOW, sw_batch_size=4, overlap=0.25, mode="gaussian")
    for name, stages in RECIPES.items():
        recipe = Recipe(stages, "segmentation", combine="probabilities", name=name)
        better = unstride.enhance(net, torch.zeros(1, 1, *WINDOW), recipe=recipe)
        with torch.no_grad():
            labels = torch.as_tensor(infer(volume, better).argmax(1))[0]
        dice = "" if mask is None else f"   Dice {float(2 * (labels * mask).sum() / (labels.sum() + mask.sum())):.3f}"
        print(f"{name:45s} {int(labels.sum()):6d} voxels{dice}")


if __name__ == "__main__":
    main()
