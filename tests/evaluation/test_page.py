"""The evaluation's report: every figure of the rows, the images that really changed, and nothing from outside."""

import dataclasses
import html
import re

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import PREPROCESS, images, net, normalised, npz

import unstride
from unstride import data
from unstride.errors import OptionError
from unstride.evaluation import evaluate
from unstride.procedure.gates import Stage
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, parse_view


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


def labelled(folder, count):
    """Images that the plain network gets wrong where it differs from six states, and such that these get wrong."""
    x, _ = images(count)
    plain = net()(normalised(x)).argmax(1).numpy()
    better = unstride.enhance(net(), normalised(x[:1]), 6)(normalised(x)).argmax(1).numpy()
    differ = np.flatnonzero(plain != better)
    y = better.copy()
    y[differ[::2]] = plain[differ[::2]]
    np.savez(folder / "data.npz", x=x, y=y)
    return x, y


def test_every_row_the_images_that_changed_and_the_layers(tmp_path):
    x, y = labelled(tmp_path, 300)
    dataset = data.load(f"npz:{tmp_path / 'data.npz'}", PREPROCESS, classes=6)
    rows = evaluate(net(), dataset, (1, 6), report=tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text("utf-8"))
    for row in rows:
        assert f"{100 * row.metrics['top1']:.2f} %" in page
        assert f"{row.metrics['nll']:.4f}" in page
    for row in rows[1:]:
        g = row.gain
        assert f"{100 * g['gain']:+.2f} [{100 * g['low']:+.2f}, {100 * g['high']:+.2f}]" in page
        assert f"{g['corrected']:,} / {g['corrupted']:,}" in page
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http-equiv", "")
    assert len(re.findall(r"<td>[abc] \(conv\)</td>", page)) == 3  # the layers

    shown = next((row for row in rows[1:] if row.recommended), max(rows[1:], key=lambda row: row.quality))
    plain = net()(normalised(x)).argmax(1).numpy()
    better = unstride.enhance(net(), normalised(x[:1]), shown.budget)(normalised(x)).argmax(1).numpy()
    for mark, right, wrong in (("✓ corrected", better, plain), ("✗ corrupted", plain, better)):
        wanted = [
            f"class {y[k]}: class {plain[k]} → class {better[k]}"
            for k in np.flatnonzero((right == y) & (wrong != y))[:7]
        ]
        assert wanted, "the test shows nothing without a change"
        assert re.findall(rf"{mark}</b>([^<]+)</figcaption>", page) == wanted


def test_captions_are_of_the_looks_that_were_evaluated(tmp_path):
    """A wider look sees what the crop leaves out, which the prepared tensor no longer has."""
    x = np.random.default_rng(0).integers(0, 256, (60, 1, 1, 3), np.uint8).repeat(32, 1).repeat(32, 2)
    x[:, 4:28, 4:28] = 255 - x[:, 4:28, 4:28]
    crops = dataclasses.replace(PREPROCESS, resize=32, crop=(24, 24))
    wider = Stage((parse_view("Size=1.3333 + Crop=1.3333"),), weights=(9.0,))
    better = unstride.enhance(
        net(), torch.zeros(1, 3, 24, 24), recipe=Recipe(stages=(Stage(), wider)), preprocess=crops
    )
    seen = [Image.fromarray(one) for one in x]
    plain, now = (z.argmax(1).numpy() for z in (better.plain(better._source(seen).render(PLAIN)), better(seen)))
    np.savez(tmp_path / "data.npz", x=x, y=now)  # every change is for the better
    dataset = data.load(f"npz:{tmp_path / 'data.npz'}", crops, classes=6)
    evaluate(net(), dataset, recipe=better.recipe, report=tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text("utf-8"))
    wanted = [f"class {now[k]}: class {plain[k]} → class {now[k]}" for k in np.flatnonzero(plain != now)[:7]]
    assert wanted and re.findall(r"✓ corrected</b>([^<]+)</figcaption>", page) == wanted
    assert "<svg" not in page  # looks have no budgets to draw them over


def test_segmentation_shows_strips_of_what_gained_and_lost(tmp_path):
    rng = np.random.default_rng(1)
    for name in ("images", "masks"):
        (tmp_path / "set" / name).mkdir(parents=True)
    for i in range(6):
        Image.fromarray(rng.integers(0, 256, (16, 24, 3)).astype(np.uint8)).save(tmp_path / f"set/images/{i}.png")
        mask = rng.integers(0, 6, (16, 24)).astype(np.uint8)
        mask[0] = 255
        Image.fromarray(mask).save(tmp_path / f"set/masks/{i}.png")
    dataset = data.load(f"masks:{tmp_path / 'set'}", PREPROCESS, classes=6)
    rows = evaluate(net(maps=True), dataset, (1, 4), tta="flip", report=tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text("utf-8"))
    assert f"{100 * rows[3].metrics['miou']:.2f} %" in page
    assert "unstride in 2 views" in page
    told = re.findall(r"(corrected|corrupted)</b>images/(\d)\.png: ([+-]\d+) pixels right", page)
    assert told
    assert all((mark == "corrected") == (int(gained) > 0) for mark, _, gained in told)


def test_a_run_that_changes_nothing_says_so(tmp_path):
    evaluate(net(), data.load(npz(tmp_path, 4), PREPROCESS, classes=6), (1,), report=tmp_path / "r.html")
    assert "Only the plain network was evaluated" in (tmp_path / "r.html").read_text("utf-8")


@pytest.mark.parametrize(("name", "word"), [("report.txt", "ends in .html"), ("nowhere/report.html", "no folder")])
def test_a_page_that_cannot_be_written_is_found_before_the_work(tmp_path, name, word):
    with pytest.raises(OptionError, match=word):
        evaluate(net(), "no data are read", report=tmp_path / name)
