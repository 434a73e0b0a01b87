"""A recipe on a GPU, beside the same on the CPU: answers, devices and time. Without a GPU it runs on the CPU alone.

    python examples/on_a_gpu.py          # or: unstride bench timm:resnet50 --device cuda

GPU figures have not been measured by this project; these lines give yours.
"""

import time

import torch

import unstride

torch.manual_seed(0)
model = unstride.models.load("torchvision:resnet18", weights="random").model
images = torch.randn(4, 3, 96, 96)
devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
answers = {}
for device in devices:
    better = unstride.enhance(model.to(device), recipe="flip")
    batch = images.to(device)
    answers[device] = better(batch).cpu()
    start = time.perf_counter()
    for _ in range(3):
        better(batch)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{device}: {(time.perf_counter() - start) / 3 * 1e3:.1f} ms for a flip of {len(images)} images")
for device, answer in answers.items():
    print(f"{device}: largest difference from the CPU {float((answer - answers['cpu']).abs().max()):.1e}")
