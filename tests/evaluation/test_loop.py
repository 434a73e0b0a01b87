"""The loop's rows are what a few lines by hand give, whatever the batches, damages and restarts."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from full_disk import runs_until_there_is_space
from PIL import Image

import unstride
from unstride import data, models
from unstride.errors import DataError, OptionError
from unstride.evaluation import evaluate, measures, metrics, read_rows, work
from unstride.evaluation.words import setting
from unstride.recipe import policies
from unstride.recipe.view import parse_view
from unstride.tta import TTA, Policy
from unstride.views.images import Preprocess

BUDGETS = (1, 3, 6)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    for task, size in (("classification", 8), ("segmentation", 4)):
        monkeypatch.setitem(measures.MEASURES, task, replace(measures.MEASURES[task], shard=size))
    torch.set_num_threads(1)


@pytest.fixture
def dataset(tmp_path):
    return data.load(tiny.npz(tmp_path, 21), tiny.PREPROCESS)


def loaded_images(dataset):
    pairs = [dataset.tensors(i) for i in range(len(dataset))]
    return torch.stack([x for x, _ in pairs]), [y for _, y in pairs]


def close(found, wanted):
    """Batches of another size may differ in the last bits."""
    return found == pytest.approx(wanted, abs=2e-6)


def test_rows_are_what_the_enhanced_model_gives(dataset):
    model = tiny.net()
    rows = evaluate(model, dataset, (6, 3), batch_size=5, layers=range(1, 4))
    x, y = loaded_images(dataset)
    with torch.no_grad():
        plain = metrics.score(model(x), y)
    assert [(r.budget, r.views) for r in rows] == [(1, 1), (3, 1), (6, 1)]
    for row in rows:
        better = unstride.enhance(model, x[:1], budget=row.budget, layers=range(1, 4))
        scores = metrics.score(better(x), y)
        wanted = metrics.summarise(scores)
        gain = metrics.compare(plain, scores)
        for name in ("top1", "top5", "nll", "ece", "brier"):
            assert close(row.metrics[name], getattr(wanted, name)), name
        assert (row.gain["corrected"], row.gain["corrupted"]) == (gain.corrected, gain.corrupted)
        assert row.gain["low"] == gain.low
        assert row.macs == pytest.approx(np.mean([p.cost for p in better.explain(x)]))
        assert row.images == 21
        assert row.errors == 0
    assert rows[0].gain["gain"] == 0
    assert rows[2].gain["corrected"] + rows[2].gain["corrupted"] > 0, "the test's net must change its mind somewhere"
    assert rows[0].latency == 1.0
    assert min(rows[1].latency, rows[2].latency, rows[0].plain_ms) > 0  # how long is not for a busy machine to test
    assert sum(r.recommended for r in rows) == 1


def test_a_row_says_how_it_came_about(dataset):
    row = evaluate(tiny.net(), dataset, (1, 3), criterion="displacement", seed=5)[-1]
    assert row.options["criterion"] == "displacement"
    assert row.options["layers"] == [1, 2, 3]
    assert Preprocess.from_json(row.preprocess) == tiny.PREPROCESS
    assert row.versions["torch"] == torch.__version__.split("+")[0] or row.versions["torch"] == torch.__version__
    assert row.data_fingerprint == dataset.fingerprint()
    assert row.seed == 5
    assert row.command and row.threads == torch.get_num_threads() and row.cpu
    json.dumps(row.to_json(), allow_nan=False)


def test_what_names_a_run(tmp_path, dataset):
    def run(model, data, budgets=(1, 3), **options):
        return evaluate(model, data, budgets, **options)[0].run

    model = tiny.net()
    same = run(model, dataset)
    assert run(tiny.net(), dataset, batch_size=2) == same
    other = tiny.net()
    other.head.bias.data += 1e-3
    assert len({same, run(model, dataset, aggregate="mean"), run(model, dataset, (1, 4)), run(other, dataset)}) == 4
    assert run(model, dataset, limit=20) != same
    assert run(model, dataset, tta="flip") != same


def test_what_is_done_is_not_done_again(tmp_path, dataset, monkeypatch):
    done = []
    scored = work._scored
    monkeypatch.setattr(
        work, "_scored", lambda job, batch, errors: done.append(len(batch)) or scored(job, batch, errors)
    )
    model, out = tiny.net(), tmp_path / "run"
    first = evaluate(model, dataset, BUDGETS, out=out)
    assert sum(done) == 21
    done.clear()
    assert evaluate(model, dataset, BUDGETS, out=out) == first
    assert done == []
    lost = sorted(out.glob("cache/evaluation-*/*.safetensors"))[1]
    lost.write_bytes(lost.read_bytes()[:-5])
    leftover = lost.parent / ".000001.safetensors.xyz.tmp"
    leftover.write_bytes(b"of a killed process")
    os.utime(leftover, (0, 0))
    shutil.move(out / "rows.jsonl", tmp_path / "rows.jsonl")
    again = evaluate(model, dataset, BUDGETS, out=out, batch_size=32)
    assert done in ([8], [5])
    assert [tiny.numbers(r.to_json()) for r in again] == [tiny.numbers(r.to_json()) for r in first]
    assert not list(lost.parent.glob(".*.tmp"))
    assert read_rows(out / "rows.jsonl") == again
    evaluate(model, dataset, (1, 2), out=out)
    assert len(read_rows(out / "rows.jsonl")) == len(again) + 2


def counted(monkeypatch):
    """The sizes of the batches that are evaluated."""
    done, scored = [], work._scored
    monkeypatch.setattr(
        work, "_scored", lambda job, batch, errors: done.append(len(batch)) or scored(job, batch, errors)
    )
    return done


MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 2, 1)
    def forward(self, x):
        return self.b(self.a(x).relu()).mean((2, 3))
def make():
    torch.manual_seed(0)
    from unstride.views.images import Preprocess
    return Net().eval(), Preprocess(None, None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
"""


