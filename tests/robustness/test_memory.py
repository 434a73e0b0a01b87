"""A bound on memory holds for large maps too, where results and what is measured of them are larger than prefixes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.evaluation.timing import peak_bytes
from unstride.geometry.positions import compacted
from unstride.graph.capture import capture
from unstride.tasks.tasks import PIECE, entropy, in_pieces


class Wide(nn.Module):
    """A segmenter whose logits, at full resolution, are by far its largest values."""

    def __init__(self, classes: int = 24) -> None:
        super().__init__()
        self.a, self.b, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(8, classes, 3, 1, 1)
        self.last = nn.Conv2d(3, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(F.relu(self.b(F.relu(self.a(x)))), scale_factor=4.0)
        return self.up(torch.cat([y, self.last(x)], 1))


def test_a_capture_needs_two_images_and_little_beside() -> None:
    torch.manual_seed(0)
    model, images = Wide().eval(), torch.randn(1, 3, 192, 192)
    one = 24 * 192 * 192 * 4
    capture(model, images)
    with torch.no_grad():
        two = peak_bytes(lambda: model(images.repeat(2, 1, 1, 1)))
    assert peak_bytes(lambda: capture(model, images)) <= two + 3 * one


def test_places_that_repeat_are_kept_once() -> None:
    rows = torch.arange(64.0).view(1, 1, 64, 1).repeat(1, 32, 1, 64)
    rows[:, :, :5] = float("nan")
    kept = compacted(rows)
    assert kept.shape == rows.shape and kept.untyped_storage().nbytes() == 64 * 4
    torch.testing.assert_close(kept, rows.clone(), equal_nan=True, rtol=0, atol=0)
    rows[0, 3, 9, 7] = 1e3
    torch.testing.assert_close(compacted(rows), rows, equal_nan=True, rtol=0, atol=0)


def test_a_measure_in_pieces_is_the_measure() -> None:
    maps = torch.randn(3, 7, 301, PIECE // 7 // 301)
    for some in (maps, maps[..., 0], maps[..., 0, 0]):
        torch.testing.assert_close(in_pieces(entropy, some), entropy(some), rtol=1e-6, atol=1e-6)
