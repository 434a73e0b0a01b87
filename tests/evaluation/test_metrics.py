"""Metrics against torchmetrics, an independent reference, and against answers worked out by hand."""

import numpy as np
import pytest
import torch

from unstride.errors import DataError, InputError, OptionError
from unstride.evaluation import metrics as M

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import JaccardIndex  # noqa: E402
from torchmetrics.classification import (  # noqa: E402
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
)


def some(n=700, classes=12, seed=0, sharpness=2.0):
    torch.manual_seed(seed)
    labels = torch.randint(classes, (n,))
    logits = sharpness * torch.randn(n, classes)
    logits[torch.arange(n), labels] += 1.5
    return logits, labels


@pytest.mark.parametrize("classes", [3, 12, 100])
def test_classification_equals_torchmetrics(classes):
    logits, labels = some(classes=classes)
    ours = M.summarise(M.score(logits, labels))
    for k, value in ((1, ours.top1), (min(5, classes), ours.top5)):
        assert value == pytest.approx(float(MulticlassAccuracy(classes, top_k=k, average="micro")(logits, labels)))
    reference = MulticlassCalibrationError(classes, n_bins=15, norm="l1")(logits.softmax(1), labels)
    assert ours.ece == pytest.approx(float(reference), abs=1e-6)
    assert ours.nll == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(labels, classes)
    assert ours.brier == pytest.approx(float((logits.softmax(1) - one_hot).square().sum(1).mean()), rel=1e-5)


def test_scores_do_not_depend_on_the_batches():
    logits, labels = some(50)
    whole = M.score(logits, labels)
    parts = M.Scores.joined([M.score(logits[i : i + 7], labels[i : i + 7]) for i in range(0, 50, 7)])
    for name in ("top1", "top5", "nll", "brier", "confidence"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


def test_certain_predictions_are_in_the_last_bin():
    # Nine right, one wrong, all at confidence 1: the error is the tenth that it is wrong.
    assert M.calibration_error(np.ones(10), np.arange(10) < 9) == pytest.approx(0.1)
    # Two bins, each off by 0.2 in its own direction; over all images they would cancel.
    confidence, correct = np.repeat([0.7, 0.3], 10), np.r_[np.arange(10) < 9, np.arange(10) < 1]
    assert M.calibration_error(confidence, correct) == pytest.approx(0.2)


def test_a_model_that_says_nothing_is_not_right():
    scores = M.score(torch.zeros(10, 10), torch.arange(10))
    assert scores.top1.sum() == 1  # argmax of equal logits is class 0
    assert scores.top5.sum() == 5
    assert M.score(torch.zeros(2, 3), [0, 2]).top5.all()


def test_half_precision_logits_are_scored_in_full():
    logits, labels = some(50)
    full, half = M.score(logits.half().float(), labels), M.score(logits.half(), labels)
    np.testing.assert_array_equal(full.nll, half.nll)


@pytest.mark.parametrize(
    ("logits", "labels", "error", "hint"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2).long(), InputError, r"\(N, K\)"),
        (torch.zeros(2, 3), torch.zeros(3).long(), InputError, r"\(N, K\)"),
        (torch.zeros(2, 3), torch.zeros(2), InputError, "integers"),
        (torch.tensor([[0.0, 1.0], [torch.inf, 0.0]]), torch.zeros(2).long(), InputError, r"rows \[1\]"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), DataError, "label 3 for a model of 3 classes"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), DataError, "label -1"),
    ],
)
def test_bad_input(logits, labels, error, hint):
    with pytest.raises(error, match=hint):
        M.score(logits, labels)


def test_nothing_scored():
    with pytest.raises(DataError):
        M.summarise(M.score(torch.zeros(0, 3), torch.zeros(0).long()))


def flips(corrected, corrupted, same):
    """Scores of a plain and an enhanced model with so many corrections and corruptions."""
    was = np.r_[np.zeros(corrected), np.ones(corrupted), np.arange(same) % 2].astype(bool)
    now = np.r_[np.ones(corrected), np.zeros(corrupted), np.arange(same) % 2].astype(bool)
    blank = np.zeros(len(was))
    return M.Scores(was, was, blank, blank, blank), M.Scores(now, now, blank, blank, blank)


