"""A model that is an ONNX file, run by onnxruntime: what `unstride export` wrote, or any other with one image input.

loaded = load_onnx("better.onnx")
loaded.model(images)["output"]

A file that unstride wrote says itself how images are prepared, its task and its classes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unstride.errors import ArtefactError, InputError, OptionError, PreprocessAssumed, SpecError
from unstride.views.images import Preprocess

PREFIX = "unstride."  # of the metadata that unstride writes
COST = "cost"  # the output with what each image cost, in forward passes of the base model
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
_PIXELS = Preprocess(None, None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # of files that prepare images themselves


class OnnxModel(nn.Module):
    """Takes images (B, C, H, W), returns the outputs of the file by name, the batch axis first."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)
        digest = _digest(path)
        self.register_buffer("digest", torch.frombuffer(bytearray(digest), dtype=torch.uint8))  # for fingerprints
        self._key = digest
        session = self.session()
        entry = session.get_inputs()[0]
        self.input, self.kind, self.shape = entry.name, entry.type, tuple(entry.shape)
        self.outputs = tuple(output.name for output in session.get_outputs())
        self.pixels = self.kind == "tensor(uint8)"  # it takes (B, H, W, 3) and prepares them itself

    @property
    def reports_cost(self) -> bool:
        return COST in self.outputs

    def session(self) -> Any:
        """The file, open for running."""
        return _session(self.path, self._key)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        session = self.session()
        batch = self.shape[0]
        size = batch if isinstance(batch, int) else len(images)
        parts = [self._run(session, part) for part in images.split(size)]
        return {name: torch.cat([part[name] for part in parts]).to(images.device) for name in self.outputs}

    def _run(self, session: Any, images: Tensor) -> dict[str, Tensor]:
        x = images.detach().float().cpu()
        if self.pixels:
            array = (x * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        else:
            array = x.numpy().astype(_TYPES[self.kind])
        try:
            values = session.run(None, {self.input: array})
        except Exception as error:  # onnxruntime has errors of its own for every kind of wrong input
            reason = str(error).strip().splitlines()[-1]
            raise InputError(f"{self.path}: it cannot take images {tuple(images.shape)} ({reason}).") from error
        return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(self.outputs, values, strict=True)}


@functools.lru_cache(maxsize=8)
def _session(path: str, digest: bytes) -> Any:
    """A file that is open for running, with as many threads as torch has."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise OptionError("ONNX files are run by onnxruntime, which is not installed: pip install 'unstride[onnx]'")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    known = onnxruntime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in known]
    try:
        session = onnxruntime.InferenceSession(path, options, providers=providers)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ArtefactError(f"{path}: it cannot be opened as an ONNX file ({reason}).") from error
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type not in (*_TYPES, "tensor(uint8)"):
        found = ", ".join(f"{i.name}: {i.type}" for i in inputs)
        raise ArtefactError(f"{path}: got the inputs {found}, expected one tensor of images.")
    return session


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise SpecError(f"{path}: there is no such ONNX file ({error.strerror or error}).") from error


def described(model: OnnxModel) -> tuple[Preprocess, str | None, tuple[str, ...]]:
    """How images are prepared, the task, and the classes, as the file says."""
    known = model.session().get_modelmeta().custom_metadata_map
    values = {k[len(PREFIX) :]: v for k, v in known.items() if k.startswith(PREFIX) and k != f"{PREFIX}recipe"}
    try:
        stored = {name: json.loads(text) for name, text in values.items()}
    except ValueError as error:
        raise ArtefactError(f"{model.path}: its metadata is damaged ({error}). Export it again.") from error
    task, classes = stored.get("task"), tuple(map(str, stored.get("classes") or ()))
    if model.pixels:
        return _PIXELS, task, classes
    if stored.get("preprocess"):
        return Preprocess.from_json(stored["preprocess"]), task, classes
    size = [side for side in model.shape[2:] if isinstance(side, int)]
    usual = Preprocess(round(size[0] * 8 / 7), (size[0], size[1])) if len(size) == 2 else Preprocess()
    warnings.warn(
        f"{model.path} does not say how its images are prepared, so they are prepared as ImageNet's: {usual}. Write a "
        "file.py:function that returns unstride.models.LoadedModel(..., OnnxModel(path), preprocess) to change that.",
        PreprocessAssumed,
        stacklevel=4,
    )
    return usual, task, classes
