"""What is learned from: random splits, and images, labels and pixels that are checked."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_nets import write_nets
from torch import nn

import unstride
from unstride.errors import DataError, InputError, LeftOut, OptionError
from unstride.learning.images import drawn, random_split

QUICK = {"schedule": "fast", "epochs": 1, "budget": 2, "progress": False}


def test_a_split_is_drawn_at_random_by_the_seed() -> None:
    train, held = random_split(100, 0)
    assert (len(train), len(held)) == (80, 20)
    assert sorted([*train, *held]) == list(range(100))
    assert random_split(100, 0) == (train, held)
    steps = {b - a for a, b in itertools.pairwise(held)}
    assert len(steps) > 3  # not evenly spaced
    others = [random_split(100, seed)[1] for seed in range(1, 5)]
    assert all(other != held for other in others)


def test_a_limit_draws_other_images_for_each_seed() -> None:
    """The paper's 20,000 and 5,000 of ImageNet's training images, resampled for each run."""
    parts = [random_split(1000, seed, limit=25) for seed in range(3)]
    assert {(len(train), len(held)) for train, held in parts} == {(20, 5)}
    assert len({tuple(train) for train, _ in parts}) == 3
    assert sorted(parts[0][0] + parts[0][1]) == drawn(1000, 0, 25)
    assert drawn(10, 0, 50) == list(range(10))


def test_one_image_cannot_be_split() -> None:
    with pytest.raises(DataError, match="1 image is not enough"):
        random_split(1, 0)


@pytest.mark.parametrize("method", ["attention", "augtta"])
@pytest.mark.parametrize("part", ["training", "validation"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_errors(net, train, held, part: str, method: str, value: float) -> None:
    parts = {"training": train, "validation": held}
    x, y = parts[part][0]
    bad = x.clone()
    bad[3, 0, 5, 5] = value
    parts[part] = [(bad, y), *parts[part][1:]]
    options = QUICK if method == "attention" else {"policy": "standard:2", "progress": False}
    with pytest.raises(DataError, match=f"{part} images, image 3: the image has NaN or infinite pixels"):
        unstride.fit(net, parts["training"], validation=parts["validation"], method=method, **options)


@pytest.mark.parametrize("method", ["attention", "augtta"])
def test_a_network_that_returns_nan_is_an_error(train, method: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((self.conv(x) / 0.0 * 0.0).mean((2, 3)))

    options = QUICK if method == "attention" else {"policy": "standard:2", "progress": False}
    with pytest.raises(InputError, match="not finite"):
        unstride.fit(Broken().eval(), train, method=method, **options)


def test_labels_and_batches_are_checked(net, train) -> None:
    x, y = train[0]
    with pytest.raises(DataError, match=r"image \d+: its label is 7"):
        unstride.fit(net, [(x, torch.full_like(y, 7))], method="augtta", policy="standard:2", progress=False)
    with pytest.raises(InputError, match="once only"):
        unstride.fit(net, iter(train), **QUICK)
    with pytest.raises(InputError, match="integers or masks"):
        unstride.fit(net, [(x, y.float())], **QUICK)
    with pytest.raises(OptionError, match="one class for each image"):
        unstride.fit(net, [(x, torch.zeros(len(x), 24, 24, dtype=torch.long))], **QUICK)
    with pytest.raises(OptionError, match="preprocessing is not known"):
        unstride.fit(net, "npz:data.npz", **QUICK)
    with pytest.raises(InputError, match="one size"):
        unstride.fit(net, train, validation=[(torch.zeros(1, 3, 32, 32), y[:1])], **QUICK)


def test_images_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    spec = f"{write_nets(tmp_path)}:net"
    generator = np.random.default_rng(0)
    for name in ("red", "green", "blue"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for i in range(3):
            Image.fromarray(generator.integers(0, 255, (32, 32, 3), np.uint8)).save(folder / f"{i}.png")
    rows = [
        f"{p.relative_to(tmp_path / 'data')},{k}"
        for k, d in enumerate(("red", "green", "blue"))
        for p in sorted((tmp_path / "data" / d).glob("*.png"))
    ]
    (tmp_path / "data" / "all.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    (tmp_path / "data" / "green" / "1.png").write_bytes(b"no image")
    with pytest.warns(LeftOut, match=r"green/1\.png.*left out of the"):
        fitted = unstride.fit(
            spec, f"csv:{tmp_path}/data/all.csv", method="augtta", policy="standard:2", epochs=1, progress=False
        )
    assert fitted.report.train_images + fitted.report.validation_images == 8
