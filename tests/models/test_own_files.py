"""`file.py:function`: where the file says no preprocessing, what is assumed is told, once, on stderr."""

import json
import warnings
from pathlib import Path

import pytest
from small_nets import photo
from typer.testing import CliRunner

from unstride.cli import app
from unstride.errors import PreprocessAssumed
from unstride.models import Preprocess, load

SOURCE = """
from torch import nn
from unstride import Preprocess

def alone():
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def volumes():
    return nn.Conv3d(1, 2, 3, 2, 1)

def both():
    return alone(), Preprocess(resize=24, crop=24)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(SOURCE)
    return f"{tmp_path}/own.py"


def test_what_is_assumed_is_told_and_how_to_say_otherwise(own: str) -> None:
    with pytest.warns(
        PreprocessAssumed, match=r"alone returned only a module.*ImageNet's: .*crop 224x224.*return \("
    ) as told:
        assert load(f"{own}:alone").preprocess == Preprocess()
    assert [Path(one.filename).name for one in told] == [Path(__file__).name]  # once, where `load` is called
    with pytest.warns(PreprocessAssumed, match="volumes are taken as they are stored"):
        assert load(f"{own}:volumes").preprocess.crop is None


@pytest.mark.parametrize("said", ["own.py:both", "sample"])
def test_nothing_is_told_where_the_preprocessing_is_known(own: str, said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PreprocessAssumed)
        load(said.replace("own.py", own))


def test_the_command_line_says_it_once_beside_valid_json(own: str, tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    asked = ["predict", f"{own}:alone", f"{tmp_path}/a.png", "--recipe", "flip", "--json"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert len(json.loads(shown.stdout)["images"]) == 1
    assert shown.stderr.count("returned only a module") == 1
