"""The rows are what a few lines by hand give, whatever the batches, damages and restarts."""

import json
import math
import os
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import small_nets
import tiny
import torch
from full_disk import runs_until_there_is_space
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import unstride
from unstride import Recipe, Stage, data, models
from unstride.data.items import of_arrays
from unstride.errors import ArtefactError, DataError, LeftOut, OptionError, UnstrideWarning
from unstride.evaluation import measuring
from unstride.evaluation.findings import key_sample, share_known
from unstride.evaluation.intervals import PairedCounts, paired_gain
from unstride.evaluation.measuring import first_image
from unstride.evaluation.rows import decision_of, read_rows, table
from unstride.pipeline import open_pipeline
from unstride.recipe.files import StoredNetwork, write
from unstride.storage.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def dataset(tmp_path):
    return data.load(tiny.npz(tmp_path, 21), tiny.PREPROCESS)


def evaluate(*arguments, **options):
    return unstride.evaluate(*arguments, **{"progress": False, **options})


def tensors_of(dataset):
    pairs = [dataset.tensors(i) for i in range(len(dataset))]
    return torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])


def without_times(rows):
    stored = [row.to_json() for row in rows]
    for row in stored:
        row["seconds"] = row["provenance"]["command"] = row["provenance"]["threads"] = None
    return stored


@pytest.fixture
def batches(monkeypatch):
    """The sizes of the batches that ran, for all variants."""
    done, computed = [], measuring._Run.computed
    monkeypatch.setattr(
        measuring._Run,
        "computed",
        lambda self, v, images, *more: done.append(len(images)) or computed(self, v, images, *more),
    )
    return done


@contextmanager
def warned(kind, match):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if issubclass(w.category, kind)]
    assert any(match in message for message in messages), messages


# ---------------------------------------------------------------- rows
def test_rows_are_what_a_few_lines_by_hand_give(dataset):
    model = tiny.net()
    rows = evaluate(model, dataset, recipe="flip", batch_size=5)
    x, y = tensors_of(dataset)
    with torch.no_grad():
        base, flipped = model(x), (model(x) + model(x.flip(-1))) / 2
    was, now = ((logits.argmax(1) == y).numpy() for logits in (base, flipped))
    assert [row.name for row in rows] == ["Net", "flip"]
    for row, logits, hits in zip(rows, (base, flipped), (was, now), strict=True):
        assert row.value == row.metrics["accuracy"] == pytest.approx(hits.mean())
        assert row.metrics["NLL"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)
        assert row.images == 21
    assert rows[0].gain is None and rows[1].baseline == "Net"
    assert rows[1].gain == paired_gain(PairedCounts.from_correct(was, now))
    assert (rows[1].corrected, rows[1].broken) == ((now & ~was).sum(), (was & ~now).sum())
    assert [row.cost.estimate for row in rows] == [1.0, 2.0]
    assert rows[1].macs == 2 * rows[0].macs > 0
    assert rows[1].recipe["stage"][0]["views"] == ["plain", "flip"]
    assert {"command", "versions", "threads", "cpu"} <= set(rows[0].provenance)
    assert "flip" in table(rows) and str(decision_of(rows[1], rows))
    json.dumps([row.to_json() for row in rows], allow_nan=False)


def test_a_gated_recipe_costs_what_its_images_cost(dataset):
    model = tiny.net()
    gated = Recipe((Stage(), Stage(("flip",), gate=unstride.Gate(below=0.05))))
    row = evaluate(model, dataset, recipe=gated)[1]
    wanted = unstride.enhance(model, recipe=gated).run(tensors_of(dataset)[0]).costs
    assert set(wanted) == {1.0, 2.0}
    assert row.cost.estimate == pytest.approx(np.mean(wanted))
    assert 1 <= row.cost.low < row.cost.estimate < row.cost.high <= 2


