"""Programs that measure unstride on real networks."""

from unstride.compat import import_torchvision

import_torchvision()  # before any program imports it, or timm, which needs it
