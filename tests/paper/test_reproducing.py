"""One exhibit of each kind, end to end on tiny random networks: what the numbers are made of, not their size."""

from dataclasses import replace

import pytest
import torch
from tiny_exhibits import TinySource

from unstride.errors import DataError, OptionError
from unstride.paper.catalogue import get
from unstride.paper.exhibits import Run
from unstride.paper.numbers import FOUR
from unstride.paper.reproducing import reproduce


def part(name, keep):
    exhibit = get(name)
    return replace(exhibit, cells=tuple(cell for cell in exhibit.cells if keep(cell)))


def numbers(result):
    return {(v.row, v.group, v.column): v for v in result.values}


def test_a_table_with_learned_tta_fits_evaluates_and_resumes(tmp_path):
    exhibit = part("table1", lambda c: c.group == "ResNet18" and c.column == "B = 30" and c.row[0] != "ClassTTA")
    first = reproduce(exhibit, TinySource(), tmp_path)
    assert {v.row for v in first.values} == {(m, o) for m in ("GPS", "AugTTA") for o in ("no", "yes")}
    assert all(0 <= v.ours <= 100 and v.low <= v.high and v.images == 6 for v in first.values)
    assert numbers(first)[("GPS", "no"), "ResNet18", "B = 30"].paper == 70.51
    before = sorted(p for p in tmp_path.rglob("*.safetensors"))
    again = reproduce(exhibit, TinySource(), tmp_path)
    assert again.values == first.values
    assert sorted(p for p in tmp_path.rglob("*.safetensors")) == before  # nothing was fitted or evaluated again


def test_the_work_of_a_row_is_views_times_states(tmp_path):
    rows = (("1", "-", "no"), ("30", "GPS", "no"), ("30", "GPS", "yes"))
    exhibit = part("table a4", lambda c: c.row in rows)
    found = numbers(reproduce(exhibit, TinySource(), tmp_path))
    ratio = {row: v.ours for (row, _, column), v in found.items() if column == "MACs, x base"}
    assert ratio["1", "-", "no"] == 1
    assert ratio["30", "GPS", "no"] == pytest.approx(3)  # GPS keeps 3 views
    assert 2 < ratio["30", "GPS", "yes"] / 3 < 3  # 3 states in each
    times = {(row, column): v for (row, _, column), v in found.items() if column in ("time, x base", "ms / image")}
    assert all(v.ours > 0 and v.paper > 0 for v in times.values())


def test_networks_that_are_equal_are_measured_once(tmp_path, monkeypatch):
    from unstride.paper import reproducing

    calls = []
    evaluate = reproducing.evaluate
    monkeypatch.setattr(reproducing, "evaluate", lambda *a, **k: calls.append(k["budgets"]) or evaluate(*a, **k))
    result = reproduce("antialiased", TinySource(), tmp_path)
    assert len(result.values) == 15
    by_network = {}
    for v in result.values:
        by_network.setdefault(v.group, []).append(v.ours)
    assert len(set(map(tuple, by_network.values()))) == 1  # one network stands for all of them
    assert calls == [None, [4, 10]]  # the network alone, then both budgets at once


@pytest.mark.parametrize(
    ("name", "row", "changes"),
    [
        ("table3", "1 .. L", {"layers": (1, 2, 3, 4)}),
        ("table3", "2 .. L-1", {"layers": (2, 3)}),
        ("table4", "mean", {"aggregate": "mean", "criterion": "entropy"}),
        ("table4", "entropy", {"aggregate": "entropy", "criterion": "entropy"}),
        ("table4", "learned, no Align", {"aggregate": "learned", "align": "none"}),
        ("table4", "learned", {"aggregate": "learned", "criterion": "learned", "align": "average"}),
        ("table5", "random", {"aggregate": "learned", "criterion": "random"}),
        ("table5", "displacement", {"aggregate": "learned", "criterion": "displacement"}),
    ],
)
def test_an_ablation_changes_what_its_row_says(name, row, changes):
    run = next(cell.run for cell in get(name).cells if cell.row == (row,))
    stage = run.recipe(layers=4, seed=3).stages[0]
    fields = {**vars(stage), **vars(stage.states)}
    assert {key: fields[key] for key in changes} == changes
    assert stage.states.budget == 30


