"""A table of predictions: the library's own answers, in any format, whatever happened on the way."""

import csv
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from full_disk import runs_until_there_is_space
from PIL import Image
from small_nets import photo, png, write_nets

import unstride
from unstride import Gate, Recipe, Stage, models
from unstride.errors import ArtefactError, DataError, ModelChanged, OptionError, SpecError, UnstrideWarning
from unstride.predicting import run as running
from unstride.predicting.drift import drifts
from unstride.predicting.parts import PartRunner
from unstride.views.images import Preprocess, open_image

HERE = Path(__file__).parents[1]


@pytest.fixture
def nets(tmp_path):
    return write_nets(tmp_path)


def photos(folder, count, size=(40, 48)):
    folder.mkdir(exist_ok=True)
    for k in range(count):
        photo(k, size).save(folder / f"{k:04d}.png")
    return folder


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rows_are_the_librarys_own_answers(nets, tmp_path):
    folder = photos(tmp_path / "photos", 5)
    done = unstride.predict(f"{nets}:net", folder, tmp_path / "p.jsonl", recipe="multiscale-flip", top=2)
    rows = read(tmp_path / "p.jsonl")
    loaded = models.load(f"{nets}:net")
    images = [open_image(path) for path in sorted(folder.iterdir())]
    x = torch.stack([loaded.preprocess(image) for image in images])
    better = unstride.enhance(loaded.model, x[:1], recipe="multiscale-flip", preprocess=loaded.preprocess)
    for row, path, p in zip(rows, sorted(folder.iterdir()), better.explain(images), strict=True):
        probabilities = p.output.softmax(0)
        assert row["image"] == str(path)
        assert row["classes"] == probabilities.topk(2).indices.tolist()
        assert row["probabilities"] == pytest.approx(probabilities.topk(2).values.tolist(), abs=2e-5)
        assert row["names"] == [loaded.classes[k] for k in row["classes"]]
        assert row["base_class"] == int(p.base.argmax())
        assert row["changed"] is (row["base_class"] != row["classes"][0])
        assert row["passes"] == 6
        assert row["cost"] == pytest.approx(p.cost, abs=1e-5)
        assert row["agreement"] == pytest.approx(p.agreement, abs=1e-5)
        assert row["spread"] == pytest.approx(float(p.spread), abs=1e-5)
        assert row["error"] is None
    assert (done.images, done.errors) == (5, 0)
    assert done.changed == pytest.approx(np.mean([row["changed"] for row in rows]))
    assert not (tmp_path / "p.jsonl.parts").exists()


def test_a_model_that_is_changed_meanwhile_gives_no_rows_of_both(nets, tmp_path, monkeypatch):
    loaded, run = models.load(f"{nets}:net"), PartRunner.run

    def changed_after_the_first_part(runner, part, images):
        result = run(runner, part, images)
        next(loaded.model.parameters()).data.add_(1.0)
        return result

    monkeypatch.setattr(PartRunner, "run", changed_after_the_first_part)
    with pytest.raises(ModelChanged, match="were changed"):
        unstride.predict(loaded, photos(tmp_path / "photos", 5), tmp_path / "p.jsonl", batch_size=2, recipe="flip")
    assert not (tmp_path / "p.jsonl").exists()
    monkeypatch.undo()
    unstride.predict(loaded, tmp_path / "photos", tmp_path / "p.jsonl", batch_size=2, recipe="flip")  # as it is now
    assert len(read(tmp_path / "p.jsonl")) == 5


def test_views_come_from_the_image_and_not_from_its_crop(nets, tmp_path):
    """A larger size must show detail that the prepared tensor no longer has."""
    folder = photos(tmp_path / "photos", 1, size=(160, 160))
    recipe = "multiscale-flip"
    unstride.predict(f"{nets}:net", folder, tmp_path / "p.jsonl", recipe=recipe, top=4)
    (row,) = read(tmp_path / "p.jsonl")
    loaded = models.load(f"{nets}:net")
    x = loaded.preprocess(open_image(folder / "0000.png"))[None]
    blind = unstride.enhance(loaded.model, x, recipe=recipe).explain(x)[0].output.softmax(0)
    assert row["probabilities"] != pytest.approx(blind.sort(descending=True).values.tolist(), abs=1e-4)


