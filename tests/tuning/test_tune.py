"""Tuning: what it promises holds on images it has not seen, and it may answer "plain"."""

import dataclasses
import re
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unstride
from unstride.errors import DataError, InputError, NotProved, OptionError, UnstrideWarning
from unstride.evaluation.loop import _same_data
from unstride.geometry.states import State
from unstride.procedure.gates import Gate, Stage
from unstride.procedure.looks import Look
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, parse_view
from unstride.tuning.candidates import Unit
from unstride.tuning.certificate import certify, clopper_pearson, in_sequence, verdict
from unstride.tuning.choose import choose, stages_of
from unstride.tuning.pool import Pool, Work
from unstride.tuning.simulate import simulate
from unstride.tuning.tuned import Line, settled

ZERO = State(((0, 0),))
VIEWS = (PLAIN, *(parse_view(v) for v in ("flip", "1.15x", "ShiftX=1", "ShiftX=-1", "ShiftY=1")))


def made_up(count: int, seed: int, helps: float, noise: float = 1.5, classes: int = 6) -> Pool:
    """Logits of looks that share most of their errors; `helps` is how much of each look's error is its own."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=g)
    truth = 3.0 * torch.nn.functional.one_hot(labels, classes)
    common = noise * torch.randn(count, classes, generator=g)
    own = noise * helps * torch.randn(len(VIEWS), count, classes, generator=g)
    work = {v: Work((1000, 0), 0, (ZERO,)) for v in VIEWS}
    return Pool(tuple(Look(v, ZERO) for v in VIEWS), truth + common + own, labels, work)


def gain(pool: Pool, logits: Tensor) -> float:
    right, plain = (z.argmax(1) == pool.labels for z in (logits, pool.plain))
    return float(right.double().mean() - plain.double().mean())


UNITS = [Unit(v) for v in VIEWS[1:]]


def test_it_finds_looks_that_help_under_the_ceiling():
    pool, fresh = made_up(600, 0, 1.0), made_up(4000, 1, 1.0)
    for ceiling in (1.25, 2.0, 4.0):
        stages = stages_of(choose(pool, UNITS, ceiling), pool)
        done = simulate(fresh, stages)
        assert done.cost <= ceiling + 0.05
        assert gain(fresh, done.logits) > 0.01


def test_of_looks_that_are_as_good_it_takes_the_plainest():
    pool, moved = made_up(600, 0, 1.0), parse_view("flip + ShiftX=1")
    logits = torch.cat([pool.logits, pool.logits[1:2]])  # says just what the mirror says
    twin = Pool((*pool.looks, Look(moved, ZERO)), logits, pool.labels, {**pool.work, moved: pool.work[VIEWS[1]]})
    assert choose(twin, [Unit(moved), Unit(VIEWS[1])], 2.0).units == (Unit(VIEWS[1]),)


def test_what_people_do_is_tried_whatever_the_greedy_order_is(monkeypatch):
    monkeypatch.setattr("unstride.tuning.choose.greedy", lambda *_: [])
    chosen = choose(made_up(600, 0, 1.0), UNITS, 3.0)
    assert set(chosen.units) <= {Unit(VIEWS[1]), Unit(VIEWS[2])} and chosen.units


def test_what_people_do_is_tried_behind_the_gate_that_spends_the_ceiling(monkeypatch):
    """Three looks cost 3: under a ceiling of 2.2 they fit where 40 % look again, which no fixed share is."""
    monkeypatch.setattr("unstride.tuning.choose.greedy", lambda *_: [])
    monkeypatch.setattr("unstride.tuning.candidates.usual", lambda units: {"all three": list(units[:3])})
    chosen = choose(made_up(2000, 0, 1.0), UNITS, 2.2)
    assert chosen.units == tuple(UNITS[:3]) and chosen.share == 0.4


@pytest.mark.parametrize(("loud", "matched"), [(1.0, False), (3.0, True)])
def test_what_people_do_is_taken_as_they_do_it_unless_a_view_is_too_loud(loud, matched, monkeypatch):
    """Just the mean of both where that is as good; a view that drowns the plain one is brought to its temperature."""
    monkeypatch.setattr("unstride.tuning.choose.greedy", lambda *_: [])
    pool = made_up(800, 0, 1.0)
    pool = dataclasses.replace(pool, logits=torch.cat([pool.logits[:1], loud * pool.logits[1:2], pool.logits[2:]]))
    chosen = choose(pool, UNITS[:1], 2.0)
    assert chosen.units == (UNITS[0],) and chosen.matched == matched
    own = stages_of(chosen, pool)[1].temperatures
    assert own == () if not matched else 2 < own[0] < 5


def test_it_leaves_alone_what_cannot_be_improved():
    chosen = [choose(made_up(300, seed, 0.0), UNITS, 3.0) for seed in range(10)]
    assert all(len(c.units) <= 1 for c in chosen)


def test_what_is_promised_is_kept():
    """Tuned on 200 of many draws, the certificate's interval covers the gain on thousands of others."""
    fresh, covered, worse, draws = made_up(8000, 99, 0.4), 0, 0, 40
    for seed in range(draws):
        pool = made_up(200, seed, 0.4)
        half = torch.arange(200) % 2 == 0
        stages = stages_of(choose(pool.rows(half.nonzero()[:, 0]), UNITS, 2.0), pool.rows(half.nonzero()[:, 0]))
        test = pool.rows((~half).nonzero()[:, 0])
        right, plain = (z.argmax(1) == test.labels for z in (simulate(test, stages).logits, test.plain))
        proof = certify(int((right & ~plain).sum()), int((~right & plain).sum()), len(right))
        true = gain(fresh, simulate(fresh, stages).logits)
        covered += proof.low <= true <= proof.high
        worse += true < -0.005
    assert covered >= 0.95 * draws and worse == 0


