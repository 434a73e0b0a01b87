"""Segmentation with the embedded network: a flip, uncertain tiles only, disagreement of passes, windows."""

import torch

import unstride
from unstride import Gate, Recipe, Stage, sample
from unstride.windows import SlidingWindow

model = sample.load_segmenter()
images, masks = sample.segmentation_sample(2)
scenes, truth = sample.preprocess_segmentation(images), torch.as_tensor(masks)

tiles = Recipe(
    (Stage(), Stage(("flip",), gate=Gate(below=0.6, tile=16, context=16))), "segmentation", combine="probabilities"
)
for name, recipe in {"flip": "flip", "flip of uncertain tiles": tiles}.items():
    better = unstride.enhance(model, scenes[:1], recipe=recipe, task="segmentation")
    for p, wanted in zip(better.explain(scenes), truth, strict=True):
        known = wanted < len(sample.SCENE_CLASSES)
        right = [(output.argmax(0) == wanted)[known].float().mean() for output in (p.base, p.output)]
        print(f"{name}: pixels right {right[0]:.2%} -> {right[1]:.2%}; cost {p.cost:.2f} forward passes")
        row, column = divmod(int(p.spread.argmax()), p.spread.shape[1])
        print(f"  the passes disagree most at row {row}, column {column}: {float(p.spread.max()):.2f} nats")

large = torch.cat([scenes[:1], scenes[1:2]], dim=3)  # wider than the network is used to
height, width = scenes.shape[2:]
print("in windows:", tuple(SlidingWindow(better, (height, width))(large).shape))
