"""An Enhanced where a model of another library is expected: transformers' pipeline, accelerate's loop, keywords."""

import copy
import inspect
import logging
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from procedure_nets import SmallNet, seeded
from small_nets import photo
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import unstride
from unstride.errors import InputError

X = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class Logged(logging.Handler):
    """What a library logs as a warning or an error."""

    def __init__(self, library: str) -> None:
        super().__init__(logging.WARNING)
        self.logger, self.messages = logging.getLogger(library), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> "Logged":
        self.logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)


@pytest.fixture(scope="module")
def resnet():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_type="basic"
    )
    torch.manual_seed(0)
    return transformers.ResNetForImageClassification(config).eval()


def test_keywords_as_the_library_calls_it(resnet):
    better = unstride.enhance(resnet, X[:1], recipe="flip")
    wanted = better(X)
    for inputs in (
        {"pixel_values": X},
        {"pixel_values": X, "labels": torch.zeros(4, dtype=torch.long)},
        {"pixel_values": X, "output_hidden_states": None},
    ):
        found = better(**inputs)
        assert type(found) is type(wanted)
        assert torch.equal(found.logits, wanted.logits)
    assert not torch.allclose(wanted.logits, resnet(X).logits)
    with pytest.raises(InputError, match="output_hidden_states"):
        better(pixel_values=X, output_hidden_states=True)
    with pytest.raises(InputError, match="expected the images"):
        better()
    with pytest.raises(InputError, match="expected the images"):
        better(labels=torch.zeros(4))


def test_a_name_that_the_model_does_not_have_is_an_error():
    net = seeded(SmallNet())
    x = torch.zeros(1, 3, 32, 32)
    better = unstride.enhance(net, x, recipe="flip")
    name = next(iter(inspect.signature(net.forward).parameters))
    assert torch.equal(better(**{name: x}), better(x))
    with pytest.raises(InputError, match="pixels"):
        better(pixels=x)


def test_other_attributes_are_the_models(resnet):
    better = unstride.enhance(resnet, X[:1], recipe="flip")
    assert better.config is resnet.config
    assert (better.device, better.dtype) == (resnet.device, resnet.dtype)
    assert better.num_labels == 5
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = better.no_such_thing
    plain = unstride.enhance(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), X[:1])
    assert (plain.device.type, plain.dtype) == ("cpu", torch.float32)
    assert not hasattr(plain, "config")
    for again in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.allclose(again(X), plain(X))


def test_a_transformers_pipeline_takes_it_unchanged(resnet):
    transformers = pytest.importorskip("transformers")
    processor = transformers.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=1.0)
    better = unstride.enhance(resnet, X[:1], recipe="multiscale-flip")
    ask = {"task": "image-classification", "image_processor": processor}
    images = [photo(k, (80, 80)) for k in range(3)]
    with Logged("transformers") as logged, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = transformers.pipeline(model=better, **ask)(images, top_k=5)
    assert not logged.messages
    x = processor(images=images, return_tensors="pt")["pixel_values"]
    wanted = better(x).logits.softmax(1)
    for answers, row in zip(found, wanted, strict=True):
        scores = {resnet.config.label2id[a["label"]]: a["score"] for a in answers}
        assert [scores[k] for k in range(5)] == pytest.approx(row.tolist(), abs=1e-5)
    plain = transformers.pipeline(model=resnet, **ask)(images, top_k=5)
    assert found != plain
    assert isinstance(better, unstride.Enhanced) and repr(better).startswith("Enhanced(ResNetForImageClassification")
    for again in (copy.deepcopy(better), pickle.loads(pickle.dumps(better)), better.replace(recipe="plain")):
        assert isinstance(again, unstride.Enhanced) and type(again) is type(better)
        assert again(X).logits.shape == (4, 5)


def test_an_accelerate_loop_takes_it_unchanged(resnet):
    accelerate = pytest.importorskip("accelerate")
    better = unstride.enhance(resnet, X[:1], recipe="flip")
    wanted = better(X).logits
    loader = torch.utils.data.DataLoader(
        [{"pixel_values": x, "labels": k} for k, x in enumerate(X)], batch_size=3, shuffle=False
    )
    accelerator = accelerate.Accelerator(cpu=True)
    model, loader = accelerator.prepare(better, loader)
    model.eval()
    found = []
    for batch in loader:
        with torch.no_grad():
            found.append(accelerator.gather_for_metrics(model(**batch).logits))
    assert torch.allclose(torch.cat(found), wanted, atol=1e-5)


def test_lightning_predicts_with_it():
    lightning = pytest.importorskip("lightning.pytorch")

    class Task(lightning.LightningModule):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.network(batch[0])

    better = unstride.enhance(seeded(SmallNet()), recipe="flip", task="classification")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, of the loader's workers
        found = trainer.predict(Task(better), DataLoader(TensorDataset(X), batch_size=3))
    torch.testing.assert_close(torch.cat(found), better(X))


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (1, "spawn")])
def test_loaders_with_any_workers_and_start_method(workers: int, method: str | None) -> None:
    labels = torch.tensor([0, 1, 2, 3])
    loader = DataLoader(TensorDataset(X, labels), batch_size=3, num_workers=workers, multiprocessing_context=method)
    result = unstride.evaluate(seeded(SmallNet()), loader, recipe="flip", task="classification")
    alone = unstride.evaluate(seeded(SmallNet()), [(X, labels)], recipe="flip", task="classification")
    assert result[-1].metrics == pytest.approx(alone[-1].metrics)


def test_transforms_of_torchvision_as_preprocess():
    from torchvision.transforms import v2

    tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    lists = v2.Compose([v2.Resize(40), v2.CenterCrop(32), *tensor, v2.Normalize([0.5] * 3, [0.25] * 3)])
    net, images = seeded(SmallNet()), [photo(k, (60, 50)) for k in range(2)]
    better = unstride.enhance(net, recipe="flip", task="classification", preprocess=lists)
    x = torch.stack([lists(image) for image in images])
    with torch.no_grad():
        torch.testing.assert_close(better(images), (net(x) + net(x.flip(-1))) / 2)


NETS = """
from torch import nn

def net(channels):
    layers = nn.Conv2d(channels, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers)

def grey():
    return net(1)

def many():
    return net(6)
"""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_grey_and_many_channels_are_read_from_the_model(tmp_path: Path) -> None:
    from unstride.cli.main import app

    file = tmp_path / "nets.py"
    file.write_text(NETS)
    photo(0, (60, 50)).save(tmp_path / "a.png")
    for command in (["inspect", f"{file}:many"], ["inspect", f"{file}:grey"], ["predict", f"{file}:grey", "a.png"]):
        words = [str(tmp_path / word) if word.endswith(".png") else word for word in command]
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == 0, (command, done.output)
