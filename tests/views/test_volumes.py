"""NIfTI: what is read is what was written, what predict writes lies where the volume did, errors name the file."""

import gzip
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import unstride
from unstride.cli import app
from unstride.data import load as load_data
from unstride.errors import DataError, OptionError
from unstride.models import Loaded
from unstride.views.images import Preprocess
from unstride.views.volumes import open_volume, open_volume_mask

nibabel = pytest.importorskip("nibabel")
AFFINE = np.array([[-1.5, 0, 0, 20], [0, 2.0, 0, -7], [0, 0, 3.0, 4], [0, 0, 0, 1]])
AS_IS = Preprocess(None, None, (0.0,), (1.0,), channels="L")
SIZE = (8, 10, 12)


class Segments(nn.Module):
    """Bright is 1, dark is 0: a strided convolution and its way back, so that there is something to look at again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(1, 4, 2, 2, bias=False), nn.ConvTranspose3d(4, 2, 2, 2)
        nn.init.constant_(self.down.weight, 1 / 8)
        nn.init.constant_(self.up.weight, 0.25)
        with torch.no_grad():
            self.up.weight[:, 0].zero_()
            self.up.bias.copy_(torch.tensor([0.5, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


def write(path: Path, values: np.ndarray, units: str = "mm") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values, AFFINE)
    image.header.set_xyzt_units(units)
    nibabel.save(image, path)
    return path


def case(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A bright box on dark ground, and where it is."""
    mask = np.zeros(SIZE, np.uint8)
    mask[2:6, 2:8, 4 + 2 * seed : 8 + 2 * seed] = 1
    noise = np.random.default_rng(seed).normal(0, 0.05, SIZE)
    return (mask + noise).astype(np.float32), mask


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(2):
        values, mask = case(k)
        write(tmp_path / f"images/case_{k}.nii.gz", values)
        write(tmp_path / f"masks/case_{k}.nii.gz", mask)
    return tmp_path


def test_values_channels_and_labels_are_read_as_they_are(tmp_path: Path) -> None:
    values, mask = case()
    one = open_volume(write(tmp_path / "one.nii", values))
    assert torch.equal(one.values[0], torch.from_numpy(values)) and np.allclose(one.frame.affine, AFFINE)
    many = open_volume(write(tmp_path / "many.nii.gz", np.stack([values, 2 * values], 3)))
    assert many.values.shape == (2, *SIZE) and torch.equal(many.values[1], 2 * one.values[0])
    assert np.array_equal(open_volume_mask(write(tmp_path / "mask.nii.gz", mask.astype(np.float32))), mask)
    seen = Preprocess(None, None, (0.5,), (2.0,), channels="L")(many)
    assert torch.allclose(seen, (many.values - 0.5) / 2)


def test_errors_name_the_file(tmp_path: Path) -> None:
    values, mask = case()
    with pytest.raises(DataError, match=r"plane.nii: a volume of shape \(8, 10\); wanted \(X, Y, Z\)"):
        open_volume(write(tmp_path / "plane.nii", values[..., 0]))
    with pytest.raises(DataError, match=r"half.nii: a mask with float32 values that are no whole numbers"):
        open_volume_mask(write(tmp_path / "half.nii", mask.astype(np.float32) / 2))
    (tmp_path / "cut.nii.gz").write_bytes(gzip.compress(b"no volume"))
    with pytest.raises(DataError, match=r"cut.nii.gz: cannot be read as NIfTI"):
        open_volume(tmp_path / "cut.nii.gz")
    whole = write(tmp_path / "whole.nii", values).read_bytes()
    (tmp_path / "short.nii").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"short.nii: cannot be read as NIfTI"):
        open_volume(tmp_path / "short.nii")
    with pytest.raises(OptionError, match=r"a volume of 8 x 10 x 12 is seen whole"):
        Preprocess()(open_volume(tmp_path / "whole.nii"))


def test_a_mask_of_another_size_is_an_error_of_its_own(folder: Path) -> None:
    write(folder / "masks/case_1.nii.gz", np.zeros((8, 10, 11), np.uint8))
    data = load_data(f"masks:{folder}", AS_IS)
    assert data.tensors(0)[1].shape == SIZE
    with pytest.raises(DataError, match=r"case_1.nii.gz: the mask has 8 x 10 x 11 pixels, its image 8 x 10 x 12"):
        data.tensors(1)