def test_a_model_whose_code_changed_is_evaluated_again(tmp_path, dataset, monkeypatch):
    done = counted(monkeypatch)
    file, found = tmp_path / "f.py", []
    for source in (MODEL, MODEL.replace("relu()", "tanh()"), MODEL):
        file.write_text(source)
        found.append(evaluate(f"{file}:make", dataset.name, (1, 3), out=tmp_path / "out")[0].metrics["nll"])
    assert found[0] == found[2] != found[1]
    assert sum(done) == 2 * 21


def test_images_that_changed_under_their_names_are_evaluated_again(tmp_path, monkeypatch, capfd):
    done, files = counted(monkeypatch), image_folder(tmp_path / "data", 10)
    data_set = data.load(f"folder:{tmp_path / 'data'}", tiny.PREPROCESS)
    first = evaluate(tiny.net(), data_set, (1, 3), out=tmp_path / "out")
    assert "taken from an earlier run" not in capfd.readouterr().err
    files[3].write_bytes(files[4].read_bytes())
    second = evaluate(tiny.net(), data_set, (1, 3), out=tmp_path / "out")
    assert sum(done) == 11
    assert "9 of 10 images are taken from an earlier run" in capfd.readouterr().err
    assert second[0].run != first[0].run and second[0].metrics["nll"] != first[0].metrics["nll"]


def test_a_full_disk_is_an_error_and_the_run_goes_on_when_there_is_space(tmp_path, dataset, monkeypatch):
    def run(name="out"):
        return evaluate(tiny.net(), dataset, (1, 3), out=tmp_path / name, batch_size=8)

    rows = runs_until_there_is_space(run, monkeypatch, step=2)
    assert [tiny.numbers(r.to_json()) for r in rows] == [tiny.numbers(r.to_json()) for r in run("whole")]


def test_more_images_reuse_what_was_computed(tmp_path, dataset, monkeypatch):
    done = counted(monkeypatch)
    evaluate(tiny.net(), dataset, BUDGETS, out=tmp_path / "out", limit=10)
    rows = evaluate(tiny.net(), dataset, BUDGETS, out=tmp_path / "out", batch_size=3)
    assert sum(done) == 21
    fresh = evaluate(tiny.net(), dataset, BUDGETS)
    assert all(close(a.metrics["nll"], b.metrics["nll"]) for a, b in zip(rows, fresh, strict=True))


