"""Two recipes on unlabelled images: what differs is labelled, and the gain is that of all images."""

import csv
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from full_disk import runs_until_there_is_space
from small_nets import photo, write_nets

import unstride
from unstride import Recipe, Stage, models
from unstride.errors import DataError, InputError, OptionError
from unstride.evaluation.intervals import PairedCounts, paired_gain
from unstride.pipeline import open_pipeline
from unstride.predicting.compare import compare
from unstride.predicting.labelling import LabelPage, LabelServer

COUNT = 60
NAMES = ("red", "green", "blue", "<b>[odd]</b> name")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for k in range(COUNT):
        photo(k, (34, 40)).save(folder / f"{k:03d}.png")
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same networks: the first alone, the second alone, which breaks most predictions."""
    spec = write_nets(tmp_path_factory.mktemp("nets"))
    recipe = Recipe((Stage(), Stage(network="net2", join="replace")))
    two = [models.load(f"{spec}:net"), models.load(f"{spec}:other")]
    return open_pipeline(two, recipe="plain"), open_pipeline(two, recipe=recipe)


@pytest.fixture(scope="module")
def answers(pair, images, tmp_path_factory):
    """Of each image, the class of either recipe, by `predict`."""
    out = tmp_path_factory.mktemp("answers")
    tables = []
    for k, pipeline in enumerate(pair):
        unstride.predict(pipeline, images, out / f"{k}.jsonl")
        rows = [json.loads(line) for line in (out / f"{k}.jsonl").read_text().splitlines()]
        tables.append({row["image"]: row["classes"][0] for row in rows})
    return {image: (tables[0][image], tables[1][image]) for image in tables[0]}


@pytest.fixture
def truth(answers):
    """Labels of all images, of which each recipe has some right."""
    draw = np.random.default_rng(0)
    return {image: int(draw.choice([*pair, draw.integers(4)])) for image, pair in sorted(answers.items())}


def read(path):
    with Path(path).open(newline="") as stream:
        return list(csv.DictReader(stream))


def label(path, truth, count=None):
    rows = read(path)
    for row in rows[:count]:
        name = NAMES[truth[row["image"]]]
        row["label"] = name if name in (row["answer_1"], row["answer_2"]) else "neither"
    rewrite(path, rows)


def rewrite(path, rows):
    with Path(path).open("w", newline="") as stream:
        table = csv.DictWriter(stream, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def test_with_all_labels_the_gain_is_that_of_all_images(pair, images, answers, truth, tmp_path):
    out = tmp_path / "to_label.csv"
    first = compare(*pair, images, out)
    differing = {image for image, (a, b) in answers.items() if a != b}
    assert 5 < len(differing) <= COUNT
    assert {row["image"] for row in read(out)} == differing and {row["probability"] for row in read(out)} == {"1.0"}
    assert first.gain is None and f"disagree on {len(differing)} of them" in str(first)
    label(out, truth)
    done = compare(*pair, images, out, labels=out)
    base, new = (np.array([answers[i][k] == truth[i] for i in truth]) for k in (0, 1))
    wanted = paired_gain(PairedCounts.from_correct(base, new))
    assert done.gain == pytest.approx(wanted) if isinstance(done.gain, float) else done.gain == wanted
    assert done.images == COUNT and done.cost == pytest.approx(2)
    assert str(done).splitlines()[-1] == str(done.decision)


def test_a_part_of_the_labels_gives_a_wider_interval(pair, images, truth, tmp_path):
    out = tmp_path / "to_label.csv"
    total = len(compare(*pair, images, out).disagreements)
    label(out, truth, total // 2)
    half = compare(*pair, images, out, labels=out)
    label(out, truth)
    whole = compare(*pair, images, out, labels=out)
    assert len(half.labels) == total // 2 and half.gain.width > whole.gain.width
    assert half.outcomes == whole.outcomes[: total // 2]


def test_the_first_rows_are_a_random_part_and_answers_are_in_random_order(pair, images, answers, tmp_path):
    orders = set()
    left = Counter()
    for seed in range(8):
        found = compare(*pair, images, tmp_path / "to_label.csv", seed=seed, count=5)
        rows = read(tmp_path / "to_label.csv")
        assert len(rows) == 5
        assert float(rows[0]["probability"]) == pytest.approx(5 / len(found.disagreements))
        orders.add(tuple(row["image"] for row in rows))
        left.update(row["answer_1"] == NAMES[answers[row["image"]][0]] for row in rows)
    assert len(orders) == 8
    assert 8 <= left[True] <= 32  # of 40


def test_nothing_is_computed_twice_and_no_label_is_lost(pair, images, truth, tmp_path, capfd):
    out = tmp_path / "to_label.csv"
    compare(*pair, images, out)
    label(out, truth, 3)
    kept = [row["label"] for row in read(out)]
    calls = []
    handle = pair[0].better.model.register_forward_hook(lambda *_: calls.append(1))
    compare(*pair, images, out)
    handle.remove()
    assert len(calls) < 12  # probes of the model, no batch of images
    assert [row["label"] for row in read(out)] == kept
    with pytest.raises(OptionError, match=r"labels of \d images that would not be in it"):
        compare(pair[0], pair[0], images, out)
    assert [row["label"] for row in read(out)] == kept


def test_recipes_that_agree_gain_nothing(pair, images, tmp_path):
    done = compare(pair[0], pair[0], images, tmp_path / "a.csv")
    assert (done.gain.estimate, done.disagreements) == (0, ()) and "Keep" in str(done)


def test_a_part_that_was_drawn_with_another_seed_is_refused(pair, images, truth, tmp_path):
    out = tmp_path / "to_label.csv"
    compare(*pair, images, out, seed=1, count=4)
    label(out, truth)
    assert len(compare(*pair, images, out, labels=out, seed=1, count=4).labels) == 4
    with pytest.raises(DataError, match="another seed than 0"):
        compare(*pair, images, out, labels=out)


def test_images_that_cannot_be_read_are_counted(pair, images, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_text("no image")
    with pytest.raises(DataError, match="none of the images could be read"):
        compare(*pair, folder, tmp_path / "a.csv")
    done = compare(*pair, [images, folder], tmp_path / "b.csv")
    assert (done.images, done.errors) == (COUNT, 1) and "1 could not be read" in str(done)


def test_a_full_disk_is_an_error_and_what_was_computed_stays(pair, images, tmp_path, monkeypatch):
    for module in ("run", "summary"):
        monkeypatch.setattr(f"unstride.predicting.{module}.PART", 20)
    whole = compare(*pair, images, tmp_path / "whole.csv")
    done = runs_until_there_is_space(lambda: compare(*pair, images, tmp_path / "a.csv"), monkeypatch, step=2)
    assert done.disagreements == whole.disagreements
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))


def damaged(rows, **changes):
    rows[1] |= changes
    return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: damaged(rows, label=""), r"line 3 \(.*\) has no label, but line 4 has one"),
        (lambda rows: damaged(rows, label="gren"), "line 3: label 'gren' is not a class of the model; did you mean"),
        (lambda rows: damaged(rows, image="other.png"), "line 3: the recipes do not disagree on other.png"),
        (lambda rows: damaged(rows, image=rows[0]["image"]), "line 3: .* is in line 2, too"),
        (lambda rows: damaged(rows, probability="0.5"), "line 3: its probability is 0.5"),
        (lambda rows: damaged(rows, probability="nan"), "line 3: probability: got 'nan'"),
        (lambda rows: rows[:-1], "line 2: its probability is 1"),
        (lambda rows: [{**row, "label": ""} for row in rows], "no row has a label"),
        (lambda rows: [{"image": row["image"], "label": "red"} for row in rows], "no column 'probability'"),
    ],
)
def test_wrong_files_are_clear_errors(pair, images, truth, tmp_path, change, message):
    out, labels = tmp_path / "to_label.csv", tmp_path / "labels.csv"
    compare(*pair, images, out)
    label(out, truth)
    rewrite(labels, change(read(out)))
    before = labels.read_bytes(), out.read_bytes()
    with pytest.raises(DataError, match=message):
        compare(*pair, images, out, labels=labels)
    assert (labels.read_bytes(), out.read_bytes()) == before


def test_what_cannot_be_compared_is_refused(pair, images, tmp_path):
    spec = write_nets(tmp_path)
    with pytest.raises(OptionError, match="expected classification"):
        compare(pair[0], open_pipeline(f"{spec}:segmenter"), images, tmp_path / "a.csv")
    with pytest.raises(InputError, match="classes"):
        compare(pair[0], open_pipeline("sample"), images, tmp_path / "a.csv")
    with pytest.raises(OptionError, match=r"ends in \.csv"):
        compare(*pair, images, tmp_path / "a.txt")
    for wrong in ({"count": 0}, {"margin": -1}, {"margin": "a"}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            compare(*pair, images, tmp_path / "a.csv", **wrong)


# ------------------------------------------------------------------------------------------------------------ the page


@pytest.fixture
def server(pair, images, tmp_path):
    found = compare(*pair, images, tmp_path / "to_label.csv", count=3)
    server = LabelServer(LabelPage(found))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def post(server, data, **headers):
    headers = {"X-Token": server.page.token, **headers}
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + "label", body, headers)) as reply:
        return json.loads(reply.read())


def test_every_label_is_saved_at_once(server):
    out = server.page.comparison.out
    assert post(server, {"row": 0, "label": "red"}) == {"done": False}
    assert [row["label"] for row in read(out)] == ["red", "", ""]
    post(server, {"row": 1, "label": "neither"})
    assert post(server, {"row": 2, "label": "blue"}) == {"done": True}
    assert [row["label"] for row in read(out)] == ["red", "neither", "blue"]


def test_the_page_is_whole_and_does_not_say_which_recipe_said_what(server):
    with urllib.request.urlopen(server.url) as reply:
        text = reply.read().decode()
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert "http" not in text.replace("http-equiv", "") and "&lt;b&gt;" in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [set(row) for row in data["rows"]] == [{"image", "answers", "label"}] * 3
    with urllib.request.urlopen(server.url + "image/0") as reply:
        assert reply.headers["Content-Type"] == "image/jpeg" and reply.read(2) == b"\xff\xd8"


@pytest.mark.parametrize(
    ("data", "headers", "code"),
    [
        ({"row": 0, "label": "tabby"}, {}, 400),
        ({"row": 9, "label": "red"}, {}, 400),
        ({"row": "0", "label": "red"}, {}, 400),
        (b"[" * 1000, {}, 400),
        ({"row": 0, "label": "r" * 10_000}, {}, 400),
        ({"row": 0, "label": "red"}, {"X-Token": "guessed"}, 403),
        ({"row": 0, "label": "red"}, {"Host": "example.org"}, 403),
    ],
)
def test_bad_requests_change_nothing(server, data, headers, code):
    with pytest.raises(urllib.error.HTTPError) as failure:
        post(server, data, **headers)
    assert failure.value.code == code
    assert [row["label"] for row in read(server.page.comparison.out)] == ["", "", ""]
    for path in ("image/9", "image/-1", "../etc/passwd", "nothing"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + path)


def test_an_empty_folder_leaves_nothing_behind(pair, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="there is no image"):
        compare(*pair, tmp_path / "none", tmp_path / "to_label.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["none"]