def gated(nets, folder, path):
    """A recipe that takes two more views of about half of the images."""
    loaded = models.load(f"{nets}:net")
    x = torch.stack([loaded.preprocess(open_image(one)) for one in sorted(folder.iterdir())[:32]])
    best = loaded.model(x).detach().softmax(1).topk(2).values
    gate = Gate("margin", below=float((best[:, 0] - best[:, 1]).median()))
    recipe = Recipe((Stage(), Stage(("1.3x", "flip"), gate=gate)), name="gated")
    return unstride.enhance(loaded, recipe=recipe).save(path)


def test_gated_passes_are_taken_only_where_the_gate_opens(nets, tmp_path):
    folder = photos(tmp_path / "photos", 12)
    unstride.predict(f"{nets}:net", folder, tmp_path / "p.jsonl", recipe=gated(nets, folder, tmp_path / "r.toml"))
    rows = read(tmp_path / "p.jsonl")
    for row in rows:
        again = row["stopped"] == "all passes"
        assert row["passes"] == (3 if again else 1)
        assert row["cost"] > 3 if again else row["cost"] == pytest.approx(1, abs=0.01)
    assert 3 <= sum(row["passes"] == 3 for row in rows) <= 9


def test_csv_and_parquet_hold_the_same_rows(nets, tmp_path):
    folder = photos(tmp_path / "photos", 4)
    (folder / "cut.png").write_bytes(png(photo())[:300])
    for kind in ("jsonl", "csv", "parquet"):
        if kind == "parquet":
            pytest.importorskip("pyarrow")
        done = unstride.predict(f"{nets}:net", folder, tmp_path / f"p.{kind}", recipe="flip", top=2)
        assert done.errors == 1 and "see the column `error`" in str(done)
    rows = read(tmp_path / "p.jsonl")
    assert "cut.png" in rows[-1]["error"]
    assert rows[-1]["classes"] is None
    with (tmp_path / "p.csv").open(newline="") as file:
        flat = list(csv.DictReader(file))
    for row, one in zip(rows, flat, strict=True):
        assert one["image"] == row["image"]
        if row["error"] is None:
            assert [int(one["class_1"]), int(one["class_2"])] == row["classes"]
            assert float(one["probability_1"]) == row["probabilities"][0]
            assert one["changed"] == str(row["changed"])
        else:
            assert one["class_1"] == "" and one["error"] == row["error"]
    from pyarrow import parquet

    assert parquet.read_table(tmp_path / "p.parquet").to_pylist() == rows


