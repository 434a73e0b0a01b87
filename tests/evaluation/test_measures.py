"""What each task is measured by: against torchmetrics and by hand, with paired intervals; and whole evaluations."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from procedure_nets import SmallDepth, SmallNet, seeded
from torch import nn

import unstride
from unstride import data
from unstride.errors import InputError, OptionError
from unstride.evaluation import measures
from unstride.evaluation.words import advice, verdict
from unstride.models import LoadedModel
from unstride.views.images import Preprocess

torchmetrics = pytest.importorskip("torchmetrics")
RNG = torch.Generator().manual_seed(0)
WHOLE = Preprocess(None, None)


def joined(values: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([v[name] for v in values]) for name in values[0]}


def test_several_labels() -> None:
    target = (torch.rand(60, 4, generator=RNG) > 0.6).float()
    plain = torch.randn(60, 4, generator=RNG)
    better = plain + 2 * (target - 0.5)
    values = joined(measures.score("multilabel", [plain, better], list(target)))
    measured, compare = measures.summarise("multilabel", values, 0)
    wanted = torchmetrics.functional.classification.multilabel_average_precision(
        better.sigmoid(), target.long(), num_labels=4
    )
    assert measured[1]["map"] == pytest.approx(float(wanted))
    gain = compare(0, 1)
    assert gain.verdict == "helps" and gain.low < gain.gain < gain.high
    was, now = (plain > 0) == (target > 0), (better > 0) == (target > 0)
    assert (gain.corrected, gain.corrupted) == (int((~was & now).sum()), int((was & ~now).sum()))
    assert compare(1, 0).verdict == "hurts" and compare(0, 0).gain == 0


def test_a_single_label() -> None:
    """A yes or no has an average precision as well, also where draws of the interval have no other label."""
    target = torch.tensor([[1.0], [0], [0], [1], [0], [0]])
    plain, better = torch.tensor([[0.3], [0.9], [-1], [-0.2], [0.1], [-2]]), target - 0.5
    measured, compare = measures.summarise(
        "multilabel", joined(measures.score("multilabel", [plain, better], list(target))), 0
    )
    wanted = torchmetrics.functional.classification.binary_average_precision(plain[:, 0].sigmoid(), target[:, 0].long())
    assert measured[0]["map"] == pytest.approx(float(wanted)) and measured[1]["map"] == 1
    assert compare(0, 1).gain == pytest.approx(1 - float(wanted))


def test_numbers() -> None:
    target = torch.randn(50, 2, generator=RNG)
    plain, better = target + torch.randn(50, 2, generator=RNG), target + 0.1
    values = joined(measures.score("regression", [plain, better], list(target)))
    measured, compare = measures.summarise("regression", values, 0)
    functional = torchmetrics.functional
    assert measured[0]["rmse"] == pytest.approx(float(functional.mean_squared_error(plain, target, squared=False)))
    assert measured[0]["mae"] == pytest.approx(float(functional.mean_absolute_error(plain, target)))
    assert compare(0, 1).verdict == "helps" and compare(0, 1).gain == pytest.approx(measured[0]["rmse"] - 0.1)


def test_depth() -> None:
    """Pixels count alike, whichever map they are in; what was not measured does not count."""
    targets = [torch.rand(4, 6, generator=RNG) + 1 for _ in range(3)]
    targets[1][0] = torch.nan
    guesses = torch.stack([t.nan_to_num(3.0) * s for t, s in zip(targets, (1.1, 1.2, 1.5), strict=True)])
    values = joined(measures.score("dense", [guesses, guesses[:, None]], targets))
    measured, compare = measures.summarise("dense", values, 0)
    known = torch.cat([t[t.isfinite()] for t in targets])
    found = torch.cat([g[t.isfinite()] for g, t in zip(guesses, targets, strict=True)])
    assert measured[0]["rmse"] == pytest.approx(float((known - found).square().mean().sqrt()), rel=1e-5)
    assert measured[0]["absrel"] == pytest.approx(float(((known - found).abs() / known).mean()), rel=1e-5)
    assert measured[0]["delta1"] == pytest.approx(42 / 66)
    assert measured[0] == measured[1] and compare(0, 1).gain == 0


def test_neighbours_by_hand_and_by_torchmetrics() -> None:
    vectors = nn.functional.normalize(torch.randn(40, 5, generator=RNG))
    labels = torch.randint(0, 3, (40,), generator=RNG)
    near = measures.neighbours(vectors, 5, step=7)
    cosine = vectors @ vectors.T - 2 * torch.eye(40)
    assert torch.equal(near, cosine.topk(5, 1).indices)
    values = joined(measures.score("embedding", [vectors, vectors], labels.tolist()))
    measured, compare = measures.summarise("embedding", values, 0)
    others = ~torch.eye(40, dtype=torch.bool)
    hits = [
        torchmetrics.functional.retrieval.retrieval_hit_rate(
            cosine[i][others[i]], labels[others[i]] == labels[i], top_k=5
        )
        for i in range(40)
    ]
    assert measured[0]["recall5"] == pytest.approx(float(torch.stack(hits).mean()))
    votes = [np.bincount(labels[row], minlength=3) for row in near]
    sure = [i for i, v in enumerate(votes) if np.sort(v)[-1] > np.sort(v)[-2]]
    voted = measures.voted(labels[near])
    assert all(int(voted[i]) == int(votes[i].argmax()) for i in sure) and len(sure) > 20
    assert compare(0, 1).gain == 0


def test_pairs_by_hand() -> None:
    """A query is looked for among the second column, never found as itself, and counts where a match of it is there."""
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.5, 0.6], [1, 0.01]])
    pairs = torch.tensor([[0, 1, 1, -1], [1, 1, 2, 3], [2, 1, -1, -1], [3, 0, 2, -1], [4, 0, 9, -1]])
    unit = nn.functional.normalize(vectors)
    assert measures.asked_pairs(pairs).tolist() == [0, 1, 3]  # 4 has a match that could not be read
    assert measures.paired(unit, pairs, 2).tolist() == [[True, False], [False, True], [True, False]]
    values = joined(measures.score("embedding", [vectors, vectors.flip(1)], list(pairs)))
    measured, compare = measures.summarise("embedding", values, 0)
    assert measured[0] == {"recall1": pytest.approx(2 / 3), "recall5": 1.0, "chance": pytest.approx(1 / 3)}
    assert compare(0, 1).n == 3 and measures.measure_of("embedding", measured[0]).name == "recall@1"
    assert measures.measure_of("embedding").key == "knn"


def test_of_equal_votes_the_nearest_wins() -> None:
    assert measures.voted(torch.tensor([[2, 1, 1, 2, 0], [0, 1, 2, 3, 4], [1, 0, 0, 0, 1]])).tolist() == [2, 0, 0]


def test_features_have_no_labels() -> None:
    with pytest.raises(OptionError, match="no labels"):
        measures.measure_of("features")


# ------------------------------------------------------------------------------------------------- whole evaluations


def images(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(folder.name))
    for k in range(count):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"p{k}.png")
    return [f"p{k}.png" for k in range(count)]


def evaluated(model: nn.Module, found: object, report: Path | None = None, **options: object) -> list[unstride.Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = unstride.evaluate(model, found, recipe="flip", report=report, batch_size=3, **options)
    assert len(rows) == 2 and advice(rows)
    assert all(np.isfinite(r.quality) for r in rows)
    return rows


def test_an_evaluation_of_depth(tmp_path: Path) -> None:
    names = images(tmp_path / "images", 4)
    (tmp_path / "depth").mkdir()
    for name in names:
        np.save(
            tmp_path / "depth" / name.replace("png", "npy"), np.random.default_rng(0).random((32, 32), np.float32) + 1
        )
    found = data.load(f"depth:{tmp_path}", WHOLE)
    rows = evaluated(seeded(SmallDepth()), found, tmp_path / "page.html")
    assert set(rows[0].metrics) == {"rmse", "absrel", "delta1"} and rows[0].measure.lower
    assert rows[1].gain["gain"] == pytest.approx(rows[0].metrics["rmse"] - rows[1].metrics["rmse"])
    assert "RMSE" in (tmp_path / "page.html").read_text() and "RMSE" in verdict(rows[1])


def test_an_evaluation_of_several_labels_and_of_numbers(tmp_path: Path) -> None:
    names = images(tmp_path, 6)
    heads = ",".join(f"l{k}" for k in range(5))
    lines = [f"{n}," + ",".join(str((i + k) % 2) for k in range(5)) for i, n in enumerate(names)]
    (tmp_path / "t.csv").write_text(f"path,{heads}\n" + "\n".join(lines))
    rows = evaluated(seeded(SmallNet()), data.load(f"labels:{tmp_path / 't.csv'}", WHOLE))
    assert rows[0].task == "multilabel" and 0 <= rows[0].metrics["map"] <= 1 and "mAP" in verdict(rows[1])
    rows = evaluated(seeded(SmallNet()), data.load(f"values:{tmp_path / 't.csv'}", WHOLE))
    assert rows[0].task == "regression" and rows[0].metrics["rmse"] > 0


def test_an_evaluation_of_embeddings(tmp_path: Path) -> None:
    for name in ("a", "bb", "ccc"):
        images(tmp_path / name, 3)
    found = data.load(f"folder:{tmp_path}", WHOLE)
    rows = evaluated(seeded(SmallNet(7)), found, task="embedding")
    assert rows[0].task == "embedding" and 0 <= rows[0].metrics["recall1"] <= rows[0].metrics["recall5"] <= 1
    better = unstride.enhance(seeded(SmallNet(7)), torch.randn(1, 3, 32, 32), task="embedding", recipe="flip")
    again = unstride.evaluate(better, found)
    assert [r.metrics for r in again] == [r.metrics for r in rows]
    with pytest.raises(OptionError, match="labelled for classification"):
        unstride.evaluate(better.model, found, task="dense")


def test_an_evaluation_of_pairs(tmp_path: Path) -> None:
    names = images(tmp_path, 6)
    rows = [f"{a},{b}" for a, b in zip(names[:3], names[3:], strict=True)]
    (tmp_path / "pairs.csv").write_text("\n".join(["query,match", *rows]))
    found = data.load(f"pairs:{tmp_path / 'pairs.csv'}", WHOLE)
    rows = evaluated(seeded(SmallNet(7)), found, tmp_path / "page.html", task="embedding")
    model = seeded(SmallNet(7))
    with torch.no_grad():
        x = torch.stack([found.tensors(k)[0] for k in range(6)])
        unit = nn.functional.normalize(model(x))
    at = {item.id: k for k, item in enumerate(found)}
    q, g = ([at[n] for n in part] for part in (names[:3], names[3:]))
    right = (unit[q] @ unit[g].T).argmax(1) == torch.arange(3)
    assert rows[0].metrics["recall1"] == pytest.approx(float(right.double().mean()))
    assert rows[0].metrics["recall5"] == 1 and "knn" not in rows[0].metrics
    assert rows[0].measure.name == "recall@1" and "recall@1" in verdict(rows[1])
    assert "recall@1" in (tmp_path / "page.html").read_text()


def test_batches_of_labels_numbers_and_maps() -> None:
    """A loader's numbers are measured as a data set's are; what does not fit the task is refused."""
    x = torch.randn(6, 3, 32, 32, generator=RNG)
    y = torch.rand(6, 5, generator=RNG)
    rows = evaluated(seeded(SmallNet()), [(x[:4], y[:4]), (x[4:], y[4:])], task="regression")
    with torch.no_grad():
        wanted = float((seeded(SmallNet())(x) - y).square().mean().sqrt())
    assert rows[0].metrics["rmse"] == pytest.approx(wanted, rel=1e-5)
    assert evaluated(seeded(SmallNet()), [(x, (y > 0.5).long())], task="multilabel")[0].task == "multilabel"
    assert evaluated(seeded(SmallDepth()), [(x, 1 + x[:, 0].abs())], task="depth")[0].task == "dense"
    for labels, task, words in ((y, "multilabel", "0 or 1"), (y, "dense", "a map"), (y / 0, "regression", "finite")):
        with pytest.raises(InputError, match=words):
            unstride.evaluate(seeded(SmallNet()), [(x, labels)], task=task)


def test_a_recipe_for_embeddings_reads_class_folders_as_such(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k in range(8):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "ab"[k % 2] / f"{k}.png")
    loaded = LoadedModel("mine", seeded(SmallNet(7)), WHOLE)
    rows = unstride.evaluate(loaded, f"folder:{tmp_path}", recipe=unstride.recipe.presets.get("flip", "embedding"))
    assert rows[1].task == "embedding" and "knn" in rows[1].metrics
