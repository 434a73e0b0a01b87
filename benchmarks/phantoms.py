"""Volumes and signals with labels, and small networks that learn them: what `benchmarks.volumes` measures on.

Synthetic but for the atlas, where the anatomy is real and the noise is not. Volumes: bright tubes and dimmer blobs,
drawn at twice the resolution and averaged, so that border voxels hold a mixture (partial volume), under a slow bias
field and noise; a voxel's label is what most of it is. Signals: events whose order in time is the class, so that a
reversed signal is of another class.
"""

import importlib.util
import itertools
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool3d, cross_entropy, interpolate, softmax

SIZE, FINE = 32, 2  # voxels along an axis, and how much finer they are drawn
TUBE, BLOB = 1, 2
LENGTH, KINDS = 256, 6


# ------------------------------------------------------------------------------------------------------------- volumes
def phantom(seed: int) -> tuple[Tensor, Tensor]:
    """(1, D, H, W) and its labels (D, H, W): 0 nothing, 1 tube, 2 blob."""
    draw = torch.Generator().manual_seed(seed)
    side = SIZE * FINE
    tube, blob = (torch.zeros(side, side, side, dtype=torch.bool) for _ in range(2))
    for _ in range(3):
        path, radius = _path(draw), 0.8 + 1.2 * float(torch.rand((), generator=draw))
        for a, b in itertools.pairwise(path):
            box, places = _box(torch.minimum(a, b) - radius, torch.maximum(a, b) + radius)
            along = ((places - a) @ (b - a) / (b - a).square().sum()).clamp(0, 1)
            tube[box] |= (places - a - along[..., None] * (b - a)).square().sum(-1) < radius**2
    for _ in range(4):
        centre, radii = torch.rand(3, generator=draw) * SIZE, 1.5 + 3.5 * torch.rand(3, generator=draw)
        box, places = _box(centre - radii, centre + radii)
        blob[box] |= ((places - centre) / radii).square().sum(-1) < 1
    shares = torch.stack([~(tube | blob), tube, blob & ~tube]).float()[None]
    mixed = avg_pool3d(shares, FINE)[0]
    clean = 1.0 * mixed[TUBE] + 0.6 * mixed[BLOB]
    bias = interpolate(torch.randn(1, 1, 3, 3, 3, generator=draw), (SIZE,) * 3, mode="trilinear")[0]
    return clean + 0.15 * bias + 0.35 * torch.randn(1, SIZE, SIZE, SIZE, generator=draw), mixed.argmax(0)


def _path(draw: torch.Generator) -> list[Tensor]:
    """A bending line through the volume, in steps of three voxels."""
    here = torch.rand(3, generator=draw) * SIZE
    way = torch.randn(3, generator=draw)
    found = [here]
    for _ in range(9):
        way = way / way.norm() + 0.35 * torch.randn(3, generator=draw)
        here = here + 3 * way / way.norm()
        found.append(here)
    return found


def _box(low: Tensor, high: Tensor) -> tuple[tuple[slice, ...], Tensor]:
    """The fine voxels between two corners, and where they lie (.., .., .., 3)."""
    ends = [(max(0, math.floor(FINE * a)), max(0, math.ceil(FINE * b))) for a, b in zip(low, high, strict=True)]
    sides = [slice(a, min(b, SIZE * FINE)) for a, b in ends]
    axes = [(torch.arange(max(0, s.stop - s.start)) + s.start + 0.5) / FINE for s in sides]
    return tuple(sides), torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


def phantoms(first: int, count: int) -> tuple[Tensor, Tensor]:
    """(N, 1, D, H, W) and (N, D, H, W) of so many seeds."""
    pairs = [phantom(first + k) for k in range(count)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def volume_net() -> nn.Module:
    """MONAI's UNet, as its tutorials build it, with fewer channels."""
    from monai.networks.nets import UNet

    return UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)


