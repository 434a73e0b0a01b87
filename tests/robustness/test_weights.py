"""Weights that nobody asked for, that lie about their size, or that were ruined: never an accuracy without a word."""

import inspect
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from typer.testing import CliRunner

import unstride
from unstride import data, models
from unstride.cli import app
from unstride.errors import ArtefactError, DataError, SpecError, UnstrideWarning
from unstride.models import LoadedModel, load, read_weights
from unstride.views.images import Preprocess

NET = "torchvision:squeezenet1_1"


def run(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def state(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**nn.Conv2d(3, 4, 3).state_dict(), **changes}


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text("from torch import nn\ndef net():\n    return nn.Conv2d(3, 4, 3)\n")
    return f"{tmp_path}/mine.py:net"


# ------------------------------------------------------------------------------------------------------ one rule


def test_pretrained_everywhere_and_random_only_if_asked() -> None:
    for function in (models.load, unstride.evaluate, unstride.predict, unstride.tune, unstride.fit):
        assert inspect.signature(function).parameters["weights"].default == "default", function
    for command in ("evaluate", "predict", "fit", "studio", "tune"):
        shown = run(command, "--help").stdout
        assert "default (pretrained), random" in " ".join(shown.replace("│", " ").split()), command


def test_what_comes_with_weights_has_no_random_ones(spec: str) -> None:
    for name in ("sample", spec):
        with pytest.raises(SpecError, match="its own weights"):
            load(name, weights="random")
    assert load("sample", weights=None).weights == "embedded"
    assert load(NET, weights=None).untrained


def test_a_pretrained_encoder_with_a_random_decoder_is_called_random(monkeypatch: pytest.MonkeyPatch) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    make = smp.create_model
    monkeypatch.setattr(smp, "create_model", lambda *a, **k: make(*a, **{**k, "encoder_weights": None}))
    from unstride.models import libraries

    monkeypatch.setattr(libraries, "_optional", lambda *_: smp)
    monkeypatch.setattr(smp.encoders, "get_preprocessing_params", lambda name: {
        "input_range": [0, 1], "mean": [0.5] * 3, "std": [0.2] * 3, "input_space": "RGB"})  # fmt: skip
    with pytest.warns(UnstrideWarning, match="decoder is random"):
        loaded = load("smp:Unet:resnet18")
    assert loaded.untrained
    assert "decoder" in loaded.weights


def test_accuracy_of_random_weights_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("evaluate", NET, "--weights", "random", "--data", tiny.npz(tmp_path, 24, 64), "--limit", 4)
    assert "random weights" in run(*options, "--recipe", "plain").stderr
    result = run(*options, "--recipe", "flip", "--report", "page.html", "--json")
    assert "random weights" in result.stderr
    assert {row["provenance"]["weights"] for row in json.loads(result.stdout)["rows"]} == {"random"}
    assert "random" in (tmp_path / "page.html").read_text("utf-8")


# ------------------------------------------------------------------------------------------------------ at chance


def shuffled(order: list[int]) -> LoadedModel:
    """The embedded network, as if somebody had numbered its classes in another order."""
    loaded = models.load("sample")
    body = loaded.model

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)[:, order]

    return LoadedModel("moved", Moved().eval(), loaded.preprocess, "classification")


def measured(model: Any, limit: int) -> float:
    return unstride.evaluate(model, "sample", recipe="plain", limit=limit, progress=False)[0].value


def test_accuracy_at_chance_says_what_is_usually_wrong() -> None:
    with pytest.warns(UnstrideWarning, match=r"no better than guessing \(10\.00 %\).*order.*BGR"):
        assert measured(shuffled([(k + 1) % 10 for k in range(10)]), 200) < 0.15


def test_names_in_another_order_are_put_right_instead() -> None:
    order = [(k + 1) % 10 for k in range(10)]
    moved, own = shuffled(order), models.load("sample")
    named = LoadedModel("moved", moved.model, moved.preprocess, "classification", tuple(own.classes[k] for k in order))
    assert measured(named, 100) == measured(own, 100) > 0.8


def test_a_good_accuracy_is_not_doubted(recwarn: pytest.WarningsRecorder) -> None:
    measured("sample", 40)
    assert not [w for w in recwarn if issubclass(w.category, UnstrideWarning)]


