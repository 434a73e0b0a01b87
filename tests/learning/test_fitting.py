"""Training the attention: what is learned, what is never touched, and that a killed run ends as a whole one."""

import copy
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fitting_nets
import pytest
import torch
from torch import nn

import unstride
from unstride.enhanced import Enhanced
from unstride.errors import DataError, InputError, OptionError
from unstride.learning.fitting import FitReport, fit
from unstride.procedure.aggregate import Attention
from unstride.storage.fingerprint import fingerprint

OPTIONS = {"epochs": 3, "lr": 0.02, "budget": 8, "batch_size": 16, "show": False, "familiar": False}


def weights(better: Enhanced) -> dict[str, torch.Tensor]:
    assert better.attention is not None
    return better.attention.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def test_training_lowers_the_loss_and_never_loses_validation_accuracy(better, train, val):
    before = fingerprint(better.model)
    report = fit(better, train, val, **{**OPTIONS, "epochs": 6})
    losses = [e.loss for e in report.epochs[1:]]
    assert losses[-1] < losses[0]
    assert report.epochs[0].loss is None
    assert report.accuracy >= report.epochs[0].val_accuracy
    start, kept = report.epochs[0], report.epochs[report.best]
    assert kept.val_nll == min(e.val_nll for e in report.epochs if e.val_accuracy >= start.val_accuracy)
    assert (report.train_images, report.val_images, report.states, report.channels) == (48, 40, 8, 12)
    assert fingerprint(better.model) == before
    assert all(p.grad is None for p in better.model.parameters())


def test_what_was_learned_is_used_at_any_budget(better, train, val):
    fit(better, train, val, **{**OPTIONS, "lr": 0.1})
    with torch.no_grad():
        better.attention.out.fill_(0.5)
    x = val[0][0]
    learned = better.with_options(aggregate="attention", criterion="learned")
    mean = better.with_options(aggregate="mean", criterion="entropy")
    for budget in (2, 5, 20):
        a, b = learned.with_options(budget=budget)(x), mean.with_options(budget=budget)(x)
        assert a.shape == b.shape and not torch.allclose(a, b)
        assert learned.with_options(budget=budget).explain(x[:1])[0].states.__len__() == budget


def test_epoch_0_is_the_mean_of_the_states(better, train, val):
    """The untrained module is the mean, so validation before training is that of aggregate="mean"."""
    report = fit(better, train, val, **{**OPTIONS, "epochs": 1})
    mean = better.with_options(aggregate="attention", criterion="entropy", budget=8)
    mean.attention = Attention(12)
    x, y = (torch.cat(parts) for parts in zip(*val, strict=True))
    logits = mean(x)
    assert report.epochs[0].val_accuracy == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert report.epochs[0].val_nll == pytest.approx(float(nn.functional.cross_entropy(logits, y)), abs=2e-3)
    plain = better.model(x).argmax(1)
    assert report.plain == pytest.approx(float((plain == y).float().mean()))


def test_a_seed_decides_everything_but_the_order_of_the_loader_nothing(better, train, val, tmp_path):
    reports = [fit(better, train, val, **OPTIONS, seed=1)]
    first = {k: v.clone() for k, v in weights(better).items()}
    x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
    order = torch.randperm(len(y))
    shuffled = [(x[i], y[i]) for i in order.split(13)]
    reports.append(fit(better, shuffled, val, **OPTIONS, seed=1, cache_dir=tmp_path))
    # maps may differ in the last bit between batch sizes, so the weights agree to rounding
    assert all(torch.allclose(first[k], v, atol=1e-4) for k, v in weights(better).items())
    fit(better, train, val, **OPTIONS, seed=2)
    assert not same(first, weights(better))


@pytest.fixture
def too_sure(net):
    """Right as often as the net, and far too sure of it: the one thing that is certainly to be learned."""
    sure = copy.deepcopy(net)
    with torch.no_grad():
        sure[-1].weight.mul_(20)
        sure[-1].bias.mul_(20)
    return unstride.enhance(sure, torch.zeros(1, 3, 24, 24), budget=6)


def test_what_familiar_images_teach_goes_half_the_way(too_sure, train, val, monkeypatch):
    """Without the new light only the way of w_o differs, and an untrained query prefers no state."""
    better = too_sure
    monkeypatch.setattr("unstride.learning.sources.unfamiliar", lambda images, seeds: images)
    found = []
    for familiar in (False, True):
        report = fit(better, train, train, **{**OPTIONS, "epochs": 1, "lr": 1e-3, "familiar": familiar})
        assert report.best == 1
        found.append({k: v.clone() for k, v in weights(better).items()})
    assert torch.allclose(found[1]["out"], found[0]["out"] / 2) and found[0]["out"].abs().max() > 0
    assert torch.equal(found[0]["query.weight"], found[1]["query.weight"])


def test_overconfident_logits_are_softened(too_sure, train, val):
    """The common part of w_o is fast enough to find the scale of the logits in few steps."""
    report = fit(too_sure, train, val, **{**OPTIONS, "epochs": 40, "lr": 1e-4})
    assert report.epochs[report.best].val_nll < 0.8 * report.epochs[0].val_nll
    assert float(too_sure.attention.out.max()) < -0.01  # every channel is scaled down


