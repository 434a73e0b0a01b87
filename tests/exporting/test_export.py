"""One file for a whole recipe: compared with the recipe, with passes worked out by hand, and by what it holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import tiny
import torch
from torch import nn

import unstride
from unstride import Gate, Near, Recipe, Search, Stage
from unstride.errors import ArtefactError, OptionError
from unstride.exporting import checking, loop
from unstride.exporting.arithmetic import Arithmetic
from unstride.exporting.networks import session
from unstride.recipe.files import from_data
from unstride.views.images import Preprocess

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SHAPE = (3, 32, 40)
X = torch.stack(checking.noise_images(SHAPE, 24))


class Large(nn.Module):
    """Another network for the same six classes."""

    def __init__(self, hidden=24):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, hidden, 3, 4, 1), nn.Linear(hidden, 6)
        torch.manual_seed(7)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))


class TwoMaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = tiny.net(maps=True)

    def forward(self, x):
        y = self.net(x)
        return {"out": y, "aux": 2 * y.flip(1)}


class OneSize(nn.Module):
    """Takes images of 32 x 40 and 48 x 64 px, each by another path, so that no graph has both."""

    def __init__(self):
        super().__init__()
        self.net = tiny.net()

    def forward(self, x):
        return self.net(x) * (2.0 if x.shape[-1] == 40 else 3.0)


def small():
    model = tiny.net()
    model.head.weight.data *= 6
    return model


def gate(below, by="margin"):
    return Gate(by, below=below)


def written(tmp_path, models, recipe, **options):
    """The file's run function, what it wrote, and the recipe in Python."""
    task = recipe.task if isinstance(recipe, Recipe) else "classification"
    better = unstride.enhance(models, recipe=recipe, task=task, **options.pop("enhance", {}))
    options = {"example": X[:1], "checked": 16, **options}
    file = unstride.export(better, tmp_path / "net.onnx", **options)
    opened = session(file.path)
    names = [o.name for o in opened.get_outputs()]
    return lambda x: dict(zip(names, opened.run(None, {"images": np.asarray(x)}), strict=True)), file, better


