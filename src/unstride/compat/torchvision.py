"""One place for a known trap: a torchvision wheel whose compiled part does not fit the installed torch.

Importing it then fails with "operator torchvision::nms does not exist". None of unstride's work needs those
operators, only their schemas. So `import unstride` watches the import of torchvision: where it works, nothing is
done; where it has failed with that error, the schemas are declared and it is imported once more.

`python -m unstride.compat` has every Python of an environment with such a pair import unstride when it
starts: then torchvision, and timm, which needs it, can be imported before unstride as well.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_ERROR = "operator torchvision::"
ALONE = "import sys; sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != '_Watch']; import torchvision"
_declared: list[Any] = []  # the library, kept alive: the schemas vanish with it


class _Retry(Loader):
    """Another loader, that gets a second try after the one error that is known."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:  # what else importlib asks loaders for: sources, resources
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        fresh = dict(vars(module))
        try:
            self.loader.exec_module(module)
        except RuntimeError as error:
            if _ERROR not in str(error) or _declared:
                raise
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            vars(module).clear()  # or it would keep the modules of the attempt that failed, beside new ones
            vars(module).update(fresh)
            _declare()
            self.loader.exec_module(module)


class _Watch(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Retry(spec.loader)
                return spec
        return None


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.split("(")[0]):
            library.define(schema)
    _declared.append(library)


def settle(site: Path) -> str:
    """Have Pythons that look for packages in `site` start with unstride, if torchvision cannot be imported alone."""
    alone = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    if _ERROR not in alone.stderr:
        return "nothing to do: torchvision can be imported, or fails for another reason"
    file = site / "unstride-torchvision.pth"
    file.write_text("import unstride\n", encoding="utf-8")
    return (
        "torchvision's compiled part does not fit this torch, which is known and does no harm: in this environment "
        f"imports work in any order now ({file.name} in its site-packages; delete that file to undo it)"
    )


def install() -> None:
    """From now on, `import torchvision` works where only its compiled part is unusable."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
