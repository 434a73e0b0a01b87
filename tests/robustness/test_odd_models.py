"""Models that are wrapped, oddly built, or return more than logits: as others, or an error that says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from procedure_nets import SmallNet, SmallSegmenter, SmallUnet, seeded
from torch import Tensor, nn

import unstride
from unstride.errors import CaptureError, InputError, UnstrideError
from unstride.graph.capture import capture
from unstride.graph.verify import gap
from unstride.windows import SlidingWindow

PAPER: dict[str, Any] = {"recipe": "paper-refined", "task": "classification", "budget": 4}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def wanted() -> Tensor:
    return unstride.enhance(seeded(SmallNet()), IMAGES[:1], **PAPER)(IMAGES)


WRAPPED: list[Callable[[nn.Module], nn.Module]] = [
    torch.compile,  # type: ignore[list-item]
    nn.DataParallel,
    lambda m: nn.DataParallel(torch.compile(m)),  # type: ignore[arg-type]
    lambda m: nn.Sequential(torch.compile(m)),  # type: ignore[arg-type]
    lambda m: nn.Sequential(nn.DataParallel(m)),
]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_wrapped_models_are_what_they_wrap(wrap: Callable[[nn.Module], nn.Module], wanted: Tensor) -> None:
    better = unstride.enhance(wrap(seeded(SmallNet())), IMAGES[:1], **PAPER)
    torch.testing.assert_close(better(IMAGES), wanted)


def test_a_model_that_compiled_itself(wanted: Tensor) -> None:
    model = seeded(SmallNet())
    model.compile()
    torch.testing.assert_close(unstride.enhance(model, IMAGES[:1], **PAPER)(IMAGES), wanted)


@pytest.mark.parametrize("wrap", [lambda b: b, nn.Sequential, lambda b: SlidingWindow(b, 32)])
def test_an_enhanced_model_is_not_enhanced_again(wrap: Any) -> None:
    better = unstride.enhance(seeded(SmallNet()), IMAGES[:1], **PAPER)
    with pytest.raises(InputError, match="inner module"):
        unstride.enhance(wrap(better), IMAGES[:1])
    with pytest.raises(UnstrideError, match="inner module"):
        unstride.inspect(wrap(better), IMAGES[:1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_has_views_and_says_why_it_has_no_states() -> None:
    model = seeded(SmallNet())
    scripted = torch.jit.trace(model, IMAGES[:1])
    flip = unstride.enhance(model, recipe="flip", task="classification")(IMAGES)
    torch.testing.assert_close(unstride.enhance(scripted, recipe="flip", task="classification")(IMAGES), flip)
    with pytest.raises(UnstrideError, match="TorchScript"):
        unstride.enhance(scripted, **PAPER)(IMAGES)
    with pytest.raises(UnstrideError, match="TorchScript"):
        unstride.inspect(scripted, IMAGES[:1])


def test_a_model_built_in_inference_mode(wanted: Tensor) -> None:
    with torch.inference_mode():
        model = seeded(SmallNet())
    better = unstride.enhance(model, IMAGES[:1], **PAPER)
    torch.testing.assert_close(better(IMAGES), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(better(IMAGES), wanted)
        torch.testing.assert_close(unstride.enhance(model, IMAGES[:1], **PAPER)(IMAGES), wanted)
        before = better(IMAGES)
        model.head.weight.mul_(2.0)  # type: ignore[operator, union-attr]
        assert not torch.allclose(better(IMAGES), before)


def test_images_of_inference_mode(wanted: Tensor) -> None:
    with torch.inference_mode():
        images = IMAGES.clone()
        better = unstride.enhance(seeded(SmallNet()), images[:1], **PAPER)
        torch.testing.assert_close(better(images), wanted)
    torch.testing.assert_close(better(IMAGES), wanted)


class Beside(nn.Module):
    """Logits, and what else a model may return that no image has to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.net(x)
        return {
            "scale": self.scale.exp(),
            "buffer": self.net.bn.running_mean,
            "logits": y,
            "names": torch.arange(5).view(1, 5).float(),
            "rows": torch.arange(len(x)),
            "score": y.amax(1),
            "text": "five",
        }


