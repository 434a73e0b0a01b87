"""Exhibits by name and by number, and the paper's numbers in them."""

import pytest

from unstride.errors import OptionError, SpecError
from unstride.paper.catalogue import EXHIBITS, get
from unstride.paper.exhibits import only


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("table1", "imagenet-expanded"),
        ("Table 1", "imagenet-expanded"),
        ("Tab. A4", "computation-resnet18"),
        ("TABLE A11", "layers-resnet18"),
        ("figure5", "budget"),
        ("Fig. 6", "criterion"),
        ("Figure A2", "cifar100"),
        ("imagenet-standard", "imagenet-standard"),
        (" Segmentation ", "segmentation"),
    ],
)
def test_an_exhibit_has_a_name_and_a_number(asked, name):
    assert get(asked).name == name


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("imagenet-expandet", "'imagenet-expanded' (Table 1)"),
        ("tabel 1", "Table"),
        ("antialized", "'antialiased' (Table A8)"),
        ("flowers102-fine", "'flowers102-finetune'"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(asked, near):
    with pytest.raises(SpecError) as error:
        get(asked)
    assert near in str(error.value).partition("Did you mean")[2]


def test_all_tables_and_figures_that_are_measured_are_there():
    numbers = {exhibit.where for exhibit in EXHIBITS.values()}
    assert numbers >= {f"Table {k}" for k in range(1, 7)} | {f"Table A{k}" for k in range(1, 12)}
    assert numbers >= {"Figure 5", "Figure 6"} | {f"Figure A{k}" for k in range(1, 6)}
    for exhibit in EXHIBITS.values():
        places = [(c.row, c.group, c.column) for c in exhibit.cells]
        assert len(set(places)) == len(places), exhibit.name


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("table a1", {(10, 3), (10, 10), (10, 15)}),
        ("table a7", {(15, 2), (15, 5), (15, 10)}),
        ("table a6", {(1, 30)}),
    ],
)
def test_the_papers_budget_pairs(name, pairs):
    assert {(c.run.views, c.run.budget) for c in get(name).cells if c.row[1] == "yes"} == pairs


@pytest.mark.parametrize(
    ("name", "row", "group", "column", "paper"),
    [  # read from the paper's tables
        ("table1", ("AugTTA", "yes"), "InceptionV3", "B = 150", 72.24),
        ("table2", ("GPS", "yes"), "ResNet18", "B = 30", 88.93),
        ("table3", ("2 .. L",), "", "top-1 %", 80.06),
        ("table3", ("1 .. L",), "", "latency, as printed", 53.46),
        ("table4", ("learned, no Align",), "", "top-1 %", 79.52),
        ("table5", ("displacement",), "", "latency, as printed", 12.65),
        ("table6", ("ade20k", "yes"), "MiT-SegFormer", "B = 4", 38.33),
        ("table a4", ("100", "ClassTTA", "yes"), "", "ms / image", 118.8),
        ("table a5", ("150", "AugTTA", "no"), "", "time, x base", 180.6),
        ("table a8", ("anti-aliased",), "WideResNet50", "B = 10", 78.91),
    ],
)
def test_numbers_are_as_printed(name, row, group, column, paper):
    found = {(c.row, c.group, c.column): c.paper for c in get(name).cells}
    assert found[row, group, column] == paper


def test_one_network_of_an_exhibit():
    assert {c.run.model for c in only(get("table1"), "resnet18").cells} == {"ResNet18"}
    with pytest.raises(OptionError, match="Did you mean 'ResNet18'"):
        only(get("table1"), "ResNet180")
