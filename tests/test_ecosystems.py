"""An Enhanced where a model of another library is expected: transformers' pipeline, accelerate's loop, keywords."""

import copy
import inspect
import pickle

import pytest
import torch
from procedure_nets import SmallNet, seeded
from small_nets import photo
from torch import nn

import unstride
from unstride.errors import InputError

X = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


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
    with pytest.raises(InputError, match="wanted the images"):
        better()
    with pytest.raises(InputError, match="wanted the images"):
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
    found = transformers.pipeline(model=better, **ask)(images, top_k=5)
    x = processor(images=images, return_tensors="pt")["pixel_values"]
    wanted = better(x).logits.softmax(1)
    for answers, row in zip(found, wanted, strict=True):
        scores = {resnet.config.label2id[a["label"]]: a["score"] for a in answers}
        assert [scores[k] for k in range(5)] == pytest.approx(row.tolist(), abs=1e-5)
    plain = transformers.pipeline(model=resnet, **ask)(images, top_k=5)
    assert found != plain


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