def test_masks_lie_over_the_image_and_have_colours(nets, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for k, size in enumerate([(40, 48), (44, 52), (37, 61)]):
        photo(k, size).save(folder / f"{k}.png")
    done = unstride.predict(f"{nets}:segmenter", folder, tmp_path / "p.jsonl", recipe="flip")
    for row in read(tmp_path / "p.jsonl"):
        assert (tmp_path / row["mask"]).is_relative_to(done.masks)
        with Image.open(tmp_path / row["mask"]) as mask:  # a path from the table's own folder
            assert mask.mode == "P" and mask.getpalette()
            seen = np.asarray(mask)
        with Image.open(row["image"]) as image:
            assert seen.shape == (image.height, image.width)
        found, counts = np.unique(seen, return_counts=True)
        shares = dict(zip(row["classes"], row["shares"], strict=True))
        assert shares == pytest.approx(dict(zip(found.tolist(), counts / seen.size, strict=True)), abs=1e-5)
        assert 0 <= row["changed"] < 1


def test_masks_are_not_written_among_the_images(nets, tmp_path):
    """They would be images of the next run, and a killed one could not go on."""
    folder = photos(tmp_path / "photos", 1)
    with pytest.raises(OptionError, match="among the images"):
        unstride.predict(f"{nets}:segmenter", folder, folder / "p.csv", recipe="flip")
    assert unstride.predict(f"{nets}:net", folder, folder / "p.csv", recipe="flip").images == 1


def test_the_names_ending_says_the_form_however_it_is_written(nets, tmp_path):
    folder = photos(tmp_path / "photos", 1)
    unstride.predict(f"{nets}:net", folder, tmp_path / "p.CSV", recipe="plain")
    assert (tmp_path / "p.CSV").read_text().startswith("image,class_1")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have only names that are text")
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_names_that_are_no_text_are_written_readably(nets, tmp_path, suffix):
    folder = photos(tmp_path / "photos", 1)
    (folder / "0000.png").rename(folder / os.fsdecode(b"\xff.png"))
    unstride.predict(f"{nets}:net", folder, tmp_path / f"p.{suffix}", recipe="plain")
    text = (tmp_path / f"p.{suffix}").read_text()
    name = json.loads(text)["image"] if suffix == "jsonl" else text.splitlines()[1].split(",")[0]
    assert name.endswith("\\xff.png")


def test_a_gate_without_a_threshold_is_refused_at_once(nets, tmp_path):
    folder = photos(tmp_path / "photos", 1)
    unset = Recipe((Stage(), Stage(("flip",), gate=Gate(share=0.5))))
    with pytest.raises(OptionError, match="calibrate"):
        unstride.predict(f"{nets}:net", folder, tmp_path / "p.csv", recipe=unset)


def test_a_finished_run_says_what_it_said_and_another_is_not_overwritten(nets, tmp_path):
    folder, out = photos(tmp_path / "photos", 3), tmp_path / "p.jsonl"
    first = unstride.predict(f"{nets}:net", folder, out, recipe="flip")
    written = out.stat().st_mtime_ns
    again = unstride.predict(f"{nets}:net", folder, out, recipe="flip")
    assert again == replace(first, already=True, seconds=0.0, waiting=0.0)
    assert str(again).startswith("already done: nothing left to do\n3 images")
    assert "already" not in str(first) and "images/s" in str(first)
    assert out.stat().st_mtime_ns == written
    with pytest.raises(OptionError, match="another run"):
        unstride.predict(f"{nets}:net", folder, out, recipe="plain")
    record = json.loads((tmp_path / "p.jsonl.run.json").read_text())
    assert record["pipeline"]["recipe"]["stage"][0]["views"] == ["plain", "flip"]


def test_parts_of_another_run_are_refused(nets, tmp_path, monkeypatch):
    folder, out = photos(tmp_path / "photos", 3), tmp_path / "p.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(running, "_join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            unstride.predict(f"{nets}:net", folder, out, recipe="flip")
    with pytest.raises(OptionError, match="parts of another run"):
        unstride.predict(f"{nets}:net", folder, out, recipe="plain")
    done = unstride.predict(f"{nets}:net", folder, out, recipe="flip")
    assert (done.images, done.before) == (3, 3) and "(0.0 images/s)" in str(done)


MODEL = """
import torch
from torch import nn
from unstride import Preprocess
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 2, 1)
    def forward(self, x):
        return self.b(self.a(x).relu()).mean((2, 3))
def make():
    torch.manual_seed(0)
    return Net().eval(), Preprocess(None, None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
"""


def interrupted(monkeypatch, *arguments, **options):
    """A run that ends before its table is written."""
    with monkeypatch.context() as patched:
        patched.setattr(running, "_join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            unstride.predict(*arguments, **options)


def test_a_model_whose_code_changed_is_another_run(tmp_path, monkeypatch):
    folder, out, file = photos(tmp_path / "photos", 3), tmp_path / "p.jsonl", tmp_path / "f.py"
    file.write_text(MODEL)
    unstride.predict(f"{file}:make", folder, out, recipe="flip")
    file.write_text(MODEL.replace("relu()", "tanh()"))
    with pytest.raises(OptionError, match="is there already, from another run"):
        unstride.predict(f"{file}:make", folder, out, recipe="flip")
    interrupted(monkeypatch, f"{file}:make", folder, tmp_path / "q.jsonl", recipe="flip")
    file.write_text(MODEL)
    with pytest.raises(OptionError, match="finished parts of another run"):
        unstride.predict(f"{file}:make", folder, tmp_path / "q.jsonl", recipe="flip")


def test_images_that_changed_under_their_names_are_computed_again(nets, tmp_path, monkeypatch, capfd):
    folder, out = photos(tmp_path / "photos", 5), tmp_path / "p.jsonl"
    monkeypatch.setattr(running, "PART", 2)
    monkeypatch.setattr("unstride.predicting.summary.PART", 2)
    interrupted(monkeypatch, f"{nets}:net", folder, out, recipe="flip")
    photo(77, (40, 48)).save(folder / "0001.png")
    done = unstride.predict(f"{nets}:net", folder, out, recipe="flip")
    assert done.before == 3  # of the second and the third part
    assert "2 of 3 parts" in capfd.readouterr().err
    unstride.predict(f"{nets}:net", folder, tmp_path / "whole.jsonl", recipe="flip")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    first = json.loads((tmp_path / "p.jsonl.run.json").read_text())
    assert first["command"] and first["threads"] and first["cpu"] and first["versions"]["torch"]
    photo(78, (40, 48)).save(folder / "0001.png")
    with pytest.raises(OptionError, match="is there already, from another run"):
        unstride.predict(f"{nets}:net", folder, out, recipe="flip")
    unstride.predict(f"{nets}:net", folder, tmp_path / "r.jsonl", recipe="flip")
    assert json.loads((tmp_path / "r.jsonl.run.json").read_text())["read"] != first["read"]


def test_parts_that_are_taken_from_an_earlier_run_are_named(nets, tmp_path, monkeypatch, capfd):
    folder, out = photos(tmp_path / "photos", 3), tmp_path / "p.jsonl"
    interrupted(monkeypatch, f"{nets}:net", folder, out, recipe="flip")
    assert "earlier run" not in capfd.readouterr().err
    unstride.predict(f"{nets}:net", folder, out, recipe="flip")
    assert "1 of 1 parts of 256 images are taken from an earlier run" in capfd.readouterr().err


@pytest.mark.parametrize("model", ["net", "segmenter"])
def test_a_full_disk_is_an_error_and_the_run_goes_on_when_there_is_space(nets, tmp_path, monkeypatch, model):
    folder = photos(tmp_path / "photos", 5)
    monkeypatch.setattr(running, "PART", 2)
    monkeypatch.setattr("unstride.predicting.summary.PART", 2)

    def run(name="p.jsonl"):
        return unstride.predict(f"{nets}:{model}", folder, tmp_path / name, recipe="flip")

    run("whole.jsonl")
    runs_until_there_is_space(run, monkeypatch)
    wanted = (tmp_path / "whole.jsonl").read_text().replace("whole.jsonl", "p.jsonl")
    assert (tmp_path / "p.jsonl").read_text() == wanted
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_empty_folder_leaves_nothing_behind(nets, tmp_path):
    folder, out = tmp_path / "photos", tmp_path / "p.jsonl"
    folder.mkdir()
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz"):
        pass
    for inputs in (folder, tmp_path / "s.tar.gz"):
        with pytest.raises(DataError, match="there is no image"):
            unstride.predict(f"{nets}:net", inputs, out, recipe="flip")
        assert not list(tmp_path.glob("*p.jsonl*"))
    photos(folder, 2)
    assert unstride.predict(f"{nets}:net", folder, out, recipe="plain").images == 2


def test_tables_of_one_stem_have_masks_of_their_own(nets, tmp_path):
    folder = photos(tmp_path / "photos", 2)
    masks = []
    for name, model in (("m.csv", "segmenter"), ("m.jsonl", "segmenter")):
        done = unstride.predict(f"{nets}:{model}", folder, tmp_path / name, recipe="flip" if masks else "plain")
        masks.append(done.masks)
    assert masks == [str(tmp_path / "m.csv.masks"), str(tmp_path / "m.jsonl.masks")]
    for row in read(tmp_path / "m.jsonl"):
        assert row["mask"].startswith("m.jsonl.masks/") and (tmp_path / row["mask"]).is_file()


def test_masks_of_images_that_changed_meanwhile_do_not_stay(nets, tmp_path, monkeypatch):
    folder, out = photos(tmp_path / "photos", 3), tmp_path / "m.jsonl"
    interrupted(monkeypatch, f"{nets}:segmenter", folder, out, recipe="plain")
    (folder / "0001.png").rename(folder / "1111.png")
    unstride.predict(f"{nets}:segmenter", folder, out, recipe="plain")
    masks = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "m.jsonl.masks").rglob("*.png")]
    assert sorted(masks) == sorted(row["mask"] for row in read(out))


