"""Passes of networks that return numbers, maps, vectors and features: combined by hand, each where it belongs."""

import pytest
import torch
import torch.nn.functional as F
from procedure_nets import SmallDepth, SmallNet, seeded
from torch import Tensor, nn
from torch.nn.functional import normalize

import unstride
from unstride.errors import CaptureError, OptionError
from unstride.recipe.stage import Near, Stage

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NEAR = (Stage(states=Near(4)),)


class Ramp(nn.Module):
    """Two means: a ramp stays a ramp, whatever the state."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.avg_pool2d(x, 2), 2)


class Tokens(nn.Module):
    """A patch embedding, a class token before it, one attention: (B, 1 + N, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        t = self.patch(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.token.expand(len(t), -1, -1), t], 1)
        q, k, v = self.mix(self.norm(t)).chunk(3, -1)
        return {"tokens": t + F.scaled_dot_product_attention(q, k, v)}


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        a = self.a(x).relu()
        return [a, self.b(a).relu()]


@pytest.mark.parametrize("combine", ["values", "median"])
def test_depth_by_hand(combine: str) -> None:
    model = seeded(SmallDepth())
    stages = (Stage(("plain", "flip", "FlipUD")),)
    better = unstride.enhance(model, IMAGES[:1], task="depth", recipe="flip", combine=combine, stages=stages)
    with torch.no_grad():
        outputs = torch.stack([model(IMAGES), model(IMAGES.flip(-1)).flip(-1), model(IMAGES.flip(-2)).flip(-2)])
    wanted = outputs.mean(0) if combine == "values" else outputs.median(0).values
    torch.testing.assert_close(better(IMAGES), wanted)
    p = better.explain(IMAGES)[1]
    torch.testing.assert_close(p.output, wanted[1])
    torch.testing.assert_close(p.spread, outputs[:, 1].std(0, correction=0), atol=1e-5, rtol=1e-4)
    assert p.task == "dense" and "pixel" in repr(p)


def test_near_states_of_a_map_lie_where_the_plain_one_does() -> None:
    """Averages of a ramp, in every state, aligned: the ramp itself, away from the border."""
    ramp = torch.arange(32.0).expand(2, 3, 32, 32) + torch.arange(32.0)[:, None] * 3
    for options in ({"stages": NEAR}, {"recipe": "paper"}, {"stages": NEAR, "combine": "median"}):
        better = unstride.enhance(Ramp(), ramp[:1], task="dense", **options)
        inside = (..., slice(2, -2), slice(2, -2))
        torch.testing.assert_close(better(ramp)[inside], Ramp()(ramp)[inside])
        assert float(better.explain(ramp)[0].spread[inside].max()) < 1e-2


def test_odd_sizes_are_padded_and_cut() -> None:
    class Even(SmallDepth):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] % 8:
                raise ValueError("multiples of 8")
            return super().forward(x)

    x = torch.randn(2, 3, 30, 27)
    better = unstride.enhance(seeded(Even()), x[:1], task="dense")
    assert better(x).shape == (2, 30, 27) and better.explain(x)[0].spread.shape == (30, 27)


@pytest.mark.parametrize(
    "options",
    [{"recipe": "flip"}, {"recipe": "paper", "budget": 3}, {"recipe": "paper", "budget": 3, "space": "logits"}],
    ids=str,
)
def test_embeddings_are_unit_norm_means_of_the_passes(options: dict[str, object]) -> None:
    model = seeded(SmallNet())
    better = unstride.enhance(model, IMAGES[:1], task="embedding", **options)
    p = better.explain(IMAGES)[0]
    outputs = torch.stack([v.output for v in p.passes])
    if options.get("space") == "logits" or options["recipe"] == "flip":
        wanted = normalize(normalize(outputs).mean(0), dim=0) * outputs.norm(dim=1).mean()
        torch.testing.assert_close(better(IMAGES)[0], wanted, atol=1e-5, rtol=1e-4)
    assert p.agreement == pytest.approx(float((normalize(outputs) @ normalize(p.output, dim=0)).mean()), abs=1e-5)
    assert len(p.passes) == (2 if options["recipe"] == "flip" else 3)


