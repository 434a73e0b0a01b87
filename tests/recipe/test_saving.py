"""What `save` writes, `load` gives back around the same network, and around no other."""

import json
import struct

import pytest
import torch
from fitting_nets import labelled, small_net
from safetensors.torch import save_file

import unstride
from unstride.enhanced import Enhanced, load
from unstride.errors import ArtefactError, InputError, OptionError
from unstride.procedure.aggregate import Attention
from unstride.storage.artefacts import write_artefact
from unstride.views.images import Preprocess


@pytest.fixture
def learned(better: Enhanced) -> Enhanced:
    torch.manual_seed(4)
    better.attention = Attention(12)
    with torch.no_grad():
        better.attention.out.normal_()
    return better.with_options(aggregate="attention", criterion="learned", layers=(1, 2), budget=7)


def test_the_loaded_one_answers_alike(learned, net, tmp_path):
    x, _ = labelled(4, 0)
    again = load(learned.save(tmp_path / "a.safetensors"), net)
    assert torch.equal(again(x), learned(x))
    assert again.signature == learned.signature
    assert torch.equal(again.with_options(budget=3)(x), learned.with_options(budget=3)(x))


@pytest.mark.parametrize(
    "stop", [unstride.Confident(0.5), unstride.Margin(0.2), unstride.LowEntropy(0.3), unstride.Agreement(0.8, 3)]
)
def test_options_come_back_as_they_were(better, net, tmp_path, stop):
    states = (((0, 0), (0, 0), (0, 0)), ((0, 1), (1, 0), (0, 0)))
    asked = better.with_options(stop=stop, states=states, aggregate="mean", border="zeros", align=False)
    again = load(asked.save(tmp_path / "a.safetensors"), net)
    assert again.signature == asked.signature
    assert again.attention is None


def test_a_stop_rule_of_ones_own_is_not_saved(better, tmp_path):
    class Mine:
        def reason(self, now):
            return None

    with pytest.raises(OptionError, match="code is not saved"):
        better.with_options(stop=Mine()).save(tmp_path / "a.safetensors")


def test_preprocessing_travels_and_is_checked(learned, net, tmp_path):
    mine = Preprocess(resize=28, crop=24)
    path = learned.save(tmp_path / "a.safetensors", mine)
    assert load(path, net, preprocess=mine).preprocess == mine
    assert load(path, net).with_options(budget=2).preprocess == mine
    with pytest.raises(ArtefactError, match="crop"):
        load(path, net, preprocess=Preprocess(resize=28, crop=20))


def test_another_network_is_refused(learned, tmp_path):
    path = learned.save(tmp_path / "a.safetensors")
    with pytest.raises(ArtefactError, match="fingerprint"):
        load(path, small_net(seed=9))
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        load(path, "resnet18")


def test_foreign_and_damaged_files_are_refused(learned, net, tmp_path):
    path = learned.save(tmp_path / "a.safetensors")
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArtefactError):
            load(path, net)
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(ArtefactError, match="damaged"):
        load(path, net)
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(ArtefactError, match="not one that unstride saved"):
        load(path, net)
    write_artefact(path, {"w": torch.zeros(2)}, {"kind": "tta"})
    with pytest.raises(ArtefactError, match="tta"):
        load(path, net)
    torch.save({"w": torch.zeros(2)}, path)
    with pytest.raises(ArtefactError):
        load(path, net)
    with pytest.raises(ArtefactError, match="not a file"):
        load(tmp_path / "nothing", net)


def test_a_header_that_says_nonsense_is_refused(learned, net, tmp_path):
    path = learned.save(tmp_path / "a.safetensors")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    inner = json.loads(header["__metadata__"]["unstride"])
    for key, value in (
        ("recipe", {"task": "juggling"}),
        ("channels", 99),
        ("recipe", {"budgett": 3}),
        ("preprocess", {"zoom": 1}),
    ):
        meta = {**inner, "meta": {**inner["meta"], key: value}}
        text = json.dumps({**header, "__metadata__": {"unstride": json.dumps(meta)}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        with pytest.raises(ArtefactError, match="usable"):
            load(path, net)