def test_a_model_whose_answers_depend_on_the_batch_is_a_warning(nets, tmp_path):
    folder = photos(tmp_path / "photos", 64)
    loaded = models.load(f"{nets}:net")
    mixing = torch.nn.Sequential(torch.nn.BatchNorm2d(3, track_running_stats=False), loaded.model).eval()
    with pytest.warns(UnstrideWarning, match="depends on the images beside it"):
        unstride.predict(replace(loaded, model=mixing), folder, tmp_path / "p.jsonl", recipe="plain")


def test_a_table_without_a_suffix_is_told_where_masks_go(nets, tmp_path):
    folder = photos(tmp_path / "photos", 1)
    with pytest.raises(OptionError, match=r"ends in \.jsonl \.csv \.parquet; .*beside it, as m\.csv\.masks/ of m\.csv"):
        unstride.predict(f"{nets}:segmenter", folder, tmp_path / "m", recipe="flip")


def test_a_recipe_for_another_model_or_preprocessing_is_refused(nets, tmp_path):
    folder = photos(tmp_path / "photos", 1)
    loaded, other = models.load(f"{nets}:net"), models.load(f"{nets}:segmenter")
    unstride.enhance(other, recipe="flip").save(tmp_path / "r.toml")
    with pytest.raises(SpecError, match="fingerprint"):
        unstride.predict(loaded, folder, tmp_path / "p.jsonl", recipe=tmp_path / "r.toml")
    unstride.enhance(loaded.model, recipe="flip", preprocess=other.preprocess, task="classification").save(
        tmp_path / "s.toml"
    )
    with pytest.raises(ArtefactError, match="preprocessing"):
        unstride.predict(loaded, folder, tmp_path / "p.jsonl", recipe=tmp_path / "s.toml")


