"""Combine with test-time augmentation: the search runs inside each view; weights of the views are fitted."""

import torch

import unstride
from unstride.recipe import policies
from unstride.recipe.view import parse_view
from unstride.tta import TTA

loaded = unstride.models.load("sample")
data = unstride.data.load("sample", loaded.preprocess, limit=48)
pairs = [data.tensors(i) for i in range(len(data))]
images, labels = torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])

flip = policies.Policy("flip", (parse_view("Identity"), parse_view("FlipLR")))
better = unstride.enhance(loaded.model, images[:1], budget=4)
both = TTA(better, flip, "mean", budget=2, preprocess=loaded.preprocess)  # 2 views x 4 states

for name, model in {"plain": loaded.model, "unstride": better, "unstride in 2 views": both}.items():
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    print(f"{name}: {right} of {len(labels)} right")

fitted = TTA(loaded.model, "standard", "augtta", budget=4, preprocess=loaded.preprocess)
print(fitted.fit([(images, labels)], epochs=5, progress=False))
