"""Weights from a file: they fit exactly or are refused, and nothing is executed."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from unstride.errors import ArtefactError, SpecError
from unstride.models import load, read_weights

SPEC = "torchvision:squeezenet1_1"


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(3)
    from torchvision.models import squeezenet1_1

    return squeezenet1_1().state_dict()


@pytest.mark.parametrize("prefix", ["", "module.", "model.module.", "_orig_mod."])
@pytest.mark.parametrize("envelope", [None, "state_dict", "model"])
def test_pt_files_with_what_trainers_put_around_them(tmp_path, state, prefix, envelope):
    content = {prefix + name: tensor for name, tensor in state.items()}
    torch.save(content if envelope is None else {envelope: content, "epoch": 3}, tmp_path / "w.pth")
    loaded = load(SPEC, weights=tmp_path / "w.pth")
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.model.state_dict().items())
    assert loaded.weights == str(tmp_path / "w.pth")
    assert len(loaded.classes) == 1000


def test_safetensors_with_another_number_of_classes(tmp_path):
    from torchvision.models import squeezenet1_1

    small = squeezenet1_1(num_classes=7)
    save_file(small.state_dict(), tmp_path / "w.safetensors")
    loaded = load(SPEC, weights=tmp_path / "w.safetensors")
    assert loaded.classes == ()  # ImageNet's names would be wrong
    with torch.no_grad():
        x = loaded.example(64)
        assert torch.equal(loaded.model(x), small.eval()(x))


def test_a_segmenter_with_its_auxiliary_head(tmp_path):
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, aux_loss=True, num_classes=4)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    loaded = load("torchvision:deeplabv3_mobilenet_v3_large", weights=tmp_path / "w.safetensors")
    with torch.no_grad():
        out = loaded.model(loaded.example(64))
    assert out["aux"].shape == out["out"].shape == (1, 4, 64, 64)


def test_smp_and_timm_heads_of_another_size(tmp_path):
    smp = pytest.importorskip("segmentation_models_pytorch")
    import timm

    save_file(smp.Unet("resnet18", encoder_weights=None, classes=11).state_dict(), tmp_path / "u.safetensors")
    assert load("smp:Unet:resnet18", tmp_path / "u.safetensors").model.segmentation_head[0].out_channels == 11
    save_file(timm.create_model("resnet10t", num_classes=102).state_dict(), tmp_path / "t.safetensors")
    assert load("timm:resnet10t", tmp_path / "t.safetensors").model.num_classes == 102


def test_old_checkpoints_without_batch_counters(tmp_path):
    from torchvision.models import resnet18

    state = {k: v for k, v in resnet18().state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "old.pth")
    assert torch.equal(load("torchvision:resnet18", tmp_path / "old.pth").model.conv1.weight, state["conv1.weight"])


def test_weights_of_another_model_name_what_differs(tmp_path, state):
    wrong = dict(state)
    del wrong["features.0.bias"]
    wrong["features.0.extra"] = torch.zeros(1)
    wrong["features.0.weight"] = torch.zeros(64, 1, 3, 3)
    torch.save(wrong, tmp_path / "w.pt")
    with pytest.raises(ArtefactError) as caught:
        load(SPEC, tmp_path / "w.pt")
    for part in (
        "1 missing (features.0.bias)",
        "1 unexpected (features.0.extra)",
        "(64, 1, 3, 3), expected (64, 3, 3, 3)",
    ):
        assert part in str(caught.value)


def test_weights_go_into_a_users_file_too(tmp_path):
    (tmp_path / "mine.py").write_text("from torch import nn\ndef net():\n    return nn.Conv2d(3, 2, 1)\n")
    own = nn.Conv2d(3, 2, 1)
    save_file(own.state_dict(), tmp_path / "w.safetensors")
    assert torch.equal(load(f"{tmp_path}/mine.py:net", tmp_path / "w.safetensors").model.weight, own.weight)


class _Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_a_pickle_is_refused_and_not_run(tmp_path):
    (tmp_path / "bomb.pth").write_bytes(pickle.dumps({"state_dict": _Bomb()}))
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    for name in ("bomb.pth", "module.pt"):
        with pytest.raises(ArtefactError, match="never executed"):
            read_weights(tmp_path / name)


def test_damaged_and_foreign_files(tmp_path, state):
    save_file(state, tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    for name in ("w.safetensors", "text.pth", "empty.pth", "other.pth"):
        with pytest.raises(ArtefactError, match=name):
            read_weights(tmp_path / name)
    with pytest.raises(SpecError, match="no such file"):
        load(SPEC, "nowhere.pth")
    with pytest.raises(SpecError, match="no such file"):
        load(SPEC, "defualt")
