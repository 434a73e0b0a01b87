"""Tuning for several labels, numbers, depth and embeddings: what is simulated runs; what is promised holds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from procedure_nets import SmallDepth, SmallNet, seeded
from torch import Tensor, nn
from typer.testing import CliRunner

import unstride
from unstride.cli.main import app
from unstride.errors import DataError, InputError, OptionError
from unstride.geometry.states import State
from unstride.procedure.gates import Gate
from unstride.procedure.looks import Look
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, parse_view
from unstride.storage.distributed import world
from unstride.tuning.candidates import Unit
from unstride.tuning.certificate import in_sequence
from unstride.tuning.choose import laid
from unstride.tuning.choose_looks import Heard, choose_looks
from unstride.tuning.gather import Gathered, gather
from unstride.tuning.judges import judge_of
from unstride.tuning.parts import parts
from unstride.tuning.pool import Pool, Work
from unstride.tuning.simulate import simulate
from unstride.tuning.tasks import Judged

UNITS = [Unit(parse_view("flip")), Unit(parse_view("1.25x")), Unit(PLAIN, "near:3")]


def labelled(task: str, count: int = 6, size: int = 32) -> tuple[nn.Module, Tensor, Tensor]:
    """A tiny network, images, and labels that fit the task."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, size, size, generator=g)
    labels = {
        "multilabel": torch.randint(2, (count, 5), generator=g),
        "regression": torch.randn(count, 5, generator=g),
        "dense": torch.rand(count, size, size, generator=g) + 0.5,
        "embedding": torch.arange(count) % 3,
    }
    return seeded(SmallDepth() if task == "dense" else SmallNet()), x, labels[task]


TASKS = ("multilabel", "regression", "dense", "embedding")


@pytest.mark.parametrize("task", TASKS)
def test_simulated_equals_run(task, tmp_path):
    """Answers and costs; of depth in two sizes, of which one must be filled up, with pixels that were not measured."""
    model, x, y = labelled(task)
    given = [(x, y)]
    if task == "dense":
        y[1, :20] = torch.nan
        given.append((torch.randn(2, 3, 40, 48), torch.rand(2, 40, 48) + 0.5))
    plain = unstride.enhance(model, x[:1], recipe="plain", task=task)
    seen = list(parts(given, x.new_zeros(()), task))
    with world() as us:
        found = gather(plain, seen, UNITS, tmp_path, us, False)
    pool = found.pool
    assert len(found.units) == 3 and not found.left_out
    gates = [None, Gate("margin", below=0.6)] if task == "multilabel" else [None]
    for units, gate in [(u, g) for u in ([], UNITS[:1], UNITS, UNITS[::-2]) for g in gates]:
        stages = laid(units, gate)
        ran = [plain.with_options(recipe=Recipe("", task, stages)).looks(images) for images, _ in given]
        done = simulate(pool, stages)
        costs = [c for _, own in ran for c in own]
        assert done.costs.tolist() == pytest.approx(costs, rel=1e-6)
        outputs = [one for answers, _ in ran for one in answers]
        if task == "dense":
            kept = [o.flatten()[p.at] for o, p in zip(outputs, seen, strict=True)]
            outputs = [nn.functional.pad(o, (0, pool.logits.shape[2] - len(o))) for o in kept]
        torch.testing.assert_close(done.logits, torch.stack(outputs), atol=1e-5, rtol=1e-4)
    if task == "dense":
        assert pool.labels[1].isnan().any() and pool.stands.tolist() == [1024, 384, *[1024] * 4, 1920, 1920]


ZERO = State(((0, 0),))
VIEWS = (PLAIN, *(parse_view(v) for v in ("flip", "1.15x", "ShiftX=1", "ShiftX=-1")))
LOOKS = [Unit(v) for v in VIEWS[1:]]


