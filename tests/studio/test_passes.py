"""What the page shows is what the model computes: passes, gates, costs, maps."""

import pytest
import torch
from small_nets import photo, write_nets

from unstride.pipeline import Pipeline, open_pipeline
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Stage
from unstride.studio.choices import Truth
from unstride.studio.passes import explained

CLASSES = ("red", "green", "blue", "<b>[odd]</b> name")


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_nets(tmp_path_factory.mktemp("nets"))


def cascade(nets: str, below: float) -> Pipeline:
    recipe = Recipe((Stage(), Stage(("flip",), network="net2", gate=Gate(below=below), join="replace")))
    return open_pipeline([f"{nets}:net", f"{nets}:net"], recipe=recipe)


def logits(pipeline: Pipeline, flip: bool = False) -> torch.Tensor:
    x = pipeline.base.seen(photo(3))[None]
    with torch.no_grad():
        return pipeline.base.model(x.flip(-1) if flip else x)[0].softmax(0)


def test_an_open_gate_and_a_closed_one(nets: str) -> None:
    pipeline = cascade(nets, below=1.0)
    data = explained(pipeline, photo(3), Truth("red thing", ("red",)))
    before, after = logits(pipeline), logits(pipeline, flip=True)
    first, second = data["stages"]
    margin = float(before.topk(2).values.diff().abs())
    assert first["gate"] is None and first["reached"] and second["reached"]
    assert second["gate"]["text"] == f"margin {margin:.2f} is below 1.00: go on"
    assert second["gate"]["value"] == pytest.approx(margin, abs=1e-5)
    assert second["gate"]["passed"] is True
    (one,), (two,) = first["passes"], second["passes"]
    assert one["text"] == f"{CLASSES[int(before.argmax())]} {before.max():.0%}"
    assert two["text"] == data["answer"]["text"] == two["running"]["text"]
    assert two["text"] == f"{CLASSES[int(after.argmax())]} {after.max():.0%}"
    assert one["right"] is (int(before.argmax()) == 0)
    assert one["network"] == data["base_network"] == "nets.py:net"  # without its folder
    assert (one["view"], two["view"], two["cost"]) == ("plain", "flip", 1.0)
    assert (first["spent"], second["spent"], data["cost"]) == (1.0, 2.0, 2.0)
    assert data["stopped"] == "All passes of the recipe ran." and data["truth"] == "red thing"
    shown = {e["name"]: (e["base"], e["answer"]) for e in data["scores"]}
    for k, name in enumerate(CLASSES):
        assert shown[name] == pytest.approx((float(before[k]), float(after[k])), abs=1e-5)

    data = explained(cascade(nets, below=0.0), photo(3))
    assert [s["reached"] for s in data["stages"]] == [True, False]
    assert data["stages"][1]["gate"]["text"].endswith("is not below 0.00: stop")
    assert data["stages"][1]["passes"] == [] and data["cost"] == 1.0
    assert data["stopped"].startswith("Stopped early: margin") and data["truth"] is None
    assert data["answer"]["right"] is None


def test_what_follows_a_closed_gate_is_not_reached(nets: str) -> None:
    gates = [Gate(below=0.0), Gate("agreement", below=1.0)]
    recipe = Recipe((Stage(), *(Stage((v,), gate=g) for v, g in zip(("flip", "1.3x"), gates, strict=True))))
    data = explained(open_pipeline([f"{nets}:net"], recipe=recipe), photo(3))
    assert data["stages"][2]["gate"] is None and not data["stages"][2]["reached"]
    assert data["stages"][2]["condition"] == "agreement below 1"


def test_every_state_of_a_search_is_a_row(nets: str) -> None:
    data = explained(open_pipeline([f"{nets}:net"], recipe="paper", budget=5), photo(3))
    (stage,) = data["stages"]
    assert [one["state"] for one in stage["passes"]][:1] == [""]
    assert len({one["state"] for one in stage["passes"]}) == 5
    assert sum(one["weight"] for one in stage["passes"]) == pytest.approx(1)
    assert data["stopped"] == "The search reached its budget."


def test_a_segmentation_has_maps_and_its_label(nets: str) -> None:
    pipeline = open_pipeline([f"{nets}:segmenter"], recipe="flip")
    image = photo(3, (40, 48))
    with torch.no_grad():
        best = pipeline.base.model(pipeline.base.seen(image)[None])[0].argmax(0)
    data = explained(pipeline, image, Truth(mask=best.byte().numpy()))
    assert data["base"]["text"] == "100.0% of the pixels right"
    assert [i["caption"].split(" (")[0] for i in data["images"]] == [
        "image", "base model", "combined", "where they differ", "label",
    ]  # fmt: skip
    assert all(one["map"].startswith("data:image/") for one in data["stages"][0]["passes"])


@pytest.mark.parametrize(("name", "maps", "unit"), [("depth", 4, "mean"), ("tower", 0, "value 0")])
def test_numbers_are_shown_too(nets: str, name: str, maps: int, unit: str) -> None:
    data = explained(open_pipeline([f"{nets}:{name}"], recipe="flip"), photo(3), Truth("cat", ("cat",)))
    assert len(data["images"]) == maps
    assert data["answer"]["right"] is None
    assert data["scores"][0]["name"] == unit and data["scores"][0]["kind"] == "value"


def test_large_images_of_a_model_without_a_size_are_reduced(nets: str) -> None:
    data = explained(open_pipeline([f"{nets}:depth"], recipe="plain"), photo(3, (200, 800)))
    assert data["stages"][0]["passes"][0]["size"] == "80 x 320"
