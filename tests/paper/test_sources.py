"""Where the networks and images of an exhibit come from."""

import pytest
import torch

from unstride.errors import DataError, OptionError
from unstride.models import LoadedModel, load
from unstride.paper.catalogue import EXHIBITS
from unstride.paper.reproducing import reproduce
from unstride.paper.sources import LAYOUTS, EmbeddedSample, PaperFolder, _library, weights_name
from unstride.views.images import Preprocess


def test_what_is_missing_is_named_with_its_layout_and_its_weights(tmp_path):
    with pytest.raises(DataError, match="there is no such folder"):
        PaperFolder(tmp_path / "nothing")
    with pytest.raises(DataError) as error:
        reproduce("table6", PaperFolder(tmp_path))
    text = str(error.value)
    assert "cityscapes/leftImg8bit" in text
    assert "ADEChallengeData2016/" in text
    assert "weights/cityscapes-fcn-r50-d8.pth (fcn-r50-d8 for cityscapes in the model zoo" in text
    with pytest.raises(DataError, match=r"weights/flowers102-resnet18\.pth \(`unstride reproduce flowers102-finetune`"):
        reproduce("table2", PaperFolder(tmp_path))
    with pytest.raises(OptionError, match="limit"):
        EmbeddedSample(0)


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [
        ("ResNet20", "cifar10", "cifar10-resnet20"),
        ("MobileNetV2-x0.75", "cifar100", "cifar100-mobilenetv2-x0-75"),
        ("RepVGG-A0", "cifar10", "cifar10-repvgg-a0"),
        ("Twins-UperNet", "ade20k", "ade20k-upernet-twins-pcpvt-s"),
        ("antialiased ResNet34", "imagenet", "antialiased-resnet34"),
        ("ResNet18", "flowers102", "flowers102-resnet18"),
    ],
)
def test_weights_have_the_networks_name(model, data, name):
    assert weights_name(model, data) == name


def test_a_network_comes_from_a_weights_file(tmp_path):
    folder = PaperFolder(tmp_path)
    with pytest.raises(DataError, match=r"weights/cifar10-resnet20\.pth"):
        folder.load("ResNet20", "cifar10")
    (tmp_path / "weights").mkdir()
    torch.manual_seed(3)
    own = load("paper:cifar10-resnet20", "random").model
    state = {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in own.state_dict().items()}
    torch.save(state, tmp_path / "weights" / "cifar10_resnet20-4118986f.pt")  # as it is published
    loaded = folder.load("ResNet20", "cifar10")
    assert torch.equal(next(loaded.model.parameters()), next(iter(state.values())))
    assert loaded.spec == "paper:cifar10-resnet20"


def test_every_network_of_an_exhibit_has_a_builder():
    """Nobody writes a function for a network of the paper."""
    specs = {_library(model, data) for exhibit in EXHIBITS.values() for model, data in exhibit.needs if data in LAYOUTS}
    assert {spec.partition(":")[0] for spec in specs} == {"torchvision", "timm", "paper"}
    assert sum(spec.startswith("paper:cifar") for spec in specs) == 2 * 19


def test_the_first_weights_are_loaded(tmp_path, monkeypatch):
    from unstride.compat import import_torchvision

    import_torchvision()
    from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

    fetched = []
    monkeypatch.setattr(
        MobileNet_V2_Weights, "get_state_dict", lambda self, **k: fetched.append(self) or mobilenet_v2().state_dict()
    )
    loaded = PaperFolder(tmp_path).load("MobileNetV2", "imagenet")
    assert fetched == [MobileNet_V2_Weights.IMAGENET1K_V1]
    assert loaded.weights == "IMAGENET1K_V1"
    assert (loaded.preprocess.resize, loaded.preprocess.crop) == (256, (224, 224))


def test_the_rehearsal_fits_on_other_images():
    source = EmbeddedSample(20)
    gray = Preprocess(56, (64, 64), (0.2,), (0.3,), channels="L")
    loaded = LoadedModel("sample", torch.nn.Identity(), gray, "classification")
    test, fitting = source.test(loaded, "imagenet"), source.fitting(loaded, "imagenet")
    assert (len(test), len(fitting.train), fitting.limit) == (20, 2500, 500)
    assert not set(test.chosen) & set(fitting.train.chosen)
    assert "cannot be compared" in source.note
    assert source.schedule == "fast"
