"""The reference (the paper in plain PyTorch) against the engine: the same states, logits and predictions.

`ours` is the only place that calls unstride.
"""

from dataclasses import dataclass, field

import pytest
import torch
import torchvision
from reference.paper import Learned, Net, Paper, State, align, displacement
from torch import Tensor, nn

import unstride
from unstride.errors import OptionError
from unstride.geometry.states import State as OurState
from unstride.method.attention import Attention
from unstride.method.criteria import image_digest, random_criterion, random_criterion_per_image

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
RESNET_GROUPS = [
    ["conv1"],
    ["maxpool"],
    ["layer2.0.conv1", "layer2.0.downsample.0"],
    ["layer3.0.conv1", "layer3.0.downsample.0"],
    ["layer4.0.conv1", "layer4.0.downsample.0"],
]
ZERO = ((0, 0),) * 5
SEARCHED = (2, 3, 4)  # of five layers, the paper leaves out the first and the last


@dataclass(frozen=True)
class Ours:
    """What unstride did with one image."""

    states: list[State]
    expansions: list[tuple[State, int]]
    own: Tensor  # (S, K, ...), in the order of `states`
    logits: Tensor  # (K, ...)


def ours(enhanced: unstride.Enhanced, images: Tensor, learned: Learned | None = None, **changes: object) -> list[Ours]:
    """`recipe="paper"` as it is, but for `changes`. Captures are shared."""
    better = enhanced.replace("paper" if learned is None else "paper-learned", **changes)
    if learned is not None:
        better.attention = Attention(len(learned.w_o))
        parts = {"query.weight": learned.w_q[None], "query.bias": learned.b_q[None], "key.weight": learned.w_k[None]}
        better.attention.load_state_dict({**parts, "key.bias": learned.b_k[None], "out": learned.w_o})
    return [
        Ours(
            [v.state.selections for v in p.passes],
            [(e.state.selections, e.layer) for e in p.expansions],
            torch.stack([v.output for v in p.passes]),
            p.output,
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


@dataclass
class RememberingNet(Net):
    """Runs each state of an image once."""

    known: dict[tuple[str, State], Tensor] = field(default_factory=dict)

    def F(self, image: Tensor, state: State) -> Tensor:
        key = (image_digest(image), state)
        if key not in self.known:
            self.known[key] = super().F(image, state)
        return self.known[key]


@pytest.fixture(scope="module")
def net(resnet: nn.Module) -> Net:
    return RememberingNet(resnet, RESNET_GROUPS, "avgpool", lambda f: resnet.fc(resnet.avgpool(f).flatten(1)))


@pytest.fixture(scope="module")
def whole(resnet: nn.Module) -> Net:
    """F is the whole network: logits are aggregated, and there is no grid to align."""
    groups = [[f"0.{name}" for name in names] for names in RESNET_GROUPS]
    return RememberingNet(nn.Sequential(resnet, nn.Identity()), groups, "1", lambda f: f)


# -- our own switches


class Renormalised(Paper):
    """border="renormalise": a cell is divided by the part of it that the shifted map covers, and counts that much."""

    def cover(self, f: Tensor, s: State) -> Tensor:
        return super().align(torch.ones(1, 1, *f.shape[2:]), s)

    def align(self, f: Tensor, s: State) -> Tensor:
        return super().align(f, s) / self.cover(f, s).clamp(min=1e-12)

    def weights(self, S: list[State], own: Tensor, f: Tensor) -> Tensor:
        return super().weights(S, own, f).view(-1, 1, 1) * torch.cat([self.cover(f, s)[0] for s in S])


class Unaligned(Paper):
    """criterion and aggregate "entropy-unaligned": of each state's own prediction."""

    def logits(self, own: Tensor, f: Tensor) -> Tensor:
        return self.net.C(own)


def largest(f: Tensor) -> Tensor:
    """aggregate="max"."""
    return f.amax(0, keepdim=True)


@pytest.fixture(scope="module")
def better(resnet: nn.Module) -> unstride.Enhanced:
    return unstride.enhance(resnet, recipe="paper", task="classification")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 64, 48, generator=torch.Generator().manual_seed(1))


def learned() -> Learned:
    generator = torch.Generator().manual_seed(2)
    w_q, w_k, w_o = (torch.randn(512, generator=generator) * size for size in (0.02, 0.02, 0.3))
    b_q, b_k = torch.randn(2, generator=generator) * 0.2
    return Learned(w_q, w_k, w_o, b_q, b_k)


def same(expected: Paper, images: Tensor, results: list[Ours]) -> None:
    for image, result in zip(images, results, strict=True):
        paper = expected.run(image[None])
        assert result.states == paper.states
        assert result.expansions == paper.expansions
        torch.testing.assert_close(result.own, paper.own, **TOLERANCE)
        torch.testing.assert_close(result.logits, paper.y[0], **TOLERANCE)


@pytest.mark.parametrize("budget", [4, 10])
@pytest.mark.parametrize("aggregate", ["mean", "entropy", "max"])
@pytest.mark.parametrize("space", ["features", "logits"])
def test_the_engine_does_what_the_paper_says(
    net: Net, whole: Net, better: unstride.Enhanced, images: Tensor, space: str, aggregate: str, budget: int
) -> None:
    how = largest if aggregate == "max" else aggregate
    expected = Paper(net if space == "features" else whole, SEARCHED, budget, how)
    same(expected, images, ours(better, images, aggregate=aggregate, space=space, budget=budget))


def test_the_recipe_paper_is_the_paper_as_printed(net: Net, better: unstride.Enhanced, images: Tensor) -> None:
    """No switch at all: budget 10, entropy, the aligned map, zeros at the border, exactly B states."""
    results = ours(better, images)
    same(Paper(net, SEARCHED, 10), images, results)
    assert all(len(result.states) == 10 and result.states[0] == ZERO for result in results)


@pytest.mark.parametrize("aggregate", ["mean", "entropy"])
@pytest.mark.parametrize(
    ("paper", "reference", "changes"),
    [
        (Paper, {"down": "nearest"}, {"align": "nearest"}),
        (Renormalised, {}, {"border": "renormalise"}),
        (Paper, {"stop": "literal"}, {"stop": "literal"}),
        (Renormalised, {"stop": "literal"}, {"border": "renormalise", "stop": "literal"}),
    ],
    ids=["nearest", "renormalise", "literal", "both"],
)
def test_every_switch_is_the_references(
    net: Net,
    better: unstride.Enhanced,
    images: Tensor,
    aggregate: str,
    paper: type[Paper],
    reference: dict[str, str],
    changes: dict[str, str],
) -> None:
    expected = paper(net, SEARCHED, 5, aggregate, **reference)
    results = ours(better, images, aggregate=aggregate, budget=5, **changes)
    same(expected, images, results)
    if "stop" in changes:
        assert all(len(result.states) == 7 for result in results)  # |S| = 4 <= 5: one more expansion of three


def test_entropy_of_the_unaligned_map(net: Net, better: unstride.Enhanced, images: Tensor) -> None:
    expected = Unaligned(net, SEARCHED, 10)
    changes = {"criterion": "entropy-unaligned", "aggregate": "entropy-unaligned"}
    same(expected, images, ours(better, images, **changes))


def test_random_criteria(net: Net, better: unstride.Enhanced, images: Tensor) -> None:
    """One order for all images, or an order of its own for each."""
    results = ours(better, images, criterion="random", seed=3)
    same(Paper(net, SEARCHED, 10, criterion=lambda s: random_criterion(OurState(s), 3)), images, results)
    assert results[0].states == results[1].states
    results = ours(better, images, criterion="random-per-image", seed=3)
    for image, result in zip(images, results, strict=True):
        digest = image_digest(image)
        own = Paper(net, SEARCHED, 10, criterion=lambda s, d=digest: random_criterion_per_image(OurState(s), 3, d))
        same(own, image[None], [result])
    assert results[0].states != results[1].states


def test_without_alignment(net: Net, better: unstride.Enhanced, images: Tensor) -> None:
    """The ablation of Table 4: maps of different states are added where they lie."""
    result = ours(better, images[:1], align="none", aggregate="mean", budget=4)[0]
    with torch.no_grad():
        f = torch.cat([net.F(images[:1], s) for s in result.states])
        expected = net.C(f.mean(0, keepdim=True))[0]
    torch.testing.assert_close(result.logits, expected, **TOLERANCE)


@pytest.mark.parametrize("layers", [(1, 2, 3, 4, 5), (2, 3, 4, 5), (1, 2)])
def test_other_search_spaces(net: Net, better: unstride.Enhanced, images: Tensor, layers: tuple[int, ...]) -> None:
    """Delta and T count all layers before a layer, searched or not."""
    expected = Paper(net, layers, 12, "mean")
    same(expected, images, ours(better, images, aggregate="mean", layers=layers, budget=12))


def test_nearest_first(net: Net, better: unstride.Enhanced, images: Tensor) -> None:
    expected = Paper(net, SEARCHED, 10, "mean", "displacement")
    same(expected, images, ours(better, images, aggregate="mean", criterion="displacement", budget=10))


@pytest.mark.parametrize("budget", [4, 10])
def test_learned_aggregation_and_criterion(net: Net, better: unstride.Enhanced, images: Tensor, budget: int) -> None:
    expected = Paper(net, SEARCHED, budget, "learned", "learned", learned=learned())
    same(expected, images, ours(better, images, learned(), budget=budget))


def test_learned_aggregation_without_a_fit_is_an_error(net: Net, better: unstride.Enhanced, images: Tensor) -> None:
    with pytest.raises(OptionError, match="needs a fitted attention"):
        ours(better, images, aggregate="learned", criterion="learned")


def test_a_search_inside_each_view(net: Net, better: unstride.Enhanced, images: Tensor) -> None:
    """Appendix A1: the search runs in every augmented image, and the logits of the views are averaged."""
    recipe = unstride.Recipe((unstride.Stage(("plain", "flip"), unstride.Search(5), aggregate="entropy"),))
    inside = better.replace(recipe)
    total = 0.0
    for view in (images, images.flip(-1)):
        total = total + torch.cat([Paper(net, SEARCHED, 5).run(x[None]).y for x in view]) / 2
    torch.testing.assert_close(inside(images), total, **TOLERANCE)


# -- the reference by itself


def test_state_0_is_the_model(net: Net, images: Tensor) -> None:
    with torch.no_grad():
        expected = net.model(images[:1])
    result = Paper(net, SEARCHED, 1).run(images[:1])
    assert result.states == [ZERO]
    torch.testing.assert_close(result.y, expected, **TOLERANCE)


def test_displacement_and_alignment_by_hand() -> None:
    """Figure 3: four pixels, one layer of rate 2; the second activation of s = 1 lies at pixel 3."""
    assert displacement(((1, 0), (1, 1), (0, 3)), [2, 2, 4]) == (3, 14)
    f = torch.tensor([[[[10.0, 20.0]]]])
    assert align(f, (0, 1), 2).tolist() == [[[[5.0, 15.0]]]]
    assert align(f, (0, 1), 2, "nearest").tolist() == [[[[0.0, 10.0]]]]


def test_the_literal_stop_may_exceed_the_budget(net: Net, images: Tensor) -> None:
    exact, literal = (Paper(net, SEARCHED, 4, stop=stop).run(images[:1]) for stop in ("exact", "literal"))
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
    better = unstride.enhance(model, recipe="paper", task="segmentation")
    results = ours(better, images, aggregate=aggregate, budget=budget)
    paper = Paper(net, (1, 2, 3), budget, largest if aggregate == "max" else aggregate)
    for image, result in zip(images, results, strict=True):
        expected = paper.run(image[None])
        assert result.states == expected.states
        torch.testing.assert_close(result.logits, model.up(expected.y)[0], **TOLERANCE)
