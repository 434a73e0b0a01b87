"""Learned test-time augmentation, alone and with the paper's search inside each view."""

import torch

import unstride

loaded = unstride.models.load("sample")
data = unstride.data.load("sample", loaded.preprocess, limit=48)
pairs = [data.tensors(i) for i in range(len(data))]
images, labels = torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])
batches = [(images, labels)]

options = {"policy": "standard:4", "epochs": 5, "progress": False}
fits = {
    "AugTTA": unstride.fit(loaded, batches, method="augtta", **options),
    "AugTTA around the search": unstride.fit(loaded, batches, method="augtta", recipe="paper", budget=3, **options),
}
models = {"base model": loaded.model, **{name: fitted.better for name, fitted in fits.items()}}
for name, model in models.items():
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    print(f"{name}: {right} of {len(labels)} right, on the images that the weights were fitted on")
print(fits["AugTTA"])
