"""How many of our files one image passes, from `better(images)` to the answer."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from procedure_nets import SmallNet, seeded

import unstride

SOURCE = Path(unstride.__file__).parent
README = Path(__file__).parents[2] / "README.md"
GRAPH = ("geometry/", "engine/", "execution/graph_executor.py")  # what captures a graph and runs it


def files_visited(better: unstride.Enhanced, images: torch.Tensor) -> set[str]:
    """Of our files, those of which a function runs; captured and counted beforehand."""
    better(images)
    visited: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            visited.add(str(path.relative_to(SOURCE)))

    sys.setprofile(profile)
    try:
        better(images)
    finally:
        sys.setprofile(None)
    return visited


@pytest.mark.parametrize(("recipe", "most"), [("default", 12), ("flip", 12), ("paper", 16)])
def test_an_image_passes_few_files(recipe: str, most: int) -> None:
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    better = unstride.enhance(seeded(SmallNet()), recipe=recipe, task="classification")
    visited = files_visited(better, images)
    assert len(visited) <= most, sorted(visited)
    if recipe != "paper":  # the model is called directly
        assert not [path for path in visited if path.startswith(GRAPH)]


def test_this_is_the_first_example_of_the_readme() -> None:
    """The example that is counted above is the one that a reader meets first."""
    (first, *_) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert re.search(r"^(\w+) = unstride\.enhance\(\w+\).*\n(.*\n)*?\w+ = \1\(images\)", first, re.MULTILINE), first
