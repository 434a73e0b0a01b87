"""Metrics against torchmetrics and scikit-learn, independent references, and against answers worked out by hand."""

import numpy as np
import pytest
import torch

from unstride.errors import DataError, InputError
from unstride.evaluation import metrics as M

functional = pytest.importorskip("torchmetrics.functional")
from sklearn import metrics as sklearn_metrics  # noqa: E402
from torchmetrics import JaccardIndex  # noqa: E402


def some(n=300, classes=12, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    logits = sharpness * torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), labels] += 1.5
    return logits, labels


@pytest.mark.parametrize("classes", [3, 12, 100])
def test_classification_equals_torchmetrics(classes):
    logits, labels = some(classes=classes)
    scores = M.class_scores(logits, labels)
    accuracy = functional.classification.multiclass_accuracy
    for k, hits in ((1, scores.correct), (min(5, classes), scores.top5)):
        wanted = accuracy(logits, labels, classes, top_k=k, average="micro")
        assert M.mean(hits) == pytest.approx(float(wanted))
    wanted = functional.classification.multiclass_calibration_error(logits.softmax(1), labels, classes, n_bins=15)
    assert M.calibration_error(scores.confidence, scores.correct) == pytest.approx(float(wanted), abs=1e-6)
    assert M.mean(scores.nll) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(labels, classes)
    assert M.mean(scores.brier) == pytest.approx(float((logits.softmax(1) - one_hot).square().sum(1).mean()), rel=1e-5)


def test_scores_do_not_depend_on_the_batches():
    logits, labels = some(50)
    whole = M.class_scores(logits, labels)
    parts = [M.class_scores(logits[i : i + 7], labels[i : i + 7]) for i in range(0, 50, 7)]
    for name in ("correct", "top5", "nll", "brier", "confidence", "predicted"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(getattr(whole, name), joined)


def test_certain_predictions_are_in_the_last_bin():
    # Nine right, one wrong, all at confidence 1: the error is the tenth that it is wrong.
    assert M.calibration_error(np.ones(10), np.arange(10) < 9) == pytest.approx(0.1)
    # Two bins, each off by 0.2 in its own direction; over all images they would cancel.
    confidence, correct = np.repeat([0.7, 0.3], 10), np.r_[np.arange(10) < 9, np.arange(10) < 1]
    assert M.calibration_error(confidence, correct) == pytest.approx(0.2)
    assert M.reliability(confidence, correct) == [
        (pytest.approx(0.3), pytest.approx(0.1), 10),
        (pytest.approx(0.7), pytest.approx(0.9), 10),
    ]


def test_equal_logits_count_as_argmax_has_it():
    scores = M.class_scores(torch.zeros(10, 10), torch.arange(10))
    assert scores.correct.sum() == 1
    assert scores.top5.sum() == 5


def test_half_precision_logits_are_scored_in_full():
    logits, labels = some(50)
    full, half = M.class_scores(logits.half().float(), labels), M.class_scores(logits.half(), labels)
    np.testing.assert_array_equal(full.nll, half.nll)


@pytest.mark.parametrize(
    ("logits", "labels", "error", "hint"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2).long(), InputError, r"\(N, K\)"),
        (torch.zeros(2, 3), torch.zeros(3).long(), InputError, r"\(N, K\)"),
        (torch.zeros(2, 3), torch.zeros(2), InputError, "integers"),
        (torch.tensor([[0.0, 1.0], [torch.inf, 0.0]]), torch.zeros(2).long(), InputError, r"rows \[1\]"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), DataError, "got 3, expected 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), DataError, "got -1"),
    ],
)
def test_bad_input(logits, labels, error, hint):
    with pytest.raises(error, match=hint):
        M.class_scores(logits, labels)


def test_nothing_measured():
    with pytest.raises(DataError):
        M.mean([])


