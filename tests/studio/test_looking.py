"""What the page shows is what the library answers, budget by budget."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_nets import photo, write_nets
from torch import nn

import unstride
from unstride import models
from unstride.geometry.states import State
from unstride.models import LoadedModel
from unstride.procedure.gates import Gate, Stage, sureness
from unstride.execution.prediction import moved
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, parse_view
from unstride.show.answers import class_map, probabilities
from unstride.studio import looking
from unstride.studio.looking import look
from unstride.views.images import Preprocess


def looked(tmp_path: Path, name: str, image: Image.Image) -> tuple[dict[str, Any], Any, torch.Tensor]:
    loaded = models.load(f"{write_nets(tmp_path)}:{name}")
    x = loaded.preprocess(image)[None]
    better = unstride.enhance(loaded.model, x, 5, task=str(loaded.task))
    return look(loaded, better, image), better, x


def maps(part: dict[str, Any]) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(part["data"]), np.uint8)
    return values.reshape(-1, part["height"], part["width"])


def test_every_budget_is_the_enhanced_model_at_that_budget(tmp_path: Path) -> None:
    data, better, x = looked(tmp_path, "net", photo())
    names = [c["name"] for c in data["classes"]]
    order = [("red", "green", "blue", "<b>[odd]</b> name").index(name) for name in names]
    assert len(data["states"]) == 16 == len(data["enhanced"]) == len(data["cost"])  # two layers of 2x2
    for budget in (1, 4, 7, 16):
        wanted = probabilities(better.with_options(budget=budget)(x)[0])[order]
        assert data["enhanced"][budget - 1] == pytest.approx(wanted.tolist(), abs=2e-4)
    assert data["plain"] == pytest.approx(probabilities(better.model(x)[0])[order].tolist(), abs=2e-4)
    prediction = better.with_options(budget=16).explain(x)[0]
    assert data["cost"][-1] == pytest.approx(prediction.cost, abs=1e-3)
    assert data["cost"] == sorted(data["cost"])
    assert data["agreement"][-1] == pytest.approx(prediction.agreement)
    assert data["spread"][-1] == pytest.approx(float(prediction.spread), abs=2e-4)
    assert data["agreement"][0] == 1
    assert data["spread"][0] == 0


def test_states_tell_their_own_answer_and_where_they_came_from(tmp_path: Path) -> None:
    data, better, x = looked(tmp_path, "net", photo(3))
    for entry, visited in zip(data["states"], better.with_options(budget=16).explain(x)[0].states, strict=True):
        own = probabilities(visited.logits)
        assert entry["selection"] == [list(s) for s in visited.state.selections]
        assert entry["name"] == ("red", "green", "blue", "<b>[odd]</b> name")[int(own.argmax())]
        assert entry["probability"] == pytest.approx(float(own.max()), abs=1e-4)
    assert sorted(node["index"] for node in data["tree"]) == list(range(16))
    for node in data["tree"][1:]:
        mine, parents = (data["states"][k]["selection"] for k in (node["index"], node["parent"]))
        assert [k for k in (1, 2) if mine[k - 1] != parents[k - 1]] == [node["layer"]]
    assert [layer["rate"] for layer in data["layers"]["layers"]] == [[2, 2], [2, 2]]
    assert data["layers"]["searched"] == [1, 2]


def test_the_heat_map_is_hot_only_where_a_thrown_away_pixel_was() -> None:
    class Points(nn.Module):
        """Sees single pixels; pixel (5, 9) is read by the state (1, 1) alone, in cell (2, 4) of its own grid."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 3, 1, 2), nn.Linear(3, 3)
            with torch.no_grad():
                self.conv.weight.copy_(torch.eye(3)[..., None, None] * 9)
                self.conv.bias.zero_()
                self.head.weight.copy_(torch.eye(3) * 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).relu().mean((2, 3)))

    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[5, 9] = (255, 0, 0)
    loaded = LoadedModel("points", Points().eval(), Preprocess(None, None, (0.0,) * 3, (1.0,) * 3), "classification")
    image = Image.fromarray(pixels)
    better = unstride.enhance(loaded.model, loaded.preprocess(image)[None], recipe="paper")
    data = look(loaded, better, image)
    heat = maps(data["heat"])
    assert [s["selection"] for s in data["states"]] == [[[0, 0]], [[0, 1]], [[1, 0]], [[1, 1]]]
    assert not heat[:3].any()
    hot = {(int(y), int(x)) for y, x in zip(*heat[3].nonzero(), strict=True)}
    assert hot == {(2, 4), (2, 5), (3, 4), (3, 5)}  # half a cell further: shared by four