def test_a_rows_file_that_cannot_take_rows_is_found_before_the_work(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr(work, "_scored", lambda *_: pytest.fail("worked"))
    (tmp_path / "rows.jsonl").write_text("not a row\n")
    with pytest.raises(unstride.errors.ArtefactError, match="line 1"):
        evaluate(tiny.net(), dataset, (1, 3), out=tmp_path)


def image_folder(root, count=10):
    x, y = tiny.images(count)
    for c in range(6):
        (root / str(c)).mkdir(parents=True)
    for i in range(count):
        Image.fromarray(x[i]).save(root / str(y[i]) / f"{i:02d}.png")
    return sorted(root.glob("*/*.png"))


def test_damaged_images_are_counted_and_named(tmp_path):
    files = image_folder(tmp_path / "images")
    whole = data.load(f"folder:{tmp_path / 'images'}", tiny.PREPROCESS)
    x, y = loaded_images(whole)
    keep = [i for i in range(10) if i not in (0, 4)]
    for i in (0, 4):  # the first one, too: setting up must not stumble over it
        files[i].write_bytes(files[i].read_bytes()[:60])
    rows = evaluate(tiny.net(), whole, (1, 3))
    assert (rows[0].images, rows[0].errors) == (8, 2)
    assert [name.split(":")[0] for name in rows[0].error_names] == [f"{f.parent.name}/{f.name}" for f in files[:5:4]]
    with torch.no_grad():
        wanted = metrics.summarise(metrics.score(tiny.net()(x[keep]), [y[i] for i in keep]))
    assert close(rows[0].metrics["nll"], wanted.nll)
    for file in files:
        file.write_bytes(b"nothing")
    with pytest.raises(DataError, match="none of 10 images"):
        evaluate(tiny.net(), whole, (1, 3))


def test_an_image_that_the_model_chokes_on_is_an_error_of_its_own(dataset):
    class Choking(tiny.Net):
        def forward(self, x):
            # Infinite for images whose first pixel is the dark one below, finite for all others.
            return super().forward(x) / (x[:, :1, 0, 0] + 2.0)

    x, y = tiny.images(6)
    x[:, 0, 0] = 200
    x[3, 0, 0] = 0
    from unstride.data.items import of_arrays

    set_of = data.Dataset("mine", "classification", tiny.PREPROCESS, of_arrays(x, y.tolist()), range(6))
    model = Choking().eval()
    row = evaluate(model, set_of, (1, 3))[0]
    assert (row.images, row.errors) == (5, 1)
    assert row.error_names[0].startswith("3: logits are not finite")


def test_views_are_merged_as_tta_does(dataset):
    model = tiny.net()
    rows = evaluate(model, dataset, (1, 3), tta="expanded:4", tta_method="max", batch_size=21)
    assert [(r.views, r.budget) for r in rows] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    x, y = loaded_images(dataset)
    better = unstride.enhance(model, x[:1], budget=3)
    tta = TTA(better, "expanded", "max", 4, preprocess=tiny.PREPROCESS)
    for row, wanted in ((rows[2], TTA(model, "expanded", "max", 4, preprocess=tiny.PREPROCESS)), (rows[3], tta)):
        assert close(row.metrics["nll"], metrics.summarise(metrics.score(wanted(x), y)).nll)
    assert rows[2].macs == pytest.approx(4.0)
    assert rows[3].macs == pytest.approx(4 * rows[1].macs, rel=0.2)
    assert rows[3].options["tta"]["views"] == [str(v) for v in policies.expanded()[:4]]


def test_crops_see_the_margin_that_the_preprocessing_cuts_off(tmp_path):
    name = tiny.npz(tmp_path, 8, size=24)
    cropping = Preprocess(24, 16, (0.5,) * 3, (0.25,) * 3)
    rows = evaluate(tiny.net(), data.load(name, cropping), (1, 3), tta="standard:6")
    x, y = loaded_images(data.load(name, Preprocess(24, 24, (0.5,) * 3, (0.25,) * 3)))
    tta = TTA(tiny.net(), "standard", "mean", 6, preprocess=cropping, crop=16)
    assert close(rows[2].metrics["nll"], metrics.summarise(metrics.score(tta(x), y)).nll)
    assert rows[2].metrics["nll"] != pytest.approx(rows[0].metrics["nll"], abs=1e-3)


def test_a_fitted_tta_comes_as_an_object_or_a_file(tmp_path, dataset):
    model = tiny.net()
    x, y = loaded_images(dataset)
    tta = TTA(model, "expanded", "augtta", 3, preprocess=tiny.PREPROCESS)
    tta.fit([(x, torch.tensor(y))], epochs=2, progress=False)
    file = tta.save(tmp_path / "tta.safetensors")
    by_object = evaluate(model, dataset, (1, 3), tta=tta)
    by_file = evaluate(model, dataset, (1, 3), tta=str(file))
    assert [tiny.numbers(r.to_json()) for r in by_file] == [tiny.numbers(r.to_json()) for r in by_object]
    assert close(by_file[2].metrics["nll"], metrics.summarise(metrics.score(tta(x), y)).nll)


def masks_folder(root, sizes):
    rng = np.random.default_rng(1)
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for i, (h, w) in enumerate(sizes):
        Image.fromarray(rng.integers(0, 256, (h, w, 3)).astype(np.uint8)).resize((w, h)).save(root / f"images/{i}.png")
        mask = rng.integers(0, 6, (h, w)).astype(np.uint8)
        mask[0] = 255
        Image.fromarray(mask).save(root / f"masks/{i}.png")
    return f"masks:{root}"


def test_segmentation_of_images_of_all_sizes_with_and_without_flip(tmp_path):
    sizes = [(24, 32), (16, 40), (24, 32), (17, 23), (24, 32)]
    dataset = data.load(masks_folder(tmp_path / "set", sizes), tiny.PREPROCESS, classes=6)
    model = tiny.net(maps=True)
    rows = evaluate(model, dataset, (1, 4), tta="flip", batch_size=2)
    assert [(r.views, r.budget) for r in rows] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    flip = Policy("flip", (parse_view("Identity"), parse_view("FlipLR")))
    enhanced = unstride.enhance(model, dataset.tensors(0)[0][None], task="segmentation")
    for row in rows:
        total = np.zeros((6, 6), np.int64)
        for i in range(len(sizes)):
            x, mask = dataset.tensors(i)
            better = enhanced.with_options(budget=row.budget)
            if row.views == 2:
                better = TTA(better, flip, "mean", 2, preprocess=tiny.PREPROCESS, task="segmentation")
            total += metrics.confusion(better(x[None]).argmax(1)[0], mask, 6)
        wanted = metrics.summarise_segmentation(total)
        assert row.metrics["miou"] == pytest.approx(wanted.miou, abs=1e-3)  # a tie or two may fall the other way
        assert row.metrics["aacc"] == pytest.approx(wanted.aacc, abs=1e-3)
        assert list(row.metrics["iou"]) == ["0", "1", "2", "3", "4", "5"]
    labelled = sum((h - 1) * w for h, w in sizes)
    assert rows[1].gain["corrected"] + rows[1].gain["corrupted"] < labelled
    assert rows[1].gain["corrected"] > 0
    assert rows[2].macs == pytest.approx(2.0)


def test_logits_smaller_than_the_mask_are_brought_to_its_size(tmp_path):
    small = Preprocess((16, 16), None, (0.5,) * 3, (0.25,) * 3)
    dataset = data.load(masks_folder(tmp_path / "set", [(24, 32), (16, 40)]), small, classes=6)
    model = tiny.net(maps=True)
    row = evaluate(model, dataset, (1, 2))[0]
    total = np.zeros((6, 6), np.int64)
    for i in range(2):
        x, mask = dataset.tensors(i)
        with torch.no_grad():
            large = torch.nn.functional.interpolate(model(x[None]), mask.shape, mode="bilinear", align_corners=False)
        total += metrics.confusion(large.argmax(1)[0], mask, 6)
    assert row.metrics["miou"] == pytest.approx(metrics.summarise_segmentation(total).miou, abs=1e-9)


def test_an_enhanced_model_keeps_its_options_and_the_users_model_its_mode(dataset):
    model = tiny.net().train()
    x, _ = loaded_images(dataset)
    better = unstride.enhance(model, x[:1], aggregate="mean", criterion="random")
    row = evaluate(better, dataset, (1, 3))[-1]
    assert (row.options["aggregate"], row.options["criterion"]) == ("mean", "random")
    assert model.training


def test_where_nothing_is_asked_for_the_default_recipe_is_measured(dataset):
    """As `enhance` and `predict` run it; a search is measured where its budgets, options or views are asked for."""
    plain, ours = evaluate(tiny.net(), dataset)
    assert plain.plain and setting(ours) == "recipe default"
    assert [setting(row) for row in evaluate(tiny.net(), dataset, recipe="flip")] == ["plain", "recipe flip"]
    for asked in ({"budgets": (3,)}, {"order": "cost"}, {"tta": "flip"}):
        assert all(setting(row).startswith(("plain", "budget")) for row in evaluate(tiny.net(), dataset, **asked))
    with pytest.raises(OptionError, match=r"tta.*'flip' has stages"):
        evaluate(tiny.net(), dataset, recipe="flip", tta="flip")


def test_a_recipe_of_ones_own_is_measured_as_it_is(dataset):
    """At its own budget, with its own seed, states and precision: what is proved is what `predict` runs."""
    x, labels = loaded_images(dataset)
    zero = unstride.enhance(tiny.net(), x[:1]).plan.found.space.zero
    recipes = [
        unstride.Recipe("six", budget=6),
        unstride.Recipe("drawn", budget=6, criterion="random", seed=1),
        unstride.Recipe("given", states=(zero, zero.at(1, (0, 1)), zero.at(1, (1, 1)))),
        unstride.Recipe("warm", temperature=2.0),
    ]
    for recipe in recipes:
        better = unstride.enhance(tiny.net(), x[:1], recipe=recipe)
        _, row = evaluate(tiny.net(), dataset, recipe=recipe)
        wanted = metrics.score(better(x), labels)
        assert row.metrics["nll"] == pytest.approx(float(np.mean(wanted.nll)), abs=1e-5), recipe
        assert row.macs == pytest.approx(np.mean([p.cost for p in better.explain(x)])), recipe
    half = evaluate(tiny.net(), dataset, recipe=recipes[0], precision="bfloat16")[-1]
    assert half.metrics["nll"] != evaluate(tiny.net(), dataset, recipe=recipes[0])[-1].metrics["nll"]
    assert [row.plain for row in evaluate(tiny.net(), dataset, recipe="plain")] == [True]
    assert [row.budget for row in evaluate(tiny.net(), dataset, recipe="paper")] == [1, 4, 10, 15]


def test_wrong_arguments(dataset, tmp_path, monkeypatch):
    model = tiny.net()
    for budgets in ((), (0,), (2.5,)):
        with pytest.raises(OptionError, match="budgets"):
            evaluate(model, dataset, budgets)
    with pytest.raises(OptionError, match="labelled for classification"):
        evaluate(model, dataset, task="segmentation")
    with pytest.raises(OptionError, match=r"preprocessing is not known"):
        evaluate(model, "sample")
    with pytest.raises(OptionError, match=r"standard:15"):
        evaluate(model, dataset, tta="standard")
    with pytest.raises(OptionError, match=r"fitted first"):
        evaluate(model, dataset, tta="standard:4", tta_method="augtta")
    with pytest.raises(OptionError, match=r"at least 2"):
        evaluate(model, dataset, tta="expanded:1")
    with pytest.raises(OptionError, match="criterion"):
        evaluate(model, dataset, criterion="entropie")
    loaded = models.LoadedModel("mine", model, tiny.PREPROCESS, "classification")
    np.savez(tmp_path / "wrong.npz", x=np.zeros((2, 16, 16, 3), np.uint8), y=np.array([1, 6]))
    with pytest.raises(DataError, match=r"image 1: its label is 6"):
        evaluate(loaded, f"npz:{tmp_path / 'wrong.npz'}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="folder that all of them see"):
        evaluate(model, dataset)
