"""Fixed looks as a graph: equal to the model it came from, for any batch, or not written at all."""

import json
from dataclasses import replace

import pytest
import torch
from small_nets import photo, write_nets
from torch import nn
from typer.testing import CliRunner

import unstride
from unstride.cli import app
from unstride.errors import ArtefactError, OptionError
from unstride.exporting import Stages, export, run_stages, writing
from unstride.exporting.driver import open_graph
from unstride.exporting.looks import StaticView
from unstride.procedure.gates import Gate, Stage
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import parse_view
from unstride.views.source import Canvas


class Net(nn.Module):
    def __init__(self, maps=False):
        super().__init__()
        first, second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1)
        self.body = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.ReLU())
        self.head, self.maps = nn.Conv2d(12, 5, 1), maps

    def forward(self, x):
        y = self.head(self.body(x))
        if self.maps:
            return {"out": nn.functional.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)}
        return 9 * y.mean((2, 3))


def net(maps=False):
    torch.manual_seed(1)
    return Net(maps).eval()


def views(*names):
    return tuple(parse_view(name) for name in names)


X = torch.randn(5, 3, 32, 40, generator=torch.Generator().manual_seed(3))
RECIPES = {
    "flip": Recipe("flip", stages=(Stage(views("plain", "flip")),)),
    "sizes": Recipe("sizes", stages=(Stage(views("plain", "1.5x", "flip + 0.75x"), weights=(1.0, 2.0, 0.5)),)),
    "moves": Recipe("moves", stages=(Stage(views("plain", "ShiftX=3", "ShiftY=-2", "FiveCrop=LeftTop")),)),
    "states": Recipe("states", stages=(Stage(views("plain", "flip"), "near:4"), Stage(views("1.5x"), "near:2"))),
    "warm": Recipe(
        "warm", stages=(Stage(views("plain", "1.5x"), temperatures=(1.0, 1.3)),), merge="probabilities", temperature=2.0
    ),
    "given": Recipe("given", states=((0, 0), (1, 0), (0, 3)), budget=1),
    "plain": Recipe("plain"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_graph_is_the_model_for_any_batch(name, tmp_path):
    better = unstride.enhance(net(), X[:1], recipe=RECIPES[name])
    (path,) = export(better, X[:1], tmp_path / "net.pt2")
    call = open_graph(path)
    for count in (1, 2, 5):
        assert torch.allclose(call(X[:count]), better(X[:count]), atol=1e-4)


@pytest.mark.parametrize("name", ["sizes", "states"])
def test_segmentation_maps_lie_over_the_plain_one(name, tmp_path):
    recipe = RECIPES[name].changed(task="segmentation", merge="probabilities")
    better = unstride.enhance(net(maps=True), X[:1], recipe=recipe)
    (path,) = export(better, X[:1], tmp_path / "net.pt2")
    for count in (1, 3):
        assert torch.allclose(open_graph(path)(X[:count]), better(X[:count])["out"], atol=1e-3)


@pytest.mark.parametrize("name", ["sizes", "states"])
def test_onnx_runs_the_same_and_holds_the_weights_once(name, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model = net()
    model.body.append(nn.Sequential(nn.Conv2d(12, 400, 3, 1, 1), nn.Conv2d(400, 12, 1)))  # something to hold
    better = unstride.enhance(model, X[:1], recipe=RECIPES[name])
    (path,) = export(better, X[:1], tmp_path / "net.onnx")
    for count in (1, 4):
        assert torch.allclose(open_graph(path)(X[:count]), better(X[:count]), atol=1e-4)
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert path.stat().st_size < 2 * weights


def gated(margins):
    """Gates that stop about half of the images, and then about half again."""
    first, second = (Gate(below=float(margins.quantile(q))) for q in (0.6, 0.5))
    again = Stage(views("flip", "1.5x"), gate=first), Stage(views("0.75x"), gate=second)
    return Recipe("gated", stages=(Stage(), *again), temperature=1.5)


def test_gates_become_stages_with_a_driver(tmp_path):
    images = torch.randn(40, 3, 32, 40, generator=torch.Generator().manual_seed(5))
    best = net()(images).detach().softmax(1).topk(2).values
    better = unstride.enhance(net(), X[:1], recipe=gated(best[:, 0] - best[:, 1]))
    files = export(better, X[:1], tmp_path / "net.pt2")
    assert [f.name for f in files] == ["net.stage1.pt2", "net.stage2.pt2", "net.stage3.pt2", "net.stages.json"]
    looks = [len(p.states) for p in better.explain(images)]
    assert set(looks) == {1, 3, 4}  # otherwise nothing is tested
    assert torch.allclose(run_stages(tmp_path / "net.stages.json", images), better(images), atol=1e-4)
    (tmp_path / "net.stage2.pt2").unlink()
    with pytest.raises(ArtefactError, match=r"net\.stage2\.pt2"):
        Stages(tmp_path / "net.stages.json")


def test_what_cannot_be_one_graph_is_refused_with_the_reason(tmp_path):
    def refused(recipe, match, **options):
        better = unstride.enhance(net(), X[:1], recipe=recipe, **options)
        with pytest.raises(OptionError, match=match):
            export(better, X[:1], tmp_path / "net.pt2")
        assert not list(tmp_path.iterdir())

    refused("paper", "depends on each image", budget=4)
    refused(Recipe("r", stages=(Stage(), Stage(views("flip"), gate=Gate(share=0.2)))), "calibrate")
    refused(Recipe("r", stages=(Stage(), Stage(views("flip"), gate=Gate("agreement", below=0.9)))), "agreement")
    refused(Recipe("r", stages=(Stage(views("plain", "Rotate=10")),)), "no op for it")
    refused("flip", "precision 'bfloat16' casts", precision="bfloat16")
    with pytest.raises(OptionError, match=r"unstride\.enhance"):
        export(net(), X[:1], tmp_path / "net.pt2")
    with pytest.raises(OptionError, match=r"\.onnx \.pt2"):
        export(unstride.enhance(net(), X[:1], recipe="flip"), X[:1], tmp_path / "net.tflite")


def test_a_graph_that_differs_is_not_written(tmp_path, monkeypatch):
    better = unstride.enhance(net(), X[:1], recipe="flip")
    wrong = replace(better.recipe, temperature=2.0)
    other = better.with_options(recipe=wrong, execution="frozen")
    other.fitted(X[:1])
    monkeypatch.setattr(writing, "_whole", lambda own, x: writing.FixedLooks(other, x, wrong.stages))
    with pytest.raises(ArtefactError, match="was not written"):
        export(better, X[:1], tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_exporting_an_enhanced_model_directly_says_what_to_do():
    better = unstride.enhance(net(), X[:1], recipe="flip")
    with pytest.raises(Exception, match=r"unstride\.export\.export"):
        torch.export.export(better, (X,))
    with pytest.raises(OptionError, match=r"unstride\.export\.export"):
        torch.jit.trace(better, X)


@pytest.mark.parametrize("view", ["1.3x", "flip + 0.5x", "ShiftX=5 + ShiftY=-3", "Crop=1.2", "FiveCrop=RightBottom"])
def test_a_static_view_is_the_canvas_own(view):
    parsed = parse_view(view)
    assert torch.allclose(StaticView(parsed, (32, 40))(X), Canvas(X).render(parsed), atol=1e-5)


def test_the_command(tmp_path):
    spec = f"{write_nets(tmp_path)}:net"
    out = tmp_path / "net.pt2"
    done = CliRunner().invoke(app, ["export", spec, str(out), "--recipe", "multiscale-flip", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["files"] == [str(out)]
    loaded = unstride.models.load(spec)
    x = loaded.preprocess(photo())[None]
    better = unstride.enhance(loaded.model, x, recipe="multiscale-flip")
    assert torch.allclose(open_graph(out)(x), better(x), atol=1e-4)
    refused = CliRunner().invoke(app, ["export", spec, str(out), "--recipe", "paper"])
    assert refused.exit_code == 1
    assert "depends on each image" in refused.stderr
