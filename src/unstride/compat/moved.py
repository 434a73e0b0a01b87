"""Where modules of version 0.1 went: `from unstride.windows import SlidingWindow` still works, with a hint."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "unstride.benching": "unstride.evaluation.benching",
    "unstride.evaluation": "unstride.evaluation",
    "unstride.fitting": "unstride.learning.fitting",
    "unstride.images": "unstride.views.images",
    "unstride.plots": "unstride.show",
    "unstride.positions": "unstride.geometry.positions",
    "unstride.prediction": "unstride.procedure.prediction",
    "unstride.rules": "unstride.geometry.rules",
    "unstride.saving": "unstride.enhanced",
    "unstride.selecting": "unstride.learning.selecting",
    "unstride.states": "unstride.geometry.states",
    "unstride.stopping": "unstride.procedure.stopping",
    "unstride.tta.policies": "unstride.views.policies",
    "unstride.windows": "unstride.procedure.windows",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(
            f"{spec.name} is now {new}; what is public is in unstride itself", DeprecationWarning, stacklevel=2
        )
        module = ModuleType(spec.name, f"Moved to {new}.")
        module.__getattr__ = lambda name: _found(new, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are read from the new place."""


def _found(module: str, name: str) -> object:
    """In the new place, or else among the public names: `unstride.plots` went to more than one room."""
    place = importlib.import_module(module)
    return getattr(place if hasattr(place, name) or name.startswith("_") else importlib.import_module("unstride"), name)


def install() -> None:
    """Old module names are looked for after all others."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