@pytest.mark.parametrize("options", [PAPER, {"recipe": "flip"}, {**PAPER, "execution": "frozen"}], ids=str)
def test_outputs_beside_the_logits(options: dict[str, Any]) -> None:
    model = seeded(Beside())
    images = torch.cat([IMAGES, IMAGES])
    better = unstride.enhance(model, IMAGES[:1], **options)
    with torch.no_grad():
        plain, got = model(images), better(images)
    assert list(got) == list(plain)
    for name in ("scale", "buffer", "names", "rows"):
        assert torch.equal(got[name], plain[name]), name
    assert got["text"] == "five"
    alone = unstride.enhance(model.net, IMAGES[:1], **options)(images)
    torch.testing.assert_close(got["logits"], alone)
    assert got["score"].shape == (4,)


class Loss(SmallNet):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.square().mean()


class Sizes(SmallNet):
    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x), "count": x.shape[0], "wide": x.shape[-1] * 2, "scale": 0.5}


class Branches(SmallNet):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return torch.cond(y.sum() > 0, lambda a: a * 2, lambda a: a * 3, (y,))


def test_a_number_for_the_whole_batch_is_the_base_models() -> None:
    model = seeded(Loss())
    better = unstride.enhance(model, recipe="flip", task="classification")
    assert torch.equal(better(IMAGES)[1], model(IMAGES)[1])
    with pytest.raises(CaptureError, match="single number"):
        unstride.enhance(model, **PAPER)(IMAGES)


@pytest.mark.parametrize("options", [PAPER, {"recipe": "flip", "task": "classification"}], ids=str)
def test_numbers_that_are_no_tensors_stay_what_they_are(options: dict[str, Any]) -> None:
    got = unstride.enhance(seeded(Sizes()), **options)(IMAGES)
    assert {k: v for k, v in got.items() if k != "y"} == {"count": 2, "wide": 128, "scale": 0.5}
    assert torch.equal(got["y"], unstride.enhance(seeded(SmallNet()), **options)(IMAGES))


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_chooses_branches_has_views_and_says_why_it_has_no_states() -> None:
    model = seeded(Branches())
    better = unstride.enhance(model, recipe="flip", task="classification")
    with torch.no_grad():
        expected = (model(IMAGES) + model(IMAGES.flip(-1))) / 2
    better.explain(IMAGES)  # counts the work, after which the branches still run
    torch.testing.assert_close(better(IMAGES), expected)
    with pytest.raises(CaptureError, match=r"branch.*recipe='flip'"):
        unstride.enhance(model, **PAPER)(IMAGES)


class Changed(SmallNet):
    """Returns something else than a row for each image, or does something else for some batches."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(super().forward(x), x)


@pytest.mark.parametrize(
    "change",
    [
        lambda y, x: y[:0],
        lambda y, x: y[:1],
        lambda y, x: y.mean(0, keepdim=True),
        lambda y, x: y.T,
        lambda y, x: torch.cat([y, y]),
    ],
)
@pytest.mark.parametrize("recipe", ["flip", "default"])
def test_every_output_has_a_row_for_each_image(change: Callable[..., Tensor], recipe: str) -> None:
    model = seeded(Changed(change))
    with torch.no_grad():
        assert torch.equal(unstride.enhance(model, recipe="plain", task="classification")(IMAGES), model(IMAGES))
    with pytest.raises(CaptureError, match="a row for each image"):
        unstride.enhance(model, recipe=recipe, task="classification")(IMAGES)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda y, x: y if len(x) < 8 else -y, "batch size < 8"),
        (lambda y, x: y if x.shape[0] % 2 == 0 else -y, "batch size % 2"),
        (lambda y, x: y if x.numel() < 100_000 else -y, "branches on the batch size"),
        (lambda y, x: y if len(x) > 1 else -y, "an image alone and in a batch differ"),
    ],
)
def test_a_branch_on_the_batch_size_is_not_frozen(change: Callable[..., Tensor], why: str) -> None:
    model = seeded(Changed(change))
    with pytest.raises(CaptureError, match=why):
        unstride.enhance(model, **PAPER)(IMAGES)
    better = unstride.enhance(model, recipe="flip", task="classification")
    many = torch.randn(9, *IMAGES.shape[1:], generator=torch.Generator().manual_seed(1))
    for images in (IMAGES, many):
        with torch.no_grad():
            expected = (model(images) + model(images.flip(-1))) / 2
        torch.testing.assert_close(better(images), expected)


def test_a_branch_on_the_memory_format_is_not_frozen() -> None:
    model = seeded(Changed(lambda y, x: y if x.is_contiguous() else -y))
    better = unstride.enhance(model, IMAGES[:1], recipe="paper", task="classification", budget=1)
    for images in (IMAGES, IMAGES.to(memory_format=torch.channels_last), IMAGES):
        with torch.no_grad():
            torch.testing.assert_close(better(images), model(images), rtol=1e-4, atol=1e-5)


class Loud(SmallNet):
    """Scores that overflow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double().mul(1e38).float() * 1e3


