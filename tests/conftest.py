"""unstride first: it makes torchvision importable where its compiled part does not fit the installed torch."""

from hypothesis import settings

import unstride  # noqa: F401

settings.register_profile("unstride", deadline=None)  # a busy machine is no failure
settings.load_profile("unstride")
