"""One exhibit of each kind, end to end on tiny random networks: what the numbers are made of, not their size."""

import csv
import io
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from unstride.data import Dataset
from unstride.data.items import Item, Listing, of_arrays
from unstride.errors import DataError, OptionError, SpecError
from unstride.models import LoadedModel
from unstride.paper import EXHIBITS, Nowhere, Root, Sample, get, render, reproduce
from unstride.paper.exhibits import SEGMENTATION
from unstride.paper.numbers import FOUR
from unstride.views.images import Preprocess

PRE = Preprocess(None, None, (0.5,), (0.25,), channels="L")


class Net(nn.Module):
    def __init__(self, segments):
        super().__init__()
        wide = (1, 4, 6, 8, 8)
        self.convs = nn.Sequential(*(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(wide)))
        self.head = nn.Conv2d(8, 3, 1) if segments else nn.Linear(8, 3)
        self.segments = segments
        for p in self.parameters():  # as they are drawn, they give every pixel the same class
            p.data.mul_(3)

    def forward(self, x):
        h = torch.tanh(self.convs(x))
        return F.interpolate(self.head(h), x.shape[2:], mode="bilinear") if self.segments else self.head(h.mean((2, 3)))


def images(count, segments):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (count, 32, 32), dtype=np.uint8)
    if not segments:
        return of_arrays(x, (np.arange(count) % 3).tolist())
    y = torch.from_numpy(rng.integers(0, 3, (count, 32, 32)))
    plain = of_arrays(x, [0] * count)
    return Listing(range(count), lambda i: Item(str(i), plain.item(i).image, lambda: y[i]))


@dataclass(frozen=True)
class Tiny:
    """Random networks for every model, noise for every data set."""

    note: str = "tiny"
    lr: float | None = 1e-3

    def check(self, needs):
        return

    def key(self, model, data):
        return data if data in SEGMENTATION else "tiny"

    def load(self, model, data):
        torch.manual_seed(0)
        segments = data in SEGMENTATION
        return LoadedModel("tiny", Net(segments).eval(), PRE, "segmentation" if segments else "classification")

    def _data(self, data, count, chosen):
        segments = data in SEGMENTATION
        return Dataset("tiny", "segmentation" if segments else "classification", PRE, images(count, segments), chosen)

    def test(self, loaded, data):
        return self._data(data, 48, range(6))

    def fitting(self, loaded, data):
        return self._data(data, 48, range(6, 30)), self._data(data, 48, range(30, 42))


def part(name, keep):
    exhibit = get(name)
    return replace(exhibit, cells=tuple(cell for cell in exhibit.cells if keep(cell)))


def numbers(result):
    return {(v.row, v.column): v for v in result.values}


def test_a_table_with_learned_tta_fits_evaluates_and_resumes(tmp_path):
    exhibit = part(
        "imagenet-expanded", lambda c: c.row[2] == "ResNet18" and c.column == "B = 30" and c.row[0] != "ClassTTA"
    )
    first = reproduce(exhibit, Tiny(), tmp_path, epochs=1)
    assert {v.row[:2] for v in first.values} == {(m, o) for m in ("GPS", "AugTTA") for o in ("no", "yes")}
    assert all(0 <= v.ours <= 100 and v.low <= v.high and v.images == 6 for v in first.values)
    assert numbers(first)[("GPS", "no", "ResNet18"), "B = 30"].paper == 70.51
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    again = reproduce(exhibit, Tiny(), tmp_path, epochs=1)
    assert again.values == first.values
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == before  # nothing was fitted or evaluated again


WORK = (("1", "-", "no"), ("30", "GPS", "no"), ("30", "GPS", "yes"), ("30", "ClassTTA", "yes"))


def test_work_of_a_row_is_views_times_states(tmp_path):
    exhibit = part("computation-resnet18", lambda c: c.row in WORK)
    found = numbers(reproduce(exhibit, Tiny(), tmp_path, epochs=1))
    ratio = {row: v.ours for (row, column), v in found.items() if column == "MACs, x plain"}
    assert ratio["1", "-", "no"] == 1
    assert ratio["30", "GPS", "no"] == pytest.approx(3)  # GPS keeps 3 views
    inside = ratio["30", "GPS", "yes"] / 3  # 3 states in each
    assert 2 < inside < 3
    used = ratio["30", "ClassTTA", "yes"] / inside  # a view whose weight became 0 is not run
    assert used == pytest.approx(round(used))
    assert 1 < used <= 10
    assert all(v.ours > 0 for (_, column), v in found.items() if column == "time, x plain")


