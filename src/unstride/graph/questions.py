"""Models that ask `if mask.any():` of values that are the same for every image: the answers, given again to export.

Export cannot look into tensors. Where a question is asked of a value that does not come from the image, its answer is
no secret: it is heard in an ordinary forward pass. A single question about pixels, and nothing is answered.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_QUESTIONS = (Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__)


class _Listen(TorchFunctionMode):
    """Hears what is asked, and of what: everything that any result of the image flows into comes from the image."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.answers: list[Any] = []
        self.pixels = False
        self.tainted: Any = WeakIdKeyDictionary()
        self.tainted[images] = True
        self.written: dict[int, Any] = {}  # memory that in-place ops wrote on; kept, so that no address comes twice

    def _from_image(self, t: Tensor) -> bool:
        return t in self.tainted or (bool(self.written) and t.untyped_storage().data_ptr() in self.written)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        dirty = any(self._from_image(t) for t in inputs)
        if func in _QUESTIONS:
            self.answers.append(out)
            self.pixels |= dirty
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
    """Gives the answers again, in their order."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self.answers = list(answers)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS and self.answers:
            return self.answers.pop(0)
        return func(*args, **(kwargs or {}))


def constant_answers(model: nn.Module, images: Tensor) -> list[Any] | None:
    """What `model` asks of values that do not come from the images; None if it asks nothing, or asks about pixels."""
    images = images.clone()
    with torch.no_grad(), _Listen(images) as heard:
        model(images)
    return None if heard.pixels or not heard.answers else heard.answers