def made_up(task: str, count: int, seed: int, helps: float, worse: float = 1.0) -> Pool:
    """Looks that share most of their errors; `helps`: how much of each look's is its own; `worse`: of all but plain."""
    g = torch.Generator().manual_seed(seed)
    wide = {"multilabel": 4, "regression": 2, "dense": 40, "embedding": 6}[task]
    if task == "embedding":
        centres = torch.randn(5, wide, generator=torch.Generator().manual_seed(0))
        labels = torch.randint(5, (count,), generator=g)
        truth = 1.5 * centres[labels]
    else:
        labels = torch.randn(count, wide, generator=g)
        labels = (labels > 0).float() if task == "multilabel" else labels
        truth = 3 * (labels - 0.5) if task == "multilabel" else labels
    scale = torch.tensor([1.0, *[worse] * (len(VIEWS) - 1)])[:, None, None]
    own = helps * scale * torch.randn(len(VIEWS), count, wide, generator=g)
    said = truth + torch.randn(count, wide, generator=g) + own
    work = {v: Work((1000, 0), 0, (ZERO,)) for v in VIEWS}
    return Pool(tuple(Look(v, ZERO) for v in VIEWS), said, labels, work, task)


@pytest.mark.parametrize("task", TASKS)
def test_it_finds_what_helps_and_leaves_alone_what_does_not(task):
    heard, fresh = Heard(made_up(task, 150, 0, 1.0), LOOKS), made_up(task, 600, 1, 1.0)
    judge = judge_of(fresh)
    for ceiling in (1.5, 3.0):
        choice = choose_looks(heard, ceiling)
        assert choice.units or (ceiling < 2 and task != "multilabel")  # only several labels have gates
        done = simulate(fresh, heard.stages(choice))
        assert done.cost <= ceiling + 0.08
    assert judge.losses(done.logits).mean() < 0.9 * judge.losses(fresh.plain).mean()
    for same in (made_up(task, 150, 2, 0.0), made_up(task, 150, 2, 1.0, worse=4.0)):
        assert not choose_looks(Heard(same, LOOKS), 3.0).units


@pytest.fixture(scope="module")
def better():
    return unstride.enhance(seeded(SmallNet()), torch.randn(1, 3, 32, 32), recipe="plain")


def judged(pool: Pool, better, guard: float | None = None) -> unstride.Tuned:
    plain = better.with_options(recipe=Recipe("plain", pool.task))
    return Judged(Gathered(pool, None, (), 0.0, tuple(LOOKS)), plain, 0, {}).tuned([1.5, 3.0], 3.0, guard)


def test_what_is_promised_is_kept(better):
    """Tuned on 100 of many draws, the interval covers what the proposed recipe saves of the error on thousands."""
    fresh = made_up("regression", 4000, 99, 0.5)
    judge, covered = judge_of(fresh), []
    plain = judge.losses(fresh.plain).mean().sqrt()
    for seed in range(12):
        tuned = judged(made_up("regression", 100, seed, 0.5), better)
        true = float(1 - judge.losses(simulate(fresh, tuned.recipe.stages).logits).mean().sqrt() / plain)
        assert true >= 0
        if len(tuned.recipe.stages) > 1:
            covered.append(tuned.certificate.low <= true <= tuned.certificate.high)
    assert len(covered) >= 8 and all(covered)