def test_segmentation_maps_are_the_enhanced_models_maps(tmp_path: Path) -> None:
    data, better, x = looked(tmp_path, "segmenter", photo(1, (64, 48)))
    shown = [("background", "sky", "road").index(c["name"]) for c in data["classes"]]
    assert [c["background"] for c in data["classes"]] == [k == 0 for k in shown]
    classes = np.asarray(shown)[maps(data["maps"])]
    assert classes.shape == (16, 64, 48)
    for budget in (1, 4, 16):
        wanted = class_map(better.with_options(budget=budget)(x)[0])
        assert (classes[budget - 1] == wanted).all()
        assert data["changed"][budget - 1] == pytest.approx(float((wanted != classes[0]).mean()))
        assert sum(data["enhanced"][budget - 1]) == pytest.approx(1, abs=1e-3)
    assert 0 < data["changed"][-1] < 1
    assert data["states"][0]["changed"] == 0
    assert data["agreement"][0] == 1
    assert not maps(data["heat"])[0].any()
    assert maps(data["heat"])[-1].any()


def test_a_states_own_map_is_laid_where_it_belongs(tmp_path: Path) -> None:
    _, better, x = looked(tmp_path, "segmenter", photo(1, (64, 48)))
    plan = better.prepare(x)
    assert moved(plan, State(((0, 0), (0, 0))), (64, 48)) == (0, 0)
    assert moved(plan, State(((1, 0), (0, 1))), (64, 48)) == (1, 2)  # the second layer moves by twice as much
    assert moved(plan, State(((1, 0), (1, 1))), (32, 24)) == (2, 1)  # at half the size, half as far (1.5 is 2)


def test_a_long_search_over_large_maps_is_cut_to_what_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "MAPS_BYTES", 5 * 2 * 4 * 3 * 64 * 48)
    data, _, _ = looked(tmp_path, "segmenter", photo(1, (64, 48)))
    assert len(data["states"]) == 5


def test_a_large_photograph_is_made_smaller_for_a_segmenter_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "BUDGET", 2)
    data, _, _ = looked(tmp_path, "segmenter", photo(1, (80, 100)).resize((1280, 640)))
    assert (data["image"]["width"], data["image"]["height"]) == (320, 160)


@pytest.mark.parametrize("name", ["net", "segmenter"])
def test_a_recipe_of_looks_is_shown_look_by_look(name: str, tmp_path: Path) -> None:
    """The last look's answer is the recipe's own, from the image itself; before it, that of a recipe with fewer."""
    loaded = models.load(f"{write_nets(tmp_path)}:{name}")
    image = photo(2, (72, 80))
    x = loaded.preprocess(image)[None]
    options = {"task": str(loaded.task), "preprocess": loaded.preprocess}
    better = unstride.enhance(loaded.model, x, recipe="multiscale-flip", **options)
    data = look(loaded, better, image)
    p = better.explain([image])[0]
    assert [s["view"] for s in data["states"]] == [None, *(str(v.view) for v in p.states[1:])]
    assert len(data["enhanced"]) == len(data["cost"]) == len(p.states) > 2
    assert data["cost"][0] == pytest.approx(1, abs=0.01)
    assert data["cost"][-1] == pytest.approx(p.cost, abs=1e-3)
    flip = unstride.enhance(loaded.model, x, recipe="flip", **options)
    if name == "net":
        order = [loaded.classes.index(c["name"]) for c in data["classes"]]
        for row, of in ((data["enhanced"][-1], p), (data["enhanced"][1], flip.explain([image])[0])):
            assert row == pytest.approx(probabilities(of.logits)[order].tolist(), abs=2e-4)
        assert data["heat"] is None
    else:
        shown = [loaded.classes.index(c["name"]) for c in data["classes"]]
        for k, of in ((-1, p), (1, flip.explain([image])[0])):
            seen = np.asarray(shown)[maps(data["maps"])[k]]
            assert (seen == class_map(of.logits)).mean() > 0.999


