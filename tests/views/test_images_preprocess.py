"""Preprocess does what the libraries' own transforms do: bit for bit, where they divide by 255 as it does."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision.models import get_model_weights

from unstride.errors import OptionError, SpecError
from unstride.models import load
from unstride.models.libraries import from_timm, from_transformers
from unstride.views.given import check_preprocess, from_torchvision
from unstride.views.images import Preprocess

# v1 divides by 255; v2 multiplies by 1 / 255, or divides, as its version has it.
ROUNDING = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(params=[(300, 400), (500, 90), (100, 100)], ids=str)
def image(request):
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (*request.param, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "inception_v3", "swin_v2_t", "vit_h_14", "fcn_resnet50"])
def test_torchvision(image, name):
    preset = get_model_weights(name).DEFAULT.transforms()
    assert torch.equal(from_torchvision(preset)(image), preset(image))
    assert check_preprocess(preset) == from_torchvision(preset)


def as_lists(version):
    """The usual transforms of a classifier, as torchvision's guides write them."""
    if version == "v1":
        from torchvision import transforms as t

        tensor = [t.ToTensor()]
    else:
        from torchvision.transforms import v2 as t

        tensor = [t.PILToTensor(), t.ToDtype(torch.float32, scale=True)]
    normalise = t.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.2))
    return t.Compose([t.Resize(80), t.CenterCrop((60, 64)), t.Compose(tensor), normalise])


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_lists_of_torchvision_transforms(image, version):
    theirs = as_lists(version)
    torch.testing.assert_close(check_preprocess(theirs)(image), theirs(image), **ROUNDING)


def test_grey_transforms_and_those_on_tensors(image):
    from torchvision.transforms import v2

    on_tensors = v2.Compose([v2.ToImage(), v2.Resize((40, 50)), v2.ToDtype(torch.float32, scale=True)])
    assert (check_preprocess(on_tensors)(image) - on_tensors(image)).abs().mean() < 0.01
    grey = v2.Compose([v2.Grayscale(), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    torch.testing.assert_close(check_preprocess(grey)(image), grey(image), **ROUNDING)


def test_transforms_that_are_no_preprocess_are_named():
    from torchvision.transforms import v2

    for step in (v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32), v2.Resize(80, max_size=90)):
        with pytest.raises(OptionError, match=type(step).__name__):
            check_preprocess(v2.Compose([step]))
    with pytest.raises(OptionError, match="Resize"):
        check_preprocess(v2.Compose([v2.CenterCrop(8), v2.Resize(8)]))
    with pytest.raises(OptionError, match="got function, expected a Preprocess"):
        check_preprocess(as_lists)


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0", "convnext_tiny.fb_in22k", "maxvit_tiny_tf_384"])
def test_timm(image, name):
    config = timm.data.resolve_data_config(timm.get_pretrained_cfg(name).to_dict())
    theirs = timm.data.create_transform(**config, is_training=False)
    assert torch.equal(from_timm(config)(image), theirs(image))
    assert torch.equal(check_preprocess(theirs)(image), theirs(image))


def test_timm_frames_are_refused_for_real_weights_only():
    config = timm.data.resolve_data_config(timm.get_pretrained_cfg("resnet18").to_dict()) | {"crop_mode": "border"}
    with pytest.raises(SpecError, match="border"):
        from_timm(config)
    assert from_timm(config, exact=False).size == (224, 224)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViTImageProcessor", {"size": {"height": 50, "width": 70}}),
        ("SegformerImageProcessor", {}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 224}}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
        ("MobileNetV2ImageProcessor", {}),
        ("MobileViTImageProcessor", {}),  # blue first, not normalised
        ("EfficientNetImageProcessor", {}),
        ("EfficientNetImageProcessor", {"rescale_offset": True, "rescale_factor": 1 / 127.5, "include_top": False}),
        ("BeitImageProcessor", {"do_center_crop": True}),
    ],
)
def test_transformers(image, kind, settings):
    hf = pytest.importorskip("transformers")
    processor = getattr(hf, kind)(**settings)
    theirs = processor(image, return_tensors="pt")["pixel_values"][0]
    ours = from_transformers(processor.to_dict())(image)
    assert ours.shape == theirs.shape
    # transformers may resize tensors instead of PIL images: a few gray levels at most, none of them systematic
    assert (ours - theirs).abs().mean() < 0.02


def test_a_vit_has_the_size_it_was_built_with(monkeypatch):
    import torchvision

    # The best weights of vit_h_14 are for 518 pixels; built without weights it wants 224. Here a small one:
    small = torchvision.models.VisionTransformer(224, 14, 1, 1, 14, 14)
    monkeypatch.setattr("torchvision.models.get_model", lambda name, weights=None: small)
    assert load("torchvision:vit_h_14", weights="random").preprocess.size == (224, 224)


def test_a_gray_image_that_keeps_its_size():
    preprocess = Preprocess(resize=None, crop=None, mean=(0.5,), std=(0.25,), channels="L")
    pixels = np.arange(28 * 28, dtype=np.uint16).reshape(28, 28).astype(np.uint8)
    x = preprocess(Image.fromarray(pixels))
    assert x.shape == (1, 28, 28)
    torch.testing.assert_close(x[0], (torch.tensor(pixels) / 255 - 0.5) / 0.25)
    assert preprocess.size is None


def test_blue_first():
    image = Image.new("RGB", (4, 4), (255, 128, 0))
    x = Preprocess(None, None, (0, 0, 0), (1, 1, 1), channels="BGR")(image)
    assert x[:, 0, 0].tolist() == pytest.approx([0, 128 / 255, 1])


def test_a_crop_larger_than_the_image_is_black_before_normalising():
    x = Preprocess(None, 6, (0.5,) * 3, (0.5,) * 3)(Image.new("RGB", (4, 4), "white"))
    assert x[0, 0].tolist() == [-1] * 6
    assert x[0, 1].tolist() == [-1, 1, 1, 1, 1, -1]


def test_normalise_and_back():
    preprocess, x = Preprocess(), torch.rand(2, 3, 5, 5)
    torch.testing.assert_close(preprocess.denormalise(preprocess.normalise(x)), x)


@pytest.mark.parametrize(
    "preprocess", [Preprocess(), Preprocess((30, 40), None, (0.5,), (0.5,), "bicubic", "L"), Preprocess(None, 64)]
)
def test_json_and_back(preprocess):
    assert Preprocess.from_json(json.loads(json.dumps(preprocess.to_json()))) == preprocess
    hash(preprocess)


def test_it_reads_well():
    assert str(Preprocess()) == (
        "resize shorter side to 256 (bilinear), crop 224x224, RGB/255, mean 0.485 0.456 0.406, std 0.229 0.224 0.225"
    )
    assert str(Preprocess(None, None, (0.5,), (0.5,), channels="L")) == "L/255, mean 0.5, std 0.5"


@pytest.mark.parametrize(
    "wrong",
    [
        {"resize": 0},
        {"resize": (10, -1)},
        {"crop": (1, 2, 3)},
        {"interpolation": "cubic"},
        {"channels": "CMYK"},
        {"channels": "L"},
        {"std": (0.1, 0.1, 0.0)},
    ],
    ids=str,
)
def test_impossible_settings(wrong):
    with pytest.raises(OptionError):
        Preprocess(**wrong)


def test_foreign_json():
    with pytest.raises(OptionError, match="colour"):
        Preprocess.from_json({"colour": "red"})
