"""What `save` writes, `enhance(model, recipe=file)` opens around the same network, and around no other."""

import json
import struct

import pytest
import torch
from fitting_nets import labelled, small_net
from safetensors.torch import save_file
from torch import nn

import unstride
from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, InputError, OptionError
from unstride.method.attention import Attention
from unstride.storage.artefacts import write_artefact
from unstride.views.images import Preprocess

PREPROCESS = Preprocess(resize=28, crop=24)


@pytest.fixture
def learned(net: nn.Module) -> Enhanced:
    torch.manual_seed(4)
    better = unstride.enhance(net, recipe="paper-learned", task="classification", budget=7, layers=(1, 2))
    better.attention = Attention(12).requires_grad_(False)
    with torch.no_grad():
        better.attention.out.normal_()
    return better


def test_what_is_opened_gives_the_same(learned, net, tmp_path):
    x, _ = labelled(4, 0)
    again = unstride.enhance(net, recipe=learned.save(tmp_path / "a.toml"))
    assert torch.equal(again(x), learned(x))
    assert again.recipe == learned.recipe.changed(tensors="a.safetensors")
    assert torch.equal(again.replace(budget=3)(x), learned.replace(budget=3)(x))
    assert {path.name for path in tmp_path.iterdir()} == {"a.toml", "a.safetensors"}


@pytest.mark.parametrize("name", ["flip", "default", "paper", "multiscale-flip"])
def test_presets_come_back_as_they_were(net, tmp_path, name):
    better = unstride.enhance(net, recipe=name, task="classification")
    again = unstride.enhance(net, recipe=better.save(tmp_path / "a.json"))
    assert again.recipe == better.recipe and again.attention is None


def test_several_networks_are_known_by_their_weights(net, tmp_path):
    better = unstride.enhance({"small": net, "large": small_net(seed=9)}, task="classification")
    path = better.save(tmp_path / "a.toml")
    again = unstride.enhance({"small": net, "large": small_net(seed=9)}, recipe=path)
    x, _ = labelled(3, 1)
    assert torch.equal(again(x), better(x))
    with pytest.raises(ArtefactError, match="large"):
        unstride.enhance({"small": net, "large": small_net(seed=10)}, recipe=path)
    with pytest.raises(OptionError, match="names the network 'small'"):
        unstride.enhance(net, recipe=path)


def test_preprocessing_is_stored_and_checked(learned, net, tmp_path):
    path = learned.save(tmp_path / "a.toml", PREPROCESS)
    assert unstride.enhance(net, recipe=path, preprocess=PREPROCESS).preprocess == PREPROCESS
    assert unstride.enhance(net, recipe=path).replace(budget=2).preprocess == PREPROCESS
    with pytest.raises(ArtefactError, match="crop"):
        unstride.enhance(net, recipe=path, preprocess=Preprocess(resize=28, crop=20))


def test_another_network_is_an_error(learned, tmp_path):
    path = learned.save(tmp_path / "a.toml")
    with pytest.raises(ArtefactError, match=r"a\.toml"):
        unstride.enhance(small_net(seed=9), recipe=path)
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        unstride.enhance("resnet18", recipe=path)


def test_foreign_and_damaged_tensors_are_errors(learned, net, tmp_path):
    recipe = learned.save(tmp_path / "a.toml")
    path = tmp_path / "a.safetensors"
    whole = path.read_bytes()

    def fails(words: str = "a") -> None:
        with pytest.raises(ArtefactError, match=words):
            unstride.enhance(net, recipe=recipe)

    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        fails()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    path.write_bytes(bytes(flipped))
    fails("damaged")
    save_file({"w": torch.zeros(2)}, path)
    fails("not one that unstride saved")
    write_artefact(path, {"w": torch.zeros(2)}, {"kind": "photos"})
    fails("photos")
    torch.save({"w": torch.zeros(2)}, path)
    fails()
    path.unlink()
    fails("not a file")


def test_a_header_with_nonsense_is_an_error(learned, net, tmp_path):
    recipe = learned.save(tmp_path / "a.toml")
    path = tmp_path / "a.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    inner = json.loads(header["__metadata__"]["unstride"])
    for key, value in (("channels", 99), ("channels", "many"), ("heads", 5), ("model", "ab" * 8)):
        meta = {**inner, "meta": {**inner["meta"], key: value}}
        text = json.dumps({**header, "__metadata__": {"unstride": json.dumps(meta)}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        with pytest.raises(ArtefactError):
            unstride.enhance(net, recipe=recipe)
