"""Every task from outputs to metrics and gains: against torchmetrics, by hand, and whatever the batches are."""

import numpy as np
import pytest
import torch

from unstride.errors import DataError, InputError, OptionError
from unstride.evaluation.intervals import PairedCounts, paired_gain
from unstride.evaluation.scoring import METRICS, Scoring, count, scoring_for

functional = pytest.importorskip("torchmetrics.functional")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels_of(n, classes, seed=0):
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def example(task, n=24, seed=0):
    """A scoring, outputs and targets of a task."""
    if task == "classification":
        y = labels_of(n, 4)
        return scoring_for(task, classes=4), random(n, 4, seed=seed) + 1.5 * torch.eye(4)[y], y.tolist()
    if task == "multilabel":
        y = (random(n, 3, seed=9) > 0).float()
        return scoring_for(task), random(n, 3, seed=seed) + y, list(y)
    if task in ("segmentation", "multilabel-segmentation"):
        y = torch.randint(3, (n, 8, 6), generator=torch.Generator().manual_seed(1))
        y[:, :2] = 255
        return scoring_for(task, classes=3), random(n, 3, 4, 3, seed=seed), list(y)
    if task == "regression":
        y = random(n, 2, seed=5)
        return scoring_for(task), y + random(n, 2, seed=seed), list(y)
    if task == "dense":
        y = random(n, 8, 6, seed=5).abs() + 1
        y[:, :2] = torch.nan
        return scoring_for(task), y.nan_to_num(3.0) + 0.3 * random(n, 8, 6, seed=seed), list(y)
    y = labels_of(n, 4)
    return scoring_for("embedding"), random(n, 6, seed=seed) + 2 * torch.eye(6)[y], y.tolist()


@pytest.mark.parametrize("task", METRICS)
def test_metrics_and_gains_do_not_depend_on_the_batches(task):
    scoring, output, targets = example(task)
    whole = scoring.stats(output, targets)
    parts = [scoring.stats(output[i : i + 5], targets[i : i + 5]) for i in range(0, len(output), 5)]
    joined = scoring.join(parts)
    alone = scoring.join(scoring.split(whole))
    assert count(whole) == count(joined) == len(output)
    for name, value in scoring.metrics(whole).items():
        assert np.isfinite(value)
        assert scoring.metrics(joined)[name] == pytest.approx(value, rel=1e-6)
        assert scoring.metrics(alone)[name] == value
    assert scoring.value(whole) == scoring.metrics(whole)[scoring.metric]
    assert scoring.loss(whole).shape == (len(output),)


@pytest.mark.parametrize("task", METRICS)
def test_a_gain_is_positive_where_the_result_is_better(task):
    scoring, output, targets = example(task)
    _, worse, _ = example(task, seed=1)
    rest = 0.3 * worse + 0.7 * output if task not in ("embedding",) else random(*output.shape, seed=3)
    for metric in METRICS[task]:
        own = scoring_for(task, metric, scoring.classes or None)
        before, after = own.stats(rest, targets), own.stats(output, targets)
        gain = own.gain(before, after)
        change = own.value(after) - own.value(before)
        lower = metric in ("NLL", "ECE", "Brier", "RMSE", "MAE", "AbsRel")
        assert gain.estimate == pytest.approx(-change if lower else change, abs=1e-9)
        assert gain.low <= gain.estimate <= gain.high
        assert own.gain(before, before).estimate == 0
        corrected, broken = own.changed(before, after)
        assert corrected.shape == broken.shape == (len(output),) and not (corrected & broken).any()


def test_accuracy_has_the_paired_interval():
    scoring, output, targets = example("classification", 60)
    other = random(60, 4, seed=8) + 1.5 * torch.eye(4)[torch.tensor(targets)]
    before, after = scoring.stats(other, targets), scoring.stats(output, targets)
    was, now = ((x.argmax(1) == torch.tensor(targets)).numpy() for x in (other, output))
    assert scoring.gain(before, after) == paired_gain(PairedCounts.from_correct(was, now))
    assert [int(c.sum()) for c in scoring.changed(before, after)] == [(now & ~was).sum(), (was & ~now).sum()]
    # Copies of each image, as groups, say as little as the images alone; as images they would say more.
    twice = [scoring.join([stats, stats, stats, stats]) for stats in (before, after)]
    grouped = scoring.gain(*twice, groups=np.tile(np.arange(60), 4))
    assert grouped.estimate == pytest.approx(scoring.gain(before, after).estimate)
    assert grouped.width > 1.5 * scoring.gain(*twice).width


def test_one_logit_is_the_second_of_two_classes():
    scoring = scoring_for("classification")
    stats = scoring.stats(torch.tensor([[2.0], [-1.0], [0.5]]), [1, 0, 0])
    assert stats["correct"].tolist() == [True, True, False]
    maps = scoring_for("segmentation").stats(torch.tensor([[[[2.0, -1.0]]]]), torch.tensor([[[1, 1]]]))
    assert maps["areas"].tolist() == [[[0, 1], [1, 1], [0, 2]]]


