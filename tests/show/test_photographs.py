"""Photographs with their label and both answers."""

import pytest

pytest.importorskip("matplotlib")

from drawings import texts
from PIL import Image

from unstride.show.photographs import Photograph, plot_photographs


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("before", "after", "mark"),
    [(True, True, "right"), (False, False, "wrong"), (False, True, "corrected"), (True, False, "broken")],
)
def test_a_photograph_says_what_became_of_it(before: bool, after: bool, mark: str) -> None:
    photo = Photograph(Image.new("RGB", (60, 40)), "a cat", ("dog", 0.4, before), ("cat", 0.6, after), 1.5)
    assert photo.mark == mark
    svg = texts(plot_photographs([photo]))
    assert all(words in svg for words in ("label: a cat", "dog 40%", "cat 60%", f"{mark}, cost 1.5x"))
