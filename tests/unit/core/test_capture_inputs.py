"""Bad input: one typed error that says what came, what was wanted and what to do."""

import pytest
import torch
import torch.nn.functional as F
from checks import Net, check_all, some_states
from torch import Tensor, nn

from unstride.engine.engine import Engine
from unstride.errors import CaptureError, InputError
from unstride.geometry.find import find_layers
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
        (torch.randn(3, 16, 16), r"got shape \(3, 16, 16\).*unsqueeze"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "uint8.*preprocessing"),
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
    with pytest.raises(CaptureError, match="Pass an example of the size"):
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


def test_no_spatial_map() -> None:
    graph = capture(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)), torch.randn(1, 3, 16, 16))
    assert find_layers(graph).layers == ()


# ---------------------------------------------------------------- unpooling
class SegNet(nn.Module):
    """Unpooling puts values back to where the maxima were: that pool, and what lies between, must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 4, 3, 2, 1), nn.MaxPool2d(2, 2, return_indices=True)
        self.deep, self.out = nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, where = self.pool(self.stem(x))
        x = F.interpolate(self.deep(x), scale_factor=2)
        return self.out(F.max_unpool2d(x, where, 2))


def test_a_pool_whose_indices_are_used_is_left_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    net = Net.of(SegNet().double().eval(), x[:1])
    assert [[path for path, _ in layer.ops] for layer in net.found.layers] == [["stem"]]
    reasons = {item.op.split()[0]: item.reason for item in net.found.left_out}
    assert "unpooling" in reasons["pool"]
    assert "cannot be moved" in reasons["deep"]
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)


def test_a_pool_whose_indices_are_not_used_is_a_layer() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.conv = nn.MaxPool2d(2, 2, return_indices=True), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.pool(x)[0])

    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    net = Net.of(Ignores().double().eval(), x[:1])
    assert len(net.found.layers) == 1
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)


# ---------------------------------------------------------------- batches that are not image after image
class Columns(nn.Module):
    """Puts the batch behind the rows of the image: (H, B, ...) where a layer follows."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together, self.a, self.b = together, nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, (1, 3), (1, 2), (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        b, c, h, w = x.shape
        if self.together:  # each image keeps its rows together
            y = x.transpose(1, 2).reshape(b * h, c, 1, w)
            return self.b(y).reshape(b, h, c, -1).mean((1, 3))
        y = x.permute(2, 0, 1, 3).reshape(h * b, c, 1, w)
        return self.b(y).reshape(h, b, c, -1).mean((0, 3))


@pytest.mark.parametrize("together", [True, False])
def test_a_convolution_over_separate_rows_is_left_out(together: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    net = Net.of(Columns(together).double().eval(), x[:1])
    assert [[path for path, _ in layer.ops] for layer in net.found.layers] == [["a"]]
    assert "not a plain map" in net.found.left_out[0].reason
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)


def test_values_can_be_kept_only_where_an_image_keeps_its_rows_together() -> None:
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    for together in (True, False):
        net = Net.of(Columns(together).double().eval(), x[:1])
        folded = next(n for n in net.graph.nodes if "reshape" in n.name)
        if together:
            run = Engine(net.graph, net.found, [folded]).start(x)
            assert run.plain[folded].shape == (12, 4, 1, 6)
        else:
            with pytest.raises(CaptureError, match="mixes the images"):
                Engine(net.graph, net.found, [folded])


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
