"""What cannot be meant is refused by name, with the kind of error that the rest of the tool gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from procedure_nets import SmallNet, SmallSegmenter, seeded
from torch import nn

import unstride
from unstride.errors import InputError, OptionError, UnstrideError
from unstride.geometry.states import State, StateSpace

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def better() -> unstride.Enhanced:
    return unstride.enhance(seeded(SmallNet()), IMAGES[:1], budget=4)


WRONG: list[dict[str, Any]] = [
    {"layers": 2},
    {"layers": "2-3"},
    {"layers": (2.0, 3.0)},
    {"layers": []},
    {"layers": (0, 1)},
    {"layers": (3, 4, 5)},
    {"states": 5},
    {"states": "0123"},
    {"states": []},
    {"states": [5]},
    {"states": [None]},
    {"states": [[0, 0, 0, 0.5]]},
    {"states": [[0, 0, 0, (0.5, 1)]]},
    {"states": [[0, 0, 0, (0, 1, 1)]]},
    {"states": [[0, 0, 0, "1"]]},
    {"states": [[0, 0, 0]]},
    {"states": [[0, 0, 0, 4]]},
    {"states": [[0, 0, 0, float("nan")]]},
    {"execution": "fast"},
    {"execution": None},
    {"execution": True},
    {"budget": 0},
    {"budget": -1},
    {"budget": 2.0},
    {"budget": "4"},
    {"budget": True},
    {"bugdet": 4},
    {"task": "detection"},
    {"space": "pixels"},
    {"stop": 0.9},
    {"seed": "a"},
    {"recipe": "nothing of the kind"},
    {"recipe": 5},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_enhance_refuses_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(UnstrideError, match=next(iter(options)).rstrip("s")):
        unstride.enhance(seeded(SmallNet()), IMAGES[:1], **options)


@pytest.mark.parametrize("options", [o for o in WRONG if "recipe" not in o], ids=str)
def test_with_options_refuses_by_name(options: dict[str, Any], better: unstride.Enhanced) -> None:
    with pytest.raises(UnstrideError, match=next(iter(options)).rstrip("s")):
        better.with_options(**options)(IMAGES)


def test_with_options_changes_what_it_says(better: unstride.Enhanced) -> None:
    fast = better.with_options(execution="frozen")
    assert fast.prepare(IMAGES) is not better.prepare(IMAGES)
    assert better.with_options(space="logits").prepare(IMAGES).space == "logits"
    torch.testing.assert_close(fast(IMAGES), better(IMAGES), atol=1e-5, rtol=1e-4)
    with pytest.raises(UnstrideError, match="segmentation"):
        better.with_options(task="segmentation")(IMAGES)
    assert better.with_options(budget=3).prepare(IMAGES) is better.prepare(IMAGES)


@pytest.mark.parametrize(
    "budgets", [4, None, "4", [], [0], [1, -1], [2.5], [True], [None], ["4"], [[1]], range(1, 10**9)]
)
@pytest.mark.parametrize("call", ["curve", "costs"])
def test_budgets_that_there_are_not(call: str, budgets: Any, better: unstride.Enhanced) -> None:
    with pytest.raises(OptionError, match="budgets"):
        getattr(better, call)(IMAGES, budgets)


def test_a_budget_that_is_asked_for_twice_is_answered_once(better: unstride.Enhanced) -> None:
    for budgets in ([4, 4], [4, 1, 4], (b for b in (1, 4, 1))):
        found = better.costs(IMAGES, budgets)  # type: ignore[arg-type]
        assert all(len(logits) == len(costs) == 2 for logits, costs in found.values())
        torch.testing.assert_close(found[4][0], better(IMAGES))
    assert list(better.curve(IMAGES, [4, 1, 4])) == [4, 1]


def test_the_plain_state_is_counted_where_states_lack_it(better: unstride.Enhanced) -> None:
    given = better.with_options(states=[[0, 0, 1, 0], [0, 0, 0, 1]])
    (_, costs) = given.costs(IMAGES, [3])[3]
    assert costs == [pytest.approx(p.cost) for p in given.explain(IMAGES)]
    assert costs[0] > 1


@pytest.mark.parametrize("value", [[0.0, 0], [(0, 0.5), 0], ["0", 0], [None, 0], 3, None, [(0,), 0], [[[0], 0], 0]])
def test_states_that_are_none(value: Any) -> None:
    space = StateSpace(((2, 2), (2, 2)), ((1.0, 1.0), (2.0, 2.0)))
    with pytest.raises(OptionError, match="state"):
        space.parse(value)
    with pytest.raises(OptionError, match="state"):
        space.parse(State(((0.5, 0), (0, 0))))  # type: ignore[arg-type]


def test_states_of_other_whole_numbers() -> None:
    import numpy as np

    space = StateSpace(((2, 2), (2, 2)), ((1.0, 1.0), (2.0, 2.0)))
    assert space.parse(np.array([3, 0])) == space.parse([(1, 1), 0]) == space.parse(torch.tensor([3, 0]))


@pytest.mark.parametrize("images", [None, 5, "a.png", torch.zeros(3, 64, 64), torch.zeros(0, 3, 64, 64), [IMAGES[0]]])
def test_images_that_are_none(images: Any, better: unstride.Enhanced) -> None:
    for call in (better, better.explain, better.prepare, lambda x: better.curve(x, [1]), better.with_options(budget=1)):
        with pytest.raises(UnstrideError):
            call(images)


@pytest.mark.parametrize("budget", [1, 4])
def test_images_that_the_model_refuses(budget: int, better: unstride.Enhanced) -> None:
    """The same kind of error whether or not anything is captured."""
    asked = better.with_options(budget=budget)
    with pytest.raises(UnstrideError, match="model raised"):
        asked(torch.zeros(1, 4, 64, 64))
    with pytest.raises(UnstrideError, match="model raised"):
        asked(torch.zeros(1, 3, 64, 64, dtype=torch.float64))


def test_nothing_is_prepared_yet(tmp_path: Path, better: unstride.Enhanced) -> None:
    loaded = unstride.load(better.save(tmp_path / "kept.safetensors"), better.model)
    with pytest.raises(InputError, match="prepare"):
        _ = loaded.plan
    torch.testing.assert_close(loaded(IMAGES), better(IMAGES))
    assert loaded.plan is loaded.prepare(IMAGES)


@pytest.mark.parametrize("kept", ["frozen", "auto"])
def test_a_file_keeps_how_it_ran(tmp_path: Path, kept: str, better: unstride.Enhanced) -> None:
    saved = better.with_options(execution=kept).save(tmp_path / "kept.safetensors")
    loaded = unstride.load(saved, better.model)
    assert loaded.execution == kept


@pytest.mark.parametrize("model", [None, "resnet18", lambda x: x, SmallNet])
def test_models_that_are_none(model: Any, tmp_path: Path, better: unstride.Enhanced) -> None:
    file = better.save(tmp_path / "kept.safetensors")
    for call in (lambda: unstride.enhance(model, IMAGES), lambda: unstride.load(file, model)):
        with pytest.raises(InputError, match="Module"):
            call()


def test_it_prints_itself_in_a_few_lines(better: unstride.Enhanced) -> None:
    text = repr(better)
    assert len(text.splitlines()) <= 8
    assert "Conv2d" not in text
    assert "SmallNet" in text and "budget=4" in text
    assert "(B, 5) read as the scores of 5 classes" in text
    maps = unstride.enhance(seeded(SmallSegmenter()), IMAGES[:1], task="segmentation")
    assert "(B, 4, 64, 64) read as the scores of 4 classes" in repr(maps)
    sigmoid = unstride.enhance(seeded(SmallNet(1)), IMAGES[:1], budget=2)
    assert "two classes" in repr(sigmoid)
    assert "of 5" in repr(better.explain(IMAGES)[0])


def test_it_is_in_evaluation_mode_from_the_start() -> None:
    model = seeded(SmallNet()).train()
    better = unstride.enhance(model, IMAGES[:1], budget=2)
    assert not better.training and not better.with_options(budget=3).training
    assert model.training
    assert isinstance(better.train(), nn.Module) and model.training