def close(got, wanted):
    """To 1e-4 of the largest number."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * max(1.0, float(wanted.abs().max())))


def two(*later, first=("plain",), **options):
    return Recipe((Stage(first), *later), **options)


RECIPES = {
    "sizes, weights and temperatures": two(
        Stage(("flip + 0.75x",), weights=(0.5,), temperatures=(1.3,), gate=gate(0.4, "entropy")),
        first=("plain", "1.5x"),
        combine="probabilities",
        temperature=1.5,
    ),
    "gates by agreement": two(
        Stage(("FlipUD",), gate=gate(0.9, "agreement")), Stage(("ShiftX=4",), gate=gate(0.8, "agreement")),
        first=("plain", "flip"),
    ),
    "the largest logit": two(Stage(("flip", "ShiftY=-3"), gate=gate(0.7, "probability")), combine="max"),
    "near states behind a gate": two(Stage(states=Near(3), gate=gate(0.3)), temperature=2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_the_file_gives_the_recipes_answers_passes_and_cost_for_any_batch(name, tmp_path):
    run, _, better = written(tmp_path, small(), RECIPES[name])
    for count in (1, 24):
        result, got = better.run(X[:count]), run(X[:count])
        close(got["output"], better(X[:count]))
        np.testing.assert_array_equal(got["pass_count"], result.record.pass_counts)
        np.testing.assert_allclose(got["cost"], result.costs, rtol=1e-3)
        np.testing.assert_allclose(got["confidence"], torch.as_tensor(got["output"]).softmax(1).amax(1), atol=1e-5)
    assert len(set(got["pass_count"].tolist())) > 1  # otherwise no gate is tested


def test_a_gated_flip_is_what_it_is_by_hand(tmp_path):
    model, threshold = small(), 0.25
    run, file, _ = written(tmp_path, model, two(Stage(("flip",), gate=gate(threshold))))
    with torch.no_grad():
        plain, flipped = model(X), model(X.flip(-1))
    best = plain.softmax(1).topk(2).values
    uncertain = best[:, 0] - best[:, 1] < threshold
    assert 0 < int(uncertain.sum()) < len(X)
    got = run(X)
    np.testing.assert_allclose(got["output"], torch.where(uncertain[:, None], (plain + flipped) / 2, plain), atol=1e-5)
    np.testing.assert_array_equal(got["pass_count"], 1 + uncertain.long())
    assert file.outputs == ("output", "confidence", "pass_count", "cost")


def test_a_cascade_holds_each_network_once_and_says_what_it_is(tmp_path):
    models = {"small": small(), "large": Large(4000)}
    recipe = two(
        Stage(network="large", gate=gate(0.6), join="replace"), Stage(("flip",), network="large", gate=gate(0.5))
    )
    run, file, better = written(tmp_path, models, recipe)
    weights = sum(4 * p.numel() for model in models.values() for p in model.parameters())
    assert file.weights == weights
    assert file.size < 1.1 * weights
    assert not file.copies
    close(run(X)["output"], better(X))
    model = onnx.load(file.path)
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    stored = tomllib.loads(metadata["unstride.recipe"])
    head = {k: stored.pop(k) for k in ("format", "made", "networks", "cost_of")}
    assert from_data(stored) == better.recipe
    assert json.loads(metadata["unstride.networks"])["large"]["fingerprint"] == head["networks"]["large"]["fingerprint"]
    assert "torch" in json.loads(metadata["unstride.provenance"])["versions"]


def test_the_file_runs_without_torch_and_unstride(tmp_path):
    run, file, _ = written(tmp_path, small(), "default")
    np.save(tmp_path / "x.npy", X.numpy())
    code = (
        "import sys, numpy as np, onnxruntime as ort\n"
        "y = ort.InferenceSession(sys.argv[1]).run(['output'], {'images': np.load(sys.argv[2])})[0]\n"
        "assert 'torch' not in sys.modules and 'unstride' not in sys.modules\n"
        "np.save(sys.argv[3], y)"
    )
    paths = [str(file.path), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), run(X)["output"], atol=1e-6)


def test_a_network_that_has_no_graph_for_all_sizes_is_copied_and_the_copy_is_told(tmp_path):
    recipe = Recipe((Stage(("plain", "1.5x")),))
    run, file, better = written(tmp_path, OneSize(), recipe)
    assert len(file.copies) == 1
    assert "48x64" in str(file) or "48x60" in str(file)
    close(run(X)["output"], better(X))


TASKS = {
    "segmentation": (TwoMaps, two(Stage(("flip", "1.5x"), gate=gate(0.5)), task="segmentation")),
    "multilabel": (
        small,
        two(Stage(("FlipUD",), gate=gate(0.9, "agreement")), Stage(("0.75x",), gate=gate(0.2)),
            task="multilabel", first=("plain", "flip"), combine="probabilities"),
    ),
    "embedding": (
        small,
        two(Stage(("FlipUD",), gate=gate(0.999, "agreement")), first=("plain", "flip"), task="embedding"),
    ),
    "regression": (small, two(first=("plain", "flip", "FlipUD", "1.5x"), task="regression", combine="median")),
    "dense": (tiny.Deep, two(first=("plain", "flip"), task="dense")),
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_other_tasks(task, tmp_path):
    make, recipe = TASKS[task]
    run, file, better = written(tmp_path, make().eval(), recipe)
    got, wanted = run(X[:5]), better(X[:5])
    for name, value in (wanted if isinstance(wanted, dict) else {"output": wanted}).items():
        if task == "multilabel":  # averaged probabilities; near 0 and 1 their logits amplify rounding
            got[name], value = 1 / (1 + np.exp(-got[name])), value.sigmoid()
        close(got[name], value)
    assert ("confidence" in file.outputs) == (task in ("segmentation", "multilabel"))


@pytest.mark.parametrize("aggregate", ["entropy", "max"])
def test_aggregated_states(aggregate, tmp_path):
    states = Stage(states=Near(3), aggregate=aggregate, space="features")
    run, file, better = written(tmp_path, small(), Recipe((states,)))
    close(run(X)["output"], better(X))
    assert not file.copies


# ---------------------------------------------------------------------------------------------------- pixels, int8


PIXELS = {
    "small": Preprocess(40, (32, 32), (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)),
    "large": Preprocess((48, 48), None, channels="BGR", interpolation="bicubic"),
}


def test_from_pixels_each_network_gets_its_own_preprocessing(tmp_path):
    models = {"small": small(), "large": Large()}
    recipe = two(Stage(("plain", "1.25x + flip"), network="large", gate=gate(0.6)))
    options = {"from_pixels": True, "example": None, "enhance": {"preprocess": PIXELS}}
    run, file, better = written(tmp_path, models, recipe, **options)
    assert "uint8 (batch, height, width, 3)" in str(file)
    photos = checking.noise_photos((40, 50), 12)
    for size in dict.fromkeys(photo.size for photo in photos):
        own = [photo for photo in photos if photo.size == size]
        got, wanted = run(np.stack([np.asarray(photo) for photo in own])), better(own)
        np.testing.assert_allclose(got["output"], wanted, atol=0.02 * float(wanted.abs().max()))
        assert (got["output"].argmax(1) == wanted.argmax(1).numpy()).all()
    with pytest.raises(OptionError, match="--from-pixels"):
        unstride.export(better, tmp_path / "tensor.onnx", example=32)


def test_the_share_of_the_same_class_counts_images_that_are_near_another_class():
    better = unstride.enhance(small(), recipe="plain", task="classification")
    wanted = torch.tensor([[2.0, 0.0, 0.0], [1.001, 1.0, 0.0]])
    got = torch.tensor([[2.0, 0.0, 0.0], [0.999, 1.0, 0.0]]).numpy()
    assert checking.same_class(got, wanted, better).tolist() == [1.0, 0.0]


def test_int8_networks_are_smaller_and_nearly_agree(tmp_path):
    models = {"small": small(), "large": Large(4000)}
    images = X[:16]
    recipe = two(Stage(network="large", gate=gate(0.9)))
    run, file, better = written(tmp_path, models, recipe, quantize="int8", images=images)
    assert file.size < 0.6 * file.weights
    assert re.search(r"int8: same class as float32 for \d+\.\d% of these images", str(file))
    same = run(images)["output"].argmax(1) == better(images).argmax(1).numpy()
    assert same.mean() >= 0.75
    with pytest.raises(OptionError, match="images to calibrate"):
        written(tmp_path, models, recipe, quantize="int8")


# ---------------------------------------------------------------------------------------------------- .pt2


def test_a_pt2_program_for_recipes_without_gates(tmp_path):
    recipe = Recipe((Stage(("plain", "flip", "1.5x"), weights=(1.0, 2.0, 0.5)), Stage(states=Near(3))), temperature=2.0)
    better = unstride.enhance(small(), recipe=recipe, task="classification")
    file = unstride.export(better, tmp_path / "net.pt2", example=X[:1], checked=4)
    run = torch.export.load(file.path).module()
    for count in (1, 5):
        torch.testing.assert_close(run(X[:count]), better(X[:count]), atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("recipe", "name", "message"),
    [
        (Recipe((Stage(states=Search(4)),)), "net.onnx", r"Search.*Near states and gates on whole images"),
        (two(Stage(("flip",), gate=Gate(share=0.2))), "net.onnx", "calibrate"),
        (two(Stage(("Rotate=10",))), "net.onnx", "no op for it"),
        (two(Stage(("plain",), gate=gate(0.5))), "net.onnx", "no pass that was not taken before"),
        (two(Stage(("flip",), gate=gate(0.5))), "net.pt2", "holds no gates"),
        (Recipe(precision="bfloat16"), "net.onnx", "precision"),
    ],
)
def test_what_a_file_cannot_hold_is_an_error_that_says_what_can(recipe, name, message, tmp_path):
    better = unstride.enhance(small(), recipe=recipe, task="classification")
    with pytest.raises(OptionError, match=message):
        unstride.export(better, tmp_path / name, example=X[:1], checked=2)
    assert not list(tmp_path.iterdir())


def test_tile_gates_name_the_alternative(tmp_path):
    recipe = two(Stage(("flip",), gate=Gate(below=0.5, tile=16)), task="segmentation")
    better = unstride.enhance(TwoMaps(), recipe=recipe, task="segmentation")
    with pytest.raises(OptionError, match=r"tiles.*gates on whole images"):
        unstride.export(better, tmp_path / "net.onnx", example=X[:1])


@pytest.mark.parametrize("wrong", ["outputs", "gates"])
def test_a_file_that_differs_is_not_written(wrong, tmp_path, monkeypatch):
    if wrong == "outputs":
        monkeypatch.setattr(Arithmetic, "encode", lambda self, b, x: b.op("Mul", x, b.constant(1.001)))
    else:
        monkeypatch.setattr(loop._Body, "_gated", lambda self, b, index, state: state.rows)
    better = unstride.enhance(small(), recipe=two(Stage(("flip",), gate=gate(0.25))), task="classification")
    with pytest.raises(ArtefactError, match="was not written"):
        unstride.export(better, tmp_path / "net.onnx", example=X[:1], checked=16)
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(OptionError, match=r"onnxscript is not installed. Run: pip install 'unstride\[onnx\]'"):
        unstride.export(small(), tmp_path / "net.onnx", example=X[:1])
