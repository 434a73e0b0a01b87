"""Any module that makes logits from images: what it throws away, a better answer, a budget curve, early stopping."""

import torch
from torch import Tensor, nn

import unstride


class Mine(nn.Module):
    """A small residual network with a dict for an output."""

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

better = unstride.enhance(model, images[:1], budget=10)
answer = better(images)  # a dict, as the model returns
print({name: tuple(value.shape) for name, value in answer.items()})

for budget, (_, cost) in better.costs(images, (1, 4, 10)).items():
    print(f"budget {budget}: {sum(cost) / len(cost):.2f} times the MACs of a plain forward")

quick = better.with_options(stop=unstride.Agreement(share=1.0, states=4))
for p in quick.explain(images):
    print(f"{len(p.states)} states, stopped: {p.stopped}")