@pytest.mark.parametrize(
    ("task", "metric", "beside", "words"),
    [
        ("multilabel", "mAP %", "NLL", "points better than plain"),
        ("regression", "RMSE", "MAE", "RMSE at least"),
        ("dense", "RMSE", "AbsRel", "smaller than plain's"),
        ("embedding", "k-NN accuracy %", "recall@1", "points better than plain"),
    ],
)
def test_the_table_names_its_metric(task, metric, beside, words, better, monkeypatch):
    monkeypatch.setattr("unstride.evaluation.measures.DRAWS", 20)
    tuned = judged(made_up(task, 500 if task == "embedding" else 150, 0, 2.0), better)
    head = tuned.table()[0]
    assert head[1:3] == (metric, beside) and words in str(tuned) and "use it" in tuned.verdict
    names = [line.name for line in tuned.lines]
    assert names[:2] == ["plain", "flip"] and names[-2:] == ["tuned for 1.5", "tuned for 3"] and len(names) == 6
    assert ("saved %" in head[3]) == (metric == "RMSE")
    assert in_sequence([line.certificate for line in tuned.lines[:-3:-1]])[0] == 0
    left = judged(made_up(task, 60, 2, 1.0, worse=4.0), better)
    assert "leave it alone" in left.verdict and len(left.recipe.stages) == 1
    guarded = judged(tuned.pool, better, guard=-99.0)  # nothing gains so much
    assert guarded.recipe.plain and "allows" in guarded.verdict


def test_each_image_is_judged_without_having_been_seen(better):
    """A look that is right only by chance on these images promises nothing: its figures are from other folds."""
    pool = made_up("regression", 60, 5, 1.0, worse=3.0)
    tuned = judged(pool, better)
    assert all(line.certificate.low <= 0 for line in tuned.lines)


# ------------------------------------------------------------------------------------------------ the whole way

TINY = Path(__file__).parents[1] / "tiny.py"


def drawn(folder: Path, count: int) -> list[Image.Image]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    return [Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(count)]


def flipped(task: str, build: str, images: list[Image.Image]) -> Tensor:
    """What the mean with the mirror image says: labels by which nothing but that is right."""
    loaded = unstride.models.load(f"{TINY}:{build}")
    x = torch.stack([loaded.preprocess(image) for image in images])
    return unstride.enhance(loaded.model, x[:1], recipe="flip", task=task)(x).detach()


def table(root: Path, task: str) -> str:
    images = drawn(root, 40)
    for k, image in enumerate(images):
        image.save(root / f"p{k}.png")
    said = flipped(task, "build", images)
    rows = (said > 0).long() if task == "multilabel" else said
    lines = [",".join([f"p{k}.png", *(f"{v:.9g}" for v in row.tolist())]) for k, row in enumerate(rows)]
    (root / "table.csv").write_text("\n".join(["path,a,b,c,d,e,f", *lines]))
    return f"{'labels' if task == 'multilabel' else 'values'}:{root / 'table.csv'}"


def depth(root: Path) -> str:
    images = drawn(root / "images", 12)
    (root / "depth").mkdir()
    for k, (image, known) in enumerate(zip(images, flipped("dense", "build_depth", images), strict=True)):
        image.save(root / "images" / f"p{k}.png")
        np.save(root / "depth" / f"p{k}.npy", known.numpy())
    return f"depth:{root}"


