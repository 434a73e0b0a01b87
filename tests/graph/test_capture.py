"""Bad input: one typed error that says what came, what was wanted and what to do."""

import pytest
import torch
from checks import Net, check_all, some_states
from torch import Tensor, nn

from unstride.errors import CaptureError, InputError
from unstride.graph.capture import capture


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4 * 8 * 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).flatten(1))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("cat.jpg", r"got str.*\(B, C, H, W\)"),
        (torch.randn(16, 16), r"got Tensor \(16, 16\).*\(B, C, H, W\)"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), r"uint8, expected floats \(B, C, H, W\)"),
        (torch.randn(0, 3, 16, 16), "at least one image"),
    ],
)
def test_not_an_image_tensor(example: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        capture(Small(), example)  # type: ignore[arg-type]


def test_not_a_model() -> None:
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        capture(lambda x: x, torch.randn(1, 3, 16, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 3, 24, 24), (1, 1, 16, 16)])
def test_an_example_of_the_wrong_size(shape: tuple[int, ...]) -> None:
    with pytest.raises(CaptureError, match="Pass images of the size"):
        capture(Small(), torch.randn(*shape))


def test_an_output_that_depends_on_pixels() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    with pytest.raises(CaptureError):
        capture(Picks(), torch.randn(1, 3, 16, 16))


def test_control_flow_that_depends_on_pixels(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.mean() > 0 else super().forward(-x)

    with pytest.raises(CaptureError, match="cannot capture"):
        capture(Branches(), torch.randn(1, 3, 16, 16))
    assert "def forward" not in "".join(capfd.readouterr())  # torch prints the graph it had so far


class AsksAMask(Small):
    """Asks something of a mask that it makes itself (no secret), or that pixels have got into."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], 3, device=x.device)
        if self.write:
            mask[:, 1:].copy_(x[:, 1:, 0, 0])  # through a view
        if (mask > 1).any():
            return super().forward(-x)
        return super().forward(x) * float(mask.shape[1])


def test_a_question_whose_answer_is_the_same_for_every_image() -> None:
    x = torch.randn(2, 3, 16, 16)
    net = Net.of(AsksAMask(write=False).eval(), x[:1])
    check_all(net, x, some_states(net.found, 4)[1:], 1e-5)


def test_a_question_about_pixels_is_refused_wherever_they_went() -> None:
    with pytest.raises(CaptureError, match="cannot capture"):
        capture(AsksAMask(write=True), torch.randn(1, 3, 16, 16))


def test_images_that_see_each_other() -> None:
    class Mixes(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0, keepdim=True))

    with pytest.raises(CaptureError, match="each image alone"):
        capture(Mixes(), torch.randn(1, 3, 16, 16))


def test_a_model_that_throws_dice() -> None:
    class Noisy(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x))

    with pytest.raises(CaptureError, match="deterministic"):
        capture(Noisy(), torch.randn(1, 3, 16, 16))


def test_no_tensor_comes_out() -> None:
    class Counts(Small):
        def forward(self, x: Tensor) -> int:
            return 3

    with pytest.raises(CaptureError):
        capture(Counts(), torch.randn(1, 3, 16, 16))


def test_constants_may_be_called_like_methods() -> None:
    """A cast of a constant becomes a node called `to`, which a module has already."""

    class Casts(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.randn(5).half())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.bias.to(x.dtype)

    x = torch.randn(2, 3, 16, 16)
    net = Net.of(Casts().eval(), x[:1])
    assert any(n.name == "to" for n in net.graph.nodes)
    check_all(net, x, some_states(net.found, 4)[1:], 1e-5)


class Mixing(Small):
    """Lets an image see the others of its batch: all of them, or those before it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0) if self.way == "all" else y.cumsum(0)


@pytest.mark.parametrize("way", ["all", "those before"])
def test_an_image_must_not_see_the_others(way: str) -> None:
    with pytest.raises(CaptureError, match="an image alone and in a batch differ"):
        capture(Mixing(way).eval(), torch.randn(1, 3, 16, 16))