def test_evaluate_tells_dice_beside_miou(folder: Path, tmp_path: Path) -> None:
    model = Loaded("mine", Segments().eval(), AS_IS, "segmentation")
    page = tmp_path / "page.html"
    plain, looks = unstride.evaluate(model, f"masks:{folder}", recipe="flip", report=page)
    assert plain.images == 2 and plain.errors == 0 and "Dice" in page.read_text()
    assert plain.metrics["dice"] == looks.metrics["dice"] == 1.0  # boxes on even voxels: every cell is all or nothing
    write(folder / "masks/case_0.nii.gz", np.roll(case(0)[1], 1, 2))
    again = unstride.evaluate(model, f"masks:{folder}", recipe="flip")[0]
    # of 2 x 96 voxels 24 lie elsewhere: 168 of 192 are right in both
    ground = 2 * np.prod(SIZE) - 192
    assert again.metrics["dice"] == pytest.approx(np.mean([168 / 192, (ground - 24) / ground]))
    assert again.metrics["miou"] < again.metrics["dice"]


def test_predict_writes_masks_where_the_volumes_lie(folder: Path, tmp_path: Path) -> None:
    spec = tmp_path / "net.py"
    spec.write_text("import torch\nfrom torch import nn\n\n\n" + inspect.getsource(Segments) + "\n\nnet = Segments\n")
    out = tmp_path / "table.jsonl"
    done = CliRunner().invoke(
        app, ["predict", f"{spec}:net", str(folder / "images"), "--task", "segmentation", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    masks = sorted((tmp_path / "table.masks").rglob("*.nii.gz"))
    assert [m.name.split("-")[1] for m in masks] == ["case_0.nii.gz", "case_1.nii.gz"]
    assert [tmp_path / json.loads(line)["mask"] for line in out.read_text().splitlines()] == masks
    for k, path in enumerate(masks):
        written = nibabel.load(path)
        assert np.allclose(written.affine, AFFINE) and np.allclose(written.header.get_zooms(), (1.5, 2, 3))
        assert written.header.get_xyzt_units()[0] == "mm" and written.get_data_dtype() == np.uint8
        assert np.array_equal(np.asarray(written.dataobj), case(k)[1])
    one = ["predict", f"{spec}:net", str(folder / "images/case_0.nii.gz"), "--task", "segmentation"]
    shown = CliRunner().invoke(app, one)
    assert shown.exit_code == 0 and "of the pixels change" in shown.output
    refused = CliRunner().invoke(app, [*one, "--plot", str(tmp_path / "x.png")])
    assert refused.exit_code != 0 and isinstance(refused.exception, OptionError | SystemExit)


def test_how_many_classes_a_network_of_volumes_tells_apart_is_seen_on_a_volume(folder: Path) -> None:
    three = nn.Sequential(nn.Conv3d(1, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose3d(4, 3, 2, 2)).eval()
    model = Loaded("mine", three, AS_IS, "segmentation")  # an image it would take for a volume without a batch
    assert model.example().ndim == 5 and model.labels == 3
    write(folder / "masks/case_0.nii.gz", 2 * case(0)[1])
    assert unstride.evaluate(model, f"masks:{folder}", recipe="flip")[0].errors == 0
    assert model.example(8).shape == (1, 1, 8, 8, 8)
    with pytest.raises(OptionError, match=r"image size 8x8: the model wants 3 axes"):
        model.example((8, 8))


def test_a_folder_without_a_readable_volume_is_told_file_by_file(tmp_path: Path) -> None:
    spec, scans = tmp_path / "net.py", tmp_path / "scans"
    spec.write_text("import torch\nfrom torch import nn\n\n\n" + inspect.getsource(Segments) + "\n\nnet = Segments\n")
    write(scans / "plane.nii", case()[0][..., 0])
    out = tmp_path / "table.jsonl"
    done = CliRunner().invoke(app, ["predict", f"{spec}:net", str(scans), "--task", "segmentation", "--out", str(out)])
    assert "a volume of shape (8, 10); wanted (X, Y, Z)" in done.output + out.read_text()