def test_the_verdict_says_what_to_do():
    good, poor, plain, bad = certify(30, 5, 1000), certify(5, 5, 1000), certify(0, 0, 1000), certify(5, 30, 1000)
    ceilings = [1.5, 1.25, 1.1]  # the asked one first: what is cheaper need not be proved for it
    for proofs, guard, beside, words in (
        ([good, poor, good], None, "likelihood", f"use it: {good}"),
        ([good, good, poor], None, "likelihood", "what is tuned for 1.25 is proved"),
        ([good, plain, good], None, "likelihood", "what is tuned for 1.1 is proved"),
        ([poor, poor, poor], None, None, "leave it alone: no look at a cost of 1.5 or less"),
        ([poor, good, good], None, "likelihood", "not proved: with 95 % confidence at most"),
        ([poor, good, good], 0.1, "likelihood", "leave it alone: with"),
        ([plain, good, good], None, "likelihood", "not proved: no answer changed on 1000"),
        ([bad, good, good], None, "likelihood", "leave it alone: with 95 % confidence at least"),
    ):
        assert words in verdict(proofs, ceilings, guard, beside)
    assert "points worse than plain, most likely 2.50 worse" in str(bad) and bad.worse


def test_the_exact_interval():
    low, high = clopper_pearson(8, 10, 0.05)
    assert (low, high) == pytest.approx((0.4439, 0.9748), abs=1e-4)  # the textbook's
    assert clopper_pearson(0, 10, 0.05) == (0.0, pytest.approx(0.3085, abs=1e-4))
    assert clopper_pearson(60, 4700, 0.025) == pytest.approx((0.00937527, 0.01694914), abs=1e-7)  # many, far tails
    proof = certify(30, 5, 1000)
    assert proof.better and proof.gain == 0.025 and "at least" in str(proof)
    assert not certify(5, 5, 1000).better and "at most" in str(certify(5, 5, 1000))
    assert in_sequence([proof, certify(5, 5, 1000), proof]) == [0]
    plain = certify(0, 0, 1000)  # nothing is claimed, so nothing fails
    assert in_sequence([plain, proof, proof]) == [1, 2]
    assert in_sequence([plain, certify(5, 5, 1000), proof]) == []


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> unstride.Tuned:
    cache = tmp_path_factory.mktemp("pool")
    return unstride.tune("sample", "sample", cost=1.5, pool="small", limit=120, paper=False, cache_dir=cache)


