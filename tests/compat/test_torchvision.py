"""The one repair that unstride makes to another library, against packages that are laid out as the real ones are.

Each case is a folder `torchvision` on disk and a process of its own: a schema that was declared stays declared.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unstride
from unstride.compat.torchvision import ALONE, settle

SOURCE = Path(unstride.__file__).parents[1]
SCHEMA = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# What a wheel that fits does: its compiled part declares the operators. Twice is an abort there, an error here.
COMPILED = f"""
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("{SCHEMA}")
"""
# What every torchvision does next: it says of its operators what they return.
REGISTERED = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets.new_empty(0)
"""
INIT = """
from pathlib import Path
if any(Path(__file__).parent.glob("_C*.so")):  # the real one loads it by a name that depends on its version
    from . import compiled
from . import _meta_registrations, transforms
__version__ = "0.0"
"""


def package(root: Path, *, binary: str | None = None, init: str = INIT, first: str = "") -> Path:
    folder = root / "torchvision"
    (folder / "transforms").mkdir(parents=True)
    (folder / "__init__.py").write_text(first + init)
    (folder / "compiled.py").write_text(COMPILED)
    (folder / "_meta_registrations.py").write_text(REGISTERED)
    (folder / "transforms" / "__init__.py").write_text("from . import functional\n")
    (folder / "transforms" / "functional.py").write_text("def resize(image): return image\n")
    if binary is not None:
        (folder / binary).write_bytes(b"\x7fELF")
    return root


