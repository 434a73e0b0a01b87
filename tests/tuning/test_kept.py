"""What is kept of a run goes with its images and how they are prepared; few images set no temperature."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_disk import runs_until_there_is_space

import unstride
from unstride.errors import DataError, OptionError
from unstride.tasks.temperature import fit_temperature, nll, sure_temperature
from unstride.tuning import gather
from unstride.tuning.certificate import certify, verdict
from unstride.views.source import Canvas


def tuned(model, data, folder, **more):
    asked = {"cost": 1.5, "pool": "small", "paper": False, "frontier": False} | more
    return unstride.tune(model, data, cache_dir=folder, **asked)


def few(count: int = 32) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    loaded = unstride.models.load("sample")
    data = unstride.data.load("sample", loaded.preprocess, limit=count)
    pairs = [data.tensors(i) for i in range(count)]
    return loaded.model, torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])


def test_the_same_pixels_in_another_crop_are_looked_at_again(tmp_path: Path) -> None:
    model, x, y = few()
    wide = torch.nn.functional.pad(x, (8, 8, 8, 8))
    for box in ((8, 8, x.shape[2], x.shape[3]), (0, 0, x.shape[2], x.shape[3])):
        data = [(Canvas(wide, box), y)]
        kept, fresh = (tuned(model, data, folder).pool.plain for folder in (tmp_path, None))
        assert torch.equal(kept, fresh)


def test_images_that_are_prepared_otherwise_are_looked_at_again(tmp_path: Path) -> None:
    loaded = unstride.models.load("sample")
    other = dataclasses.replace(loaded.preprocess, mean=tuple(m + 0.2 for m in loaded.preprocess.mean))
    plain = []
    for preprocess in (loaded.preprocess, other):
        data = unstride.data.load("sample", preprocess, limit=32)
        plain.append(tuned(loaded.model, data, tmp_path).pool.plain)
    assert not torch.allclose(*plain)


def computed(monkeypatch) -> list[int]:
    """How many images each call of the network's looks was about."""
    done, look_at = [], gather.look_at
    monkeypatch.setattr(
        gather, "look_at", lambda b, source, looks: done.append(len(source)) or look_at(b, source, looks)
    )
    return done


def test_more_images_another_ceiling_and_another_seed_reuse_what_was_computed(
    tmp_path: Path, monkeypatch, capfd
) -> None:
    done = computed(monkeypatch)
    loaded = unstride.models.load("sample")
    for limit, more in ((32, {}), (32, {"cost": 3.0}), (32, {"seed": 7}), (64, {})):
        found = tuned(loaded, unstride.data.load("sample", loaded.preprocess, limit=limit), tmp_path, **more).pool
    assert sum(done) == 64
    assert "32 of 64 images are taken from an earlier run" in capfd.readouterr().err
    fresh = tuned(loaded, unstride.data.load("sample", loaded.preprocess, limit=64), None).pool
    torch.testing.assert_close(found.logits, fresh.logits)
    assert torch.equal(found.labels, fresh.labels)


def test_a_killed_run_loses_one_batch_and_gives_the_same(tmp_path: Path, monkeypatch) -> None:
    loaded = unstride.models.load("sample")
    data = unstride.data.load("sample", loaded.preprocess, limit=64)
    fresh = tuned(loaded, data, None).pool
    done, look_at = computed(monkeypatch), gather.look_at

    def killed(better, source, looks):
        if len(done) == 2:
            raise KeyboardInterrupt
        return look_at(better, source, looks)

    with monkeypatch.context() as patched:
        patched.setattr(gather, "look_at", killed)
        with pytest.raises(KeyboardInterrupt):
            tuned(loaded, data, tmp_path)
    assert torch.equal(tuned(loaded, data, tmp_path).pool.logits, fresh.logits)
    assert done == [16, 16, 16, 16]


def test_a_full_disk_is_an_error_and_the_run_goes_on_when_there_is_space(tmp_path: Path, monkeypatch) -> None:
    model, x, y = few()
    found = runs_until_there_is_space(lambda: tuned(model, [(x, y)], tmp_path).pool, monkeypatch)
    assert torch.equal(found.logits, tuned(model, [(x, y)], None).pool.logits)


def test_a_model_whose_code_changed_is_computed_again(tmp_path: Path) -> None:
    model, x, y = few()
    before = tuned(model, [(x, y)], tmp_path).pool.plain
    inner = model.forward
    model.forward = lambda images: inner(images) * 2
    assert not torch.allclose(tuned(model, [(x, y)], tmp_path).pool.plain, before)


def test_few_images_that_are_all_right_set_no_temperature() -> None:
    """Their likeliest temperature is as low as it goes, and makes the first mistake cost dear."""
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (2000,), generator=g)
    logits = torch.nn.functional.one_hot(labels, 5) * 4 + torch.randn(2000, 5, generator=g)
    right = (logits.argmax(1) == labels).nonzero()[:40, 0]
    assert fit_temperature(logits[right], labels[right]) < 0.5
    kept = sure_temperature(logits[right], labels[right])
    assert kept == 1.0 or nll(logits, labels, kept).mean() < nll(logits, labels).mean() + 0.01


def test_many_images_of_a_loud_network_set_one() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (500,), generator=g)
    logits = 3 * (torch.nn.functional.one_hot(labels, 5) * 1.5 + torch.randn(500, 5, generator=g))
    assert sure_temperature(logits, labels) == pytest.approx(fit_temperature(logits, labels))
    assert sure_temperature(logits, labels) > 1.5


def test_whole_numbers_of_any_width_are_labels() -> None:
    model, x, y = few()
    assert tuned(model, [(x, y.int())], None).lines[0].value == tuned(model, [(x, y)], None).lines[0].value


def test_masks_of_another_shape_than_their_images_are_refused() -> None:
    model = torch.nn.Conv2d(1, 3, 3, padding=1).eval()
    images, masks = torch.rand(12, 1, 32, 32), torch.zeros(12, 16, 32, dtype=torch.long)
    with pytest.raises(DataError, match=r"masks of \(16, 32\) are no maps of images of \(32, 32\)"):
        tuned(model, [(images, masks)], None, task="segmentation")


@pytest.mark.parametrize("wrong", [{"cost": float("inf")}, {"guard": "a"}, {"guard": -1.0}, {"window": 64}])
def test_what_cannot_be_asked_for_is_refused_before_the_work(wrong) -> None:
    model, x, y = few()
    with pytest.raises(OptionError, match=next(iter(wrong))):
        tuned(model, [(x, y)], None, **wrong)


def test_plain_is_not_refused_by_a_guard() -> None:
    words = verdict([certify(0, 0, 100)], [1.5], 0.1, None)
    assert "guard" not in words and words.startswith("leave it alone: no look")


def test_two_processes_share_a_temporary_folder_and_one_speaks(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    ask = ["tune", "sample", "--data", "sample", "--limit", "100", "--pool", "small", "--no-paper", "--cost", "1.1"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "unstride"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, *ask, "--out", str(out)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("wrote ") == 1 and out.is_file()
