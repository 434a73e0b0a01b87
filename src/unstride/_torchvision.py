"""One place for a known trap: a torchvision wheel whose compiled part does not fit the installed torch.

Importing it then fails with "operator torchvision::nms does not exist". None of unstride's work needs those operators,
only their schemas, so they are declared before the import. `unstride/__init__.py` calls this once; import order then
does not matter for anything imported after unstride.
"""

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # kept alive: the schemas vanish with it


def ensure_importable() -> None:
    """Make `import torchvision` work where only its compiled part is unusable."""
    global _library
    if "torchvision" in sys.modules or _library is not None:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _compiled_part_loads(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.split("(")[0]):
            library.define(schema)
    _library = library


def _compiled_part_loads(package: Path) -> bool:
    for binary in sorted(package.glob("_C.*")):
        try:
            torch.ops.load_library(str(binary))
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")