def python(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(root), str(SOURCE)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def said(root: Path, code: str) -> str:
    done = python(root, code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FROM_DISK = "import torchvision; assert torchvision.__version__ == '0.0'; "
HAS_NMS = "import torch; print(torch.ops.torchvision.nms.default._schema)"
DECLARED = "from unstride.compat import torchvision as repair; print(len(repair._declared))"


@pytest.mark.parametrize("binary", ["_C.so", "_C_stable.so"])
def test_a_pair_that_fits_declares_its_own_operators(tmp_path: Path, binary: str) -> None:
    root = package(tmp_path, binary=binary)
    assert said(root, f"import unstride; {FROM_DISK} {HAS_NMS}").startswith("torchvision::nms(")
    assert said(root, f"import unstride; {FROM_DISK} {DECLARED}") == "0"


@pytest.mark.parametrize("binary", ["_C.so", "_C_stable.so"])
def test_a_pair_that_fits_may_be_imported_before(tmp_path: Path, binary: str) -> None:
    root = package(tmp_path, binary=binary)
    code = f"{FROM_DISK} before = torchvision; import unstride, torchvision; assert torchvision is before; {DECLARED}"
    assert said(root, code) == "0"


def test_importing_unstride_imports_and_declares_nothing(tmp_path: Path) -> None:
    code = "import sys, unstride, torch; print('torchvision' in sys.modules, hasattr(torch.ops.torchvision, 'nms'))"
    assert said(package(tmp_path, binary="_C.so"), code) == "False False"


def test_a_pair_that_does_not_fit_fails_alone_and_works_with_unstride(tmp_path: Path) -> None:
    root = package(tmp_path)
    alone = python(root, ALONE)
    assert alone.returncode == 1
    assert "operator torchvision::nms does not exist" in alone.stderr
    assert said(root, f"import unstride; {FROM_DISK} {HAS_NMS}").startswith("torchvision::nms(")
    assert said(root, f"import unstride; {FROM_DISK} {DECLARED}") == "1"
    assert said(root, "import unstride; from torchvision.transforms import functional as f; print(f.resize(3))") == "3"


def test_what_was_half_imported_is_imported_once_more(tmp_path: Path) -> None:
    """The modules of the attempt that failed would know nothing of the second one."""
    init = "from . import transforms, _meta_registrations\n__version__ = '0.0'\n"
    same = "sys.modules['torchvision.transforms'] is torchvision.transforms"
    code = f"import unstride; {FROM_DISK} import sys; print({same})"
    assert said(package(tmp_path, init=init), code) == "True"


@pytest.mark.parametrize(
    "statement",
    [
        "raise RuntimeError('the driver is too old')",
        "raise ImportError('libjpeg.so.8: cannot open shared object file')",
        "raise RuntimeError('operator mine::nms does not exist')",
        "raise OSError(2, 'No such file')",
    ],
)
def test_another_error_comes_through_as_it_is(tmp_path: Path, statement: str) -> None:
    root = package(tmp_path, first=statement + "\n")
    alone, ours = python(root, ALONE), python(root, "import unstride, torchvision")
    assert ours.returncode == alone.returncode == 1
    assert ours.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]
    assert said(root, f"import unstride\ntry:\n  import torchvision\nexcept Exception: pass\n{DECLARED}") == "0"


def test_an_error_that_the_repair_does_not_help_against_comes_through(tmp_path: Path) -> None:
    first = "raise RuntimeError('operator torchvision::roi_align does not exist')\n"
    ours = python(package(tmp_path, first=first), "import unstride, torchvision")
    assert ours.stderr.splitlines()[-1] == "RuntimeError: operator torchvision::roi_align does not exist"


def test_no_torchvision_at_all_is_the_usual_error(tmp_path: Path) -> None:
    code = (
        "import sys, unstride\n"
        "sys.path[:] = []\n"
        "sys.path_importer_cache.clear()\n"
        "try:\n  import torchvision\nexcept ModuleNotFoundError as error: print(error)"
    )
    assert said(tmp_path, code) == "No module named 'torchvision'"


def test_tools_still_find_the_package(tmp_path: Path) -> None:
    root = package(tmp_path)
    code = (
        "import unstride, importlib.util, inspect\n"
        "print(importlib.util.find_spec('torchvision').origin)\n"
        "import torchvision\nprint(inspect.getsource(torchvision).count('_meta_registrations'))"
    )
    assert said(root, code).splitlines() == [str(root / "torchvision" / "__init__.py"), "1"]


# ------------------------------------------------------------------------------------------------------ what docs show

ROOT = Path(__file__).parents[2]
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
IMPORT = re.compile(r"^\s*(?:import (?P<names>[\w., ]+)|from (?P<module>[\w.]+) import)", re.MULTILINE)
LATER = {"timm", "torchvision", "segmentation_models_pytorch", "transformers"}  # they import torchvision themselves


def blocks(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [text] if path.suffix == ".py" else re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def imported(block: str) -> list[str]:
    found = []
    for match in IMPORT.finditer(block):
        names = match["names"].split(",") if match["names"] else [match["module"]]
        found += [name.split(" as ")[0].strip().partition(".")[0] for name in names]
    return found


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_docs_import_unstride_before_what_needs_torchvision(path: Path) -> None:
    """On a pair that does not fit, `import timm, unstride` cannot work; so nobody is told to write it."""
    before: set[str] = set()  # a page is read from its top, block by block
    for block in blocks(path):
        for name in imported(block):
            assert name not in LATER or "unstride" in before, f"{path.name}: {name} before unstride"
            before.add(name)


def test_the_order_is_looked_at() -> None:
    assert imported("import timm, torch, unstride\nfrom torchvision.models import resnet18") == [
        "timm",
        "torch",
        "unstride",
        "torchvision",
    ]
    assert sum("unstride" in imported(block) for path in SHOWN for block in blocks(path)) > 10


@pytest.mark.parametrize("binary", [None, "_C.so"])
def test_python_starts_with_unstride_only_where_the_pair_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binary: str | None
) -> None:
    root = package(tmp_path / "libraries", binary=binary)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(SOURCE)]))
    said_so, file = settle(tmp_path), tmp_path / "unstride-torchvision.pth"
    assert file.exists() == (binary is None) and ("nothing to do" in said_so) == (binary is not None)
    if file.exists():  # as Python reads it when it starts
        assert said(root, f"import site; site.addsitedir({str(tmp_path)!r}); import torchvision; {DECLARED}") == "1"
