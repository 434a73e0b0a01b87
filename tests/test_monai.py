"""An Enhanced where MONAI and nnU-Net expect a network: against MONAI's own inferer with the same passes by hand."""

import pytest
import torch
from torch import Tensor, nn

import unstride
from unstride import Gate, Recipe, Stage

monai = pytest.importorskip("monai")
from monai.data import MetaTensor  # noqa: E402
from monai.inferers import SlidingWindowInferer, sliding_window_inference  # noqa: E402
from monai.networks.nets import UNet  # noqa: E402

SIDE = (8, 8, 8)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), num_res_units=1).eval()


@pytest.fixture(scope="module")
def volume() -> Tensor:
    return torch.randn(1, 1, 14, 12, 16, generator=torch.Generator().manual_seed(1))


def flipped(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) + net(x.flip(-1)).flip(-1)) / 2


def windows(x: Tensor, predictor) -> Tensor:
    with torch.no_grad():
        return sliding_window_inference(x, SIDE, 3, predictor, overlap=0.25)


def test_a_predictor_for_sliding_windows(net: nn.Module, volume: Tensor) -> None:
    """Windows of the batch and of the inferer, tensors and MONAI's own: what MONAI makes of the same passes by hand."""
    recipe = Recipe((Stage(("plain", "flip")),), "segmentation")
    better = unstride.enhance(net, volume[..., :8, :8, :8], recipe=recipe)
    wanted = windows(volume, lambda x: flipped(net, x))
    torch.testing.assert_close(windows(volume, better), wanted, rtol=1e-4, atol=1e-5)
    own = SlidingWindowInferer(SIDE, 1, 0.25)(MetaTensor(volume), better)
    assert isinstance(own, MetaTensor)
    torch.testing.assert_close(own.as_tensor(), wanted, rtol=1e-4, atol=1e-5)
    assert not better.networks["base"].captures


def test_gates_decide_window_by_window_and_nothing_is_kept(net: nn.Module, volume: Tensor) -> None:
    parts = volume.unfold(2, 8, 6).unfold(3, 8, 4).unfold(4, 8, 8).reshape(-1, 1, *SIDE)
    margins = (2 * net(parts).softmax(1).amax(1) - 1).flatten(1).mean(1)
    below = float(margins.detach().sort().values[len(parts) // 2 - 1 :][:2].mean())  # between two of them
    gate = Gate("margin", below=below)
    recipe = Recipe((Stage(), Stage(("flip",), gate=gate)), "segmentation")
    better = unstride.enhance(net, parts[:1], recipe=recipe)
    counts = [len(p.passes) for p in better.explain(parts)]
    assert counts == [2 if m < below else 1 for m in margins.tolist()] and {1, 2} <= {*counts}

    def by_hand(x: Tensor) -> Tensor:
        plain = net(x)
        uncertain = (2 * plain.softmax(1).amax(1) - 1).flatten(1).mean(1) < below
        return torch.where(uncertain.view(-1, 1, 1, 1, 1), flipped(net, x), plain)

    wanted = windows(volume, by_hand)
    torch.testing.assert_close(windows(volume, better), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(windows(volume, better), wanted, rtol=1e-4, atol=1e-5)  # and again, after others


def test_in_the_place_of_a_network_inside_a_predictor(net: nn.Module, volume: Tensor) -> None:
    """What nnU-Net's predictor does: load each fold's weights by the network's own names, call it, mirror axes."""
    better = unstride.enhance(net, volume[..., :8, :8, :8], recipe="flip", task="segmentation")
    before, fold = windows(volume, better), {k: v.clone() for k, v in net.state_dict().items()}
    network = better.to("cpu").eval()
    network.load_state_dict({k: v * 1.5 for k, v in fold.items()})
    assert not torch.allclose(windows(volume, network), before)
    network.load_state_dict(fold)
    torch.testing.assert_close(windows(volume, network), before)
    network.load_state_dict(better.state_dict())  # and by its own names
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        x = volume[..., :8, :8, :8]
        both = network(x) + torch.flip(network(torch.flip(x, (4,))), (4,))  # its own mirroring around ours: no change
        torch.testing.assert_close(both / 2, network(x), rtol=1e-4, atol=1e-4)
