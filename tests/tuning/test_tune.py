"""Tuning tiny networks on images: what is simulated runs, what is written is the truth, the cache holds everything."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import made_pools
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import unstride
from unstride.errors import DataError, Inconclusive, OptionError, UnstrideWarning
from unstride.evaluation.labelled import open_labelled
from unstride.evaluation.measuring import first_image
from unstride.models.weights import place
from unstride.pipeline import open_pipeline
from unstride.recipe.files import read
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Stage
from unstride.recipe.view import PLAIN, parse_view
from unstride.storage.cache import Cache
from unstride.storage.distributed import World
from unstride.tuning.candidates import PassGroup
from unstride.tuning.pool import PoolStore, gather_pool
from unstride.tuning.result import Tuned
from unstride.tuning.simulate import can_simulate, simulate
from unstride.tuning.tune import usable_passes
from unstride.tuning.unlabelled import GatesOnly
from unstride.views.source import PILImages


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tuning")


@pytest.fixture(scope="module")
def tuned(folder) -> Tuned:
    return unstride.tune(made_pools.pair(), made_pools.npz(folder, 400), cost=2.5, cache=folder / "cache")


def pil(spec: str, rows: range) -> list[Image.Image]:
    return [Image.fromarray(x) for x in np.load(spec.partition(":")[2])["x"][rows.start : rows.stop]]


def test_a_cascade_is_found_tested_and_printed(tuned):
    assert set(tuned.recipe.networks) == {"base", "net2"}
    assert tuned.decision.verdict == "use" and tuned.decision.gain.low > 0
    assert tuned.cost.estimate <= tuned.cost.high <= 2.6
    text = str(tuned)
    assert text.startswith("Use this recipe: +") and "times the compute of small" in text
    names = [row.name for row in tuned.rows]
    assert names[:4] == ["small", "small + flip", "large", "large + flip"]
    assert {"ensemble of all", "ensemble of all + flip", "tuned for 2.5"} <= set(names)
    assert all(row.baseline == "small" for row in tuned.rows[1:])


def test_rows_of_the_networks_alone_are_what_evaluate_measures(tuned, folder):
    rows = unstride.evaluate(made_pools.pair(), made_pools.npz(folder, 400), recipe="plain", progress=False)
    for row in rows:
        own = next(r for r in tuned.rows if r.name in (row.name, row.name.partition(":")[2]))
        assert own.value == row.value and own.cost.estimate == pytest.approx(row.cost.estimate)


def test_the_recipe_file_runs_as_it_was_simulated(tuned, folder):
    path = tuned.save(folder / "best.toml")
    stored = read(path)
    assert stored.recipe.stages == tuned.recipe.stages
    assert stored.figures["decision"] == "use" and stored.figures["images"] == 400
    assert stored.figures["shares"]
    again = open_pipeline(made_pools.pair(), recipe=path)
    images = pil(made_pools.npz(folder, 400), range(60))
    source = PILImages(images, made_pools.PREPROCESS)
    torch.testing.assert_close(again.better.run(source).output, tuned.pipeline.better.run(source).output)
    with pytest.warns(UnstrideWarning, match="tuned on images of this evaluation"):
        rows = unstride.evaluate(made_pools.pair(), made_pools.npz(folder, 400), recipe=path, progress=False)
    assert rows[-1].cost.estimate <= 2.5


RECIPES = (
    (Stage(), Stage(("flip",), gate=Gate(below=0.5))),
    (
        Stage(temperatures=(2.0,)),
        Stage(("flip",)),
        Stage(network="net2", gate=Gate("entropy", below=0.25), weights=(2.0,)),
    ),
    (Stage(("plain", "flip")), Stage(network="net2", gate=Gate("agreement", below=0.9), join="replace")),
    (Stage(network="net2"), Stage(gate=Gate("probability", below=0.9)), Stage(("flip",), gate=Gate(below=0.4))),
    (Stage(), Stage(states=Near(4), gate=Gate(below=0.6)), Stage(("flip",))),
    (Stage(("plain", "1.125x", "flip + 1.125x")),),
)


@pytest.fixture(scope="module")
def pool_and_pipeline(folder):
    networks = [made_pools.loaded(3.0, 4, "small"), made_pools.loaded(0.5, 16, "large")]
    pipeline = open_pipeline(networks)
    spec = made_pools.npz(folder, 50, seed=3)
    data = unstride.data.load(spec, made_pools.PREPROCESS, classes=6)
    example = first_image(data)[None].to(*place(pipeline.better.model))
    store = PoolStore(pipeline, data, None, example)
    views = ("flip", "1.125x", "flip + 1.125x")
    groups = [PassGroup(n, v) for n in ("base", "net2") for v in (PLAIN, *map(parse_view, views))]
    groups.append(PassGroup("base", states=Near(4)))
    return gather_pool(store, groups, World(), batch_size=16), pipeline, pil(spec, range(50))


@pytest.mark.parametrize("number", range(len(RECIPES)))
@pytest.mark.parametrize("combine", ["logits", "probabilities"])
def test_simulated_equals_run(pool_and_pipeline, number, combine):
    """Outputs, costs, and who passes the gates."""
    pool, pipeline, images = pool_and_pipeline
    recipe = Recipe(RECIPES[number], combine=combine, temperature=1.3)
    assert can_simulate(pool, recipe)
    done = simulate(pool, recipe)
    ran = pipeline.better.replace(recipe).run(PILImages(images, made_pools.PREPROCESS))
    torch.testing.assert_close(done.outputs, ran.output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(done.costs, torch.tensor(ran.costs, dtype=torch.float64), atol=1e-3, rtol=1e-3)
    passed = [p.nonzero()[:, 0].tolist() for p in done.passed]
    assert passed == ran.record.passed_gates
    assert not recipe.stages[-1].gate or 0 < len(passed[-1]) < 50


def test_another_ceiling_and_more_images_reuse_the_passes(folder, monkeypatch, capsys):
    """Every pass of every image once: none for another ceiling or seed, and only the new images' otherwise."""
    calls = []
    forward = made_pools.Template.forward
    monkeypatch.setattr(made_pools.Template, "forward", lambda self, x: (calls.append(len(x)), forward(self, x))[1])
    cache, models = folder / "reused", made_pools.pair()
    first = unstride.tune(models, made_pools.npz(folder, 60, seed=5), cost=1.5, cache=cache, progress=False)
    count, calls[:] = sum(calls), []
    again = unstride.tune(models, made_pools.npz(folder, 60, seed=5), cost=3.0, seed=4, cache=cache, progress=False)
    few, calls[:] = sum(calls), []
    assert count > 60 * 12 and few < 60
    assert [r.value for r in first.rows[:4]] == [r.value for r in again.rows[:4]]


