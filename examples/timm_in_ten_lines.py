"""timm in ten lines. Random weights, so that it runs offline: leave `weights` out for the pretrained ones."""

import torch

import unstride

loaded = unstride.models.load("timm:resnet18", weights="random")  # or any torch.nn.Module
images = torch.randn(2, 3, 96, 96)  # preprocessed as for the model; PIL images work, too
better = unstride.enhance(loaded)  # a flip where the model is uncertain
print(better(images).softmax(1).topk(3).indices)
print(*better.explain(images), sep="\n")