def test_maps_that_do_not_fit_are_computed_anew(better, train, val):
    report = fit(better, train, val, **OPTIONS, cache_bytes=1000)
    assert not report.cached
    assert [e.epoch for e in report.epochs] == [0, 1, 2, 3]
    assert all(math.isfinite(e.loss) for e in report.epochs[1:])


def test_global_random_state_is_left_alone(better, train, val):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    better.prepare(train[0][0])
    fit(better, train, val, **{**OPTIONS, "epochs": 1})
    state = torch.rand(1)
    assert torch.equal(state, expected)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"epochs": 0}, "epochs"),
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"budget": 1}, "budget"),
        ({"batch_size": True}, "batch_size"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"familiar": "no"}, "familiar"),
    ],
)
def test_bad_options_are_refused_by_name(better, train, val, change, word):
    with pytest.raises(OptionError, match=word):
        fit(better, train, val, **{**OPTIONS, **change})


def test_bad_loaders_are_refused(better, train, val):
    x, y = train[0]
    with pytest.raises(InputError, match="once only"):
        fit(better, iter(train), val, **OPTIONS)
    with pytest.raises(InputError, match="wanted an integer each"):
        fit(better, [(x, y.float())], val, **OPTIONS)
    with pytest.raises(DataError, match="train, image 0 of a batch: its label is 7"):
        fit(better, [(x, torch.full_like(y, 7))], val, **OPTIONS)
    with pytest.raises(DataError, match="no batch"):
        fit(better, train, [], **OPTIONS)
    with pytest.raises(InputError, match="one size"):
        fit(better, train, [(torch.zeros(1, 3, 32, 32), y[:1])], **OPTIONS)
    assert better.attention is None


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[2])
import unstride
from fitting_nets import labelled, small_net
from unstride.learning.fitting import fit
torch.set_num_threads(1)
net = small_net()
better = unstride.enhance(net, torch.zeros(1, 3, 24, 24), budget=6)
(x, y), held = labelled(32, 1), labelled(16, 2)
train, val = [(x[:16], y[:16]), (x[16:], y[16:])], [held]
print("ready", flush=True)
report = fit(better, train, val, epochs=int(sys.argv[3]), lr=0.02, budget=8, cache_dir=sys.argv[1], show=False)
better.with_options(aggregate="attention").save(sys.argv[1] + "/out.safetensors")
print("resumed", report.resumed, flush=True)
"""


def start(folder: Path, epochs: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(Path(fitting_nets.__file__).parent), str(epochs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_a_killed_run_goes_on_and_ends_the_same(tmp_path):
    epochs = 60
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed, epochs)
    deadline = time.monotonic() + 300
    while not list(killed.glob("*.safetensors")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "out.safetensors").exists(), "the run ended before it was killed"
    again, other = start(killed, epochs), start(whole, epochs)
    assert "resumed" in other.communicate()[0]
    resumed = int(again.communicate()[0].split()[-1])
    assert 0 <= resumed < epochs
    assert (killed / "out.safetensors").read_bytes() == (whole / "out.safetensors").read_bytes()


def test_processes_share_the_maps_and_agree(tmp_path):
    """Two processes under torchrun end with what one process learns; each computed some of the maps."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert start(alone, 3).wait() == 0
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('"/out.safetensors"', "f\"/out{__import__('os').environ['RANK']}.safetensors\""))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    arguments = [str(shared), str(Path(fitting_nets.__file__).parent), "3"]
    subprocess.run([*command, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)
    whole = (alone / "out.safetensors").read_bytes()
    assert (shared / "out0.safetensors").read_bytes() == whole
    assert (shared / "out1.safetensors").read_bytes() == whole
    assert len(list(shared.glob("train-*/*.safetensors"))) == 2


def test_a_finished_run_is_not_trained_again(better, train, val, tmp_path):
    first = fit(better, train, val, **OPTIONS, cache_dir=tmp_path)
    kept = {k: v.clone() for k, v in weights(better).items()}
    again = fit(better, train, val, **OPTIONS, cache_dir=tmp_path)
    assert (first.resumed, again.resumed) == (0, 3)
    assert again.epochs == first.epochs and same(kept, weights(better))
    assert isinstance(again, FitReport)
    fresh = fit(better, train, val, **OPTIONS, cache_dir=tmp_path, resume=False)
    assert fresh.resumed == 0 and same(kept, weights(better))


def test_an_interrupted_epoch_is_repeated_exactly(better, train, val, tmp_path, monkeypatch):
    whole = fit(better, train, val, **OPTIONS)
    kept = {k: v.clone() for k, v in weights(better).items()}
    from unstride.learning.training import Training

    go = Training._pass

    def stop(self: Training, number: int) -> tuple[float, float]:
        if number == 2:
            raise KeyboardInterrupt
        return go(self, number)

    monkeypatch.setattr(Training, "_pass", stop)
    with pytest.raises(KeyboardInterrupt):
        fit(better, train, val, **OPTIONS, cache_dir=tmp_path)
    monkeypatch.undo()
    report = fit(better, train, val, **OPTIONS, cache_dir=tmp_path)
    assert report.resumed == 1
    assert report.epochs == whole.epochs
    assert same(kept, weights(better))


def test_damaged_work_files_are_computed_again(better, train, val, tmp_path):
    first = fit(better, train, val, **OPTIONS, cache_dir=tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 255
        path.write_bytes(bytes(data))
    again = fit(better, train, val, **OPTIONS, cache_dir=tmp_path)
    assert again.resumed == 0 and again.epochs == first.epochs