def test_networks_come_from_the_recipe_file(nets, tmp_path):
    folder, out = photos(tmp_path / "photos", 3), tmp_path / "p.jsonl"
    two = [models.load(f"{nets}:net"), models.load(f"{nets}:other")]
    better = unstride.enhance(two, recipe=Recipe((Stage(), Stage(network="net2", gate=Gate(below=1), join="replace"))))
    better.save(tmp_path / "best.toml")
    unstride.predict(two, folder, out, recipe=tmp_path / "best.toml", top=4)
    images = [open_image(path) for path in sorted(folder.iterdir())]
    second = two[1].model(torch.stack([two[1].preprocess(image) for image in images])).softmax(1)
    for row, p in zip(read(out), second, strict=True):
        assert row["probabilities"] == pytest.approx(p.sort(descending=True).values.tolist(), abs=2e-5)
        assert row["confidence"] == row["probabilities"][0] and row["passes"] == 2


def test_each_network_gets_its_own_preprocessing_behind_a_gate(nets, tmp_path):
    folder = photos(tmp_path / "photos", 12, size=(60, 70))
    one, two = models.load(f"{nets}:net"), models.load(f"{nets}:other")
    two = replace(two, preprocess=Preprocess(48, 40, (0.4,) * 3, (0.2,) * 3, channels="BGR"))
    confidences = [row["confidence"] for row in predicted_rows(one, folder, tmp_path / "alone.jsonl")]
    gate = Gate("probability", below=float(np.median(confidences)))
    recipe = Recipe((Stage(), Stage(("1.3x",), network="net2", gate=gate)))
    rows = predicted_rows([one, two], folder, tmp_path / "p.jsonl", recipe=recipe, batch_size=4, top=4)
    better = unstride.enhance([one, two], recipe=recipe)
    alone = [better.explain([open_image(path)])[0] for path in sorted(folder.iterdir())]
    for row, p in zip(rows, alone, strict=True):
        assert row["probabilities"] == pytest.approx(
            p.output.softmax(0).sort(descending=True).values.tolist(), abs=2e-5
        )
        assert row["passes"] == len(p.passes) and row["cost"] == pytest.approx(p.cost, abs=1e-5)
    assert {row["passes"] for row in rows} == {1, 2}