def test_the_whole_way_on_the_sample(tuned, tmp_path):
    text = str(tuned)
    for word in ("plain", "flip", "tuned for 1.5", "accuracy", "corrected"):
        assert word in text
    assert list(tuned.frontier) == [1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0] and tuned.asked == 1.5
    assert tuned.lines[tuned.at].name == "tuned for 1.5"
    asked = tuned.lines[tuned.at].certificate
    assert tuned.certificate == (asked.of_plain() if len(tuned.recipe.stages) < 2 else asked)
    assert tuned.recipe.plain or tuned.recipe == tuned.frontier[1.5]
    assert "over your network's own forward of the same 64 images together" in text
    assert [line.time is None for line in tuned.lines[tuned.at :]] == [False] + 4 * [True]  # dearer than was asked for
    path = tuned.save(tmp_path / "tuned.toml")
    loaded = unstride.models.load("sample")
    data = unstride.data.load("sample", loaded.preprocess, limit=16)
    images = torch.stack([data.tensors(i)[0] for i in range(len(data))])
    better = unstride.enhance(loaded.model, images[:1], recipe=path, preprocess=loaded.preprocess)
    assert better.recipe == tuned.recipe
    torch.testing.assert_close(better(images), tuned.better(images))


def test_the_pool_is_not_computed_twice(tmp_path, monkeypatch):
    ask = {"cost": 1.5, "pool": "small", "limit": 64, "paper": False, "frontier": False, "cache_dir": tmp_path}
    first = unstride.tune("sample", "sample", **ask)
    monkeypatch.setattr("unstride.tuning.gather.look_at", lambda *_: pytest.fail("computed again"))
    assert unstride.tune("sample", "sample", **ask).recipe == first.recipe


def test_a_guard_refuses_what_may_lose(monkeypatch):
    tuned = unstride.tune("sample", "sample", 1.5, pool="small", limit=64, paper=False, frontier=False, guard=0.0)
    assert tuned.recipe.plain and "leave it alone" in tuned.verdict


def lined(name: str, nll: float, corrected: int, corrupted: int) -> Line:
    return Line(name, 0.9, nll, certify(corrected, corrupted, 1000), 1.5)


def test_what_surely_lost_elsewhere_is_not_handed_out():
    looks = get("flip").changed(name="tuned for 1.5", stages=(Stage(), Stage((parse_view("flip"),))))
    plain = Line("plain", 0.9, 0.5, certify(0, 0, 1000).of_plain(), 1.0)
    for nll, turned, by, guard, kept, words in (
        (0.49, (5, 9), "likelihood", None, True, r"not proved: .* worse; it was likelier there \(NLL 0.49.* 0.50"),
        (0.51, (9, 5), "likelihood", None, True, r"not proved: .* better; it was not likelier there"),
        (0.51, (40, 4), "likelihood", None, True, "use it"),
        (0.49, (4, 40), "likelihood", None, False, r"leave it alone: .* at least .* worse"),
        (0.51, (9, 5), "accuracy", None, True, r"not proved: .* better\. More labelled"),
        (0.49, (9, 5), "likelihood", 0.1, False, "leave it alone: .*guard"),
    ):
        line = lined("tuned for 1.5", nll, *turned)
        recipe, proof, told = settled([plain, line], {1.5: looks}, 1.5, guard, by)
        assert (recipe == looks, recipe.plain) == (kept, not kept) and re.match(words, told)
        assert proof == line.certificate if kept else (proof.low, proof.high, proof.changed) == (0, 0, False)
    only = looks.changed(stages=(Stage(),), temperature=1.3)
    told = settled([plain, lined("tuned for 1.5", 0.4, 0, 0)], {1.5: only}, 1.5, None, "likelihood")[2]
    assert told.startswith("leave it alone") and told.endswith("its temperature was set to 1.3")


