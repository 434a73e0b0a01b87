"""A volume that is larger than the network's window, through MONAI's own inferer: plain, eight mirrors, near states.

    pip install 'unstride[medical]'
    python examples/monai_volume.py

Everything is synthetic: two bright balls in noise, and a small UNet that is trained on such balls for a moment, so that
the answers mean something. An `Enhanced` is a predictor like any other: gates decide window by window, and nothing is
kept from one window to the next.
"""

import itertools

import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import UNet
from torch import Tensor, nn

import unstride
from unstride import Gate, Recipe, Stage
from unstride.views.policies import parse_view

WINDOW = 16


def balls(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A volume (1, 1, D, H, W) with two noisy balls, and where they are (1, D, H, W)."""
    draw = torch.Generator().manual_seed(seed)
    axes = torch.meshgrid(*[torch.arange(size, dtype=torch.float32)] * 3, indexing="ij")
    mask = torch.zeros(size, size, size, dtype=torch.bool)
    for _ in range(2):
        centre, radius = torch.rand(3, generator=draw) * size, 2.5 + 2 * torch.rand(1, generator=draw)
        mask |= sum((axis - c) ** 2 for axis, c in zip(axes, centre, strict=True)) < radius**2
    volume = mask + 0.7 * torch.randn(mask.shape, generator=draw)
    return volume[None, None], mask[None].long()


def trained(steps: int = 40) -> nn.Module:
    torch.manual_seed(0)
    net = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(steps):
        pairs = [balls(WINDOW, 1000 + 4 * step + k) for k in range(4)]
        volumes, masks = torch.cat([v for v, _ in pairs]), torch.cat([m for _, m in pairs])
        loss = nn.functional.cross_entropy(net(volumes), masks, weight=torch.tensor([0.2, 0.8]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


def recipes() -> dict[str, Recipe]:
    """What is done to every window."""
    turns = [" + ".join(c) for k in range(4) for c in itertools.combinations(("FlipLR", "FlipUD", "FlipFB"), k)]
    mirrors = tuple(parse_view(turn or "plain") for turn in turns)
    unsure = Gate("margin", below=0.9)
    stages = {
        "plain": (),
        "eight mirrors": (Stage(mirrors),),
        "four near states": (Stage(states="near:4"),),
        "near states, where a window is unsure": (Stage(), Stage(states="near:4", gate=unsure)),
    }
    return {name: Recipe(name, "segmentation", s, merge="probabilities") for name, s in stages.items()}


def main() -> dict[str, float]:
    net, (volume, mask) = trained(), balls(40, seed=7)
    infer = SlidingWindowInferer(roi_size=(WINDOW,) * 3, sw_batch_size=4, overlap=0.25, mode="gaussian")
    found = {}
    for name, recipe in recipes().items():
        better = unstride.enhance(net, torch.zeros(1, 1, WINDOW, WINDOW, WINDOW), recipe=recipe)
        with torch.no_grad():
            seen = infer(volume, better).argmax(1)
        found[name] = float(2 * (seen * mask).sum() / (seen.sum() + mask.sum()))
        print(f"{name:40s} Dice {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