def test_images_that_pass_a_gate_fill_whole_batches_of_the_next_network(dataset, tmp_path):
    """Of 21 images in batches of 3, 14 go on. Only those of the first batch, which warms up, go on by themselves."""
    sizes = []

    class Large(tiny.Net):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    nets = {"base": tiny.net(), "other": Large().eval()}
    top = nets["base"](tensors_of(dataset)[0]).softmax(1).topk(2, 1).values
    margins = top[:, 0] - top[:, 1]
    below = float(margins.sort().values[13:15].mean())
    cascade = Recipe((Stage(), Stage(network="other", gate=unstride.Gate(below=below), join="replace")))
    row = evaluate(nets, dataset, recipe=cascade, batch_size=3)[2]
    assert row.cost.estimate == pytest.approx(1 + 14 / 21)
    rest = 14 - int((margins[:3] < below).sum())
    assert sizes[-math.ceil(rest / 3) :] == [3] * (rest // 3) + [rest % 3] * (rest % 3 > 0)


def test_several_recipes_networks_and_baselines(dataset):
    nets = {"base": tiny.net(), "other": tiny.build()[0]}
    nets["other"].head.bias.data += 0.3
    cascade = Recipe((Stage(), Stage(network="other", gate=unstride.Gate(below=0.5), join="replace")), name="cascade")
    rows = evaluate(nets, dataset, recipe=[cascade, "flip"], against="flip")
    assert [row.name for row in rows] == ["Net", "Net (2)", "flip", "cascade"]
    assert [row.gain is None for row in rows] == [False, False, True, False]
    x, y = tensors_of(dataset)
    with torch.no_grad():
        assert rows[1].value == pytest.approx(float((nets["other"](x).argmax(1) == y).float().mean()))
    assert rows[1].cost.estimate == 1.0
    by_name = evaluate(nets, dataset, recipe=cascade, against="other")
    assert [row.gain is None for row in by_name] == [False, True, False]
    twice = evaluate(nets, dataset, recipe=["flip", cascade, Recipe()], against=Recipe((Stage(("plain", "flip")),)))
    assert [row.name for row in twice] == ["Net", "Net (2)", "recipe", "cascade"]
    assert [row.gain is None for row in twice] == [False, False, True, False]


def test_budgets_are_rows_of_one_search(dataset, batches):
    model = tiny.net()
    rows = evaluate(model, dataset, recipe="paper", budgets=[1, 3, 6], batch_size=32)
    assert batches == [21, 21]  # the base model, and one search
    assert [row.name for row in rows] == ["Net", "paper, 1 state", "paper, 3 states", "paper, 6 states"]
    x, y = tensors_of(dataset)
    for row, budget in zip(rows[1:], (1, 3, 6), strict=True):
        result = unstride.enhance(model, recipe="paper", budget=budget).run(x)
        nll = float(torch.nn.functional.cross_entropy(result.output, y))
        assert row.metrics["NLL"] == pytest.approx(nll, rel=1e-4)
        assert row.cost.estimate == pytest.approx(np.mean(result.costs))
    assert rows[1].gain.estimate == 0
    with pytest.raises(OptionError, match="no single Search"):
        evaluate(model, dataset, recipe="flip", budgets=[1, 2])


def test_another_metric_decides(dataset):
    rows = evaluate(tiny.net(), dataset, recipe="flip", metric="NLL", margin=0.1)
    assert rows[1].metric == "NLL"
    assert rows[1].gain.estimate == pytest.approx(rows[0].metrics["NLL"] - rows[1].metrics["NLL"])
    assert "NLL (95 % CI" in str(decision_of(rows[1], rows))


def test_batches_of_ones_own(dataset):
    x, y = tensors_of(dataset)
    wanted = evaluate(tiny.net(), dataset, recipe="flip")
    for given in (DataLoader(TensorDataset(x, y), batch_size=4), [{"pixel_values": x, "labels": y}]):
        rows = evaluate(tiny.net(), given, recipe="flip")
        assert [row.value for row in rows] == [row.value for row in wanted]
    with pytest.raises(OptionError, match="limit and split"):
        evaluate(tiny.net(), [(x, y)], limit=3)


def test_the_task_comes_from_the_labels(tmp_path):
    folder = tmp_path / "d"
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for k in range(4):
        size = (16, 16 + 8 * (k % 2))
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / "images" / f"{k}.png")
        Image.fromarray(rng.integers(0, 6, size, dtype=np.uint8)).save(folder / "masks" / f"{k}.png")
    rows = evaluate(f"{tiny.__file__}:build_maps", f"masks:{folder}", recipe="flip")
    assert rows[0].metric == "mIoU" and rows[0].images == 4
    assert rows[1].gain.low <= rows[1].gain.estimate <= rows[1].gain.high
    with pytest.raises(OptionError, match="is labelled for segmentation"):
        evaluate(f"{tiny.__file__}:build_maps", f"masks:{folder}", task="classification")


def test_an_enhanced_model_is_measured_as_it_is(dataset):
    better = unstride.enhance(tiny.net(), recipe="flip")
    rows = evaluate(better, dataset)
    assert [row.name for row in rows] == ["Net", "flip"]