def test_gain_counts_corrections_and_corruptions():
    gain = M.compare(*flips(30, 10, 960))
    assert (gain.corrected, gain.corrupted, gain.n) == (30, 10, 1000)
    assert gain.gain == pytest.approx(0.02)
    # The normal approximation of a mean of 1000 values of variance 0.04 - 0.0004
    width = 1.96 * np.sqrt((0.04 - 0.0004) / 1000)
    assert gain.low == pytest.approx(0.02 - width, abs=0.002)
    assert gain.high == pytest.approx(0.02 + width, abs=0.002)


def test_the_interval_is_that_of_resampling_images():
    rng = np.random.default_rng(5)
    values = rng.normal(0.3, 1.0, 200)
    drawn = values[np.random.default_rng(1).integers(0, 200, (4000, 200))].mean(1)
    low, high = M.bootstrap(values, seed=2)
    expected = np.quantile(drawn, [0.025, 0.975])
    assert [low, high] == pytest.approx(list(expected), abs=0.015)


def test_the_interval_is_reproducible_and_blind_to_order():
    values = np.random.default_rng(0).integers(-1, 2, 300).astype(float)
    assert M.bootstrap(values, 3) == M.bootstrap(values[::-1], 3)
    assert M.bootstrap(values, 3) != M.bootstrap(values, 4)


def test_many_distinct_values_need_little_memory():
    values = np.random.default_rng(0).normal(size=30_000)
    low, high = M.bootstrap(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(30_000), rel=0.1)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((60, 20, 900), "helps"),
        ((20, 60, 900), "hurts"),
        ((21, 20, 900), "no measurable effect"),
        ((0, 0, 50), "no measurable effect"),
        ((1, 0, 50), "no measurable effect"),
    ],
)
def test_the_verdict_in_words(counts, words):
    assert M.compare(*flips(*counts)).verdict == words


def test_comparing_different_images_is_refused():
    plain, _ = flips(1, 1, 5)
    _, better = flips(1, 1, 6)
    with pytest.raises(InputError, match="7 plain, 8 enhanced"):
        M.compare(plain, better)
    with pytest.raises(OptionError):
        M.bootstrap(np.ones(3), resamples=0)


# -------------------------------------------------------------------------------------------------------- segmentation


def frames(n=6, classes=5, size=(20, 30), seed=0, absent=()):
    """Predictions and targets (n, H, W), a tenth of the pixels ignored."""
    torch.manual_seed(seed)
    kept = torch.tensor([k for k in range(classes) if k not in absent])
    target = kept[torch.randint(len(kept), (n, *size))]
    guess = torch.where(torch.rand(n, *size) < 0.7, target, kept[torch.randint(len(kept), (n, *size))])
    target[torch.rand(n, *size) < 0.1] = 255
    return guess, target


@pytest.mark.parametrize("absent", [(), (2,), (0, 4)])
def test_segmentation_equals_torchmetrics(absent):
    guess, target = frames(absent=absent)
    total = sum(M.confusion(g, t, 5) for g, t in zip(guess, target, strict=True))
    reference = MulticlassConfusionMatrix(5, ignore_index=255)(guess, target)
    np.testing.assert_array_equal(total, reference.numpy())
    ours = M.summarise_segmentation(total)
    jaccard = JaccardIndex("multiclass", num_classes=5, ignore_index=255)(guess, target)
    assert ours.miou == pytest.approx(float(jaccard))
    each = JaccardIndex("multiclass", num_classes=5, ignore_index=255, average="none")(guess, target)
    present = [k for k in range(5) if k not in absent]
    assert [ours.iou[k] for k in present] == pytest.approx(each[present].tolist())
    assert all(np.isnan(ours.iou[k]) and np.isnan(ours.acc[k]) for k in absent)
    seen = target != 255
    assert ours.aacc == pytest.approx(float((guess == target)[seen].float().mean()))
    recall = [float((guess == k)[target == k].float().mean()) for k in present]
    assert ours.macc == pytest.approx(np.mean(recall))


