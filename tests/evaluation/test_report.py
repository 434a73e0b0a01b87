"""The page: the decision, every alternative, the images and classes that changed, and nothing from elsewhere."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
import tiny
import torch

import unstride
from unstride import data
from unstride.errors import OptionError
from unstride.evaluation.intervals import ConfidenceInterval
from unstride.evaluation.plots import gain_against_cost
from unstride.evaluation.report import losing_classes, write_report
from unstride.evaluation.rows import Row, decision_of
from unstride.evaluation.scoring import scoring_for


@pytest.fixture
def dataset(tmp_path):
    return data.load(tiny.npz(tmp_path, 40), tiny.PREPROCESS)


def page_of(path):
    text = path.read_text()
    parser = HTMLParser()
    parser.feed(text)
    parser.close()
    assert not re.search(r'(src|href)="(?!data:)', text) and "<script" not in text
    return text


def test_the_page_of_a_classification(tmp_path, dataset):
    rows = unstride.evaluate(
        tiny.net(), dataset, recipe=["flip", "default"], report=tmp_path / "r.html", progress=False
    )
    text = page_of(tmp_path / "r.html")
    assert str(decision_of(rows[-1], rows)) in text
    for title in ("Decision", "Gain against cost", "Images that changed", "Reliability before and after", "Classes"):
        assert f"<h2>{title}</h2>" in text
    for row in rows:
        assert row.name in text
    assert rows[1].describe_gain().partition(" points")[0] in text
    assert text.count('<div class="sides">') == 1  # corrected images beside broken ones
    sides = re.findall(r">([\d,]+ (?:corrected|broken))</p>", text)
    counts = {"corrected": rows[-1].corrected, "broken": rows[-1].broken}
    assert sides == [f"{count} {mark}" for mark, count in counts.items() if count]


def test_the_page_of_a_segmentation_shows_strips(tmp_path):
    unstride.evaluate(
        "sample-segmentation", "sample-segmentation", recipe="flip", limit=3, report=tmp_path / "s.html", progress=False
    )
    text = page_of(tmp_path / "s.html")
    assert 'class="thumbs strips"' in text and "image, labels, before, after, and what changed" in text


def test_a_page_of_the_baseline_alone_and_of_batches(tmp_path, dataset):
    pairs = [dataset.tensors(i) for i in range(8)]
    given = [(torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs]))]
    unstride.evaluate(tiny.net(), given, recipe="plain", report=tmp_path / "a.html", progress=False)
    assert "Only the baseline was measured." in page_of(tmp_path / "a.html")
    unstride.evaluate(tiny.net(), given, recipe="flip", report=tmp_path / "b.html", progress=False)
    assert "not for batches" in page_of(tmp_path / "b.html")


def test_a_caller_gives_its_own_decision_and_choice(tmp_path, dataset):
    rows = unstride.evaluate(tiny.net(), dataset, recipe=["flip", "default"], progress=False)
    scoring = scoring_for("classification", classes=6)
    write_report(
        tmp_path / "t.html", rows, {}, dataset, scoring, decision="Keep it.", chosen="flip", title="<b>Mine</b>"
    )
    text = page_of(tmp_path / "t.html")
    assert "Keep it." in text and "&lt;b&gt;Mine&lt;/b&gt;" in text and "accuracy of flip" in text


def stats_of(labels, correct):
    return {"label": np.array(labels), "correct": np.array(correct), "predicted": np.array(labels)}


def test_classes_that_lose_are_named():
    scoring = scoring_for("classification", classes=("cat", "dog"))
    labels = [0] * 40 + [1] * 40
    before = stats_of(labels, [True] * 40 + [False] * 40)
    after = stats_of(labels, [True] * 28 + [False] * 12 + [True] * 40)
    (note,) = losing_classes(scoring, before, after, np.array([-0.3, 1.0]))
    assert "cat (-30.0 points)" in note.text and "dog" not in note.text
    assert losing_classes(scoring, before, before, np.array([0.0, 0.0])) == ()


def test_a_page_that_cannot_be_written_is_found_before_the_work(tmp_path, dataset):
    for name in ("r.txt", "nowhere/r.html"):
        with pytest.raises(OptionError, match="report"):
            unstride.evaluate(tiny.net(), dataset, report=tmp_path / name, progress=False)


def row(name, gain, cost):
    interval = None if gain is None else ConfidenceInterval(gain, gain - 0.01, gain + 0.01)
    own = ConfidenceInterval(cost, cost, cost)
    return Row(name, 100, "accuracy", {"accuracy": 0.9}, own, interval, "" if gain is None else "net")


def test_names_in_the_drawing_do_not_overlap():
    rows = [row("net", None, 1.0), *(row(f"recipe <{k}>", 0.0001 * k, 1 + k / 10) for k in range(20))]
    svg = gain_against_cost(rows, {"recipe <3>"}).decode()
    assert "recipe &lt;19&gt;" in svg and svg.count('class="strong"') == 1
    heights = sorted(float(y) for y in re.findall(r'<text x="546" y="([\d.]+)">', svg))
    assert len(heights) == 21 and min(np.diff(heights)) > 13.9
    assert heights[0] > 0 and heights[-1] < 420