# ---------------------------------------------------------------- groups
def test_groups_widen_the_interval(tmp_path):
    x, y = tiny.images(24)
    lines = ["path,label,patient"]
    for k in range(24):
        Image.fromarray(x[k % 6]).save(tmp_path / f"p{k % 6}_{k}.png")
        lines.append(f"p{k % 6}_{k}.png,{y[k % 6]},p{k % 6}")
    (tmp_path / "d.csv").write_text("\n".join(lines))
    name = f"csv:{tmp_path / 'd.csv'}"
    model = f"{tiny.__file__}:build"
    with warned(UnstrideWarning, "the file names suggest 6 groups"):
        alone = evaluate(model, name, recipe="flip", metric="NLL")
    grouped = evaluate(model, name, recipe="flip", metric="NLL", group="patient")
    assert grouped[1].gain.estimate == alone[1].gain.estimate
    assert grouped[1].gain.width > 1.5 * alone[1].gain.width
    with pytest.raises((OptionError, DataError), match="patient"):
        evaluate(model, name, group="hospital")
    with pytest.raises(OptionError, match="expected one for each"):
        evaluate(model, name, group=["a", "b"])


# ---------------------------------------------------------------- what is kept
def test_what_is_done_is_not_done_again(tmp_path, dataset, batches, capfd):
    out = tmp_path / "run"
    first = evaluate(tiny.net(), dataset, recipe="flip", out=out, batch_size=8)
    assert sum(batches) == 2 * 21
    batches.clear()
    capfd.readouterr()
    again = evaluate(tiny.net(), dataset, recipe="flip", out=out, batch_size=8)
    assert batches == [] and again == first
    assert "21 of 21 images are taken from an earlier run" in capfd.readouterr().err
    lost = sorted(out.glob("cache/evaluation-*/*.safetensors"))[1]
    lost.write_bytes(lost.read_bytes()[:-5])
    leftover = lost.parent / ".000001.safetensors.xyz.tmp"
    leftover.write_bytes(b"of a killed process")
    os.utime(leftover, (0, 0))
    again = evaluate(tiny.net(), dataset, recipe="flip", out=out, batch_size=32)
    assert sum(batches) in (8, 5)
    for one, other in zip(without_times(again), without_times(first), strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], abs=2e-6)
    assert not leftover.exists()
    assert read_rows(out / "rows.jsonl") == again  # the same run is there once
    evaluate(tiny.net(), dataset, recipe="default", out=out)
    assert len(read_rows(out / "rows.jsonl")) == 4


def test_more_images_and_more_recipes_reuse_what_was_computed(tmp_path, dataset, batches):
    evaluate(tiny.net(), dataset, recipe="flip", out=tmp_path, limit=10)
    evaluate(tiny.net(), dataset, recipe="flip", out=tmp_path)
    assert sum(batches) == 2 * 21
    batches.clear()
    rows = evaluate(tiny.net(), dataset, recipe=["flip", "default"], out=tmp_path)
    assert sum(batches) == 21
    assert len(rows) == 3


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


def test_a_model_whose_code_changed_is_measured_again(tmp_path, dataset, batches):
    file, values = tmp_path / "f.py", []
    for source in (MODEL, MODEL.replace("relu()", "tanh()"), MODEL):
        file.write_text(source)
        rows = evaluate(f"{file}:make", dataset.name, recipe="plain", out=tmp_path / "out")
        values.append(rows[0].metrics["NLL"])
    assert values[0] == values[2] != values[1]
    assert sum(batches) == 2 * 21


def image_folder(root, count=10):
    x, y = tiny.images(count)
    for c in range(6):
        (root / str(c)).mkdir(parents=True)
    for i in range(count):
        Image.fromarray(x[i]).save(root / str(y[i]) / f"{i:02d}.png")
    return sorted(root.glob("*/*.png"))


def test_images_that_changed_under_their_names_are_measured_again(tmp_path, batches, capfd):
    files = image_folder(tmp_path / "data")
    dataset = data.load(f"folder:{tmp_path / 'data'}", tiny.PREPROCESS)
    first = evaluate(tiny.net(), dataset, recipe="plain", out=tmp_path / "out")
    assert "taken from an earlier run" not in capfd.readouterr().err
    files[3].write_bytes(files[4].read_bytes())
    second = evaluate(tiny.net(), dataset, recipe="plain", out=tmp_path / "out")
    assert sum(batches) == 11
    assert "9 of 10 images are taken from an earlier run" in capfd.readouterr().err
    assert second[0].metrics["NLL"] != first[0].metrics["NLL"]


def test_a_full_disk_is_an_error_and_the_run_continues_when_there_is_space(tmp_path, dataset, monkeypatch):
    def run(name="out"):
        return evaluate(tiny.net(), dataset, recipe="flip", out=tmp_path / name, batch_size=8)

    rows = runs_until_there_is_space(run, monkeypatch, step=3)
    assert without_times(rows) == without_times(run("whole"))