def test_segmentation_equals_torchmetrics_at_the_size_of_the_masks():
    scoring, output, targets = example("segmentation")
    stats = scoring.stats(output, targets)
    large = torch.nn.functional.interpolate(output, (8, 6), mode="bilinear", align_corners=False)
    jaccard = functional.jaccard_index(large, torch.stack(targets), "multiclass", num_classes=3, ignore_index=255)
    assert scoring.value(stats) == pytest.approx(float(jaccard), abs=1e-6)
    nll = torch.nn.functional.cross_entropy(large, torch.stack(targets), ignore_index=255)
    assert scoring.metrics(stats)["NLL"] == pytest.approx(float(nll), rel=1e-5)
    assert scoring.by_class(stats).shape == (3,)


def test_masks_of_several_sizes_in_one_batch():
    scoring, output, targets = example("segmentation", 2)
    other = targets[1].repeat(2, 1)
    both = scoring.stats(output, [targets[0], other])
    alone = scoring.join([scoring.stats(output[:1], targets[:1]), scoring.stats(output[1:], [other])])
    np.testing.assert_array_equal(both["areas"], alone["areas"])


def test_labels_at_every_pixel():
    scoring = scoring_for("multilabel-segmentation")
    target = torch.tensor([[[1, 0], [1, 255]], [[0, 0], [1, 1]]])  # two labels of one image
    logits = torch.tensor([[[[3.0, 1.0], [-1.0, 5.0]], [[-2.0, -2.0], [4.0, -4.0]]]])
    stats = scoring.stats(logits, [target])
    assert stats["areas"].tolist() == [[[1, 1], [2, 1], [2, 2]]]  # right, predicted, labelled; 255 does not count
    assert scoring.metrics(stats)["mIoU"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    single = scoring.stats(logits[:, :1], torch.tensor([[[1, 0], [1, 255]]]))
    assert single["areas"].tolist() == [[[1], [2], [2]]]


def test_several_labels_equal_torchmetrics():
    scoring, output, targets = example("multilabel", 60)
    stats = scoring.stats(output, targets)
    target = torch.stack(targets).long()
    wanted = functional.classification.multilabel_average_precision(output.sigmoid(), target, num_labels=3)
    assert scoring.value(stats) == pytest.approx(float(wanted), rel=1e-5)
    exact = functional.classification.multilabel_exact_match(output.sigmoid(), target, num_labels=3)
    assert scoring.metrics(stats)["exact match"] == pytest.approx(float(exact))


def test_numbers_and_depth_equal_torchmetrics():
    scoring, output, targets = example("regression")
    target = torch.stack(targets)
    found = scoring.metrics(scoring.stats(output, targets))
    assert found["RMSE"] == pytest.approx(float(functional.mean_squared_error(output, target, squared=False)))
    assert found["MAE"] == pytest.approx(float(functional.mean_absolute_error(output, target)))
    scoring, output, targets = example("dense")
    target = torch.stack(targets)
    known = target.isfinite()
    found = scoring.metrics(scoring.stats(output, targets))
    wanted = functional.mean_squared_error(output[known], target[known], squared=False)
    assert found["RMSE"] == pytest.approx(float(wanted), rel=1e-5)
    relative = functional.mean_absolute_percentage_error(output[known], target[known])
    assert found["AbsRel"] == pytest.approx(float(relative), rel=1e-5)
    assert found == scoring.metrics(scoring.stats(output[:, None], targets))  # (B, 1, H, W)


def test_pairs_have_no_vote():
    scoring = scoring_for("embedding")
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.5, 0.6], [1, 0.01]])
    pairs = torch.tensor([[0, 1, 1, -1], [1, 1, 2, 3], [2, 1, -1, -1], [3, 0, 2, -1], [4, 0, 9, -1]])
    stats = scoring.stats(vectors, list(pairs))
    assert scoring.metrics(stats) == {"recall@1": pytest.approx(2 / 3), "recall@5": 1.0}
    with pytest.raises(OptionError, match="k-NN accuracy"):
        scoring_for("embedding", "k-NN accuracy").value(stats)
    gain = scoring.gain(stats, scoring.stats(vectors.flip(1), list(pairs)), groups=["a", "b", "b", "c", "c"])
    assert gain.low <= gain.estimate <= gain.high


def test_what_cannot_be_scored():
    with pytest.raises(OptionError, match="no labels to be measured with"):
        scoring_for("features")
    with pytest.raises(OptionError, match="expected one of accuracy, top-5"):
        scoring_for("classification", "mIoU")
    assert scoring_for("depth", "absrel").metric == "AbsRel"
    scoring, output, targets = example("regression")
    with pytest.raises(DataError, match="got 1 for each image"):
        scoring.stats(output, [t[:1] for t in targets])
    with pytest.raises(InputError, match="not finite"):
        scoring.stats(output / 0, targets)
    nothing = [torch.full((8, 6), torch.nan)] * 24
    with pytest.raises(DataError, match="nothing in it is measured"):
        scoring_for("dense").stats(random(24, 8, 6), nothing)
    assert isinstance(scoring, Scoring)


def test_the_value_of_each_class():
    scoring = scoring_for("classification", classes=("cat", "dog", "cow"))
    stats = scoring.stats(torch.eye(3)[[0, 1, 0, 1]], [0, 1, 1, 1])
    assert scoring.by_class(stats)[:2].tolist() == [1.0, pytest.approx(2 / 3)]
    assert np.isnan(scoring.by_class(stats)[2])
