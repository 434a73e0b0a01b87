import sysconfig
from pathlib import Path

from unstride.compat.torchvision import settle

print(settle(Path(sysconfig.get_path("purelib"))))