def test_a_rows_file_that_cannot_take_rows_is_found_before_the_work(tmp_path, dataset, batches):
    (tmp_path / "rows.jsonl").write_text("not a row\n")
    with pytest.raises(ArtefactError, match="no row"):
        evaluate(tiny.net(), dataset, out=tmp_path)
    assert batches == []


# ---------------------------------------------------------------- what goes wrong
def test_damaged_images_are_counted_and_named(tmp_path):
    files = image_folder(tmp_path / "images")
    dataset = data.load(f"folder:{tmp_path / 'images'}", tiny.PREPROCESS)
    x, y = tensors_of(dataset)
    keep = [i for i in range(10) if i not in (0, 4)]
    for i in (0, 4):  # the first one, too: setting up must not stumble over it
        files[i].write_bytes(files[i].read_bytes()[:60])
    with warned(LeftOut, f"2 images could not be measured: {files[0].parent.name}/{files[0].name}"):
        rows = evaluate(tiny.net(), dataset, recipe="plain")
    assert (rows[0].images, rows[0].provenance["unreadable"]) == (8, 2)
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(tiny.net()(x[keep]), y[keep])
    assert rows[0].metrics["NLL"] == pytest.approx(float(wanted), rel=1e-5)
    for file in files:
        file.write_bytes(b"nothing")
    with pytest.raises(DataError, match="none of 10 images"):
        evaluate(tiny.net(), dataset, recipe="plain")


class Choking(tiny.Net):
    """Infinite for images whose first pixel is black, finite for all others."""

    def forward(self, x):
        return super().forward(x) / (x[:, :1, 0, 0] + 2.0)


def test_an_image_that_the_model_cannot_take_is_an_error_of_its_own():
    x, y = tiny.images(6)
    x[:, 0, 0] = 200
    x[3, 0, 0] = 0
    dataset = data.Dataset("mine", "classification", tiny.PREPROCESS, of_arrays(x, y.tolist()), range(6))
    with warned(LeftOut, "1 image could not be measured: 3: output: got values that are not finite"):
        rows = evaluate(Choking().eval(), dataset, recipe="plain")
    assert rows[0].images == 5


def test_a_model_that_mixes_the_images_of_a_batch_is_named(dataset):
    class Mixing(tiny.Net):
        def forward(self, x):
            y = super().forward(x)
            return y - 0.1 * y.mean(0)

    with warned(UnstrideWarning, "Mixing: the answer for an image depends on the images beside it"):
        evaluate(Mixing().eval(), dataset, recipe="plain")


def test_a_recipe_that_was_tuned_on_these_images_is_warned_about(tmp_path, dataset):
    model = tiny.net()
    stored = {"base": StoredNetwork(None, fingerprint(model))}
    keys = dataset.keys()
    assert share_known(key_sample(keys[:10]), keys) == 1.0 and share_known(key_sample(keys[:10]), keys[10:]) == 0.0
    write(tmp_path / "t.toml", Recipe((Stage(("plain", "flip")),)), stored, {"image_keys": key_sample(keys[:10])})
    with warned(UnstrideWarning, "tuned on images of this evaluation (about 100%"):
        evaluate(model, dataset, recipe=tmp_path / "t.toml")
    others = data.Dataset("x", "classification", tiny.PREPROCESS, dataset.listing, range(10, 21))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*tuned on")
        evaluate(model, others, recipe=tmp_path / "t.toml")


def test_accuracy_of_guessing_is_warned_about(dataset):
    torch.manual_seed(1)
    y = torch.randint(6, (21,))
    with warned(UnstrideWarning, "no better than guessing"):
        evaluate(f"{tiny.__file__}:build", [(torch.zeros(21, 3, 16, 16), y)], recipe="plain", group=range(21))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"limit": 0}, "limit"),
        ({"out": 3}, "out: got 3"),
        ({"report": "page.txt"}, "html"),
        ({"metric": "mIoU"}, "metric: got 'mIoU'"),
        ({"recipe": "flop"}, "flop"),
        ({"budgets": []}, "budgets"),
        ({"bugdet": 4}, "bugdet"),
        ({"against": "nothing"}, "nothing"),
        ({"split": "test"}, "split"),
        ({"task": "features"}, "features"),
    ],
)
def test_wrong_options(dataset, options, match):
    with pytest.raises(unstride.errors.UnstrideError, match=match):
        evaluate(tiny.net(), dataset, **options)


