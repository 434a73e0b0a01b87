"""Any module that returns logits: what it throws away, a better answer, a budget curve, an early stop."""

import torch
from torch import Tensor, nn

import unstride


class Mine(nn.Module):
    """A small residual network whose output is a dict."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU())
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.skip = nn.Conv2d(16, 32, 1, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        x = self.pool(torch.relu(self.down(x) + self.skip(x)))
        return {"logits": self.head(x.mean((2, 3)))}


torch.manual_seed(0)
model, images = Mine(), torch.rand(4, 3, 64, 64)

print(unstride.inspect(model, images[:1]))  # `down` and `skip` meet again, so they are one layer

better = unstride.enhance(model, images[:1], recipe="paper")
answer = better(images)  # a dict, as the model returns
print({name: tuple(value.shape) for name, value in answer.items()})

for budget, (_, costs) in better.curve(images, (1, 4, 10)).items():
    print(f"budget {budget}: {sum(costs) / len(costs):.2f} forward passes of the base model")

quick = better.replace(until=unstride.Gate("agreement", below=0.9))  # ends the search of an image early
for p in quick.explain(images):
    print(f"{len(p.passes)} states, stopped: {p.stopped}")
