"""Scenes for the segmentation sample: garments scattered over cluttered backgrounds, with a label for every pixel.

    scenes, masks = compose_scenes(images, labels, n=4, seed=0)  # uint8 (4, 96, 96) each; masks index SCENE_CLASSES

The garments and their textures are real (Fashion-MNIST); the arrangement is composed. A background is a gradient with
noise of several grains, stripes, and shreds of garments, so that neither texture nor brightness gives a garment away.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unstride.errors import InputError, OptionError

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

GARMENTS = (3, 6)  # per scene, both included
SHREDS = (4, 9)
LENGTH = (28.0, 56.0)  # the side of a garment's 28x28 frame in the scene, in pixels


def compose_scenes(images: Bytes, labels: NDArray[np.int64], n: int, seed: int, size: int = 96) -> tuple[Bytes, Bytes]:
    """`n` scenes of garments (N, 28, 28) with labels (N,), and their masks: 0 is background, else label + 1.

    Scene `i` depends on `seed` and `i` only, so that the first scenes of a longer run are those of a shorter one.
    """
    if images.ndim != 3 or images.shape[1:] != (28, 28) or images.dtype != np.uint8 or len(images) != len(labels):
        raise InputError(
            f"garments are uint8 (N, 28, 28) with N labels, not {images.dtype} {images.shape}, {len(labels)}"
        )
    if n < 1 or size < 32:
        raise OptionError(f"asked for {n} scenes of {size} pixels; at least 1 scene of 32 pixels is needed")
    scenes = np.empty((n, size, size), np.uint8)
    masks = np.zeros((n, size, size), np.uint8)
    for i in range(n):
        rng = np.random.default_rng([seed, i])
        scene, mask = _background(rng, size), masks[i]
        for _ in range(rng.integers(SHREDS[0], SHREDS[1] + 1)):
            _place_shred(rng, scene, images[rng.integers(len(images))])
        for _ in range(rng.integers(GARMENTS[0], GARMENTS[1] + 1)):
            chosen = rng.integers(len(images))
            _place_garment(rng, scene, mask, images[chosen], int(labels[chosen]) + 1)
        scene += rng.normal(0, 0.012, scene.shape)
        scenes[i] = np.rint(np.clip(scene, 0, 1) * 63) * 4  # 64 grays: what the sample weighs is mostly noise
    return scenes, masks


def silhouette(image: Bytes) -> NDArray[np.bool_]:
    """Where the garment of (28, 28) is: all that black cannot reach from the frame, dark cloth inside included."""
    free = np.pad(image < 8, 1, constant_values=True)
    outside = np.zeros_like(free)
    outside[0] = outside[-1] = outside[:, 0] = outside[:, -1] = True
    while True:
        grown = outside.copy()
        grown[1:] |= outside[:-1]
        grown[:-1] |= outside[1:]
        grown[:, 1:] |= outside[:, :-1]
        grown[:, :-1] |= outside[:, 1:]
        grown &= free
        if np.array_equal(grown, outside):
            return ~outside[1:-1, 1:-1]
        outside = grown


def _background(rng: np.random.Generator, size: int) -> Floats:
    y, x = np.mgrid[0:size, 0:size] / size - 0.5
    angle = rng.uniform(0, 2 * np.pi)
    scene = rng.uniform(0.1, 0.8) + rng.uniform(0, 0.5) * (np.cos(angle) * x + np.sin(angle) * y)
    for cells in (3, 6, 12, 24, 48):
        grain = rng.normal(0, 1, (cells + 1, cells + 1))
        at = np.linspace(0, cells, size)
        scene += rng.uniform(0, 0.12) * _bilinear(grain, at[:, None], at[None, :])
    if rng.random() < 0.5:
        angle, waves = rng.uniform(0, np.pi), rng.uniform(4, 24)
        phase = 2 * np.pi * (waves * (np.cos(angle) * x + np.sin(angle) * y) + rng.random())
        scene += rng.uniform(0.02, 0.15) * np.sin(phase)
    return scene


def _place_garment(rng: np.random.Generator, scene: Floats, mask: Bytes, image: Bytes, label: int) -> None:
    window, y, x = _frame(rng, len(scene), margin=0.1, tilt=0.35)
    alpha, cloth = _bilinear(silhouette(image).astype(np.float64), y, x), _bilinear(image / 255, y, x)
    cloth = cloth / np.maximum(alpha, 0.25)  # the black around it is not cloth
    _paint(rng, scene[window], alpha, np.clip(cloth, 0, 1))
    mask[window][alpha > 0.5] = label


def _place_shred(rng: np.random.Generator, scene: Floats, image: Bytes) -> None:
    """A small round piece of cloth: texture of a garment without its shape, and so background."""
    window, y, x = _frame(rng, len(scene), margin=0.0, tilt=np.pi)
    (middle_y, middle_x), radius = rng.uniform(8, 20, 2), rng.uniform(2.5, 5.5)
    alpha = np.clip(radius - np.hypot(y - middle_y, x - middle_x), 0, 1)
    _paint(rng, scene[window], alpha, _bilinear(image / 255, y, x))


def _paint(rng: np.random.Generator, area: Floats, alpha: Floats, cloth: Floats) -> None:
    low, high = rng.uniform(0, 0.35), rng.uniform(0.55, 1)
    area += alpha * (low + (high - low) * cloth - area)


def _frame(
    rng: np.random.Generator, size: int, margin: float, tilt: float
) -> tuple[tuple[slice, slice], Floats, Floats]:
    """A window at a random place of the scene, and where its pixels lie in a 28x28 garment put there somehow."""
    centre = rng.uniform(margin * size, (1 - margin) * size, 2)
    length, angle, stretch = rng.uniform(*LENGTH), rng.uniform(-tilt, tilt), rng.uniform(0.85, 1.18)
    side = 1 if rng.random() < 0.5 else -1
    reach = 0.85 * length  # half the diagonal of the stretched frame
    start = np.maximum(np.floor(centre - reach), 0).astype(int)
    stop = np.minimum(np.ceil(centre + reach) + 1, size).astype(int)
    y, x = np.mgrid[start[0] : stop[0], start[1] : stop[1]].astype(np.float64)
    y, x = y - centre[0], x - centre[1]
    along_y = (np.cos(angle) * y - np.sin(angle) * x) * 28 / (length * stretch)
    along_x = (np.sin(angle) * y + np.cos(angle) * x) * 28 / (length / stretch) * side
    return (slice(start[0], stop[0]), slice(start[1], stop[1])), along_y + 13.5, along_x + 13.5


def _bilinear(image: Floats, y: Floats, x: Floats) -> Floats:
    """`image` read at fractional places, zero outside."""
    y, x = np.broadcast_arrays(y, x)
    framed = np.pad(image, 1)
    y, x = np.clip(y + 1, 0, framed.shape[0] - 1.001), np.clip(x + 1, 0, framed.shape[1] - 1.001)
    top, left = y.astype(np.int64), x.astype(np.int64)
    down, right = y - top, x - left
    upper = framed[top, left] * (1 - right) + framed[top, left + 1] * right
    lower = framed[top + 1, left] * (1 - right) + framed[top + 1, left + 1] * right
    return upper * (1 - down) + lower * down