def test_names_that_are_not_as_many_as_scores_are_refused() -> None:
    loaded = LoadedModel("mine", tiny.net(), tiny.PREPROCESS, "classification", ("a", "b", "c"))
    with pytest.raises(SpecError, match="3 class names, but 6 classes"):
        measured(loaded, 8)


# ------------------------------------------------------------------------------------------------------ files


def bomb(path: Path, entries: int = 1, size: int = 1 << 28) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(entries):
            with archive.open(f"archive/data/{k}", "w", force_zip64=True) as file:
                for _ in range(size >> 24):
                    file.write(bytes(1 << 24))
    return path


def test_a_zip_bomb_is_refused_before_it_is_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bomb(tmp_path / "w.pt")
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ArtefactError, match="made to fill the memory"):
        read_weights(path)


def test_entries_that_share_their_bytes_count_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of contents names one entry a hundred times."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
    raw = stream.getvalue()
    at = raw.index(b"PK\x01\x02")
    end = raw.index(b"PK\x05\x06")
    entry = raw[at:end]
    many = bytearray(raw[end:])
    many[8:12] = (100).to_bytes(2, "little") * 2
    many[12:16] = (100 * len(entry)).to_bytes(4, "little")
    (tmp_path / "w.pt").write_bytes(raw[:at] + entry * 100 + many)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ArtefactError, match="made to fill the memory"):
        read_weights(tmp_path / "w.pt")


def test_a_zip_bomb_of_images_is_refused_before_it_is_inflated(tmp_path: Path, monkeypatch: Any) -> None:
    path = bomb(tmp_path / "d.npz", size=1 << 29)
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(DataError, match="made to fill the memory"):
        data.load(f"npz:{path}", Preprocess())


def test_weights_that_torch_wrote_are_read(tmp_path: Path, spec: str) -> None:
    for k, zipped in enumerate((True, False)):
        torch.save(state(), tmp_path / f"{k}.pt", _use_new_zipfile_serialization=zipped)
        assert load(spec, weights=tmp_path / f"{k}.pt").weights.endswith(f"{k}.pt")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(10**12),
        torch.empty(4, 3, 3, 3, device="meta"),
        torch.zeros(4, 3).to_sparse(),
    ],
    ids=["expanded", "meta", "sparse"],
)
def test_tensors_that_are_not_in_the_file_are_refused(tmp_path: Path, spec: str, tensor: torch.Tensor) -> None:
    torch.save(state(weight=tensor), tmp_path / "w.pt")
    with pytest.raises(ArtefactError, match=r"w\.pt"):
        load(spec, weights=tmp_path / "w.pt")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_with_nan_are_refused_and_named(tmp_path: Path, spec: str, suffix: str) -> None:
    from safetensors.torch import save_file

    ruined = state(bias=torch.tensor([0.0, float("nan"), 0, 0]))
    (save_file if suffix == "safetensors" else torch.save)(ruined, tmp_path / f"w.{suffix}")
    with pytest.raises(ArtefactError, match=r"1 of 2 tensors hold NaN \(bias\)"):
        load(spec, weights=tmp_path / f"w.{suffix}")
    fine = state(bias=torch.tensor([0.0, -float("inf"), 0, 0]))  # as masks have it
    (save_file if suffix == "safetensors" else torch.save)(fine, tmp_path / f"w.{suffix}")
    load(spec, weights=tmp_path / f"w.{suffix}")


def nested() -> Any:
    out: Any = []
    for _ in range(200):
        out = [out]
    return out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        b"PK\x03\x04" + bytes(1000),
        b"\x80\x02" + b"(" * 200_000,
        pickle.dumps({"weight": nested()}),
        b"\xff" * 8 + b"{}",
        b"[" * 200_000,
    ],
    ids=["empty", "head", "zeros", "deep", "nested", "claims", "brackets"],
)
@pytest.mark.parametrize("suffix", ["pt", "pth", "safetensors", "bin"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_files_that_hold_no_weights(tmp_path: Path, spec: str, content: bytes, suffix: str) -> None:
    (tmp_path / f"w.{suffix}").write_bytes(content)
    with pytest.raises(ArtefactError, match=r"w\."):
        load(spec, weights=tmp_path / f"w.{suffix}")


def test_weights_that_are_a_folder_or_the_old_word(tmp_path: Path, spec: str) -> None:
    with pytest.raises(SpecError, match="expected default, random or the path"):
        load(spec, weights=tmp_path)
    with pytest.raises(SpecError, match="expected default, random or the path"):
        load(NET, weights="none")
