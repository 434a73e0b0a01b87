"""TTA around a model: what it computes, what it leaves alone, what it refuses."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torchvision.transforms.v2 import functional as F

import unstride
from unstride.errors import ArtefactError, InputError, OptionError
from unstride.recipe.view import parse_view
from unstride.tta import TTA, AugTTA, MeanTTA, Op, Policy, View, merge
from unstride.views import transforms

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def classifier(seed: int = 0, classes: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, classes)).eval()


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()


def images(n: int = 4, size: int = 32) -> torch.Tensor:
    """Normalised images with exact 8-bit values."""
    pixels = torch.randint(0, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(1)).float() / 255
    return F.normalize(pixels, list(MEAN), list(STD))


def tta(model: nn.Module, *args, **kwargs) -> TTA:
    return TTA(model, *args, mean=MEAN, std=STD, **kwargs)


@pytest.mark.parametrize("policy", ["standard", "expanded"])
def test_one_view_is_the_model_bit_for_bit(policy: str) -> None:
    model, x = classifier(), images()
    assert torch.equal(tta(model, policy, "mean", 1)(x), model(x))


@pytest.mark.parametrize("method", ["mean", "max", MeanTTA("probabilities")], ids=str)
@pytest.mark.parametrize("policy", ["standard", "expanded"])
def test_streaming_is_stacking(policy: str, method) -> None:
    model, x = classifier(), images()
    net = tta(model, policy, method, 40)
    with torch.no_grad():
        stacked = torch.stack([model(net.see(x, view)) for view in net.views])
    assert torch.allclose(net(x), merge(stacked, method), atol=1e-6)


def test_views_are_made_of_the_image_not_of_the_normalised_tensor() -> None:
    x = images()
    net = tta(classifier(), "expanded", "mean", 132)
    pixels = x * torch.tensor(STD).reshape(3, 1, 1) + torch.tensor(MEAN).reshape(3, 1, 1)
    for view in net.views:
        wanted = F.normalize(transforms.apply(view, pixels.clamp(0, 1)), list(MEAN), list(STD))
        if "Solarize" not in str(view) and "Equalize" not in str(view) and "Posterize" not in str(view):
            assert torch.allclose(net.see(x, view), wanted, atol=1e-5), view
    larger = tta(classifier(), "standard", "mean", 1, crop=40)
    assert torch.allclose(
        larger.see(x, larger.views[0])[:, :, 0, 0], (-torch.tensor(MEAN) / torch.tensor(STD)).expand(4, 3)
    )
    dark = View((Op("Brightness", 0.0),))
    assert torch.allclose(
        net.see(x, dark)[:, :, 0, 0], (-torch.tensor(MEAN) / torch.tensor(STD)).expand(4, 3), atol=1e-6
    )


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_results_depend_on_neither_chunk_nor_batch(chunk: int) -> None:
    model, x = classifier(), images(5)
    whole = tta(model, "expanded", "mean", 20)(x)
    assert torch.allclose(tta(model, "expanded", "mean", 20, chunk=chunk)(x), whole, atol=1e-6)
    assert torch.allclose(tta(model, "expanded", "mean", 20)(x[3:4]), whole[3:4], atol=1e-6)


def test_the_chunk_is_halved_where_memory_runs_out() -> None:
    class Small(nn.Module):
        sizes: list[int]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.sizes.append(len(x))
            if len(x) > 3:
                raise torch.OutOfMemoryError("too many")
            return x.mean((2, 3))

    model = Small()
    model.sizes = []
    net = TTA(model, "expanded", "mean", 2)
    x = torch.rand(10, 3, 32, 32)
    wanted = (x.mean((2, 3)) + x.flip(-1).mean((2, 3))) / 2
    assert torch.allclose(net(x), wanted, atol=1e-6)
    assert model.sizes == [10, 5, 3, 3, 3, 1, 3, 3, 3, 1] or max(model.sizes[2:]) <= 3


def test_no_more_than_one_view_is_alive() -> None:
    class Counting(nn.Module):
        seen: set[int]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add(len(x))
            return x.mean((2, 3))

    model = Counting()
    model.seen = set()
    TTA(model, "expanded", "max", 30)(torch.rand(4, 3, 32, 32))
    assert model.seen == {4}


def test_crop_gives_the_model_the_papers_size() -> None:
    shapes = set()

    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shapes.add(tuple(x.shape[-2:]))
            return x.mean((2, 3))

    x = torch.rand(2, 3, 36, 40)
    for policy, budget in (("standard", 190), ("expanded", 132)):
        TTA(Sized(), policy, "mean", budget, crop=(32, 30))(x)
    assert shapes == {(32, 30)}
    net = TTA(Sized(), "standard", "mean", 1, crop=32)
    assert torch.equal(net(x), F.center_crop(x, [32, 32]).mean((2, 3)))


def test_views_without_weight_are_not_run() -> None:
    calls = []

    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x.mean((2, 3))

    net = TTA(Counting(), "expanded", AugTTA(), 4)
    net.weights = torch.tensor([0.5, 0.0, 0.0, 0.5])
    x = torch.rand(2, 3, 32, 32)
    net(x)
    assert len(calls) == 2
    assert net.used == (net.views[0], net.views[3])


def test_the_model_is_left_as_it_was() -> None:
    model = classifier().train()
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    net = tta(model, "expanded", "mean", 10)
    state = torch.get_rng_state()
    out = net(images())
    assert not out.requires_grad
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(InputError):
        net(images(0))
    model[6].forward = None  # a model that raises
    with pytest.raises(TypeError):
        net(images())
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Pair(NamedTuple):
    first: torch.Tensor
    second: str


OUTPUTS = {
    "tensor": lambda y: y,
    "dict": lambda y: OrderedDict(out=y, aux=y * 2),
    "logits": lambda y: {"logits": y},
    "tuple": lambda y: (y, "rest"),
    "list": lambda y: [y, "rest"],
    "namedtuple": lambda y: Pair(y, "rest"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_same_type_out_as_in(kind: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = segmenter()

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> object:
            return OUTPUTS[kind](self.net(x) * scale)

    x = torch.rand(2, 3, 24, 20)
    model = Wrapped().eval()
    plain = model(x, 2.0)
    got = TTA(model, "segmentation", "mean", 2, task="segmentation")(x, scale=2.0)
    assert type(got) is type(plain)
    with torch.no_grad():
        wanted = model.net(x) + model.net(x.flip(-1)).flip(-1)
    pick = {"tensor": lambda o: o, "dict": lambda o: o["out"], "logits": lambda o: o["logits"]}.get(
        kind, lambda o: o[0]
    )
    assert torch.allclose(pick(got), wanted, atol=1e-5)
    if kind == "namedtuple":
        assert got.second == "rest"


def test_model_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = segmenter()

        def forward(self, x: torch.Tensor) -> object:
            return outputs.SemanticSegmenterOutput(logits=self.net(x)[..., ::4, ::4])

    net = TTA(Wrapped().eval(), "segmentation", "mean", 10, task="segmentation")
    got = net(torch.rand(2, 3, 32, 48))
    assert isinstance(got, outputs.SemanticSegmenterOutput)
    assert got.logits.shape == (2, 4, 8, 12)
    assert got["logits"] is got.logits


@pytest.mark.parametrize("size", [(24, 20), (33, 47), (17, 64)])
@pytest.mark.parametrize("method", ["mean", "max"])
def test_segmentation_of_a_net_that_commutes_with_the_views_is_the_net(method: str, size) -> None:
    """A net of 1x1 convolutions sees each pixel alone: flips, shifts and colour-free views must change nothing."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 1).eval()
    policy = Policy(
        "geo",
        tuple(
            parse_view(t)
            for t in ("Identity", "FlipLR", "FlipUD", "TranslateX=3", "FlipUD + TranslateY=-2", "Cutout=6")
        ),
    )
    x = torch.rand(2, 3, *size)
    got = TTA(model, policy, method, len(policy), task="segmentation")(x)
    assert torch.allclose(got, model(x), atol=1e-5)