def test_a_table_without_tta_shares_one_pass(tmp_path):
    result = reproduce("antialiased", Tiny(), tmp_path)
    assert len(result.values) == 15
    by_model = {v.row: [] for v in result.values}
    for v in result.values:
        by_model[v.row].append(v.ours)
    assert len(set(map(tuple, by_model.values()))) == 1  # the same network stands for all of them
    assert len((tmp_path / "runs" / "rows.jsonl").read_text().splitlines()) == 3  # budgets 1, 4 and 10, once


def test_the_ablations_change_what_they_say(tmp_path):
    search = reproduce("ablation-search", Tiny(), tmp_path, epochs=1)
    assert [v.row[0] for v in search.values if v.paper] == ["1 .. L", "1 .. L-1", "2 .. L", "2 .. L-1"]
    from unstride.evaluation import read_rows

    asked = {tuple(row.options["layers"]) for row in read_rows(tmp_path / "runs" / "rows.jsonl")}
    assert asked == {(1, 2, 3, 4), (1, 2, 3), (2, 3, 4), (2, 3)}
    reproduce(part("ablation-criterion", lambda c: c.row[0] in ("random", "displacement")), Tiny(), tmp_path, epochs=1)
    reproduce("ablation-aggregation", Tiny(), tmp_path, epochs=1)
    rows = [row.options for row in read_rows(tmp_path / "runs" / "rows.jsonl")]
    assert {o["criterion"] for o in rows} == {"learned", "random", "displacement", "entropy"}
    assert {o["aggregate"] for o in rows} == {"attention", "mean", "entropy"}
    assert {o["align"] for o in rows} == {True, False}


def test_segmentation_with_and_without_flip(tmp_path):
    exhibit = part("segmentation", lambda c: c.row[2] == "ResNet50-FCN" and c.row[0] == "cityscapes")
    result = reproduce(exhibit, Tiny(), tmp_path)
    found = numbers(result)
    assert found[("cityscapes", "no", "ResNet50-FCN"), "B = 4"].paper == 72.50
    assert found[("cityscapes", "yes", "ResNet50-FCN"), "B = 10"].paper == 72.97
    flipped, straight = (found[("cityscapes", o, "ResNet50-FCN"), "B = 1"].ours for o in ("yes", "no"))
    assert flipped != straight  # a random network is not symmetric


def test_a_figure_is_lines_and_has_no_numbers_of_the_paper(tmp_path):
    exhibit = part("budget", lambda c: c.row[0] in FOUR[:1] and int(c.column) <= 4)
    result = reproduce(exhibit, Tiny(), tmp_path, epochs=1)
    assert [v.column for v in result.values] == ["1", "2", "3", "4"]
    assert all(v.paper is None for v in result.values)
    assert "(paper)" not in render.markdown(result)
    written = {p.name for p in render.write(result, tmp_path)}
    assert written == {"budget.md", "budget.csv", "budget.tex", "budget.png"}
    assert (tmp_path / "budget.png").read_bytes().startswith(b"\x89PNG")


def test_segmentation_curves_have_three_measures_and_twice_the_budget_with_flip(tmp_path):
    exhibit = part("ade20k-more", lambda c: c.row[0].startswith("UNet") and c.run.budget <= 2)
    result = reproduce(exhibit, Tiny(), tmp_path)
    assert {v.row[1] for v in result.values} == {"mIoU %", "aAcc %", "mAcc %"}
    assert {v.column for v in result.values if "flip" in v.row[0]} == {"2", "4"}
    render.image(result)


def test_every_state_alone(tmp_path):
    result = reproduce("criterion", Tiny(), tmp_path, epochs=1)
    found = numbers(result)
    states = {row[1] for row, _ in found}
    assert len(states) == 16  # layers 2 and 3 of four, 4 selections each
    plain = found[("entropy", "(0 0 0 0)"), "top-1 %"].ours
    model, data = Tiny().load("", "imagenet").model, Tiny().test(None, "imagenet")
    pairs = [data.tensors(i) for i in range(len(data))]
    right = [int(model(x[None]).argmax()) == y for x, y in pairs]
    assert plain == pytest.approx(100 * sum(right) / len(right))
    assert {c for _, c in found} == {"criterion", "top-1 %"}
    assert found[("learned", "(0 0 0 0)"), "criterion"].ours != found[("entropy", "(0 0 0 0)"), "criterion"].ours
    render.image(result)