def test_worked_by_hand():
    target = torch.tensor([[0, 0, 1], [1, 1, 255]])
    guess = torch.tensor([[0, 1, 1], [1, 2, 0]])
    matrix = M.confusion(guess, target, 4)
    assert matrix.tolist() == [[1, 1, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert M.areas(matrix).tolist() == [[1, 2, 0, 0], [1, 3, 1, 0], [2, 3, 0, 0]]
    ours = M.summarise_segmentation(matrix)
    # Class 2 is predicted but never labelled: IoU 0 counts. Class 3 is nowhere: it does not.
    assert ours.iou[:3] == pytest.approx((1 / 2, 2 / 4, 0))
    assert np.isnan(ours.iou[3])
    assert ours.miou == pytest.approx(1 / 3)
    assert ours.aacc == pytest.approx(3 / 5)
    assert ours.macc == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_the_matrix_is_of_the_data_set_not_the_mean_of_images():
    target = torch.tensor([[[0, 0, 0, 0]], [[1, 1, 1, 1]]])
    guess = torch.tensor([[[0, 0, 0, 0]], [[1, 0, 0, 0]]])
    each = [M.confusion(g, t, 2) for g, t in zip(guess, target, strict=True)]
    assert M.summarise_segmentation(each[0] + each[1]).miou == pytest.approx((4 / 7 + 1 / 4) / 2)
    assert np.mean([M.summarise_segmentation(m).miou for m in each]) == pytest.approx((1 + 1 / 8) / 2)


def test_three_classes_are_no_special_case():
    guess, target = frames(classes=3)
    matrix = M.confusion(guess, target, 3)
    assert M.summarise_segmentation(matrix) == M.summarise_areas(M.areas(matrix))


def test_without_an_ignored_value():
    target = torch.tensor([[0, 1]])
    assert M.confusion(torch.tensor([[0, 0]]), target, 2, ignore=None).tolist() == [[1, 0], [1, 0]]
    with pytest.raises(DataError, match=r"class \[255\]; wanted 0 to 1"):
        M.confusion(target, torch.tensor([[0, 255]]), 2, ignore=None)


def test_bad_maps():
    target = torch.zeros(4, 4, dtype=torch.uint8)
    with pytest.raises(InputError, match="differ in shape"):
        M.confusion(torch.zeros(4, 5), target, 2)
    with pytest.raises(InputError, match=r"prediction holds class \[2\]"):
        M.confusion(torch.full((4, 4), 2), target, 2)
    with pytest.raises(DataError, match=r"target holds class \[7\]"):
        M.confusion(torch.zeros(4, 4), torch.full((4, 4), 7), 2)
    with pytest.raises(DataError, match="no labelled pixel"):
        M.summarise_segmentation(np.zeros((2, 2), np.int64))


def test_gain_in_miou():
    better, target = frames(n=40)
    plain = torch.where(torch.rand(better.shape) < 0.2, torch.randint(5, better.shape), better)
    each = [np.stack([M.areas(M.confusion(g, t, 5)) for g, t in zip(p, target, strict=True)]) for p in (plain, better)]
    flips = M.changed(plain, better, target)
    gain = M.compare_segmentation(*each, flips=flips)
    reference = [float(JaccardIndex("multiclass", num_classes=5, ignore_index=255)(p, target)) for p in (plain, better)]
    assert gain.gain == pytest.approx(reference[1] - reference[0], abs=1e-6)
    assert gain.verdict == "helps"
    assert M.compare_segmentation(*each[::-1]).verdict == "hurts"
    assert M.compare_segmentation(each[0], each[0]).verdict == "no measurable effect"
    seen = target != 255
    assert gain.corrected - gain.corrupted == int((better == target)[seen].sum() - (plain == target)[seen].sum())
    # The same interval by drawing images one by one
    rng = np.random.default_rng(9)
    drawn = []
    for _ in range(1000):
        chosen = rng.integers(0, 40, 40)
        drawn.append(np.subtract(*(M.summarise_areas(a[chosen].sum(0)).miou for a in each[::-1])))
    assert [gain.low, gain.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]).tolist(), abs=0.003)


def test_an_image_without_labels_is_no_obstacle():
    guess, target = frames(n=2)
    target[0] = 255
    each = np.stack([M.areas(M.confusion(g, t, 5)) for g, t in zip(guess, target, strict=True)])
    gain = M.compare_segmentation(each, each)
    assert (gain.low, gain.high) == (0, 0)
