"""Batches of one's own, as a DataLoader, a list or a library's dicts, wherever named data can be given."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unstride
from unstride import models
from unstride.data import load
from unstride.errors import InputError, OptionError, UnstrideError
from unstride.evaluation.benching import bench


@pytest.fixture(scope="module")
def named() -> tuple[models.LoadedModel, unstride.data.Dataset]:
    loaded = models.load("sample")
    return loaded, load("sample", loaded.preprocess, limit=40)


@pytest.fixture(scope="module")
def tensors(named) -> tuple[Tensor, Tensor]:
    _, data = named
    pairs = [data.tensors(i) for i in range(len(data))]
    return torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])


def as_given(kind: str, images: Tensor, labels: Tensor) -> object:
    if kind == "loader":
        return DataLoader(TensorDataset(images, labels), batch_size=7)
    parts = [(images[i : i + 7], labels[i : i + 7]) for i in range(0, len(images), 7)]
    return parts if kind == "list" else [{"pixel_values": x, "labels": y} for x, y in parts]


@pytest.mark.parametrize("kind", ["loader", "list", "dicts"])
def test_evaluate_gives_what_it_gives_for_the_named_data(kind, named, tensors, tmp_path) -> None:
    loaded, data = named
    wanted = unstride.evaluate(loaded, data, (1, 2))
    given = as_given(kind, *tensors)
    found = unstride.evaluate(loaded.model, given, (1, 2), out=tmp_path, batch_size=5)
    for one, other in zip(found, wanted, strict=True):
        assert one.metrics["top1"] == other.metrics["top1"]
        assert one.metrics["nll"] == pytest.approx(other.metrics["nll"], rel=1e-4)
        assert one.images == 40 and one.errors == 0
    again = unstride.evaluate(loaded.model, given, (1, 2), out=tmp_path)
    assert [row.run for row in again] == [row.run for row in found]
    assert len(unstride.read_rows(tmp_path / "rows.jsonl")) == 2


def test_masks_make_it_segmentation() -> None:
    data = load("sample-segmentation", models.load("sample-segmentation").preprocess, limit=4)
    pairs = [data.tensors(i) for i in range(len(data))]
    given = [(x[None], y[None]) for x, y in pairs]
    model = models.load("sample-segmentation").model
    (found,), (wanted,) = (unstride.evaluate(model, d, (1,)) for d in (given, data))
    assert found.task == "segmentation"
    assert found.metrics["miou"] == pytest.approx(wanted.metrics["miou"], abs=1e-6)


def test_tune_fit_and_bench_take_them(named, tensors) -> None:
    model = named[0].model
    images, labels = tensors
    tuned = unstride.tune(model, as_given("dicts", images, labels), 1.5, pool="small", paper=False, frontier=False)
    same = unstride.tune(model, as_given("loader", images, labels), 1.5, pool="small", paper=False, frontier=False)
    untimed = [[line.cells()[:6] for line in x.lines] for x in (tuned, same)]
    assert untimed[0] == untimed[1]
    better = unstride.enhance(model, images[:1], recipe="paper", budget=3)
    for kind in ("dicts", "loader"):
        train, val = as_given(kind, images[:28], labels[:28]), as_given(kind, images[28:], labels[28:])
        report = unstride.fit(better, train, val, epochs=1, budget=2, show=False)
        assert report.train_images == 28
    rows = bench(model, as_given("list", images, labels), (2,), (1,), tta=False, memory=False, growth=False, repeats=1)
    assert rows.rows[0].image == tuple(images.shape[2:])


def test_what_is_no_batch_is_said(named, tensors) -> None:
    model, (images, labels) = named[0].model, tensors
    for wrong, says in (
        ([images[:2]], "wanted \\(images, labels\\)"),
        ([(images[:2], labels[:3])], "2 images"),
        ([(images[:2], labels[:2].float())], "integer"),
        ([{"pixels": images[:2]}], "pixel_values"),
        ([(5, 6)], "pixel_values"),
        ([(images[:2], "ab")], "pixel_values"),
        ([(images[:2], None)], "pixel_values"),
        ([("ab", labels[:2])], "wanted a float tensor"),
        (iter([(images, labels)]), "once only"),
        ([], "no image"),
    ):
        with pytest.raises(UnstrideError, match=says):
            unstride.evaluate(model, wrong, (1,))
    with pytest.raises(OptionError, match="fewer batches"):
        unstride.evaluate(model, [(images, labels)], (1,), limit=3)
    with pytest.raises(OptionError, match="images themselves"):
        unstride.evaluate(model, [(images, labels)], (1,), tta="flip")
    with pytest.raises(InputError):
        bench(model, [], (2,), (1,))


def test_an_image_far_back_is_found_again() -> None:
    from unstride.data.batches import FromBatches

    read = []

    class Once:
        def __iter__(self):
            for k in range(20):
                read.append(k)
                yield torch.full((1, 1, 2, 2), float(k)), torch.tensor([k])

    data = FromBatches(Once())
    assert len(data) == 20
    for index in (0, 1, 3, 2, 19, 18, 0, 7):
        x, y = data.tensors(index)
        assert y == index and float(x[0, 0, 0]) == index
    assert len(read) == 20 + 20 + 8  # once to know it, once in order, once from the start


def test_a_lightning_loop_takes_it_unchanged(named, tensors) -> None:
    lightning = pytest.importorskip("lightning")
    images, labels = tensors
    better = unstride.enhance(named[0].model, images[:1], recipe="flip")

    class Task(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.seen: list[Tensor] = []

        def test_step(self, batch: list[Tensor], number: int) -> None:
            self.seen.append(self.model(batch[0]))
            self.log("accuracy", (self.seen[-1].argmax(1) == batch[1]).float().mean(), batch_size=len(batch[0]))

    task = Task(better)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (told,) = trainer.test(task, as_given("loader", images, labels), verbose=False)
    wanted = better(images)
    assert torch.allclose(torch.cat(task.seen), wanted, atol=1e-5)
    assert told["accuracy"] == pytest.approx(float((wanted.argmax(1) == labels).float().mean()), abs=1e-5)
    assert not torch.allclose(wanted, named[0].model(images))