def dice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy and soft Dice of the two structures, half and half: what such networks are trained with."""
    p, t = softmax(logits, 1)[:, 1:], torch.stack([labels == k for k in (TUBE, BLOB)], 1).float()
    dims = (0, 2, 3, 4)
    soft = (2 * (p * t).sum(dims) + 1) / (p.sum(dims) + t.sum(dims) + 1)
    return cross_entropy(logits, labels) + 1 - soft.mean()


# --------------------------------------------------------------------------------------------------------------- atlas
def atlas(front: bool, count: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks (N, 1, D, H, W) of the mean T1 image of 152 heads (ICBM 152, in nilearn's wheel), and their tissue: 0
    neither, 1 gray matter, 2 white, as its probability maps say. The noise is ours.

    From the front or the back of the head, with a gap between the two, and from one half, as the template is
    symmetric. `count` blocks anywhere, for training; without it, all that tile the part, for a test.
    """
    image, gray, white = (_template(name) for name in ("t1", "gm", "wm"))
    labels = torch.stack([1 - gray - white, gray, white]).argmax(0)
    half, middle = image.shape[0] // 2, image.shape[1] // 2
    where = slice(middle + 4, None) if front else slice(0, middle - 4)
    image, labels = image[:half, where], labels[:half, where]
    draw = torch.Generator().manual_seed(seed)
    if count is None:
        corners = list(itertools.product(*(range(0, n - SIZE + 1, SIZE) for n in image.shape)))
    else:
        most = torch.tensor(image.shape) - SIZE
        corners = [tuple((torch.rand(3, generator=draw) * most).int().tolist()) for _ in range(8 * count)]
    blocks = [tuple(slice(at, at + SIZE) for at in corner) for corner in corners]
    blocks = [b for b in blocks if float((labels[b] > 0).float().mean()) > 0.25][:count]
    x = torch.stack([image[b] for b in blocks])[:, None]
    return x + 0.12 * torch.randn(x.shape, generator=draw), torch.stack([labels[b] for b in blocks])


def _template(name: str) -> Tensor:
    import nibabel

    home = importlib.util.find_spec("nilearn")
    if home is None or home.origin is None:
        raise SystemExit("the atlas is in nilearn's wheel: pip install nilearn, or leave it out of --kinds")
    path = Path(home.origin).parent / f"datasets/data/mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
    values = torch.from_numpy(nibabel.load(path).get_fdata(dtype="float32"))
    return values / values.max()


# ------------------------------------------------------------------------------------------------------------- signals
def signals(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """(N, 1, L) and their kind (N,): a ramp, a decay or a chirp, each forwards or backwards, somewhere in noise."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (count,), generator=draw)
    t = torch.linspace(0, 1, 64)
    shapes = torch.stack([t, torch.exp(-5 * t), torch.sin(2 * math.pi * (2 + 5 * t) * t)])
    x = 0.9 * torch.randn(count, 1, LENGTH, generator=draw)
    starts = torch.randint(0, LENGTH - 64, (count,), generator=draw)
    loud = 0.5 + torch.rand(count, generator=draw)
    for i, (kind, start) in enumerate(zip(kinds.tolist(), starts.tolist(), strict=True)):
        event = shapes[kind // 2]
        x[i, 0, start : start + 64] += 1.6 * loud[i] * (event.flip(0) if kind % 2 else event)
    return x, kinds


class Block(nn.Module):
    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        first, second = nn.Conv1d(wide_in, wide_out, 7, 2, 3), nn.Conv1d(wide_out, wide_out, 7, 1, 3)
        self.body = nn.Sequential(first, nn.BatchNorm1d(wide_out), nn.ReLU(), second, nn.BatchNorm1d(wide_out))
        self.short = nn.Sequential(nn.Conv1d(wide_in, wide_out, 1, 2), nn.BatchNorm1d(wide_out))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.short(x)).relu()


def signal_net() -> nn.Module:
    """A residual network of one axis: four layers that subsample by two."""
    stem = nn.Sequential(nn.Conv1d(1, 16, 15, 2, 7), nn.BatchNorm1d(16), nn.ReLU())
    blocks = nn.Sequential(Block(16, 16), Block(16, 32), Block(32, 32))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, KINDS))


# ------------------------------------------------------------------------------------------------------------ training
def _atlas_part(number: int, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Networks with an even number learn the back of the head, the others the front."""
    return atlas(number % 2 == 1, count, seed)


def trained(kind: str, seed: int, folder: Path, epochs: int, count: int) -> nn.Module:
    """The network of a kind, trained on `count` of its own training examples; kept in `folder`."""
    segments = kind != "signals"
    path = folder / f"{kind}-{seed}-{epochs}-{count}.pt"
    torch.manual_seed(seed)
    model = volume_net() if segments else signal_net()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    first = 100_000 * (seed + 1)
    make = {"volumes": phantoms, "signals": signals, "atlas": partial(_atlas_part, seed)}[kind]
    x, y = make(first, count)
    together, lr, loss_of = (4, 3e-3, dice_loss) if segments else (64, 3e-3, cross_entropy)
    optimiser = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)
    steps = epochs * -(-count // together)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(count).split(together):
            seen, labels = x[rows], y[rows]
            if segments:  # mirrored at random along every axis, as nnU-Net trains
                flips = [d for d in (1, 2, 3) if torch.rand(()) < 0.5]
                seen, labels = seen.flip([d + 1 for d in flips]), labels.flip(flips)
            loss = loss_of(model(seen), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item() * len(rows)
        print(f"{kind}, seed {seed}, epoch {epoch + 1} of {epochs}: loss {total / count:.4f}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()