def test_what_passes_a_gate_is_packed_into_full_batches(nets, tmp_path):
    """Of 60 images, 8 at a time, about half go on: four batches, not one for each batch before the gate."""
    folder, calls = photos(tmp_path / "photos", 60), []
    two = [models.load(f"{nets}:net"), models.load(f"{nets}:other")]
    confidences = [row["confidence"] for row in predicted_rows(two[0], folder, tmp_path / "alone.jsonl")]
    gate = Gate("probability", below=float(np.median(confidences)))
    recipe = Recipe((Stage(), Stage(network="net2", gate=gate)))
    two[1].model.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    rows = predicted_rows(two, folder, tmp_path / "p.jsonl", recipe=recipe, batch_size=8)
    going = sum(row["passes"] == 2 for row in rows)
    assert 25 <= going <= 35
    largest = [size for size in calls if size > 2]  # without the probes
    assert sum(largest) <= going and largest[: going // 8] == [8] * (going // 8)


def predicted_rows(model, folder, out, **options):
    unstride.predict(model, folder, out, **{"recipe": "plain", **options})
    return read(out)


def test_another_batch_size_gives_the_same_answers(nets, tmp_path):
    folder = photos(tmp_path / "photos", 20)
    recipe = gated(nets, folder, tmp_path / "r.toml")
    one, two = (
        predicted_rows(f"{nets}:net", folder, tmp_path / f"{size}.jsonl", recipe=recipe, batch_size=size)
        for size in (3, 20)
    )
    for a, b in zip(one, two, strict=True):
        assert a["probabilities"] == pytest.approx(b["probabilities"], abs=1e-5) and a["passes"] == b["passes"]


def test_shares_that_drift_from_the_recipe_are_a_warning(nets, tmp_path):
    folder = photos(tmp_path / "photos", 60)
    loaded = models.load(f"{nets}:net")
    confidences = [row["confidence"] for row in predicted_rows(loaded, folder, tmp_path / "a.jsonl")]
    below = float(np.quantile(confidences, 0.5))

    def run(name, share):
        gate = Gate("probability", below=below, share=share)
        recipe = Recipe((Stage(), Stage(("flip",), gate=gate)))
        return unstride.predict(loaded, folder, tmp_path / name, recipe=recipe)

    with pytest.warns(UnstrideWarning, match=r"50\.0% of the images pass the gate .* tuned for 10\.0%"):
        assert run("b.jsonl", 0.1).passed == (0.5,)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnstrideWarning)
        run("c.jsonl", 0.45)


def test_drift_is_found_as_often_as_sampling_alone_would():
    draw = np.random.default_rng(0)
    for tuned_on in (None, 200):
        shares = draw.binomial(200, 0.25, 4000) / 200 if tuned_on else np.full(4000, 0.25)
        false = [drifts(int(draw.binomial(500, 0.25)), 500, share, tuned_on) for share in shares]
        true = [drifts(int(draw.binomial(500, 0.45)), 500, share, tuned_on) for share in shares]
        assert np.mean(false) < 0.005 and np.mean(true) > 0.9


