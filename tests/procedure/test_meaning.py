"""Each task's own confidence, agreement, spread and mean, by hand; and what a recipe may ask of it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unstride.errors import OptionError
from unstride.procedure.gates import Gate, Stage
from unstride.procedure.looks import Merged
from unstride.procedure.meaning import TASKS, task_named
from unstride.procedure.stopping import Confident
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, parse_view

NUMBERS = ("regression", "dense", "embedding", "features")


def merged(task: str, merge: str, looks: list[Tensor]) -> Tensor:
    out = Merged(merge, TASKS[task])
    for look in looks:
        out.add(len(look), list(range(len(look))), look, 1.0, 1.0)
    return out.logits()


def test_labels_are_each_a_yes_or_no() -> None:
    task = TASKS["multilabel"]
    logits = torch.tensor([[4.0, -0.2, -4.0], [4.0, 4.0, -4.0]])
    p = logits.sigmoid()
    torch.testing.assert_close(task.sure(logits, "margin"), (2 * p - 1).abs().amin(1))
    torch.testing.assert_close(task.sure(logits, "probability"), torch.maximum(p, 1 - p).amin(1))
    doubt = -(p * p.log() + (1 - p) * (1 - p).log()) / math.log(2)
    torch.testing.assert_close(task.sure(logits, "entropy"), 1 - doubt.mean(1))
    own = [task.own(logits), task.own(-logits)]
    torch.testing.assert_close(task.sure(logits, "agreement", own), torch.tensor([0.5, 0.5]))
    other = torch.tensor([[4.0, 0.2, -4.0], [4.0, 4.0, -4.0]])
    mean = merged("multilabel", "probabilities", [logits, other])
    torch.testing.assert_close(mean.sigmoid(), (p + other.sigmoid()) / 2)
    agreement, spread = task.compare([logits[0], other[0]], mean[0] + 0.01)
    assert agreement == pytest.approx(5 / 6) and spread.shape == (3,)
    assert float(spread[1]) > 0 and float(spread[0]) == pytest.approx(0, abs=1e-6)


def test_numbers_are_averaged_or_their_median_is_taken() -> None:
    looks = [torch.tensor([[v, -v]]) for v in (1.0, 2.0, 9.0)]
    assert merged("regression", "values", looks).tolist() == [[4.0, -4.0]]
    assert merged("regression", "median", looks).tolist() == [[2.0, -2.0]]
    assert merged("regression", "median", looks[:2]).tolist() == [[1.5, -1.5]]
    agreement, spread = TASKS["regression"].compare([t[0] for t in looks], torch.tensor([4.0, -4.0]))
    wanted = torch.stack([t[0] for t in looks]).std(0, correction=0)
    torch.testing.assert_close(spread, wanted)
    assert agreement == pytest.approx(1 - (3 + 2 + 5) / (5 + 6 + 13))


def test_maps_are_compared_where_they_lie() -> None:
    """Of two looks the second lies one column beyond: where both see the image they agree to the last digit."""
    ramp = torch.arange(6.0).expand(4, 6)
    moved = ramp + 1
    agreement, spread = TASKS["dense"].compare([ramp, moved], ramp, [(0, 0), (0, 1)])
    assert agreement == pytest.approx(1) and float(spread.max()) == 0
    assert TASKS["dense"].compare([ramp, moved], ramp)[1].max() == pytest.approx(0.5)


def test_directions_are_averaged_as_unit_vectors_and_keep_their_length() -> None:
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    mean = merged("embedding", "directions", [a, b])
    torch.testing.assert_close(mean, normalize(torch.ones(1, 2)) * 2)
    assert float(merged("embedding", "directions", [normalize(a), b]).norm()) == pytest.approx(1)
    agreement, spread = TASKS["embedding"].compare([a[0], b[0]], mean[0])
    assert agreement == pytest.approx(math.cos(math.pi / 4))
    assert float(spread) == pytest.approx(1 - math.sqrt(0.5))
    own = [TASKS["embedding"].own(v) for v in (a, b)]
    torch.testing.assert_close(TASKS["embedding"].sure(mean, "agreement", own), torch.tensor([math.cos(math.pi / 4)]))
    maps = torch.randn(2, 5, 3, 4)
    _, spread = TASKS["features"].compare([maps[0], maps[0] * 2], maps[0])
    assert spread.shape == (3, 4) and float(spread.max()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("task", NUMBERS)
@pytest.mark.parametrize(
    "asked",
    [
        {"budget": 4, "criterion": "entropy"},
        {"budget": 4, "aggregate": "entropy", "criterion": "displacement"},
        {"budget": 4, "criterion": "displacement", "stop": Confident(0.9)},
        {"stages": (Stage(), Stage((parse_view("flip"),), gate=Gate("margin", below=0.5)))},
        {"merge": "probabilities"},
        {"temperature": 2.0},
        {"aggregate": "attention"},
    ],
    ids=lambda asked: "-".join(asked),
)
def test_what_needs_classes_is_refused(task: str, asked: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"{task}|has none|classes"):
        Recipe(task=task, **asked)


def test_the_alternative_is_named() -> None:
    with pytest.raises(OptionError, match=r"'displacement'.*near:4"):
        Recipe(task="dense", budget=4, criterion="entropy")
    with pytest.raises(OptionError, match="near:4"):
        Recipe(task="regression", stages=(Stage(), Stage((parse_view("flip"),), gate=Gate("entropy", below=0.5))))
    with pytest.raises(OptionError, match="agreement"):
        Recipe(task="embedding", stages=(Stage(), Stage((parse_view("flip"),), gate=Gate("margin", below=0.5))))


@pytest.mark.parametrize("task", TASKS)
def test_every_preset_of_every_task_is_a_recipe_or_says_why_not(task: str) -> None:
    for name in ("default", "plain", "flip", "multiscale-flip"):
        assert get(name, task).task == task
    assert get("default", task).stages[0].views[0] == PLAIN
    searched = get("paper", task) if TASKS[task].searches else None
    if task in NUMBERS and searched is not None:
        assert (searched.criterion, searched.aggregate) == ("displacement", "mean")


def test_a_recipe_of_one_task_asked_for_another_takes_that_tasks_usual() -> None:
    flip = get("flip")
    assert (flip.merge, flip.changed(task="embedding").merge, flip.changed(task="depth").merge) == (
        "logits",
        "directions",
        "values",
    )
    with pytest.raises(OptionError, match="merge='probabilities'"):
        get("flip", "segmentation").changed(task="dense")


def test_mirrors_are_left_out_where_they_would_be_wrong() -> None:
    assert all(s.views == (PLAIN,) for s in get("default", "regression").stages)
    assert len(get("default", "embedding").stages) == 2


def test_names() -> None:
    assert task_named("depth").name == "dense"
    for strange in ("boxes", 3, None):
        with pytest.raises(OptionError, match="wanted one of 'auto'"):
            task_named(strange)
