"""A model called as its own library calls it: which of the inputs is the image, and which of the others may be there.

image_argument(model, None, {"pixel_values": images, "output_attentions": None})    # images
"""

import inspect
from typing import Any

from torch import Tensor, nn

from unstride.errors import InputError

IGNORED = ("labels",)  # only for a loss, and nothing is trained here


def image_argument(model: nn.Module, images: Any, inputs: dict[str, Any]) -> Any:
    """The images among the inputs; an InputError for any other that asks for more than the model's own default."""
    parameters = inspect.signature(model.forward).parameters
    rest = {name: value for name, value in inputs.items() if value is not None and name not in IGNORED}
    if images is None:
        known = rest if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else parameters
        maps = [name for name, value in rest.items() if name in known and isinstance(value, Tensor) and value.ndim == 4]
        first = next((name for name in parameters if name in rest), None)
        found = maps[0] if len(maps) == 1 else first
        if found is None:
            came = ", ".join(inputs) or "nothing"
            raise InputError(
                f"images: got {came}, expected the images first, or by the name that the model has for them"
            )
        images = rest.pop(found)
    for name, value in rest.items():
        usual = parameters[name].default if name in parameters else inspect.Parameter.empty
        if isinstance(value, Tensor) or value != usual:
            raise InputError(
                f"{name}: the captured network has images for its only input, everything else as when it is called "
                f"with them alone. Leave {name} out, or enhance a module that sets it in its own forward"
            )
    return images