def test_formats_hold_the_same_numbers(tmp_path):
    result = reproduce("policy-expanded")
    rows = list(csv.DictReader(io.StringIO(render.csv_text(result))))
    counts = {r["augmentation"]: (float(r["unstride"]), float(r["paper"])) for r in rows if r["column"] == "values"}
    assert all(ours == paper for ours, paper in counts.values())
    assert sum(ours for name, (ours, _) in counts.items() if name != "all views") == 132
    assert counts["all views"] == (8778, 8778)
    text = render.latex(result)
    assert r"PIL\_Blur & 1 & 1 & --" in text
    assert "| Rotate | 10 | 10 |" in render.markdown(result)


def test_everything_is_named_once_and_knows_its_models():
    wanted = {
        "imagenet-expanded", "imagenet-standard", "flowers-expanded", "flowers-standard", "imagenet-architectures",
        "computation-resnet18", "computation-mobilenetv2", "ablation-search", "ablation-aggregation",
        "ablation-criterion", "imagenet-expanded-nonlearned", "imagenet-standard-nonlearned", "antialiased",
        "segmentation", "policy-standard", "policy-expanded", "budget", "criterion", "cifar10", "cifar100",
        "imagenet-more", "cityscapes-more", "ade20k-more",
    }  # fmt: skip
    assert wanted <= set(EXHIBITS)
    for exhibit in EXHIBITS.values():
        places = [(c.row, c.column) for c in exhibit.cells]
        assert len(set(places)) == len(places), exhibit.name
    pairs = {(c.run.views, c.run.budget) for c in get("imagenet-standard").cells if c.row[1] == "yes"}
    assert pairs == {(10, 3), (10, 10), (10, 15)}
    pairs = {(c.run.views, c.run.budget) for c in get("imagenet-standard-nonlearned").cells if c.row[1] == "yes"}
    assert pairs == {(15, 2), (15, 5), (15, 10)}
    with pytest.raises(SpecError, match="imagenet-expanded"):
        get("imagenet-expandet")


def test_what_is_missing_is_named_with_its_layout(tmp_path):
    with pytest.raises(DataError, match="data-root"):
        reproduce("segmentation", Nowhere())
    with pytest.raises(DataError, match="no such folder"):
        Root(tmp_path / "nothing")
    with pytest.raises(DataError) as error:
        reproduce("segmentation", Root(tmp_path))
    text = str(error.value)
    assert "cityscapes/leftImg8bit" in text
    assert "ADEChallengeData2016/" in text
    assert "cityscapes_resnet50_fcn() in models.py" in text
    with pytest.raises(DataError, match=r"weights/flowers102-resnet18\.pth"):
        reproduce("flowers-expanded", Root(tmp_path))
    with pytest.raises(OptionError, match="limit"):
        Sample(0)


def test_models_of_a_root_come_from_its_file_its_weights_or_the_library(tmp_path):
    (tmp_path / "models.py").write_text("import torch\ndef cifar10_resnet20():\n    return torch.nn.Conv2d(3, 10, 3)\n")
    root = Root(tmp_path)
    assert isinstance(root.load("ResNet20", "cifar10").model, nn.Conv2d)
    with pytest.raises(DataError, match="nothing there"):
        root.load("ResNet32", "cifar10")
    from torchvision.models import mobilenet_v2

    torch.manual_seed(3)
    own = mobilenet_v2(num_classes=102)
    (tmp_path / "weights").mkdir()
    torch.save(own.state_dict(), tmp_path / "weights" / "flowers102-mobilenetv2.pth")
    loaded = root.load("MobileNetV2", "flowers102")
    assert torch.equal(loaded.model.classifier[1].weight, own.classifier[1].weight)
    assert (loaded.preprocess.resize, loaded.preprocess.crop) == (256, (224, 224))


def test_the_first_weights_are_asked_for(tmp_path, monkeypatch):
    from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

    asked = []

    def offline(self, *args, **kwargs):
        asked.append(self)
        return mobilenet_v2().state_dict()

    monkeypatch.setattr(MobileNet_V2_Weights, "get_state_dict", offline)
    loaded = Root(tmp_path).load("MobileNetV2", "imagenet")
    assert asked == [MobileNet_V2_Weights.IMAGENET1K_V1]
    assert loaded.weights == "IMAGENET1K_V1"


def test_the_sample_sets_other_images_aside_for_fitting():
    place = Sample(20)
    loaded = LoadedModel(
        "sample", nn.Identity(), Preprocess(56, (64, 64), (0.2,), (0.3,), channels="L"), "classification"
    )
    test = place.test(loaded, "imagenet")
    train, validation = place.fitting(loaded, "imagenet")
    assert (len(test), len(train), len(validation)) == (20, 80, 32)
    sets = [set(part.chosen) for part in (test, train, validation)]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    assert "substituted" in place.note
