"""Colours differ, text fits."""

from unstride.show.style import class_colours, shorten


def test_colours_differ_and_text_fits() -> None:
    assert len(set(class_colours(150))) == 150
    assert shorten("a rather long name", 10) == "a rather…"
    assert shorten("short", 10) == "short"
