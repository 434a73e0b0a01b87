"""What is offered: the given networks first, recipes that their task can run, images of their kind."""

import numpy as np
from small_nets import write_nets

from unstride import sample
from unstride.pipeline import open_pipeline
from unstride.studio.choices import CASCADE, GARMENTS, choices, images_for, recipes


def test_a_cascade_of_the_embedded_networks_comes_first() -> None:
    titles = [choice.title for choice in choices()]
    assert titles[:2] == ["sample + sample-large", "sample-segmentation"]
    labels = sample.classification_sample()[1]
    first = choices()[0].images[0].truth
    assert first is not None and first.classes == (sample.CLASSES[labels[GARMENTS[0]]],)


def test_given_networks_come_first_without_the_folder_they_are_in(tmp_path) -> None:
    pipeline = open_pipeline([f"{write_nets(tmp_path)}:net"], recipe="flip")
    offered = choices(pipeline)
    assert offered[0].title == "nets.py:net"
    assert offered[0].open() is pipeline
    found = recipes(pipeline)
    assert next(iter(found)) == "flip: the image and its flip"
    assert sorted({r.name for r in found.values()}) == ["default", "flip", "multiscale-flip", "paper", "plain"]
    assert len(found) == 5  # the given one is not offered twice


def test_several_networks_can_also_be_averaged() -> None:
    found = {recipe.name: recipe for recipe in recipes(open_pipeline(list(CASCADE))).values()}
    assert [stage.network for stage in found["ensemble"].stages] == ["base", "net2"]
    assert not any(stage.gate for stage in found["ensemble"].stages)
    assert found["cascade"].stages[1].gate is not None and "default" not in found


def test_recipes_that_a_task_cannot_run_are_not_offered(tmp_path) -> None:
    names = {r.name for r in recipes(open_pipeline([f"{write_nets(tmp_path)}:tower"])).values()}
    assert "paper" in names and "default" in names
    scenes = images_for("sample-segmentation")
    assert all(s.truth is not None and np.shape(s.truth.mask) == s.image.size[::-1] for s in scenes)