def test_a_file_says_what_was_proved_and_by_which_images(tuned, tmp_path):
    loaded, stages = unstride.models.load("sample"), (Stage(), Stage((parse_view("flip"),), gate=Gate(below=0.5)))
    guess = dataclasses.replace(
        tuned, recipe=Recipe("tuned", stages=stages), certificate=certify(5, 4, 120), verdict="not proved: ..."
    )
    path = guess.save(tmp_path / "guess.toml")
    with pytest.warns(NotProved, match=r"guess\.toml: not proved"):
        unstride.enhance(loaded.model, loaded.example(), recipe=path)
    with pytest.warns(UnstrideWarning, match="was tuned on images of sample"):
        unstride.evaluate("sample", "sample", limit=8, recipe=path)
    assert _same_data("folder:a/b", "folder:a/./b/") and not _same_data("folder:a", "csv:a")
    sure = dataclasses.replace(guess, certificate=certify(30, 4, 120), verdict="use it: ...")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotProved)
        unstride.load(sure.save(tmp_path / "sure.toml"), loaded.model)


def test_one_image_that_is_not_finite_is_named():
    images, labels = noise(60)
    images[41, 0, 3, 3] = torch.nan
    with pytest.raises(DataError, match=r"image 41: the network's answer is not finite"):
        unstride.tune(small(), [(images[:30], labels[:30]), (images[30:], labels[30:])], 1.5, paper=False)


def test_larger_views_may_have_more_layers_than_the_image():
    """Of 32 px nothing is left to subsample at the last stride; of 36 px there is."""
    net = nn.Sequential(
        *(nn.Conv2d(4 if k else 3, 4, 3, 2, 1) for k in range(5)), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    images, labels = noise(40)
    tuned = unstride.tune(net.eval(), [(images, labels)], 2.0, paper=False, frontier=False)
    work = tuned.pool.work
    assert len({len(w.near[0].selections) for w in work.values()}) > 1


def noise(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=g), torch.randint(4, (count,), generator=g)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([(torch.rand(4, 3, 8, 8), torch.zeros(4, 1, dtype=torch.long))], r"labels \(4, 1\).*number of its class"),
        ([(torch.rand(4, 3, 8, 8), ["a"] * 4)], r"tensor \(4, 3, 8, 8\), \(str, \.\.\.\).*labels as numbers"),
        ([{"image": torch.rand(4, 3, 8, 8), "label": [0] * 4}], "a dict with image, label"),
        ((torch.rand(4, 3, 8, 8), torch.zeros(4)), r"give \[\(images, labels\)\]"),
        ([(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long))], "torch.uint8, wanted float"),
        (TensorDataset(torch.rand(4, 3, 8, 8), torch.zeros(4)), "DataLoader"),
    ],
)
def test_batches_that_cannot_be_read_are_told(data, words):
    with pytest.raises((InputError, OptionError), match=words):
        unstride.tune(small(), data, 1.5)


def test_a_precision_is_not_dropped_in_silence():
    loaded = unstride.models.load("sample")
    data = unstride.data.load("sample", loaded.preprocess, limit=64)
    better = unstride.enhance(loaded.model, data.tensors(0)[0][None], precision="bfloat16")
    with pytest.raises(OptionError, match="bfloat16"):
        unstride.tune(better, data, pool="small")


def test_bad_questions():
    with pytest.raises(OptionError, match="plain forwards"):
        unstride.tune("sample", "sample", cost=0.5)
    with pytest.raises(OptionError, match="likelihood"):
        unstride.tune("sample", "sample", objective="fame")
    with pytest.raises(OptionError, match="small"):
        unstride.tune("sample", "sample", pool="huge", limit=32)
    with pytest.raises(DataError, match="too few"):
        unstride.tune("sample", "sample", pool="small", limit=8, paper=False)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    with pytest.raises(InputError, match="labels"):
        unstride.tune(model, [torch.randn(4, 3, 16, 16)])
