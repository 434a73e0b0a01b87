"""unstride first: it makes torchvision importable where its compiled part does not fit the installed torch."""

import unstride  # noqa: F401
