"""Weights that nobody asked for, that lie about their size, or that were ruined: never an accuracy without a word."""

import inspect
import io
import json
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner
from unstride.evaluation.words import untrained

import unstride
from unstride import data, models
from unstride.cli import app
from unstride.errors import ArtefactError, DataError, SpecError, UnstrideWarning
from unstride.models import LoadedModel, load, read_weights
from unstride.studio import Studio
from unstride.views.images import Preprocess

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "evaluation"))
import tiny

TINY = str(Path(tiny.__file__))
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
    for function in (models.load, unstride.evaluate, Studio.__init__):
        assert inspect.signature(function).parameters["weights"].default == "default", function
    for command in ("evaluate", "predict", "fit", "studio"):
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


@pytest.fixture
def photos(tmp_path: Path) -> str:
    x = np.random.default_rng(0).integers(0, 256, (24, 64, 64, 3), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(24) % 10)
    return f"npz:{tmp_path / 'd.npz'}"


def test_accuracy_of_random_weights_says_so_in_the_same_line(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("evaluate", NET, "--weights", "random", "--data", photos, "--budget", "2", "--limit", 4)
    result = run(*asked, "--report", "page.html")
    rows = [json.loads(line) for line in next(tmp_path.glob("runs/*/rows.jsonl")).read_text().splitlines()]
    assert {row["weights"] for row in rows} == {"random"}
    figures = {f"{row['metrics']['top1'] * 100:.2f}" for row in rows} | {"points of top-1"}
    lines = [line for line in result.stdout.splitlines() if any(figure in line for figure in figures)]
    assert len(lines) >= 3
    assert all("random weights" in line for line in lines), lines
    assert "random weights" in result.stderr
    assert "recommended: nothing" in result.stdout
    assert (tmp_path / "page.html").read_text("utf-8").count("random weights") >= 4


def test_rows_of_trained_weights_say_nothing_of_the_kind() -> None:
    rows = unstride.evaluate("sample", "sample", (1,), limit=20)
    assert untrained(rows[0]) == ""
    assert rows[0].metrics["chance"] == pytest.approx(0.1)


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


def test_plain_accuracy_at_chance_says_what_is_usually_wrong() -> None:
    order = [(k + 1) % 10 for k in range(10)]
    with pytest.warns(UnstrideWarning, match=r"than guessing \(10\.00 %, give or take.*order.*BGR.*random"):
        rows = unstride.evaluate(shuffled(order), "sample", (1,), limit=200)
    assert rows[0].quality < 0.15


def test_names_in_another_order_are_put_right_instead() -> None:
    order = [(k + 1) % 10 for k in range(10)]
    moved, own = shuffled(order), models.load("sample")
    named = LoadedModel("moved", moved.model, moved.preprocess, "classification", tuple(own.classes[k] for k in order))
    right = unstride.evaluate(own, "sample", (1,), limit=100)[0].quality
    assert unstride.evaluate(named, "sample", (1,), limit=100)[0].quality == right > 0.8


def test_a_good_accuracy_is_not_doubted(recwarn: pytest.WarningsRecorder) -> None:
    unstride.evaluate("sample", "sample", (1,), limit=40)
    assert not [w for w in recwarn if issubclass(w.category, UnstrideWarning)]


def test_a_segmenter_that_is_wrong_everywhere_is_doubted() -> None:
    own = models.load("sample-segmentation")

    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = own.model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).roll(1, 1)

    with pytest.warns(UnstrideWarning, match="plain mIoU is .*no better than guessing"):
        unstride.evaluate(LoadedModel("blind", Blind().eval(), own.preprocess, "segmentation"), "sample-segmentation", (1,),
                          limit=4)  # fmt: skip


def test_names_that_are_not_as_many_as_scores_are_refused() -> None:
    loaded = LoadedModel("mine", tiny.net(), tiny.PREPROCESS, "classification", ("a", "b", "c"))
    with pytest.raises(SpecError, match="3 class names, but tells 6 classes apart"):
        unstride.evaluate(loaded, "sample", (1,))


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
    with pytest.raises(SpecError, match="wanted default, random or the path"):
        load(spec, weights=tmp_path)
    with pytest.raises(SpecError, match="wanted default, random or the path"):
        load(NET, weights="none")


# ------------------------------------------------------------------------------------------------------ same models

SOURCE = """
import torch
from torch import nn
import unstride
from unstride.models import LoadedModel, Preprocess

NAMES = ("a", "b", "c", "d")

def body():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()

def plain():
    return body(), Preprocess(32, 32)

def named():
    return LoadedModel("x", body(), Preprocess(32, 32), "classification", NAMES)

def double():
    return LoadedModel("x", body().double(), Preprocess(32, 32))

def training():
    return LoadedModel("x", body().train(), Preprocess(32, 32))

def enhanced():
    return LoadedModel("x", unstride.enhance(body(), torch.zeros(1, 3, 32, 32), 3, aggregate="mean"), Preprocess(32, 32))
"""


@pytest.mark.parametrize("name", ["plain", "named", "double", "training", "enhanced"])
def test_predict_and_evaluate_take_the_same_models(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(SOURCE)
    x = np.random.default_rng(0).integers(0, 256, (24, 40, 40, 3), dtype=np.uint8)
    np.savez("d.npz", x=x, y=np.arange(24) % 4)
    Image.fromarray(x[0]).save("a.png")
    rows = json.loads(run("evaluate", f"nets.py:{name}", "--data", "npz:d.npz", "--budget", 3, "--json").stdout)["rows"]
    one = json.loads(run("predict", f"nets.py:{name}", "a.png", "--budget", 3, "--json").stdout)["images"][0]
    assert rows[1]["macs"] > 1
    assert len(one["states"]) == 3
    weights = {round(s["weight"], 6) for s in one["states"]}
    assert (len(weights) == 1) == (rows[0]["options"]["aggregate"] == "mean") == (name == "enhanced")
