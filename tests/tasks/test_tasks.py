"""Each task's own confidence, agreement, spread and mean, by hand; and what a recipe may ask of it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unstride.errors import OptionError
from unstride.execution.record import Combine
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Search, Stage
from unstride.recipe.view import PLAIN
from unstride.tasks.tasks import TASKS, task_named

NUMBERS = ("regression", "dense", "embedding", "features")


def combined(task: str, how: str, outputs: list[Tensor]) -> Tensor:
    total = Combine(how, TASKS[task], len(outputs[0]))
    for output in outputs:
        total.add(range(len(output)), output, 1.0)
    return total.value()


def test_labels_are_each_a_yes_or_no() -> None:
    task = TASKS["multilabel"]
    logits = torch.tensor([[4.0, -0.2, -4.0], [4.0, 4.0, -4.0]])
    p = logits.sigmoid()
    torch.testing.assert_close(task.confidence(logits, "margin"), (2 * p - 1).abs().amin(1))
    torch.testing.assert_close(task.confidence(logits, "probability"), torch.maximum(p, 1 - p).amin(1))
    uncertainty = -(p * p.log() + (1 - p) * (1 - p).log()) / math.log(2)
    torch.testing.assert_close(task.confidence(logits, "entropy"), 1 - uncertainty.mean(1))
    answers = [task.answer(logits), task.answer(-logits)]
    torch.testing.assert_close(task.confidence(logits, "agreement", answers), torch.tensor([0.5, 0.5]))
    other = torch.tensor([[4.0, 0.2, -4.0], [4.0, 4.0, -4.0]])
    mean = combined("multilabel", "probabilities", [logits, other])
    torch.testing.assert_close(mean.sigmoid(), (p + other.sigmoid()) / 2)
    agreement, spread = task.compare([logits[0], other[0]], mean[0] + 0.01)
    assert agreement == pytest.approx(5 / 6) and spread.shape == (3,)
    assert float(spread[1]) > 0 and float(spread[0]) == pytest.approx(0, abs=1e-6)


def test_numbers_are_averaged_or_their_median_is_taken() -> None:
    outputs = [torch.tensor([[v, -v]]) for v in (1.0, 2.0, 9.0)]
    assert combined("regression", "values", outputs).tolist() == [[4.0, -4.0]]
    assert combined("regression", "median", outputs).tolist() == [[2.0, -2.0]]
    assert combined("regression", "median", outputs[:2]).tolist() == [[1.5, -1.5]]
    agreement, spread = TASKS["regression"].compare([t[0] for t in outputs], torch.tensor([4.0, -4.0]))
    wanted = torch.stack([t[0] for t in outputs]).std(0, correction=0)
    torch.testing.assert_close(spread, wanted)
    assert agreement == pytest.approx(1 - (3 + 2 + 5) / (5 + 6 + 13))


def test_maps_are_compared_pixel_by_pixel() -> None:
    """Two maps that lie one apart everywhere: half of that is their standard deviation."""
    ramp = torch.arange(6.0).expand(4, 6)
    agreement, spread = TASKS["dense"].compare([ramp, ramp + 1], ramp)
    torch.testing.assert_close(spread, torch.full((4, 6), 0.5))
    assert 0 < agreement < 1
    assert TASKS["dense"].compare([ramp, ramp], ramp)[0] == pytest.approx(1)


def test_directions_are_averaged_as_unit_vectors_and_keep_their_length() -> None:
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    mean = combined("embedding", "directions", [a, b])
    torch.testing.assert_close(mean, normalize(torch.ones(1, 2)) * 2)
    assert float(combined("embedding", "directions", [normalize(a), b]).norm()) == pytest.approx(1)
    agreement, spread = TASKS["embedding"].compare([a[0], b[0]], mean[0])
    assert agreement == pytest.approx(math.cos(math.pi / 4))
    assert float(spread) == pytest.approx(1 - math.sqrt(0.5))
    answers = [TASKS["embedding"].answer(v) for v in (a, b)]
    torch.testing.assert_close(
        TASKS["embedding"].confidence(mean, "agreement", answers), torch.tensor([math.cos(math.pi / 4)])
    )
    maps = torch.randn(2, 5, 3, 4)
    _, spread = TASKS["features"].compare([maps[0], maps[0] * 2], maps[0])
    assert spread.shape == (3, 4) and float(spread.max()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("task", NUMBERS)
@pytest.mark.parametrize(
    "fields",
    [
        {"stages": (Stage(states=Search(4, criterion="entropy")),)},
        {"stages": (Stage(states=Search(4, criterion="displacement"), aggregate="entropy"),)},
        {"stages": (Stage(states=Search(4, criterion="displacement", until=Gate(below=0.9))),)},
        {"stages": (Stage(), Stage(("flip",), gate=Gate("margin", below=0.5)))},
        {"combine": "probabilities"},
        {"temperature": 2.0},
        {"stages": (Stage(states=Near(4), aggregate="learned"),)},
    ],
)
def test_what_needs_classes_is_an_error(task: str, fields: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"{task}|has none|classes|one class"):
        Recipe(task=task, **fields)


def test_the_alternative_is_named() -> None:
    with pytest.raises(OptionError, match=r"'displacement'.*Near\(4\)"):
        Recipe((Stage(states=Search(4)),), task="dense")
    with pytest.raises(OptionError, match=r"Near\(4\)"):
        Recipe((Stage(), Stage(("flip",), gate=Gate("entropy", below=0.5))), task="regression")
    with pytest.raises(OptionError, match="agreement"):
        Recipe((Stage(), Stage(("flip",), gate=Gate("margin", below=0.5))), task="embedding")


@pytest.mark.parametrize("task", TASKS)
def test_every_preset_of_every_task_is_a_recipe_or_says_why_not(task: str) -> None:
    for name in ("default", "plain", "flip", "multiscale-flip"):
        assert get(name, task).task == task
    assert get("default", task).stages[0].views[0] == PLAIN
    if task in NUMBERS and TASKS[task].searches:
        (stage,) = get("paper", task).stages
        assert (stage.states.criterion, stage.aggregate) == ("displacement", "mean")


def test_a_recipe_of_one_task_fields_for_another_takes_that_tasks_usual() -> None:
    flip = get("flip")
    assert (flip.combine, flip.changed(task="embedding").combine, flip.changed(task="depth").combine) == (
        "logits",
        "directions",
        "values",
    )
    with pytest.raises(OptionError, match="combine: got 'probabilities'"):
        get("flip", "segmentation").changed(task="dense")


def test_flips_are_left_out_where_they_would_be_wrong() -> None:
    assert all(s.views == (PLAIN,) for s in get("default", "regression").stages)
    assert len(get("default", "embedding").stages) == 2


def test_names() -> None:
    assert task_named("depth").name == "dense"
    for strange in ("boxes", 3, None):
        with pytest.raises(OptionError, match="expected one of 'auto'"):
            task_named(strange)
