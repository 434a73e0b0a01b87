"""What a result was made with: the command, versions, threads and processor."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("unstride", "torch", "numpy", "pillow")
_MODELS = ("torchvision", "timm", "transformers", "segmentation-models-pytorch")


def provenance() -> dict[str, Any]:
    """The record beside every result that is written, so that it can be made again."""
    return {"command": command(), "versions": versions(), "threads": torch.get_num_threads(), "cpu": processor()}


def command() -> str:
    """The command line of this process, as it can be typed again; bytes that are no UTF-8 as \\udcff."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    started = ["python", "-m", "unstride"] if name == "__main__.py" else [name]
    return shlex.join([*started, *sys.argv[1:]]).encode(errors="backslashreplace").decode()


def versions() -> dict[str, str]:
    """Versions of Python, of what every result depends on, and of the model libraries that are installed."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_MODELS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in _PACKAGES:
                found[package] = getattr(sys.modules.get(package), "__version__", "unknown")
    return found


def processor() -> str:
    """The name of the CPU, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
