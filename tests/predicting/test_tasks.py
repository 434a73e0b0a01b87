"""Tables of other tasks: vectors in the row, maps in files, what was assumed in the record."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from procedure_nets import SmallDepth, SmallNet, seeded
from torch import Tensor, nn

import unstride
from unstride.models import LoadedModel
from unstride.recipe.files import write
from unstride.views.images import Preprocess, open_image

WHOLE = Preprocess(None, None)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(3):
        Image.fromarray(rng.integers(0, 256, (32, 40, 3), dtype=np.uint8)).save(folder / f"p{k}.png")
    (folder / "p3.png").write_bytes(b"no image")
    return folder


def predicted(model: nn.Module, photos: Path, out: Path, task: str | None, **options: Any) -> list[dict[str, Any]]:
    done = unstride.predict(LoadedModel("mine", model, WHOLE), photos, out, task=task, recipe="flip", **options)
    assert done.images == 4 and done.errors == 1 and 0 <= done.changed <= 1
    return [json.loads(line) for line in out.read_text().splitlines()]


def seen(photos: Path, k: int) -> Tensor:
    return WHOLE(open_image(photos / f"p{k}.png"))[None]


@pytest.mark.parametrize("task", ["embedding", "regression"])
def test_vectors_are_in_the_row(photos: Path, tmp_path: Path, task: str) -> None:
    model = seeded(SmallNet(7))
    rows = predicted(model, photos, tmp_path / "t.jsonl", task)
    better = unstride.enhance(model, seen(photos, 0), task=task, recipe="flip")
    wanted = better(seen(photos, 1))[0]
    torch.testing.assert_close(torch.tensor(rows[1]["values"]), wanted, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        plain = model(seen(photos, 1))[0]
    torch.testing.assert_close(torch.tensor(rows[1]["base_values"]), plain, atol=1e-4, rtol=1e-3)
    assert rows[1]["passes"] == 2 and rows[3]["error"] and rows[3]["values"] is None
    unstride.predict(LoadedModel("mine", model, WHOLE), photos, tmp_path / "t.csv", task=task, recipe="flip")
    with (tmp_path / "t.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert float(table[1]["value_7"]) == pytest.approx(rows[1]["values"][6], rel=1e-6)


def test_maps_are_files(photos: Path, tmp_path: Path) -> None:
    model = seeded(SmallDepth())
    rows = predicted(model, photos, tmp_path / "t.jsonl", "depth")
    better = unstride.enhance(model, seen(photos, 0), task="depth", recipe="flip")
    wanted = better(seen(photos, 2))[0]
    stored = np.load(tmp_path / rows[2]["map"], allow_pickle=False)
    torch.testing.assert_close(torch.from_numpy(stored), wanted, atol=1e-4, rtol=1e-3)
    assert rows[2]["mean"] == pytest.approx(float(wanted.mean()), abs=1e-4)
    assert rows[2]["least"] <= rows[2]["mean"] <= rows[2]["most"] and rows[2]["spread"] > 0


def test_several_labels(photos: Path, tmp_path: Path) -> None:
    model = seeded(SmallNet())
    rows = predicted(model, photos, tmp_path / "t.jsonl", "multilabel", top=5)
    better = unstride.enhance(model, seen(photos, 0), task="multilabel", recipe="flip")
    p = better(seen(photos, 0))[0].sigmoid().sort(descending=True).values
    torch.testing.assert_close(torch.tensor(rows[0]["probabilities"]), p, atol=1e-4, rtol=1e-3)
    assert isinstance(rows[0]["changed"], float)


def test_what_was_assumed_is_in_the_record(photos: Path, tmp_path: Path) -> None:
    predicted(seeded(SmallNet()), photos, tmp_path / "t.jsonl", None)
    record = json.loads((tmp_path / "t.jsonl.run.json").read_text())
    assert record["pipeline"]["recipe"]["task"] == "classification" and "output of scores" in record["assumed"]


@pytest.mark.parametrize("task", ["embedding", "regression", "multilabel"])
def test_a_recipe_that_was_made_for_a_task_is_run_for_it(photos: Path, tmp_path: Path, task: str) -> None:
    """The shape of the output says classes, the file says otherwise, and nothing is assumed."""
    loaded = LoadedModel("mine", seeded(SmallNet(7)), WHOLE)
    made = unstride.enhance(loaded.model, seen(photos, 0), task=task, recipe="flip").recipe
    tuned = write(tmp_path / "tuned.toml", made)
    for k, recipe in enumerate((tuned, str(tuned), made)):
        out = tmp_path / f"t{k}.jsonl"
        unstride.predict(loaded, photos, out, recipe=recipe)
        record = json.loads(Path(f"{out}.run.json").read_text())
        assert (record["pipeline"]["recipe"]["task"], record["assumed"]) == (task, "")
