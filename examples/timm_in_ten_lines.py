"""timm in ten lines. Random weights, so that it runs offline: say pretrained=True for a real answer."""

import timm
import torch

import unstride

model = timm.create_model("resnet18", pretrained=False).eval()
images = torch.randn(2, 3, 96, 96)  # preprocessed as for the model
better = unstride.enhance(model, images[:1], budget=4)
print(better(images).softmax(1).topk(3).indices)
print(*better.explain(images), sep="\n")
