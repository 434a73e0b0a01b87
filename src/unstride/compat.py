"""One known trap: a torchvision wheel whose compiled part does not fit the installed torch.

Importing it then fails with "operator torchvision::nms does not exist". unstride needs none of those operators, only
their schemas. `import_torchvision()` comes before every import of torchvision, or of a library that needs it, in
unstride itself. A torchvision that can be imported is left alone.
"""

import importlib
import sys
import threading
from typing import Any

_ERROR = "operator torchvision::"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_lock = threading.RLock()  # threads that decode images import it at the same time
_declared: list[Any] = []  # keeps the library alive: the schemas vanish with it


def import_torchvision() -> None:
    """Import torchvision; if only its compiled part is unusable, declare the missing schemas and import it again."""
    with _lock:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if _ERROR not in str(error) or _declared:
                raise
            for name in [name for name in list(sys.modules) if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]  # half imported by the attempt that failed
            _declare()
            importlib.import_module("torchvision")


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    _declared.append(library)