def weighted(metric, *arrays):
    """A metric of a weighting equals the metric of the images repeated."""
    rng = np.random.default_rng(3)
    times = rng.integers(0, 4, (5, len(arrays[0])))
    repeated = [metric(*(np.repeat(a, own, axis=0) for a in arrays)) for own in times]
    np.testing.assert_allclose(metric(*arrays, weights=times.astype(float)), repeated, rtol=1e-9)


def test_a_weight_is_how_often_an_image_counts():
    rng = np.random.default_rng(0)
    scores, target = rng.normal(size=60).round(1), rng.integers(0, 2, 60)
    confidence, correct = rng.random(60), rng.random(60) < 0.7
    weighted(M.mean, scores)
    weighted(M.calibration_error, confidence, correct)
    weighted(M.average_precision, scores, target)
    weighted(M.auroc, scores, target)
    weighted(M.mean_iou, rng.integers(1, 30, (60, 3, 4)))
    weighted(M.dice, rng.integers(1, 30, (60, 3, 4)))


@pytest.mark.parametrize("ties", [False, True])
def test_rankings_equal_scikit_learn(ties):
    rng = np.random.default_rng(1)
    target = rng.integers(0, 2, (80, 4))
    scores = rng.normal(size=(80, 4)) + target
    scores = scores.round(0) if ties else scores
    for ours, theirs in (
        (M.average_precision, sklearn_metrics.average_precision_score),
        (M.auroc, sklearn_metrics.roc_auc_score),
    ):
        each = [theirs(target[:, k], scores[:, k]) for k in range(4)]
        assert [ours(scores[:, k], target[:, k]) for k in range(4)] == pytest.approx(each)
        assert M.mean_over_labels(ours, scores, target) == pytest.approx(np.mean(each))


def test_a_label_that_no_image_has_says_nothing():
    scores, target = np.array([[0.3, 0.1], [0.2, 0.5]]), np.array([[1, 0], [0, 0]])
    assert M.mean_over_labels(M.average_precision, scores, target) == 1.0
    assert np.isnan(M.average_precision(scores[:, 1], target[:, 1]))