def test_the_same_image_has_one_row(nets, tmp_path):
    folder = photos(tmp_path / "photos", 3)
    with pytest.warns(UnstrideWarning, match=r"4 images are given more than once .*0000\.png"):
        done = unstride.predict(
            f"{nets}:net", [folder, folder / "0000.png", folder], tmp_path / "p.jsonl", recipe="plain"
        )
    assert done.images == 3 and len(read(tmp_path / "p.jsonl")) == 3


@pytest.mark.parametrize(("top", "columns"), [(2, 2), (100, 4), (10**11, 4)])
def test_top_is_bounded_by_the_classes(nets, tmp_path, top, columns):
    folder = photos(tmp_path / "photos", 1)
    unstride.predict(f"{nets}:net", folder, tmp_path / "p.csv", recipe="plain", top=top)
    titles = (tmp_path / "p.csv").read_text().splitlines()[0].split(",")
    assert [t for t in titles if t.startswith("class_")] == [f"class_{k + 1}" for k in range(columns)]


def test_options_that_are_no_numbers_are_refused(nets, tmp_path):
    folder = photos(tmp_path / "photos", 1)
    for name, value in (("top", "a"), ("top", 0), ("batch_size", 0), ("batch_size", 2.5)):
        with pytest.raises(OptionError, match=f"{name}: got"):
            unstride.predict(f"{nets}:net", folder, tmp_path / "p.csv", **{name: value})
    with pytest.raises(OptionError, match="model: got"):
        unstride.predict(3, folder, tmp_path / "p.csv")


def command(nets, inputs, out, *options):
    return ["-m", "unstride", "predict", f"{nets}:net", *map(str, inputs), "--out", str(out), "--json", *options]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}


def test_two_processes_give_the_rows_of_one(nets, tmp_path):
    folder = photos(tmp_path / "photos", 300)
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        tar.add(folder, "s")
    inputs = [folder, tmp_path / "s.tar"]
    torch.set_num_threads(1)
    recipe = str(gated(nets, folder, tmp_path / "r.toml"))
    unstride.predict(f"{nets}:net", inputs, tmp_path / "one.jsonl", recipe=recipe)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, *command(nets, inputs, tmp_path / "two.jsonl", "--recipe", recipe)],
        env=environment(), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["images"] == 600
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


# One process pays for imports; each child that it forks is a run of its own, and is killed for real.
KILLED = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import unstride
from unstride import models
from unstride.predicting import run, summary

summary.PART = run.PART = 32
spec, folder, whole, killed, seed, recipe = sys.argv[1:]
rng, loaded = random.Random(seed), models.load(spec)

def start(out):
    pid = os.fork()
    if not pid:
        try:
            unstride.predict(loaded, folder, out, recipe=recipe, batch_size=8)
        except BaseException as error:
            import traceback; traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

def ended(pid):
    done, status = os.waitpid(pid, os.WNOHANG)
    if done and os.waitstatus_to_exitcode(status):
        sys.exit("a run failed")
    return done

def finished_parts():
    return len(list(run.Path(killed + ".parts").rglob("*.safetensors")))

pid = start(whole)
while not ended(pid):
    time.sleep(0.01)
