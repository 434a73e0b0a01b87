"""Models that ask `if mask.any():` of values that are the same for every image: the answers, given again to export.

Export cannot read numbers from tensors. If such a value does not come from the image, an ordinary forward pass tells
the number. If a model reads a single number that comes from pixels, nothing is answered and export fails.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_READS = (Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__)


class _Recorder(TorchFunctionMode):
    """Records the numbers that are read, and whether any of them is computed from the image."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.answers: list[Any] = []
        self.reads_pixels = False
        self.tainted: Any = WeakIdKeyDictionary()
        self.tainted[images] = True
        self.written: dict[int, Any] = {}  # memory that in-place ops wrote to; kept, so that no address is used twice

    def _from_image(self, t: Tensor) -> bool:
        return t in self.tainted or (bool(self.written) and t.untyped_storage().data_ptr() in self.written)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        dirty = any(self._from_image(t) for t in inputs)
        if func in _READS:
            self.answers.append(out)
            self.reads_pixels |= dirty
        elif dirty:
            name = getattr(func, "__name__", "")
            if name.endswith("_") or "out" in kwargs:
                for t in inputs if "out" in kwargs else inputs[:1]:
                    self.written[t.untyped_storage().data_ptr()] = t.untyped_storage()
            for t in pytree.tree_leaves(out):
                if isinstance(t, Tensor):
                    self.tainted[t] = True
        return out


class Answers(TorchFunctionMode):
    """Returns the recorded numbers again, in their order."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self.answers = list(answers)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self.answers:
            return self.answers.pop(0)
        return func(*args, **(kwargs or {}))


def constant_answers(model: nn.Module, images: Tensor) -> list[Any] | None:
    """The numbers that `model` reads from its own tensors; None if it reads none, or some that come from images."""
    images = images.clone()
    with torch.no_grad(), _Recorder(images) as recorder:
        model(images)
    return None if recorder.reads_pixels or not recorder.answers else recorder.answers
