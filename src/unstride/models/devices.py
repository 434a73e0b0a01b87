"""Where a model runs: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto`."""

from __future__ import annotations

import os
import re

import torch

from unstride.errors import OptionError


def device_named(name: str | None) -> torch.device | None:
    """The device, checked to be there; None for None. `auto`: CUDA, else MPS, else the CPU."""
    if name is None:
        return None
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if not isinstance(name, str) or not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name):
        raise OptionError(f"device: got {str(name)[:40]!r}, expected cpu, cuda, cuda:1, mps or auto.")
    kind, _, index = name.partition(":")
    count = {"cpu": 1, "mps": int(torch.backends.mps.is_available()), "cuda": torch.cuda.device_count()}[kind]
    if int(index or 0) >= count:
        plural = "" if count == 1 else "s"
        raise OptionError(f"device: {name} is not available here; torch finds {count} {kind} device{plural}.")
    return torch.device(name)
