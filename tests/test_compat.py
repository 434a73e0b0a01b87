"""The one repair that unstride makes to another library, against packages that are laid out as the real ones are.

Each case is a folder `torchvision` on disk and a process of its own: a schema that was declared stays declared.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import unstride

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


def output(root: Path, code: str) -> str:
    done = python(root, code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OURS = "from unstride.compat import import_torchvision, _declared; import_torchvision(); "
FROM_DISK = "import torchvision; assert torchvision.__version__ == '0.0'; "
HAS_NMS = "import torch; print(torch.ops.torchvision.nms.default._schema)"
DECLARED = "print(len(_declared))"


@pytest.mark.parametrize("binary", ["_C.so", "_C_stable.so"])
def test_a_pair_that_fits_declares_its_own_operators(tmp_path: Path, binary: str) -> None:
    root = package(tmp_path, binary=binary)
    assert output(root, OURS + FROM_DISK + HAS_NMS).startswith("torchvision::nms(")
    assert output(root, OURS + FROM_DISK + DECLARED) == "0"


def test_a_pair_that_fits_may_be_imported_before(tmp_path: Path) -> None:
    root = package(tmp_path, binary="_C.so")
    code = f"{FROM_DISK} before = torchvision; {OURS} import torchvision; assert torchvision is before; {DECLARED}"
    assert output(root, code) == "0"


def test_importing_unstride_imports_and_declares_nothing(tmp_path: Path) -> None:
    code = "import sys, unstride, torch; print('torchvision' in sys.modules, hasattr(torch.ops.torchvision, 'nms'))"
    assert output(package(tmp_path, binary="_C.so"), code) == "False False"


def test_importing_unstride_leaves_the_import_system_alone(tmp_path: Path) -> None:
    code = "import sys; before = list(sys.meta_path); import unstride; print(sys.meta_path == before)"
    assert output(package(tmp_path), code) == "True"


def test_a_pair_that_does_not_fit_fails_alone_and_works_with_unstride(tmp_path: Path) -> None:
    root = package(tmp_path)
    alone = python(root, "import torchvision")
    assert alone.returncode == 1
    assert "operator torchvision::nms does not exist" in alone.stderr
    assert output(root, OURS + FROM_DISK + HAS_NMS).startswith("torchvision::nms(")
    assert output(root, OURS + FROM_DISK + DECLARED) == "1"
    assert output(root, OURS + "from torchvision.transforms import functional as f; print(f.resize(3))") == "3"


def test_an_import_that_failed_before_is_no_obstacle(tmp_path: Path) -> None:
    code = f"try:\n  import torchvision\nexcept RuntimeError: pass\n{OURS}\n{FROM_DISK}\n{DECLARED}"
    assert output(package(tmp_path), code) == "1"


def test_what_was_half_imported_is_imported_once_more(tmp_path: Path) -> None:
    """The modules of the attempt that failed would know nothing of the second one."""
    init = "from . import transforms, _meta_registrations\n__version__ = '0.0'\n"
    same = "sys.modules['torchvision.transforms'] is torchvision.transforms"
    assert output(package(tmp_path, init=init), f"{OURS}{FROM_DISK} import sys; print({same})") == "True"


@pytest.mark.parametrize(
    "statement",
    [
        "raise RuntimeError('the driver is too old')",
        "raise ImportError('libjpeg.so.8: cannot open shared object file')",
        "raise RuntimeError('operator mine::nms does not exist')",
        "raise OSError(2, 'No such file')",
        "raise RuntimeError('operator torchvision::roi_align does not exist')",
    ],
)
def test_another_error_comes_through_as_it_is(tmp_path: Path, statement: str) -> None:
    root = package(tmp_path, first=statement + "\n")
    alone, ours = python(root, "import torchvision"), python(root, OURS)
    assert ours.returncode == alone.returncode == 1
    assert ours.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]


def test_no_torchvision_at_all_is_the_usual_error(tmp_path: Path) -> None:
    code = (
        "import sys, unstride.compat\n"
        "sys.path[:] = []\n"
        "sys.path_importer_cache.clear()\n"
        "try:\n  unstride.compat.import_torchvision()\nexcept ModuleNotFoundError as error: print(error)"
    )
    assert output(tmp_path, code) == "No module named 'torchvision'"


def test_the_papers_networks_repair_torchvision_before_they_import_it() -> None:
    code = """
import sys
from unstride import compat
imported = []
real = compat.import_torchvision
compat.import_torchvision = lambda: (imported.append("torchvision" in sys.modules), real())
from unstride.models import paper_networks
print(imported[0], len(paper_networks.names()) > 38)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr[-2000:]
