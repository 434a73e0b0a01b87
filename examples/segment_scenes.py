"""Segmentation with the embedded network: better masks, where the states disagree, a large image in windows."""

import torch

import unstride
from unstride import sample
from unstride.procedure.windows import SlidingWindow

model = sample.load_segmenter()
images, masks = sample.segmentation_sample(2)
scenes, truth = sample.preprocess_segmentation(images), torch.as_tensor(masks)

better = unstride.enhance(model, scenes[:1], budget=6, task="segmentation")
for p, wanted in zip(better.explain(scenes), truth, strict=True):
    known = wanted < len(sample.SCENE_CLASSES)
    right = [(logits.argmax(0) == wanted)[known].float().mean() for logits in (p.plain, p.logits)]
    print(f"pixels right: plain {right[0]:.2%}, enhanced {right[1]:.2%}; cost {p.cost:.1f}x")
    row, column = divmod(int(p.spread.argmax()), p.spread.shape[1])
    print(f"  the states disagree most at row {row}, column {column}: {float(p.spread.max()):.2f} nats")

stitched = better.with_options(align="stitch")(scenes)
print("stitched on a finer grid:", tuple(stitched.shape))

large = torch.cat([scenes[:1], scenes[1:2]], dim=3)  # wider than the network is used to
height, width = scenes.shape[2:]
print("in windows:", tuple(SlidingWindow(better, (height, width))(large).shape))
