import sys
from pathlib import Path

import unstride  # noqa: F401  (before torchvision and timm, see unstride/_torchvision.py)

sys.path.insert(0, str(Path(__file__).parent))
