"""What an enhanced model captured for images of one size."""

from torch import Tensor

import unstride
from unstride.execution.graph_executor import Capture
from unstride.method.split import Split
from unstride.tasks.tasks import TASKS


def capture_of(better: unstride.Enhanced, images: Tensor) -> Capture:
    """The capture of the base model as it is now."""
    captures = better.networks["base"].captures
    captures.check()
    return captures.of(images)


def split_of(better: unstride.Enhanced, images: Tensor) -> Split:
    """The same, split for the model's task."""
    space = next((stage.space for stage in better.recipe.stages if stage.states is not None), "")
    return capture_of(better, images).split(TASKS[better.task], space)


def frozen_form(better: unstride.Enhanced) -> unstride.Enhanced:
    """The same recipe with copies of the weights."""
    return unstride.enhance(better.model, recipe=better.recipe, execution="frozen")