def test_a_killed_run_continues(tmp_path):
    """The process is killed while it computes; the next one takes over what is there and comes to the same result."""
    data = made_pools.npz(tmp_path, 120)
    script = textwrap.dedent(f"""
        import sys, made_pools, unstride
        forward = made_pools.Template.forward
        calls = 0
        def dying(self, x):
            global calls
            calls += len(x) > 1
            if "die" in sys.argv and calls == 40:
                import os, signal
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(self, x)
        made_pools.Template.forward = dying
        tuned = unstride.tune(made_pools.pair(), {data!r}, cost=1.5, cache={str(tmp_path / "cache")!r}, batch_size=32)
        print(calls, tuned.recipe.digest(), tuned.decision)
    """)
    path = os.pathsep.join([str(Path(made_pools.__file__).parent), os.environ.get("PYTHONPATH", "")])

    def start(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", script, *arguments]
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    died = start("die")
    assert died.returncode == -signal.SIGKILL, died.stderr
    done = len(list((tmp_path / "cache").glob("pool-*/*.safetensors")))
    assert done > 0
    second = start()
    assert second.returncode == 0, second.stderr
    assert "forward passes of" in second.stderr
    fresh = unstride.tune(made_pools.pair(), data, cost=1.5, progress=False)
    assert second.stdout.split()[1] == fresh.recipe.digest()


def test_keep_is_not_written_without_anyway(folder):
    """A network whose flips say the same: nothing helps."""
    net = made_pools.loaded(0.5, 16, "large")
    result = unstride.tune(net, made_pools.npz(folder, 60, seed=9), cost=1.2, progress=False)
    assert result.decision.verdict == "keep" and result.recipe.plain
    with pytest.raises(OptionError, match=r"keep\.toml: not written\. Keep large: .* anyway=True"):
        result.save(folder / "keep.toml")
    assert not (folder / "keep.toml").exists()
    assert read(result.save(folder / "keep.toml", anyway=True)).figures["decision"] == "keep"


def test_an_inconclusive_recipe_is_marked(folder):
    """Few images: the gain is there and not significant. Whoever uses the file is warned."""
    networks = [made_pools.loaded(3.0, 4, "small"), made_pools.loaded(2.0, 16, "large")]
    for seed in range(6):
        result = unstride.tune(networks, made_pools.npz(folder, 40, seed=20 + seed), cost=3.0, progress=False)
        if result.decision.verdict == "inconclusive":
            break
    assert "more labelled image" in str(result)
    path = result.save(folder / "maybe.toml")
    with pytest.warns(Inconclusive, match="Inconclusive"):
        read(path).warn()


def test_against_a_network_and_a_recipe(folder):
    spec = made_pools.npz(folder, 60, seed=5)
    options = {"cost": 3.0, "cache": folder / "against", "progress": False}
    large = unstride.tune(made_pools.pair(), spec, against="large", **options)
    assert large.decision.baseline == "large" and large.decision.cost < 1
    flip = unstride.tune(made_pools.pair(), spec, against="flip", **options)
    assert flip.decision.baseline == "flip" and flip.rows[0].name == "flip" and flip.rows[0].gain is None
    median = Recipe((Stage(("plain", "flip", "ShiftX=1")),), combine="max", name="own")
    other = unstride.tune(made_pools.pair(), spec, against=median, **options)
    row = unstride.evaluate(made_pools.pair(), spec, recipe=median, progress=False)[-1]
    assert other.rows[0].name == "own" and other.rows[0].value == row.value


def test_groups_and_copies_stay_in_one_fold(folder):
    x, y = made_pools.images(40, seed=2)
    np.savez(folder / "copies.npz", x=np.concatenate([x, x]), y=np.concatenate([y, y]))
    from unstride.tuning import tune as module

    seen = {}
    original = module.Evidence.of

    def spy(*args, **kwargs):
        seen["evidence"] = original(*args, **kwargs)
        return seen["evidence"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Evidence, "of", spy)
        unstride.tune(made_pools.pair(), f"npz:{folder / 'copies.npz'}", progress=False)
        folds = seen["evidence"].folds
        assert (folds[:40] == folds[40:]).all() and len(set(folds)) == 5
        group = [str(k % 10) for k in range(80)]
        unstride.tune(made_pools.pair(), f"npz:{folder / 'copies.npz'}", group=group, progress=False)
        folds = seen["evidence"].folds
        assert all(len({int(f) for f, g in zip(folds, group, strict=True) if g == name}) == 1 for name in group)


def test_batches_of_tensors_and_of_pil_images(folder):
    x, y = made_pools.images(60, seed=5)
    named = unstride.tune(made_pools.pair(), made_pools.npz(folder, 60, seed=5), cost=2.0, progress=False)
    pixels = torch.stack([made_pools.PREPROCESS(Image.fromarray(one)) for one in x])
    tensors = DataLoader(TensorDataset(pixels, torch.from_numpy(y)), batch_size=25)
    pils = [([Image.fromarray(one) for one in x[i : i + 25]], y[i : i + 25].tolist()) for i in (0, 25, 50)]
    for data in (tensors, pils):
        other = unstride.tune(made_pools.pair(), data, cost=2.0, progress=False)
        assert [r.value for r in other.rows[:4]] == [r.value for r in named.rows[:4]]


def test_a_network_that_cannot_be_captured_is_tuned_without_states(folder):
    class Branching(made_pools.Template):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > -1e9 else super().forward(-x)

    with torch.random.fork_rng():
        model = unstride.models.LoadedModel("branching", Branching(3.0, 4), made_pools.PREPROCESS, "classification")
    result = unstride.tune(model, made_pools.npz(folder, 60, seed=5), cost=1.5, progress=False)
    assert [note for note in result.notes if note.startswith("Left out: branching: plain in the 4 nearest states")]


def test_a_network_above_the_ceiling_has_no_views_of_other_sizes(folder):
    data = made_pools.npz(folder, 60, seed=5)
    pipeline, images = open_labelled(made_pools.pair(), data)
    groups = {ceiling: usable_passes(pipeline, images, ceiling) for ceiling in (2.0, 40.0)}
    sizes = {c: [str(g) for g in kept if "x" in str(g.view)] for c, (kept, _) in groups.items()}
    assert [g for g in sizes[40.0] if g not in sizes[2.0]] == [g for g in sizes[40.0] if g.startswith("net2")] != []
    (note,) = groups[2.0][1]
    assert groups[40.0][1] == [] and "large: 1.125x" in note and "more than the ceiling" in note


def test_images_without_labels_set_the_gates(folder):
    images = pil(made_pools.npz(folder, 60, seed=5), range(40))
    result = unstride.tune(made_pools.pair(), images, cost=2.0, progress=False)
    assert isinstance(result, GatesOnly)
    assert result.calibration.cost == pytest.approx(2.0, abs=0.2)
    assert "without labels" in str(result)
    with pytest.warns(Inconclusive, match="without labels"):
        read(result.save(folder / "gates.toml")).warn()
    for k, image in enumerate(images):
        (folder / "photos").mkdir(exist_ok=True)
        image.save(folder / "photos" / f"{k:02}.png")
    same = unstride.tune(made_pools.pair(), folder / "photos", cost=2.0, progress=False)
    assert same.recipe == result.recipe


def test_max_time_ratio_is_measured(folder):
    result = unstride.tune(
        made_pools.pair(), made_pools.npz(folder, 60, seed=5), cost=5.0, max_time_ratio=50.0, progress=False
    )
    assert result.time is not None and result.time.ratio.estimate <= 50
    assert any(note.startswith("Measured time") for note in result.notes)


def test_wrong_options_and_too_few_images_are_clear_errors(folder):
    pair = made_pools.pair()
    with pytest.raises(OptionError, match="cost: got 0, expected more than 0"):
        unstride.tune(pair, "sample", cost=0)
    with pytest.raises(OptionError, match="objective: got 'auc'"):
        unstride.tune(pair, "sample", objective="auc")
    with pytest.raises(DataError, match="got 20 labelled images, expected at least 30"):
        unstride.tune(pair, made_pools.npz(folder, 20), progress=False)
    with pytest.raises(OptionError, match=r"cheapest network costs 1 "):
        unstride.tune(pair, made_pools.npz(folder, 60, seed=5), cost=0.5, progress=False)


def test_the_page_and_the_plot(tuned, folder):
    page = tuned.report(folder / "page.html").read_text()
    assert "Use this recipe" in page and "ensemble of all + flip" in page and "Reliability" in page
    svg = tuned.plot().save(folder / "plot.svg").read_text()
    assert svg.startswith("<svg") and "tuned for 2.5" in svg


def test_the_cache_is_one_run_for_each_set_of_passes(tuned, folder):
    runs = list((folder / "cache").glob("pool-*"))
    assert len(runs) >= 10 and all(list(run.glob("*.safetensors")) for run in runs)
    assert Cache  # the one format: nothing else lies there
    others = [
        p.name for p in (folder / "cache").iterdir() if p.name.split("-")[0] not in ("pool", "files", "evaluation")
    ]
    assert not others


def test_no_warning_of_numpy_or_torch(folder, recwarn):
    unstride.tune(made_pools.pair(), made_pools.npz(folder, 60, seed=5), cost=1.3, progress=False)
    assert not [w for w in recwarn if not issubclass(w.category, UnstrideWarning)]