def test_segmentation_scales_keep_the_grid() -> None:
    model = nn.Conv2d(3, 2, 1).eval()
    y, x = torch.meshgrid(torch.linspace(0, 1, 48), torch.linspace(0, 1, 64), indexing="ij")
    ramp = torch.stack([x, y, x * 0])[None]
    got = TTA(model, "segmentation", "mean", 10, task="segmentation", divisor=8)(ramp)
    assert torch.allclose(got[..., 6:-6, 6:-6], model(ramp)[..., 6:-6, 6:-6], atol=5e-3)


def test_save_and_load(tmp_path) -> None:
    model, x = classifier(), images()
    net = tta(model, "expanded", "classtta", 12, crop=30, seed=4)
    with pytest.raises(OptionError, match="Fit it"):
        net.save(tmp_path / "t.safetensors")
    with pytest.raises(OptionError, match="no weights yet"):
        net(x)
    net.weights = torch.softmax(torch.randn(12, 5), 0)
    path = net.save(tmp_path / "t.safetensors")
    again = TTA.load(path, model)
    assert torch.equal(again(x), net(x))
    assert (again.views, again.method, again.crop, again.mean, again.std) == (
        net.views,
        net.method,
        net.crop,
        MEAN,
        STD,
    )
    with pytest.raises(ArtefactError, match="fingerprint"):
        TTA.load(path, classifier(seed=1))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ArtefactError, match="damaged"):
        TTA.load(path, model)
    for method in ("gps", "gps-shanmugam", "mean", "max", MeanTTA("probabilities")):
        net = tta(model, "standard", method, 4)
        net.weights = torch.tensor([0.5, 0.25, 0.0, 0.25])
        assert TTA.load(net.save(tmp_path / "m.safetensors"), model).method == net.method
        assert torch.equal(TTA.load(tmp_path / "m.safetensors", model)(x), net(x))


