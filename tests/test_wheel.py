"""The wheel: what is in it, that an index takes it, and that it works where nothing else of the project is."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import unstride

pytest.importorskip("build", reason="pip install 'unstride[dev]' brings it")
pytest.importorskip("hatchling", reason="pip install 'unstride[dev]' brings it")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = (ROOT / "constraints.txt").read_text()
LARGEST = 10_000_000  # bytes


def ran(*command: str | Path, cwd: Path, check: bool = True) -> str:
    """What a command prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_it_is_small_and_has_its_data_files_and_nothing_else(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    package = {name for name in names if name.startswith("unstride/")}
    assert {name.split("/")[0] for name in names} == {"unstride", f"unstride-{unstride.__version__}.dist-info"}
    source = {
        f"unstride/{path.relative_to(ROOT / 'src/unstride').as_posix()}"
        for path in (ROOT / "src/unstride").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package == source
    assert {name.rpartition(".")[2] for name in package} > {"py", "safetensors", "npz"}


def test_an_index_takes_it_and_it_says_what_it_needs(wheel: Path) -> None:
    pytest.importorskip("twine", reason="pip install 'unstride[dev]' brings it")
    assert "PASSED" in ran(sys.executable, "-m", "twine", "check", "--strict", wheel, cwd=wheel.parent)
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"unstride-{unstride.__version__}.dist-info/METADATA").decode()
    about = email.message_from_string(text)
    assert {"onnx", "ray", "openvino"} <= set(about.get_all("Provides-Extra", []))
    needed = [Requirement(line) for line in about.get_all("Requires-Dist", [])]
    always = {entry.name for entry in needed if entry.marker is None}
    assert always == {Requirement(line).name for line in PROJECT["dependencies"]}
    assert not always & {"pytest", "ruff", "mypy", "onnx", "ray", "openvino"}


def test_every_extra_that_a_message_names_exists() -> None:
    named = {
        extra
        for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.py")]
        for extras in re.findall(r"unstride\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert {"onnx", "openvino", "ray"} <= named <= set(PROJECT["optional-dependencies"])


# ------------------------------------------------------------------------------------------------ fresh environments


def lowest(python: Path, requirement: Requirement, folder: Path) -> str:
    """NAME==VERSION: the lowest declared version that the index has for this Python."""
    printed = ran(python, "-m", "pip", "index", "versions", "--only-binary", ":all:", requirement.name, cwd=folder)
    listed = re.search(r"Available versions: (.+)", printed)
    assert listed, printed
    known = [Version(text) for text in listed[1].split(", ")]
    return f"{requirement.name}=={min(v for v in known if requirement.specifier.contains(v))}"


SMOKE = """
import sys
import unstride
better = unstride.enhance(unstride.models.load("sample"), recipe="flip")
(alone, flip) = unstride.evaluate(unstride.models.load("sample"), "sample", recipe="flip", limit=64, progress=False)
assert flip.cost.estimate == 2.0 and flip.images == 64, flip
for name in ("pytest", "mypy", "hypothesis", "ray", "openvino"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name)
print("works", unstride.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("versions", ["lowest", "newest"])
def test_it_works_in_a_fresh_environment(wheel: Path, tmp_path: Path, versions: str) -> None:
    """torch and torchvision are those of constraints.txt: of the lowest ones an index may have no CPU build."""
    ran(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python, command = (tmp_path / "env/bin" / name for name in ("python", "unstride"))
    pins = tmp_path / "pins.txt"
    pins.write_text(PINS)
    if versions == "lowest":
        declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["onnx"]]
        wanted = [entry for entry in map(Requirement, declared) if f"\n{entry.name}==" not in f"\n{PINS}"]
        pins.write_text("\n".join([PINS, *(lowest(python, entry, tmp_path) for entry in wanted)]))
    install = [python, "-m", "pip", "install", "--quiet", "-c", pins]
    ran(*install, wheel, cwd=tmp_path)
    assert f"works {tmp_path}" in ran(python, "-c", SMOKE, cwd=tmp_path)
    assert unstride.__version__ in ran(command, "--version", cwd=tmp_path)
    for arguments, extra in (
        (["export", "sample", "--out", "net.onnx"], "onnx"),
        (["predict", "sample", "photo.png", "--out", "p.csv", "--ray", "local"], "ray"),
        (["predict", "sample", "photo.png", "--out", "p.parquet"], "parquet"),
        (["predict", "sample", "s3://bucket/photos", "--out", "p.csv"], "remote"),
    ):
        ran(python, "-c", "from PIL import Image; Image.new('RGB', (28, 28)).save('photo.png')", cwd=tmp_path)
        assert f"pip install 'unstride[{extra}]'" in ran(command, *arguments, cwd=tmp_path, check=False)
    ran(*install, f"{wheel}[onnx]", cwd=tmp_path)
    shown = ran(command, "export", "sample", "--out", "net.onnx", "--limit", "8", cwd=tmp_path)
    assert "returns output, confidence, pass_count, cost" in shown
    ran(command, "predict", "sample", "photo.png", "--out", "p.csv", cwd=tmp_path)
    assert (tmp_path / "p.csv").read_text().count("\n") == 2
