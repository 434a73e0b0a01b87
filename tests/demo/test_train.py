"""The script that makes the embedded default: the same seed gives the same samples and the same weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_bytes

from unstride import sample
from unstride.demo import train
from unstride.enhanced import load
from unstride.sample.data import FashionMNIST


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> FashionMNIST:
    """Test images in the place of all splits: enough to run every step, too few to learn anything."""
    images, labels = sample.classification_sample(300)
    monkeypatch.setattr(train, "TEST_IMAGES", 20)
    monkeypatch.setattr(train, "TEST_SCENES", 3)
    monkeypatch.setattr(train, "TRAIN_SCENES", 64)
    monkeypatch.setattr(train, "FIT_IMAGES", 16)
    rest = (images[256:288], labels[256:288], images[288:], labels[288:])
    return FashionMNIST(images[:256], labels[:256], *rest)


@pytest.fixture(autouse=True)
def as_the_script() -> None:
    torch.set_num_threads(1)


def made(data: FashionMNIST, out: Path) -> dict[str, bytes]:
    out.mkdir()
    train.write_samples(data, out)
    train.train_classification(data, out, epochs=1)
    train.train_segmentation(data, out, epochs=1)
    train.fit_aggregation(data, out, epochs=1)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_every_step_reproduces_its_file(few: FashionMNIST, tmp_path: Path) -> None:
    first, again = made(few, tmp_path / "a"), made(few, tmp_path / "b")
    shipped = {path.name for path in (Path(sample.__file__).parent / "files").iterdir()} - {"LICENSE.txt"}
    assert set(first) == shipped
    for name, content in first.items():
        if not name.endswith(".safetensors"):
            assert content == again[name], name
            continue
        found = [load_bytes(c) for c in (content, again[name])]  # not the bytes: the header's order is free
        one, two = (torch.cat([tensors[key].double().flatten() for key in sorted(tensors)]) for tensors in found)
        assert float((one - two).norm() / one.norm()) < 0.02, name


def test_another_seed_gives_other_networks(few: FashionMNIST, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train.train_classification(few, tmp_path, epochs=1)
    one = (tmp_path / sample.CLASSIFIER_FILE).read_bytes()
    monkeypatch.setattr(train, "SEED", train.SEED + 1)
    train.train_classification(few, tmp_path, epochs=1)
    assert one != (tmp_path / sample.CLASSIFIER_FILE).read_bytes()


def test_the_shipped_aggregation_belongs_to_the_shipped_network() -> None:
    """It is loaded with its fingerprint checked, and its answers differ from the learning-free ones."""
    model = sample.load_classifier()
    file = Path(sample.__file__).parent / "files" / sample.AGGREGATION_FILE
    learned = load(file, model).with_options(budget=4)
    images = sample.preprocess_classification(sample.classification_sample(8)[0])
    with torch.no_grad():
        plain = model(images)
    assert learned(images).shape == plain.shape
    assert not np.allclose(learned(images), plain, atol=1e-3)