kills, done = 0, False
while not done:
    pid, before = start(killed), finished_parts()
    patience = rng.choice((1, 2, 3)) if kills < 4 else 10**9
    while not (done := ended(pid)) and finished_parts() < before + patience:
        time.sleep(0.001)
    if not done:
        time.sleep(rng.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        kills += os.WIFSIGNALED(status)
        done = not os.WIFSIGNALED(status)
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_run_killed_again_and_again_ends_with_the_rows_of_one_that_was_not(nets, tmp_path):
    folder, seed = photos(tmp_path / "photos", 420), str(random.SystemRandom().randrange(10**9))
    arguments = [f"{nets}:net", str(folder), str(tmp_path / "whole.jsonl"), str(tmp_path / "killed.jsonl"), seed]
    arguments.append(str(gated(nets, folder, tmp_path / "r.toml")))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        env=environment(), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (seed, done.stderr)
    assert int(done.stdout) >= 3, seed
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes(), seed
    assert len(read(tmp_path / "killed.jsonl")) == 420
    left = sorted(path.name for path in tmp_path.glob("*killed*"))
    assert left == ["killed.jsonl", "killed.jsonl.run.json"]


MEASURED = """
import json, resource, sys
import torch
torch.set_num_threads(1)
import unstride
done = unstride.predict(sys.argv[1], sys.argv[2], sys.argv[3], recipe="default")
print(json.dumps([done.images, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


@pytest.mark.slow
def test_a_hundred_thousand_images_take_no_more_memory_than_a_few_thousand(nets, tmp_path):
    data = png(photo(size=(16, 16)))
    peaks = {}
    for count in (4_000, 100_000):
        path = tmp_path / f"{count}.tar"
        with tarfile.open(path, "w") as tar:
            info = tarfile.TarInfo()
            for k in range(count):
                info.name, info.size = f"{k:06d}.png", len(data)
                tar.addfile(info, io.BytesIO(data))
        arguments = [f"{nets}:net", str(path), str(tmp_path / f"{count}.jsonl")]
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *arguments],
            env=environment(), capture_output=True, text=True, timeout=3000, check=True,
        )  # fmt: skip
        images, peaks[count] = json.loads(done.stdout)
        assert images == count
    assert peaks[100_000] < peaks[4_000] + 64 * 1024, peaks  # in KiB


OVERLAP = """
import json, os, sys, time, warnings
import torch
import unstride
from unstride.errors import UnstrideWarning
from unstride.pipeline import open_pipeline
from unstride.predicting.inputs import ImageInputs
from unstride.predicting.run import open_runner

warnings.simplefilter("ignore", UnstrideWarning)
cores = os.cpu_count()
torch.set_num_threads(cores)

def idle():
    # seconds in which cores had nothing to do, of all cores
    with open("/proc/stat") as file:
        ticks = file.readline().split()
    return (int(ticks[4]) + int(ticks[5])) / os.sysconf("SC_CLK_TCK")

def alone(folder):
    # CPU seconds of decoding and of computing these images, one after the other
    entries, start = list(ImageInputs(folder)), time.process_time()
    images = [runner.preparation(k, entry) for k, entry in enumerate(entries)]
    decoding, start = time.process_time() - start, time.process_time()
    runner.run(0, images)
    return decoding, time.process_time() - start

pipeline = open_pipeline("timm:mobilenetv2_100", recipe="plain", weights="random")
runner = open_runner(pipeline)
folder, part, out, times = sys.argv[1:]
alone(part)  # warms up
before = alone(part)
spent, waited, start = time.process_time(), idle(), time.perf_counter()
done = unstride.predict(pipeline, folder, out)
wall = time.perf_counter() - start
loop = time.process_time() - spent + idle() - waited
after = alone(part)
parts = int(times) * (sum(before) + sum(after)) / 2
shares = {"decoding": sum(p[0] for p in (before, after)) / sum(sum(p) for p in (before, after))}
print(json.dumps({"images": done.images, "ratio": loop / parts, "loop": loop, "parts": parts, "wall": wall, **shares}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="reads the cores' idle time from /proc/stat")
def test_decoding_overlaps_computing(tmp_path):
    """5,000 JPEGs of 500 x 375 px: the loop's CPU time, and that of cores that idled, over decoding and computing."""
    folder, part, times = tmp_path / "photos", tmp_path / "part", 20
    folder.mkdir()
    part.mkdir()
    for k in range(250):
        photo(k, (375, 500)).save(part / f"{k:03d}.jpg", quality=90)
        for copy in range(times):
            os.link(part / f"{k:03d}.jpg", folder / f"{copy:02d}-{k:03d}.jpg")
    clean = {k: v for k, v in environment().items() if k != "OMP_NUM_THREADS"}
    clean["OMP_WAIT_POLICY"] = "passive"  # threads that wait for each other would count as computing
    done = subprocess.run(
        [sys.executable, "-c", OVERLAP, str(folder), str(part), str(tmp_path / "p.jsonl"), str(times)],
        env=clean, capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    print(measured)
    assert measured["images"] == 5_000
    assert measured["ratio"] <= 1.15, measured
