"""Looks of networks that give numbers, maps, vectors and features: merged by hand, and laid where they belong."""

import pytest
import torch
import torch.nn.functional as F
from procedure_nets import SmallDepth, SmallNet, seeded
from torch import Tensor, nn
from torch.nn.functional import normalize

import unstride
from unstride.errors import CaptureError, OptionError
from unstride.recipe.view import parse_view

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NEAR = (unstride.Stage(states="near:4"),)


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


@pytest.mark.parametrize("merge", ["values", "median"])
def test_depth_by_hand(merge: str) -> None:
    model = seeded(SmallDepth())
    views = tuple(parse_view(v) for v in ("plain", "flip", "FlipUD"))
    better = unstride.enhance(model, IMAGES[:1], task="depth", recipe="flip", merge=merge)
    better = better.with_options(stages=(unstride.Stage(views),))
    with torch.no_grad():
        looks = torch.stack([model(IMAGES), model(IMAGES.flip(-1)).flip(-1), model(IMAGES.flip(-2)).flip(-2)])
    wanted = looks.mean(0) if merge == "values" else looks.median(0).values
    torch.testing.assert_close(better(IMAGES), wanted)
    p = better.explain(IMAGES)[1]
    torch.testing.assert_close(p.logits, wanted[1])
    torch.testing.assert_close(p.spread, looks[:, 1].std(0, correction=0), atol=1e-5, rtol=1e-4)
    assert p.task == "dense" and "pixel" in repr(p)


def test_near_states_of_a_map_lie_where_the_plain_one_does() -> None:
    """Averages of a ramp, in every state, aligned: the ramp itself, away from the border."""
    ramp = torch.arange(32.0).expand(2, 3, 32, 32) + torch.arange(32.0)[:, None] * 3
    for options in ({"stages": NEAR}, {"budget": 4}, {"stages": NEAR, "merge": "median"}):
        name = "paper" if "budget" in options else "default"
        better = unstride.enhance(Ramp(), ramp[:1], task="dense", recipe=name).with_options(**options)
        inside = (..., slice(2, -2), slice(2, -2))
        torch.testing.assert_close(better(ramp)[inside], Ramp()(ramp)[inside])
        if better.recipe.stages:
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


@pytest.mark.parametrize("options", [{"recipe": "flip"}, {"budget": 3}, {"budget": 3, "space": "logits"}], ids=str)
def test_embeddings_are_unit_norm_means_of_the_looks(options: dict[str, object]) -> None:
    model = seeded(SmallNet())
    better = unstride.enhance(model, IMAGES[:1], task="embedding", **options)
    p = better.explain(IMAGES)[0]
    looks = torch.stack([v.logits for v in p.states])
    if better.recipe.stages or better.plan.space == "logits":
        wanted = normalize(normalize(looks).mean(0), dim=0) * looks.norm(dim=1).mean()
        torch.testing.assert_close(better(IMAGES)[0], wanted, atol=1e-5, rtol=1e-4)
    assert p.agreement == pytest.approx(float((normalize(looks) @ normalize(p.logits, dim=0)).mean()), abs=1e-5)
    assert len(p.states) == (2 if better.recipe.stages else 3)


def test_embeddings_that_look_again_where_looks_disagree() -> None:
    first = unstride.Stage((parse_view("plain"), parse_view("flip")))
    again = unstride.Stage(states="near:3", gate=unstride.Gate("agreement", below=0.9999))
    recipe = unstride.Recipe(task="embedding", stages=(first, again))
    model = seeded(SmallNet())
    better = unstride.enhance(model, IMAGES[:1], recipe=recipe)
    symmetric = torch.cat([IMAGES[:1] + IMAGES[:1].flip(-1), IMAGES[1:2]])
    counts = [len(p.states) for p in better.explain(symmetric)]
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
    assert better(IMAGES).shape == (3,) and len(p.states) == 4
    assert float(p.logits) == pytest.approx(sum(float(v.logits) for v in p.states) / 4, abs=1e-5)
    assert float(p.spread) > 0


# ------------------------------------------------------------------------------------------------------------ features