def test_the_papers_budget_pairs_are_views_with_a_search_in_each():
    run = Run("ResNet18", "imagenet", 5, False, 15, "standard", "max")
    recipe = run.recipe(0)
    assert (len(recipe.stages), len(recipe.stages[0].views), recipe.stages[0].states.budget) == (1, 15, 5)
    assert recipe.combine == "max"


def test_a_seed_draws_anew_and_values_are_means(tmp_path):
    exhibit = part("table5", lambda c: c.row[0] in ("random", "entropy") and c.measure in ("top1", "nll"))
    source = TinySource()
    both = numbers(reproduce(exhibit, source, tmp_path, seeds=2))
    value = both[("random",), "", "NLL"]
    assert value.seeds == 2
    assert value.spread > 0  # another attention, another random order
    one = numbers(reproduce(exhibit, source, tmp_path))[("random",), "", "NLL"]
    assert (one.seeds, one.spread) == (1, None)
    other = 2 * value.ours - one.ours
    assert value.spread == pytest.approx(abs(other - one.ours) / 2**0.5)  # of two numbers


def test_segmentation_with_and_without_a_flip(tmp_path):
    exhibit = part("table6", lambda c: c.group == "ResNet50-FCN" and c.row[0] == "cityscapes")
    found = numbers(reproduce(exhibit, TinySource(), tmp_path))
    assert found[("cityscapes", "no"), "ResNet50-FCN", "B = 4"].paper == 72.50
    assert found[("cityscapes", "yes"), "ResNet50-FCN", "B = 10"].paper == 72.97
    flipped, straight = (found[("cityscapes", o), "ResNet50-FCN", "B = 1"].ours for o in ("yes", "no"))
    assert flipped != straight  # a random network is not symmetric


def test_a_figure_has_a_number_for_each_budget(tmp_path):
    exhibit = part("figure5", lambda c: c.row[0] in FOUR[:1] and int(c.column) <= 4)
    result = reproduce(exhibit, TinySource(), tmp_path)
    assert [v.column for v in result.values] == ["1", "2", "3", "4"]
    assert all(v.paper is None for v in result.values)


def test_segmentation_curves_have_three_metrics_and_twice_the_budget_with_a_flip(tmp_path):
    exhibit = part("figure a5", lambda c: c.row[0].startswith("Swin") and c.run.budget <= 2)
    result = reproduce(exhibit, TinySource(), tmp_path)
    assert {v.row[1] for v in result.values} == {"mIoU %", "aAcc %", "mAcc %"}
    assert {v.column for v in result.values if "flip" in v.row[0]} == {"2", "4"}


def test_every_state_alone(tmp_path):
    found = numbers(reproduce("figure6", TinySource(), tmp_path, epochs=20))
    states = {row[1] for row, _, _ in found}
    assert len(states) == 16  # layers 2 and 3 of four, 4 selections each
    base = found[("entropy", "(0 0 0 0)"), "", "top-1 %"].ours
    model, data = TinySource().load("", "imagenet").model, TinySource().test(None, "imagenet")
    pairs = [data.tensors(i) for i in range(len(data))]
    with torch.no_grad():
        right = [int(model(x[None]).argmax()) == y for x, y in pairs]
    assert base == pytest.approx(100 * sum(right) / len(right))
    for criterion in ("learned", "entropy"):  # no vertical line
        values = {v.ours for (row, _, column), v in found.items() if row[0] == criterion and column == "mean value"}
        assert len(values) > 10


def test_without_images_only_what_needs_none():
    with pytest.raises(DataError, match="--data sample"):
        reproduce("table6")
    values = numbers(reproduce("policy-standard"))
    assert values[("Scale",), "", "values"].ours == 19
    with pytest.raises(OptionError, match="seeds: got 0"):
        reproduce("table6", TinySource(), seeds=0)
