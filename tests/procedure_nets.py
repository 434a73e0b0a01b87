"""Small networks with answers that can be checked."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmallNet(nn.Module):
    """Four strided layers (conv, max-pool, residual with shortcut, conv), a 1-channel-wide head."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.bn = nn.BatchNorm2d(8)
        self.a = nn.Conv2d(8, 12, 3, 2, 1)
        self.b = nn.Conv2d(8, 12, 1, 2)
        self.c = nn.Conv2d(12, 16, 3, 2, 1)
        self.head = nn.Linear(16, classes)

    def features(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x))), 2)
        x = F.relu(self.a(x) + self.b(x))
        return F.relu(self.c(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class SmallSegmenter(nn.Module):
    """Encoder of stride 8, 1x1 classifier, bilinear upsampling to the image: the shape of an FCN."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 16, 3, 2, 1)
        self.cls = nn.Conv2d(16, classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))))
        y = F.interpolate(self.cls(y), x.shape[2:], mode="bilinear", align_corners=False)
        return {"out": y, "half": y * 0.5}


class SmallDepth(nn.Module):
    """(B, H, W), one positive number at each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallSegmenter(1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.net(x)["out"][:, 0])


class SmallUnet(nn.Module):
    """Two strided steps down, two up with skips: skips must meet the moved grid."""

    def __init__(self, classes: int = 3, wide: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, wide, 3, 1, 1),
            nn.Conv2d(wide, wide, 3, 2, 1),
            nn.Conv2d(wide, wide, 3, 2, 1),
        )
        self.up1, self.up2 = nn.Conv2d(2 * wide, wide, 3, 1, 1), nn.Conv2d(2 * wide, classes, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.relu(self.b(a))
        c = F.relu(self.c(b))
        y = F.relu(self.up1(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1)))
        return self.up2(torch.cat([F.interpolate(y, scale_factor=2.0), a], 1))


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with reproducible random weights and lively batch norms, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for m in model.modules():
        for name, p in m.named_parameters(recurse=False):
            p.data = torch.randn(p.shape, generator=generator) * (0.3 if name == "weight" else 0.1)
        if isinstance(m, nn.BatchNorm2d):
            m.weight.data = 1 + 0.1 * torch.randn(m.weight.shape, generator=generator)
            m.running_mean.normal_(0, 0.1, generator=generator)
            m.running_var.uniform_(0.5, 2, generator=generator)
    return model.eval()


class Pooled(nn.Module):
    """Two means and the way back: each state sees the same image a little moved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.avg_pool2d(F.avg_pool2d(x, 2), 2)
        return F.interpolate(y, x.shape[2:], mode="bilinear")