def test_features_of_a_classifier_are_its_last_map() -> None:
    model = seeded(SmallNet())
    better = unstride.enhance(model, IMAGES[:1], task="features", recipe="plain")
    with torch.no_grad():
        wanted = model.features(IMAGES)
    for plain in (better, better.with_options(stages=(unstride.Stage(),))):
        torch.testing.assert_close(plain.features(IMAGES), wanted)
        torch.testing.assert_close(plain.explain(IMAGES)[1].logits, wanted[1])
    with pytest.raises(OptionError, match=r"better\.features"):
        better.with_options(stages=NEAR)(IMAGES)
    assert torch.equal(better(IMAGES), model(IMAGES))  # the plain recipe is the model


def test_finer_features_lie_between_the_cells() -> None:
    """Means of a ramp, twice as dense: the ramp at half steps; and four states of the last layer make it."""
    ramp = torch.arange(32.0).expand(1, 3, 32, 32) + torch.arange(32.0)[:, None] * 3
    better = unstride.enhance(Ramp(), ramp, task="features")
    fine, coarse = better.features(ramp, finer=2), Ramp()(ramp)
    assert fine.shape == (1, 3, 16, 16)
    torch.testing.assert_close(fine[:, :, 2:-3:2, 2:-3:2], coarse[:, :, 1:-1, 1:-1])
    between = (coarse[..., 1:-2] + coarse[..., 2:-1]) / 2
    torch.testing.assert_close(fine[:, :, 2:-3:2, 3:-4:2], between[:, :, 1:-1])
    assert better.features(ramp, finer=4).shape == (1, 3, 32, 32)
    for wrong in (3, 0, 1.5):
        with pytest.raises(OptionError, match="finer"):
            better.features(ramp, finer=wrong)  # type: ignore[arg-type]


def test_tokens_come_back_as_tokens_and_as_their_map() -> None:
    model = seeded(Tokens())
    better = unstride.enhance(model, IMAGES[:1], task="features")
    plain, out = model(IMAGES)["tokens"], better(IMAGES)["tokens"]
    assert out.shape == plain.shape == (3, 65, 8)
    torch.testing.assert_close(out[:, :1], plain[:, :1])  # the class token has no place: it is the plain look's
    maps = better.features(IMAGES)
    assert maps.shape == (3, 8, 8, 8)
    torch.testing.assert_close(out[:, 1:].transpose(1, 2).reshape(3, 8, 8, 8), maps)
    alone = better.with_options(stages=(unstride.Stage(),))(IMAGES)["tokens"]
    torch.testing.assert_close(alone, plain)
    assert not torch.allclose(out[:, 1:], plain[:, 1:])


def test_every_map_of_a_pyramid_is_merged() -> None:
    model = seeded(Pyramid())
    better = unstride.enhance(model, IMAGES[:1], task="features", recipe="flip")
    with torch.no_grad():
        plain, flipped = model(IMAGES), model(IMAGES.flip(-1))
    for got, a, b in zip(better(IMAGES), plain, flipped, strict=True):
        torch.testing.assert_close(got, (a + b.flip(-1)) / 2)
    assert better.features(IMAGES).shape == (3, 6, 8, 8)


def test_a_search_has_no_features() -> None:
    with pytest.raises(OptionError, match="stages"):
        unstride.enhance(seeded(Pyramid()), IMAGES[:1], task="features", budget=4)
    with pytest.raises(OptionError, match="task='features'"):
        unstride.enhance(seeded(SmallNet()), IMAGES[:1], task="classification").features(IMAGES)


def test_features_that_lie_nowhere_are_refused() -> None:
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
    better = unstride.enhance(model, IMAGES[:1], task="embedding").with_options(stages=(unstride.Stage(),))
    with torch.no_grad():
        for some in (IMAGES, IMAGES[:2], IMAGES[:1]):
            torch.testing.assert_close(better(some), model(some), atol=1e-5, rtol=1e-4)
    near = better.with_options(stages=NEAR)
    torch.testing.assert_close(near(IMAGES)[:1], near(IMAGES[:1]), atol=1e-5, rtol=1e-4)