def test_a_module_and_the_name_of_data_is_an_error(tmp_path):
    with pytest.raises(OptionError, match="preprocessing is not known"):
        evaluate(tiny.net(), tiny.npz(tmp_path, 4))


def test_the_first_image_that_can_be_read(dataset):
    assert first_image(dataset).shape == (3, 16, 16)
    assert open_pipeline(models.load("sample")).task == "classification"


# ---------------------------------------------------------------- other tasks
def table_of_images(folder, header, rows):
    lines = [header]
    for k, cells in enumerate(rows):
        small_nets.photo(k, (32, 32)).save(folder / f"{k}.png")
        lines.append(",".join([f"{k}.png", *map(str, cells)]))
    (folder / "d.csv").write_text("\n".join(lines))
    return folder / "d.csv"


@pytest.mark.parametrize(("kind", "metric"), [("labels", "mAP"), ("values", "RMSE")])
def test_several_labels_and_numbers(tmp_path, kind, metric):
    spec = f"{small_nets.write_nets(tmp_path)}:net"
    header = "path,red,green,blue,<b>[odd]</b> name"
    path = table_of_images(tmp_path, header, [(k % 2, 1 - k % 2, int(k < 3), 1) for k in range(8)])
    rows = evaluate(spec, f"{kind}:{path}", recipe="flip")
    assert rows[0].metric == metric and rows[1].gain.low <= rows[1].gain.estimate <= rows[1].gain.high
    x = torch.stack([models.load(spec).preprocess(small_nets.photo(k, (32, 32))) for k in range(8)])
    with torch.no_grad():
        y = models.load(spec).model(x)
    target = torch.tensor([(k % 2, 1 - k % 2, int(k < 3), 1) for k in range(8)], dtype=torch.float32)
    if metric == "RMSE":
        assert rows[0].value == pytest.approx(float((y - target).square().mean().sqrt()), rel=1e-5)
    else:
        assert rows[0].metrics["exact match"] == float(((y > 0) == (target > 0.5)).all(1).float().mean())


def test_depth_and_embeddings(tmp_path):
    nets = small_nets.write_nets(tmp_path)
    for name in ("images", "depth", *(f"f/{c}" for c in "ab")):
        (tmp_path / name).mkdir(parents=True)
    for k in range(6):
        small_nets.photo(k, (32, 32)).save(tmp_path / "images" / f"{k}.png")
        small_nets.photo(k, (32, 32)).save(tmp_path / "f" / "ab"[k % 2] / f"{k}.png")
        np.save(tmp_path / "depth" / f"{k}.npy", np.full((32, 32), 1.0 + k, np.float32))
    depth = evaluate(f"{nets}:depth", f"depth:{tmp_path}", recipe="flip")
    assert depth[0].metric == "RMSE" and set(depth[0].metrics) == {"RMSE", "AbsRel", "within 1.25"}
    vectors = evaluate(f"{nets}:tower", f"folder:{tmp_path / 'f'}", recipe="flip")
    assert vectors[0].metric == "recall@1" and "k-NN accuracy" in vectors[0].metrics
    pairs = table_of_images(tmp_path, "query,match", [(f"{(k + 1) % 6}.png",) for k in range(6)])
    rows = evaluate(f"{nets}:tower", f"pairs:{pairs}", recipe="flip")
    assert set(rows[0].metrics) == {"recall@1", "recall@5"} and rows[0].images == 6


class Means(torch.nn.Module):
    """Nothing in it is counted as multiply-accumulates."""

    def forward(self, x):
        return x.mean((2, 3))


def test_cost_is_time_where_macs_cannot_be_counted():
    given = [(torch.rand(8, 3, 64, 64), torch.arange(8) % 3)]
    rows = evaluate(Means(), given, recipe="flip", batch_size=8)
    assert rows[1].cost_unit == "times the time of the base model" and rows[1].macs == 0
    assert rows[1].cost.estimate == pytest.approx(rows[1].seconds / rows[0].seconds)
    rows = evaluate(
        {"base": tiny.net(), "means": Means()}, [(torch.rand(8, 3, 16, 16), torch.arange(8) % 3)], recipe="plain"
    )
    assert [row.cost_unit.split()[0] for row in rows] == ["forward", "times"] and rows[1].cost.estimate > 0


def test_a_recipe_that_the_model_cannot_run_ends_the_run(dataset, batches):
    class Branching(tiny.Net):
        def forward(self, x):
            return super().forward(x) * (2 if float(x.sum()) > 0 else 1)

    with pytest.raises(unstride.errors.CaptureError):
        evaluate(Branching().eval(), dataset, recipe="paper", batch_size=4)
    assert len(batches) <= 4  # not image by image