def test_scores_that_overflow_are_answered_so() -> None:
    model = seeded(Loud())
    with torch.no_grad():
        plain = model(IMAGES)
    assert not plain.isfinite().any()
    better = unstride.enhance(model, IMAGES[:1], **PAPER)
    assert not better(IMAGES).isfinite().any()
    assert torch.equal(better.replace("plain")(IMAGES), plain)


def test_the_gap_by_hand() -> None:
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([1.0, -inf, nan, 2.0])
    assert gap(a, torch.tensor([1.0, inf, nan, 2.0])) == 0
    assert gap(a, torch.tensor([1.0, inf, inf, 4.0])) == 0.5
    assert not gap(a, torch.tensor([1.0, 0.0, nan, 2.0])) <= 1e9
    assert not gap(a, torch.tensor([1.0, 0.0])) <= 1e9
    assert gap(torch.full((3,), nan), torch.full((3,), inf)) == 0


def test_a_random_model_is_still_refused() -> None:
    class Random(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x))

    with pytest.raises(CaptureError, match="deterministic"):
        capture(seeded(Random()), IMAGES[:1])


@pytest.mark.parametrize("example", [float("nan"), float("inf"), 0.0])
def test_what_an_example_shows_does_not_matter(example: float, wanted: Tensor) -> None:
    better = unstride.enhance(seeded(SmallNet()), torch.full((1, 3, 64, 64), example), **PAPER)
    torch.testing.assert_close(better(IMAGES), wanted)


class Even(SmallUnet):
    """A segmenter that refuses what is no multiple of 4."""

    def forward(self, x: Tensor) -> Any:
        if x.shape[-1] % 4 or x.shape[-2] % 4:
            raise ValueError(f"sizes must be multiples of 4, got {tuple(x.shape[2:])}")
        y = super().forward(x)
        return {"out": y, "tags": y.mean((2, 3)), "mask": y.argmax(1), "names": torch.eye(50)}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "options", [{"recipe": "paper", "budget": 1}, {"recipe": "paper", "budget": 4}, {"recipe": "flip"}], ids=str
)
def test_odd_sizes_are_padded_at_every_budget(options: dict[str, Any], train: bool) -> None:
    model = seeded(Even()).train(train)
    better = unstride.enhance(model, torch.zeros(1, 3, 64, 64), task="segmentation", **options)
    images = torch.randn(2, 3, 45, 50)
    shapes = {name: tuple(value.shape) for name, value in better(images).items()}
    assert shapes == {"out": (2, 3, 45, 50), "tags": (2, 3), "mask": (2, 45, 50), "names": (50, 50)}
    got = better(images)["out"]
    padded = F.pad(images, (0, 14, 0, 19), mode="replicate")
    if options["recipe"] != "flip":  # a flipped image has its padding on the other side
        torch.testing.assert_close(got, better(padded)["out"][..., :45, :50], atol=1e-5, rtol=1e-4)
    for p in better.explain(images):
        assert p.output.shape == (3, 45, 50)


def test_a_size_that_padding_cannot_save() -> None:
    class Never(SmallSegmenter):
        def forward(self, x: Tensor) -> Any:
            if x.shape[-1] != 64:
                raise ValueError("only 64")
            return super().forward(x)

    better = unstride.enhance(seeded(Never()), IMAGES[:1], **{**PAPER, "task": "segmentation"})
    for asked in (better, better.replace(budget=1)):
        with pytest.raises(InputError, match="padding to 64x96 did not help"):
            asked(torch.zeros(1, 3, 64, 65))
