"""Figures of a segmentation hold what the prediction says; classes can be told apart."""

import numpy as np
import pytest
import torch
from drawings import prediction, texts
from PIL import Image

from unstride.geometry.states import State
from unstride.show import overlay, strip
from unstride.show.segmentation import TILE, palette


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("classes", [1, 3, 40])
def test_segmentation_maps(classes: int) -> None:
    logits = torch.randn(2, classes, 12, 20, generator=torch.Generator().manual_seed(0))
    p = prediction(logits, [State.zero(1), State(((0, 1),))], torch.rand(12, 20), "segmentation")
    svg = texts(p.plot(Image.new("RGB", (40, 24)), title="Scene"))
    plain = (logits[0, 0] > 0).long() if classes == 1 else logits[0].argmax(0)
    final = (logits.mean(0)[0] > 0).long() if classes == 1 else logits.mean(0).argmax(0)
    assert f"{float((plain != final).float().mean()):.1%}" in svg
    assert "passes disagree" in svg


def test_overlay_tints_classes_and_leaves_the_background() -> None:
    gray = Image.new("RGB", (8, 4), (100, 100, 100))
    seen = np.repeat([[0, 1, 2, 9]] * 4, 2, 1)  # 9: no label
    named = np.asarray(overlay(gray, seen, ("background", "a", "b"), 3))
    assert named[0, 0].tolist() == named[0, 7].tolist() == [100, 100, 100]
    assert named[0, 2].tolist() != named[0, 4].tolist()
    assert np.asarray(overlay(gray, seen, (), 3))[0, 0].tolist() != [100, 100, 100]
    assert palette(("background",), 3).shape == (3, 3)


@pytest.mark.parametrize("light", [20, 235])
def test_classes_are_told_apart_without_colour(light: int) -> None:
    """In gray print the fills look alike; the outline between two classes stands out from both."""
    seen = np.repeat([[0, 1, 2, 3]], 6, 0).repeat(4, 1)
    shown = np.asarray(overlay(Image.new("RGB", (16, 6), (light,) * 3), seen, (), 4).convert("L")).astype(int)
    for edge in (3, 7, 11):
        assert abs(shown[0, edge] - shown[0, edge - 1]) > 60
    assert (shown[:, 13] == shown[:, 14]).all()  # none inside a class


def test_a_strip_shows_what_changed_and_shrinks_large_images() -> None:
    truth = np.array([[1, 1, 0, 255]])
    plain, better = np.array([[0, 1, 0, 0]]), np.array([[1, 0, 0, 1]])
    made = np.asarray(strip(Image.new("L", (4, 1), 80), [truth, plain, better], ("background", "a"), 2))
    assert made.shape == (1, 5 * 4 + 4 * 3, 3)
    right, wrong, same, unlabelled = made[0, -4:]
    assert right.tolist() == [255, 255, 255]
    assert wrong[0] > 2 * wrong[1]
    assert same.tolist() == unlabelled.tolist() == [20, 20, 20]
    large = [np.zeros((600, 900), np.int64)] * 3
    assert strip(Image.new("RGB", (900, 600)), large, (), 2).size == (5 * TILE + 12, TILE * 2 // 3)


def test_large_classes_are_named_in_the_image() -> None:
    logits = torch.zeros(1, 3, 20, 20)
    logits[0, 1, :, 10:], logits[0, 2, 0, 0] = 5.0, 9.0
    p = prediction(logits, [State.zero(1)], torch.zeros(20, 20), "segmentation")
    figure = p.plot(Image.new("RGB", (20, 20)), ("background", "tree", "dot"))
    names = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert names.count("tree") == 3  # base model, combined, legend
    assert names.count("dot") == 1  # too small a part of the image
    assert names.count("background") == 1
