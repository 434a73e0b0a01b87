"""unstride is imported before torchvision, so that a torchvision without its compiled part works, too."""

import unstride  # noqa: F401
