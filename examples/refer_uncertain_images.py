"""Which images should a person check? Passes of a recipe are second opinions: refer images where they disagree.

In medicine, inspection or moderation a wrong answer is worse than a referred image. `agreement` is the share of passes
with the final class; `spread` is their mutual information in nats. Both are compared with plain confidence on images of
the embedded sample. Which one finds most errors differs from data to data: compare on yours, and set the threshold on
images that you do not report on.
"""

import torch

import unstride
from unstride import sample

REFER = 0.1  # of the images

images, labels = sample.classification_sample(120)
images, truth = sample.preprocess_classification(images), torch.as_tensor(labels)
better = unstride.enhance(sample.load_classifier(), images[:1], recipe="paper", budget=10)
predictions = better.explain(images)

base = torch.stack([p.base for p in predictions])
final = torch.stack([p.output for p in predictions])
wrong = final.argmax(1) != truth
uncertainty = {
    "confidence of the base model": 1 - base.softmax(1).amax(1),
    "confidence of the combined answer": 1 - final.softmax(1).amax(1),
    "agreement of the passes": 1 - torch.tensor([p.agreement for p in predictions]),
    "spread of the passes": torch.stack([p.spread for p in predictions]),
}
count = round(REFER * len(predictions))
print(f"{len(predictions)} images, {int(wrong.sum())} wrong; referring {count} of them to a person")
for name, value in uncertainty.items():
    referred = value.argsort(descending=True, stable=True)[:count]
    errors = int(wrong[referred].sum())
    print(f"  by {name}: {errors} wrong answers are referred, {int(wrong.sum()) - errors} stay")

worst = max(predictions, key=lambda p: float(p.spread))
print("the most uncertain image:", worst)
for step in worst.passes:
    print(f"  {step.state}: {sample.CLASSES[int(step.output.argmax())]}, criterion {step.criterion:.2f}")
