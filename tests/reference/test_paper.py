"""The reference (the paper in plain PyTorch) against the engine: the same states, logits and predictions.

`ours` is the only place that calls unstride.
"""

from dataclasses import dataclass

import pytest
import torch
import torchvision
from reference.paper import Learned, Net, Paper, State, align, displacement
from torch import Tensor, nn

import unstride

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
RESNET_GROUPS = [
    ["conv1"],
    ["maxpool"],
    ["layer2.0.conv1", "layer2.0.downsample.0"],
    ["layer3.0.conv1", "layer3.0.downsample.0"],
    ["layer4.0.conv1", "layer4.0.downsample.0"],
]
ENTROPY_OF = "unaligned"  # of the engine's criterion, and of its weights in classification; the paper's is "aligned"
SEARCHED = (2, 3, 4)  # of five layers, the paper leaves out the first and the last


@dataclass(frozen=True)
class Ours:
    """What unstride did with one image."""

    states: list[State]
    expansions: list[tuple[State, int]]
    own: Tensor  # (S, K, ...), in the order of `states`
    logits: Tensor  # (K, ...)


def ours(model: nn.Module, images: Tensor, learned: Learned | None = None, **changes: object) -> list[Ours]:
    """The paper's recipe as printed, but for `changes`."""
    names = {"learned": "attention"}
    changes["aggregate"] = names.get(changes["aggregate"], changes["aggregate"])
    better = unstride.enhance(model, images[:1], recipe="paper", border="zeros", optimise=False, **changes)
    if learned is not None:
        better.attention.load_state_dict(
            {
                "query.weight": learned.w_q[None],
                "query.bias": torch.tensor([learned.b_q]),
                "key.weight": learned.w_k[None],
                "key.bias": torch.tensor([learned.b_k]),
                "out": learned.w_o,
            }
        )
    return [
        Ours(
            [v.state.selections for v in p.states],
            [(e.state.selections, e.layer) for e in p.expansions],
            torch.stack([v.logits for v in p.states]),
            p.logits,
        )
        for p in better.explain(images)
    ]


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    """ResNet-18 with random weights whose predictions differ between states: batch norms and head are not neutral."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torchvision.models.resnet18(weights=None, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    model.eval()
    with torch.no_grad():
        size = model(torch.randn(4, 3, 96, 64, generator=generator)).abs().max()
        model.fc.weight.div_(size)  # logits of about 1, so that a tolerance of 1e-5 is one of float32
    return model


@pytest.fixture(scope="module")
def net(resnet: nn.Module) -> Net:
    return Net(resnet, RESNET_GROUPS, "avgpool", lambda f: resnet.fc(resnet.avgpool(f).flatten(1)))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 96, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def learned() -> Learned:
    generator = torch.Generator().manual_seed(2)
    w_q, w_k, w_o = (torch.randn(512, generator=generator) for _ in range(3))
    return Learned(w_q * 0.02, w_k * 0.02, w_o * 0.3, 0.1, -0.2)


def same(expected: Paper, images: Tensor, results: list[Ours]) -> None:
    for image, result in zip(images, results, strict=True):
        with torch.no_grad():
            found = expected.search(image[None])
            own, logits = expected.all_of(image[None], found.states)[1], expected.predict(image[None], found.states)
        assert result.states == found.states
        assert result.expansions == found.expansions
        torch.testing.assert_close(result.own, own, **TOLERANCE)
        torch.testing.assert_close(result.logits, logits[0], **TOLERANCE)


@pytest.mark.parametrize("budget", [4, 10])
@pytest.mark.parametrize("aggregate", ["mean", "entropy", "max"])
@pytest.mark.parametrize("space", ["features", "logits"])
def test_the_engine_does_what_the_paper_says(net: Net, images: Tensor, space: str, aggregate: str, budget: int) -> None:
    expected = Paper(net, SEARCHED, budget, aggregate, space=space, entropy_of=ENTROPY_OF)
    same(expected, images, ours(net.model, images, aggregate=aggregate, space=space, budget=budget))


@pytest.mark.parametrize("layers", [(1, 2, 3, 4, 5), (2, 3, 4, 5), (1, 2)])
def test_other_search_spaces(net: Net, images: Tensor, layers: tuple[int, ...]) -> None:
    """Delta and T count all layers before a layer, searched or not."""
    expected = Paper(net, layers, 12, "mean", entropy_of=ENTROPY_OF)
    same(expected, images, ours(net.model, images, aggregate="mean", layers=layers, budget=12))


def test_nearest_first(net: Net, images: Tensor) -> None:
    expected = Paper(net, SEARCHED, 10, "mean", "displacement")
    same(expected, images, ours(net.model, images, aggregate="mean", criterion="displacement", budget=10))


@pytest.mark.parametrize("budget", [4, 10])
def test_learned_aggregation_and_criterion(net: Net, images: Tensor, learned: Learned, budget: int) -> None:
    expected = Paper(net, SEARCHED, budget, "learned", "learned", learned=learned)
    changes = {"aggregate": "learned", "criterion": "learned", "budget": budget}
    same(expected, images, ours(net.model, images, learned, **changes))


# -- the reference by itself


def test_state_0_is_the_model(net: Net, images: Tensor) -> None:
    with torch.no_grad():
        expected = net.model(images[:1])
        paper = Paper(net, SEARCHED, 1)
        assert paper.search(images[:1]).states == [net.zero]
        torch.testing.assert_close(paper.predict(images[:1], [net.zero]), expected, **TOLERANCE)


def test_displacement_and_alignment_by_hand() -> None:
    """Figure 3: four pixels, one layer of rate 2; the second activation of s = 1 lies at pixel 3."""
    assert displacement(((1, 0), (1, 1), (0, 3)), [2, 2, 4]) == (3, 14)
    f = torch.tensor([[[[10.0, 20.0]]]])
    assert align(f, (0, 1), 2).tolist() == [[[[5.0, 15.0]]]]
    assert align(f, (0, 1), 2, "nearest").tolist() == [[[[0.0, 10.0]]]]


def test_the_literal_stop_may_exceed_the_budget(net: Net, images: Tensor) -> None:
    exact, literal = (Paper(net, SEARCHED, 4, stop=stop).search(images[:1]) for stop in ("exact", "literal"))
    assert len(exact.states) == 4
    assert len(literal.states) == 7
    assert literal.states[:4] == exact.states


# -- segmentation


class Segmenter(nn.Module):
    """Stride 8, then upsampling to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 16, 3, 2, 1)
        self.classes = nn.Conv2d(16, 4, 1)
        self.up = nn.Upsample(scale_factor=8, mode="bilinear", align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.classes(self.c(self.b(self.a(x).relu()).relu()).relu()))


@pytest.mark.parametrize("aggregate", ["mean", "entropy", "max"])
@pytest.mark.parametrize("budget", [4, 10])
def test_segmentation_is_the_same_for_each_pixel(aggregate: str, budget: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Segmenter().eval()
        for p in model.parameters():
            p.data *= 3
    images = torch.randn(2, 3, 64, 48, generator=torch.Generator().manual_seed(4))
    net = Net(model, [["a"], ["b"], ["c"]], "up", lambda f: f)
    results = ours(model, images, aggregate=aggregate, budget=budget, task="segmentation")
    # today the criterion reads a state's own map, and the weights of the aggregation read the aligned map
    search = Paper(net, (1, 2, 3), budget, entropy_of=ENTROPY_OF)
    for image, result in zip(images, results, strict=True):
        with torch.no_grad():
            assert result.states == search.search(image[None]).states
            expected = model.up(Paper(net, (1, 2, 3), budget, aggregate).predict(image[None], result.states))
        torch.testing.assert_close(result.logits, expected[0], **TOLERANCE)