def test_weights_fitted_around_a_search_belong_to_the_network(tmp_path) -> None:
    model, x = classifier(), images()
    better = unstride.enhance(model, x[:1], budget=3)
    net = tta(better, "standard", "augtta", 3)
    net.weights = torch.tensor([0.5, 0.2, 0.3])
    path = net.save(tmp_path / "t.safetensors")
    assert torch.equal(TTA.load(path, better)(x), net(x))
    plain = tta(model, "standard", "augtta", 3)
    plain.weights = net.weights
    assert torch.equal(TTA.load(path, model)(x), plain(x))  # and without the search, as `unstride evaluate` compares
    with pytest.raises(ArtefactError, match="fingerprint"):
        TTA.load(path, unstride.enhance(classifier(seed=1), x[:1]))


def test_preprocess_gives_mean_and_std() -> None:
    class Preprocess:
        mean, std = MEAN, STD

    net = TTA(classifier(), "expanded", "mean", 12, preprocess=Preprocess())
    assert torch.equal(net(images()), tta(classifier(), "expanded", "mean", 12)(images()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "nope"}, "unknown policy"),
        ({"method": "nope"}, "unknown TTA method"),
        ({"policy": "standard", "budget": 191}, "above the 190"),
        ({"task": "detection"}, "task 'detection'"),
        ({"task": "segmentation", "method": "augtta"}, "for classification"),
        ({"task": "segmentation", "method": "mean", "policy": "standard"}, "no exact way back"),
        ({"task": "segmentation", "method": "mean", "policy": "segmentation", "crop": 8}, "whole image"),
        ({"mean": (0.5,)}, "mean and std go together"),
        ({"mean": (0.5,), "std": (0.0,)}, "mean and std go together"),
        ({"chunk": 0}, "at least 1"),
    ],
)
def test_bad_options(options, said) -> None:
    with pytest.raises(OptionError, match=said):
        TTA(classifier(), **options)


def test_bad_inputs() -> None:
    net = tta(classifier(), "expanded", "mean", 10)
    for bad in (torch.rand(3, 32, 32), torch.rand(0, 3, 32, 32), [1, 2], torch.rand(2, 1, 32, 32)):
        with pytest.raises(InputError):
            net(bad)
    with pytest.raises(InputError, match="mean and std"):
        TTA(classifier(), "expanded", "mean", 10)(images() * 3)
    with pytest.raises(InputError, match="Is the task right"):
        TTA(segmenter(), "expanded", "mean", 2)(torch.rand(1, 3, 32, 32))

    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return {"boxes": x}

    with pytest.raises(InputError, match="returned dict"):
        TTA(Strange(), "expanded", "mean", 2)(torch.rand(1, 3, 32, 32))