def gated(tmp_path: Path, below: float, by: str = "margin") -> tuple[dict[str, Any], Any]:
    """Plain, then the mirror image behind a gate, then two sizes and near states behind another."""
    loaded = models.load(f"{write_nets(tmp_path)}:net")
    mirror = Stage((parse_view("flip"),), gate=Gate(by, below=below))
    more = Stage((PLAIN, parse_view("1.25x")), "near:2", gate=Gate("agreement", below=1.000001))
    recipe = Recipe("gated", stages=(Stage(), mirror, more), temperature=1.5)
    better = unstride.enhance(loaded.model, loaded.example(), recipe=recipe, preprocess=loaded.preprocess)
    return look(loaded, better, photo(2), truth=2), better.explain([photo(2)])[0]


@pytest.mark.parametrize("by", ["margin", "probability", "entropy"])
def test_a_gate_is_open_or_closed_as_it_was_for_this_image(by: str, tmp_path: Path) -> None:
    data, p = gated(tmp_path, 1.0, by)
    sure = float(sureness(p.plain[None], by))
    first, mirror, more = data["story"]
    assert (first["gate"], first["looks"], first["cost"]) == (None, [0], 1.0)
    assert mirror["gate"] == {"by": by, "value": pytest.approx(sure, abs=1e-4), "below": 1.0, "open": True}
    assert (mirror["looks"], mirror["cost"]) == ([1], pytest.approx(2, abs=0.01))
    assert more["gate"]["open"]
    assert more["gate"]["value"] in (0.5, 1.0)  # of two looks
    assert more["looks"] == list(range(2, len(p.states)))  # the plain view's plain state was seen before
    assert more["cost"] == pytest.approx(p.cost, abs=1e-3)

    data, p = gated(tmp_path, sure - 1e-4, by)
    first, mirror, more = data["story"]
    assert mirror["gate"] == {"by": by, "value": pytest.approx(sure, abs=1e-4), "below": sure - 1e-4, "open": False}
    assert [s["looks"] for s in data["story"]] == [[0], [], []]
    assert [s["reached"] for s in data["story"]] == [True, False, False]
    assert more["gate"] is None
    assert data["cost"][-1] == p.cost == pytest.approx(1, abs=0.01)
    assert mirror["cost"] == pytest.approx(2, abs=0.01)  # what was saved


def test_each_look_comes_with_what_it_sees_and_the_truth(tmp_path: Path) -> None:
    data, _ = gated(tmp_path, 1.0)
    assert data["truth"] == "blue"
    plain, mirror = (image(data["states"][k]["seen"]) for k in (0, 1))
    assert (plain == mirror[:, ::-1]).all()
    assert (plain != mirror).any()
    assert [s["size"] for s in data["states"][:2]] == [[32, 32], [32, 32]]
    assert [40, 40] in [s["size"] for s in data["states"]]


@pytest.mark.parametrize(("accepted", "truth"), [(("red", "blue"), "a balloon"), (("tripod",), None)])
def test_a_photograph_may_have_several_right_answers_or_none_here(
    accepted: tuple[str, ...], truth: str | None, tmp_path: Path
) -> None:
    loaded = models.load(f"{write_nets(tmp_path)}:net")
    better = unstride.enhance(loaded.model, loaded.example(), recipe="flip", preprocess=loaded.preprocess)
    data = look(loaded, better, photo(2), ("a balloon", accepted))
    assert data["truth"] == truth
    assert data["accepted"] == ([] if truth is None else list(accepted))


def image(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))))


def test_a_known_segmentation_is_shown_and_counted(tmp_path: Path) -> None:
    loaded = models.load(f"{write_nets(tmp_path)}:segmenter")
    image = photo(1, (64, 48))
    better = unstride.enhance(loaded.model, loaded.preprocess(image)[None], recipe="flip", task="segmentation")
    truth = np.zeros((64, 48), np.uint8)
    truth[:32] = 2
    data = look(loaded, better, image, truth)
    shown = np.asarray([loaded.classes.index(c["name"]) for c in data["classes"]])[maps(data["maps"])]
    assert (shown[-1] == truth).all()  # behind the answers
    assert data["right"] == pytest.approx([float((m == truth).mean()) for m in shown[:-1]])
    assert data["truth"] is None