# ---------------------------------------------------------------- maps of classes
def frames(n=6, classes=5, size=(20, 30), seed=0, absent=()):
    """Predictions and targets (n, H, W), a tenth of the pixels without a label."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.tensor([k for k in range(classes) if k not in absent])
    target = known[torch.randint(len(known), (n, *size), generator=generator)]
    other = known[torch.randint(len(known), (n, *size), generator=generator)]
    guess = torch.where(torch.rand(n, *size, generator=generator) < 0.7, target, other)
    target[torch.rand(n, *size, generator=generator) < 0.1] = 255
    return guess, target


def areas_of(guess, target, classes=5):
    return np.stack([M.areas(g, t, classes) for g, t in zip(guess, target, strict=True)])


@pytest.mark.parametrize("absent", [(), (2,), (0, 4)])
def test_segmentation_equals_torchmetrics(absent):
    guess, target = frames(absent=absent)
    areas = areas_of(guess, target)
    jaccard = JaccardIndex("multiclass", num_classes=5, ignore_index=255)(guess, target)
    assert M.mean_iou(areas) == pytest.approx(float(jaccard))
    each = JaccardIndex("multiclass", num_classes=5, ignore_index=255, average="none")(guess, target)
    present = [k for k in range(5) if k not in absent]
    assert M.class_iou(areas)[0][present] == pytest.approx(each[present].tolist())
    assert np.isnan(M.class_iou(areas)[0][list(absent)]).all()
    seen = target != 255
    assert M.pixel_accuracy(areas) == pytest.approx(float((guess == target)[seen].float().mean()))
    f1 = sklearn_metrics.f1_score(target[seen], guess[seen], average="macro", labels=present)
    assert M.dice(areas) == pytest.approx(f1)
    recall = sklearn_metrics.recall_score(target[seen], guess[seen], average="macro", labels=present)
    assert M.mean_accuracy(areas) == pytest.approx(recall)


def test_worked_by_hand():
    target = torch.tensor([[0, 0, 1], [1, 1, 255]])
    guess = torch.tensor([[0, 1, 1], [1, 2, 0]])
    areas = M.areas(guess, target, 4)
    assert areas.tolist() == [[1, 2, 0, 0], [1, 3, 1, 0], [2, 3, 0, 0]]
    # Class 2 is predicted but never labelled: IoU 0 counts. Class 3 is nowhere: it does not.
    assert M.class_iou([areas])[0][:3] == pytest.approx([1 / 2, 2 / 4, 0])
    assert M.mean_iou([areas]) == pytest.approx(1 / 3)
    assert M.pixel_accuracy([areas]) == pytest.approx(3 / 5)
    assert M.mean_accuracy([areas]) == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_iou_is_of_the_data_set_not_the_mean_of_images():
    target = torch.tensor([[[0, 0, 0, 0]], [[1, 1, 1, 1]]])
    guess = torch.tensor([[[0, 0, 0, 0]], [[1, 0, 0, 0]]])
    areas = areas_of(guess, target, 2)
    assert M.mean_iou(areas) == pytest.approx((4 / 7 + 1 / 4) / 2)
    assert np.mean([M.mean_iou(own[None]) for own in areas]) == pytest.approx((1 + 1 / 8) / 2)


def test_bad_maps():
    target = torch.zeros(4, 4, dtype=torch.uint8)
    with pytest.raises(InputError, match=r"\(4, 5\) for a mask \(4, 4\)"):
        M.areas(torch.zeros(4, 5), target, 2)
    with pytest.raises(DataError, match=r"class \[7\], expected 0 to 1"):
        M.areas(torch.zeros(4, 4), torch.full((4, 4), 7), 2)
    with pytest.raises(DataError, match=r"class \[255\], expected 0 to 1"):
        M.areas(torch.zeros(1, 2), torch.tensor([[0, 255]]), 2, ignore=None)
    with pytest.raises(DataError, match="no pixel has a label"):
        M.mean_iou(np.zeros((2, 3, 2)))


# ---------------------------------------------------------------- vectors
def test_neighbours_equal_brute_force_and_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(40, 5, generator=generator))
    labels = torch.randint(0, 3, (40,), generator=generator)
    near = M.neighbours(vectors, 5, step=7)
    cosine = vectors @ vectors.T - 2 * torch.eye(40)
    assert torch.equal(near, cosine.topk(5, 1).indices)
    hits, voted = M.neighbour_hits(vectors, labels, 5)
    others = ~torch.eye(40, dtype=torch.bool)
    rate = functional.retrieval.retrieval_hit_rate
    wanted = [rate(cosine[i][others[i]], labels[others[i]] == labels[i], top_k=5) for i in range(40)]
    assert M.mean(hits[:, :5].any(1)) == pytest.approx(float(torch.stack(wanted).mean()))
    votes = [np.bincount(labels[row], minlength=3) for row in near]
    clear = [i for i, v in enumerate(votes) if np.sort(v)[-1] > np.sort(v)[-2]]
    assert len(clear) > 20
    assert all(voted[i] == (int(votes[i].argmax()) == int(labels[i])) for i in clear)


def test_pairs_by_hand():
    """A query is looked for among the second column, never found as itself; without a match there it does not count."""
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.5, 0.6], [1, 0.01]])
    pairs = torch.tensor([[0, 1, 1, -1], [1, 1, 2, 3], [2, 1, -1, -1], [3, 0, 2, -1], [4, 0, 9, -1]])
    hits, rows = M.pair_hits(vectors, pairs, 2)
    assert rows.tolist() == [0, 1, 3]
    assert hits.tolist() == [[True, False], [False, True], [True, False]]
    with pytest.raises(DataError, match="0 queries"):
        M.pair_hits(vectors, pairs[4:].expand(5, -1), 2)


def test_maps_of_numbers_are_weighted_by_their_pixels():
    squares, pixels = np.array([1.0, 4.0]), np.array([30, 10])
    assert M.root_mean_square(squares, pixels) == pytest.approx(np.sqrt((30 + 40) / 40))
    assert M.mean_error(squares, pixels) == pytest.approx(1.75)
