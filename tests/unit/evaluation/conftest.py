"""`tiny` is also what subprocesses import, so it is a module of its own and not a part of the tests' package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
