"""`file.py:function`: where the file names no preprocessing, one warning says what is assumed."""

import warnings
from pathlib import Path

import pytest

from unstride.errors import PreprocessAssumed, SpecError
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

def named():
    return *both(), ["cat", "dog"]

def numbered():
    return *both(), 2
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(SOURCE)
    return f"{tmp_path}/own.py"


def test_what_is_assumed_is_a_warning_with_the_way_out(own: str) -> None:
    with pytest.warns(
        PreprocessAssumed, match=r"alone returned only a module.*ImageNet's: .*crop 224x224.*return \("
    ) as caught:
        assert load(f"{own}:alone").preprocess == Preprocess()
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]  # once, where `load` is called
    with pytest.warns(PreprocessAssumed, match="volumes are taken as they are stored"):
        assert load(f"{own}:volumes").preprocess.crop is None


@pytest.mark.parametrize("spec", ["own.py:both", "sample"])
def test_no_warning_where_the_preprocessing_is_known(own: str, spec: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PreprocessAssumed)
        load(spec.replace("own.py", own))


def test_a_function_may_name_the_classes(own: str) -> None:
    assert load(f"{own}:named").classes == ("cat", "dog")
    assert load(f"{own}:both").classes == ()
    with pytest.raises(SpecError, match=r"numbered: it returned 2 as its classes, expected a list of their names\."):
        load(f"{own}:numbered")
