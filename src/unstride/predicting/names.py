"""Whether a word of the command line names a model or images."""

from __future__ import annotations

import re
from pathlib import Path

from unstride.models.libraries import LIBRARIES
from unstride.pipeline import is_spec
from unstride.predicting.containers import is_hf


def is_model(text: str) -> bool:
    """`is_model("timm:resnet18")`; not `is_model("photos/")`, nor `is_model("hf:flowers")` where that is a data set."""
    source, _, name = text.partition(":")
    if text.startswith("@") or "://" in text or (source == "hf" and is_hf(Path(name))):
        return False
    if re.fullmatch(r".+\.py:\w+", text) or (source in LIBRARIES and name):
        return True
    return ":" not in text and is_spec(text) and (not Path(text).exists() or text.endswith(".onnx"))