def twins(root: Path, pairs: bool) -> str:
    """Each image belongs to its mirror image, in a folder to several that are a little brighter each."""
    images, rows = drawn(root, 40 if pairs else 12), ["query,match"]
    for k, image in enumerate(images):
        folder = root if pairs else root / f"c{k:02d}"
        folder.mkdir(exist_ok=True)
        image.save(folder / f"q{k}.png")
        other = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for j in range(1 if pairs else 5):
            other.point(lambda v, j=j: min(255, v + j)).save(folder / f"m{k}{'_' * j}.png")
        rows.append(f"q{k}.png,m{k}.png")
    if pairs:
        (root / "pairs.csv").write_text("\n".join(rows))
    return f"pairs:{root / 'pairs.csv'}" if pairs else f"folder:{root}"


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "task", "key", "best"),
    [
        ("labels", "multilabel", "map", 1.0),
        ("values", "regression", "rmse", 0.0),
        ("depth", "depth", "rmse", 0.0),
        ("folder", "embedding", "knn", 1.0),
        ("pairs", "embedding", "recall1", 1.0),
    ],
)
def test_a_tuned_recipe_walks_through(kind, task, key, best, tmp_path, monkeypatch):
    """The labels are what a mirror makes right: tune finds it, the file runs in evaluate and predict for the task."""
    monkeypatch.setattr("unstride.evaluation.measures.DRAWS", 20)
    name = {"labels": lambda: table(tmp_path, task), "values": lambda: table(tmp_path, task)}
    name |= {"depth": lambda: depth(tmp_path), "folder": lambda: twins(tmp_path, False)}
    data = (name | {"pairs": lambda: twins(tmp_path, True)})[kind]()
    spec, out = f"{TINY}:{'build_depth' if kind == 'depth' else 'build'}", tmp_path / "tuned.toml"
    ask = ["--data", data, "--task", task]
    page = tmp_path / "page.html"
    ways = ["--pool", "small", "--no-paper", "--out", out, "--report", page, "--json"]
    told = run("tune", spec, *ask, "--cost", 2.1, *ways)
    tuned = json.loads(told[told.index("{") :])
    asked = next(row for row in tuned["rows"] if row["name"] == "tuned for 2.1")
    assert "at least" in tuned["verdict"] and "flip" in asked["looks"]
    rows = run("evaluate", spec, *ask, "--recipe", out, "--out", tmp_path / "run", "--json")
    plain, ours = json.loads(rows[rows.index("{") :])["rows"]
    assert ours["metrics"][key] == pytest.approx(best, abs=1e-5) and abs(plain["metrics"][key] - best) > 0.01
    metric = next(k for k in tuned["rows"][0] if k in ("mAP", "RMSE", "k-NN accuracy", "recall@1"))
    assert f"{metric}{'' if key == 'rmse' else ' %'}, plain" in page.read_text()
    assert tuned["rows"][0][metric] == pytest.approx(plain["metrics"][key], rel=1e-4)  # what evaluate measures
    assert ours["macs"] == pytest.approx(asked["cost"], abs=0.01)
    image = next(p for p in tmp_path.rglob("*.png"))
    run("predict", spec, image, "--task", task, "--recipe", out, "--out", tmp_path / "answers.jsonl")
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 1


def test_bad_questions():
    model, x, y = labelled("regression", 40, 16)
    for task, words in (("features", "none for features"), ("multilabel-segmentation", "none for multilabel-seg")):
        with pytest.raises(OptionError, match=words):
            unstride.tune(model, [(x, y)], task=task)
    with pytest.raises(OptionError, match="RMSE"):
        unstride.tune(model, [(x, y)], task="regression", objective="accuracy")
    with pytest.raises(InputError, match="0 or 1"):
        unstride.tune(model, [(x, y)], task="multilabel")
    ask = {"pool": "small", "paper": False, "frontier": False}
    with pytest.raises(DataError, match="3 numbers for a model that gives"):
        unstride.tune(model, [(x, y[:, :3])], task="regression", **ask)
    with pytest.raises(DataError, match="too few"):
        unstride.tune(model, [(x[:9], y[:9])], task="regression", **ask)
    with pytest.raises(DataError, match="no neighbour"):
        unstride.tune(model, [(x, torch.zeros(40, dtype=torch.long))], task="embedding", **ask)
    better = unstride.enhance(model, x[:1], task="regression")
    with pytest.raises(OptionError, match="enhanced for regression"):
        unstride.tune(better, [(x, torch.zeros(40, dtype=torch.long))], task="embedding", **ask)


def test_yours_and_the_paper_are_rows_of_the_table():
    model, x, y = labelled("regression", 32, 16)
    ask = {"pool": "small", "frontier": False, "task": "regression"}
    tuned = unstride.tune(model, [(x, y)], 1.5, recipe="flip", **ask)
    rows = {line.name: line for line in tuned.lines}
    assert rows["yours"].value == pytest.approx(rows["flip"].value, rel=1e-5)
    assert rows["paper, 10 states"].cost > 1.5 and rows["flip"].time is not None