def test_embeddings_go_on_where_passes_disagree() -> None:
    again = Stage(states=Near(3), gate=unstride.Gate("agreement", below=0.9999))
    recipe = unstride.Recipe((Stage(("plain", "flip")), again), task="embedding")
    model = seeded(SmallNet())
    better = unstride.enhance(model, IMAGES[:1], recipe=recipe)
    symmetric = torch.cat([IMAGES[:1] + IMAGES[:1].flip(-1), IMAGES[1:2]])
    counts = [len(p.passes) for p in better.explain(symmetric)]
    with torch.no_grad():
        apart = [float(F.cosine_similarity(model(x), model(x.flip(-1)))) for x in symmetric.split(1)]
    assert counts == [2 if to_mean(c) >= 0.9999 else 4 for c in apart] and counts[0] == 2


def to_mean(between: float) -> float:
    """The cosine of each of two unit vectors with their mean, from that between them."""
    return ((1 + between) / 2) ** 0.5


def test_one_number_for_each_image() -> None:
    class Age(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]

    model = seeded(Age())
    better = unstride.enhance(model, IMAGES[:1], task="regression")
    p = better.explain(IMAGES)[0]
    assert better(IMAGES).shape == (3,) and len(p.passes) == 4
    assert float(p.output) == pytest.approx(sum(float(v.output) for v in p.passes) / 4, abs=1e-5)
    assert float(p.spread) > 0


def test_features_of_a_classifier_are_its_last_map() -> None:
    model = seeded(SmallNet())
    better = unstride.enhance(model, IMAGES[:1], task="features", recipe="plain")
    with torch.no_grad():
        wanted = model.features(IMAGES)
    torch.testing.assert_close(better.run(IMAGES).output, wanted)
    torch.testing.assert_close(better.explain(IMAGES)[1].output, wanted[1])
    with pytest.raises(OptionError, match="returns no features"):
        better.replace(stages=NEAR)(IMAGES)
    assert torch.equal(better(IMAGES), model(IMAGES))  # the plain recipe is the model


def test_tokens_come_back_as_tokens_and_as_their_map() -> None:
    model = seeded(Tokens())
    better = unstride.enhance(model, IMAGES[:1], task="features")
    plain, out = model(IMAGES)["tokens"], better(IMAGES)["tokens"]
    assert out.shape == plain.shape == (3, 65, 8)
    torch.testing.assert_close(out[:, :1], plain[:, :1])  # the class token has no place: it is the plain pass's
    maps = better.run(IMAGES).output
    assert maps.shape == (3, 8, 8, 8)
    torch.testing.assert_close(out[:, 1:].transpose(1, 2).reshape(3, 8, 8, 8), maps)
    alone = better.replace(stages=(Stage(),))(IMAGES)["tokens"]
    torch.testing.assert_close(alone, plain)
    assert not torch.allclose(out[:, 1:], plain[:, 1:])


def test_every_map_of_a_pyramid_is_combined() -> None:
    model = seeded(Pyramid())
    better = unstride.enhance(model, IMAGES[:1], task="features", recipe="flip")
    with torch.no_grad():
        plain, flipped = model(IMAGES), model(IMAGES.flip(-1))
    for got, a, b in zip(better(IMAGES), plain, flipped, strict=True):
        torch.testing.assert_close(got, (a + b.flip(-1)) / 2)
    assert better.run(IMAGES).output.shape == (3, 6, 8, 8)


def test_a_search_has_no_features() -> None:
    with pytest.raises(OptionError, match="no search"):
        unstride.enhance(seeded(Pyramid()), IMAGES[:1], task="features", recipe="paper")


def test_features_without_a_place_are_an_error() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 4, 4), nn.Linear(256, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).flatten(1).sort(1).values)

    with pytest.raises(CaptureError, match="features need a map"):
        unstride.enhance(seeded(Flat()), IMAGES[:1], task="features")


def test_a_pooling_attention_packs_its_keys_with_the_images_elsewhere() -> None:
    """What is packed as (2, N, B, C) is no map of a row for each image (SigLIP's head has it)."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.probe = nn.Conv2d(3, 8, 8, 8), nn.Parameter(torch.randn(1, 1, 8))
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            t = self.patch(x).flatten(2).transpose(1, 2)
            return self.attend(self.probe.expand(len(t), -1, -1), t, t)[0][:, 0]

    torch.manual_seed(0)
    model = Pooling().eval()
    better = unstride.enhance(model, IMAGES[:1], task="embedding", recipe="plain")
    with torch.no_grad():
        for some in (IMAGES, IMAGES[:2], IMAGES[:1]):
            torch.testing.assert_close(better(some), model(some), atol=1e-5, rtol=1e-4)
    near = better.replace(stages=NEAR)
    torch.testing.assert_close(near(IMAGES)[:1], near(IMAGES[:1]), atol=1e-5, rtol=1e-4)
