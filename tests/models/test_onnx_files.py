"""ONNX files as models: exported recipes with their cost, and files of others, with rows beside the original's."""

import numpy as np
import pytest
import torch
from PIL import Image

import unstride
from unstride import data, models
from unstride.errors import ArtefactError, InputError, PreprocessAssumed, SpecError

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A gated recipe as a file."""
    loaded = models.load("sample")
    images = [item.image() for item in data.load("sample", loaded.preprocess, limit=16)]
    path = tmp_path_factory.mktemp("onnx") / "tensor.onnx"
    unstride.export(loaded, path, recipe="default", images=images)
    return str(path)


def test_the_rows_of_an_exported_file_are_those_of_its_recipe(exported):
    rows = unstride.evaluate(["sample", exported], "sample", limit=60, progress=False)
    recipe = unstride.evaluate("sample", "sample", limit=60, progress=False)[1]
    assert [row.name for row in rows] == ["sample", exported]
    assert rows[1].metrics == pytest.approx(recipe.metrics, abs=1e-3)
    assert rows[1].gain == recipe.gain
    assert rows[1].cost.estimate == pytest.approx(recipe.cost.estimate)


def test_a_file_alone_says_what_it_costs(exported):
    (row,) = unstride.evaluate(exported, "sample", limit=60, progress=False)
    assert 1 < row.cost.estimate < 2 and row.macs == 0


def test_the_file_says_how_images_are_prepared(exported):
    loaded, sample = models.load(exported), models.load("sample")
    assert (loaded.preprocess, loaded.classes, loaded.task) == (sample.preprocess, sample.classes, "classification")
    x = torch.randn(5, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded.model(x)["output"], unstride.enhance(sample)(x), atol=1e-4, rtol=1e-4)


def write(path, kinds, shapes, *nodes):
    ends = [onnx.helper.make_tensor_value_info(n, t, s) for n, t, s in zip("xy", kinds, shapes, strict=True)]
    graph = onnx.helper.make_graph(list(nodes), "g", ends[:1], ends[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8), path)
    return str(path)


def foreign(path, batch):
    """A file that another program wrote: (batch, 3, 16, 16) -> the means (batch, 3)."""
    node = onnx.helper.make_node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)
    return write(path, (1, 1), ([batch, 3, 16, 16], [batch, 3]), node)


def test_a_file_of_pixels_prepares_them_itself(tmp_path):
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["f"], to=1),
        onnx.helper.make_node("ReduceMean", ["f"], ["y"], axes=[1, 2], keepdims=0),
    ]
    loaded = models.load(write(tmp_path / "p.onnx", (2, 1), (["n", "h", "w", 3], ["n", 3]), *nodes))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8))
    means = loaded.model(loaded.preprocess(photo)[None])["y"]
    np.testing.assert_allclose(means[0], np.asarray(photo).mean((0, 1)), rtol=1e-5)


@pytest.mark.parametrize("batch", [1, "n"])
def test_a_file_of_another_program(tmp_path, batch):
    with pytest.warns(PreprocessAssumed, match="does not say how its images are prepared"):
        loaded = models.load(foreign(tmp_path / "f.onnx", batch))
    x = torch.rand(3, 3, 16, 16)
    torch.testing.assert_close(loaded.model(x)["y"], x.mean((2, 3)))
    assert loaded.preprocess.size == (16, 16)
    better = unstride.enhance(loaded.model, recipe="flip", task="classification")
    torch.testing.assert_close(better(x)["y"], x.mean((2, 3)))
    with pytest.raises(InputError, match="cannot take images"):
        loaded.model(torch.rand(2, 3, 8, 8))


def test_files_that_are_none(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(ArtefactError, match="cannot be opened as an ONNX file"):
        models.load(str(tmp_path / "bad.onnx"))
    with pytest.raises(SpecError, match="no such ONNX file"):
        models.load(str(tmp_path / "missing.onnx"))
