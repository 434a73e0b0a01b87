"""An enhanced model's options and learned aggregation in one file, never the network itself."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unstride.aggregate import Attention
from unstride.artefacts import read_artefact, write_artefact
from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, InputError, OptionError
from unstride.fingerprint import fingerprint
from unstride.images import Preprocess
from unstride.options import validate
from unstride.states import State
from unstride.stopping import Agreement, Confident, LowEntropy, Margin

KIND = "enhanced"
_STOPS = {rule.__name__: rule for rule in (Agreement, Confident, LowEntropy, Margin)}


def save(better: Enhanced, path: str | Path, preprocess: Preprocess | None = None) -> Path:
    """`better.save("better.safetensors")`: options, attention, preprocessing, and the fingerprint of the network."""
    preprocess = preprocess or better.preprocess
    plans = list(better._plans.values())
    options = dict(better._asked)
    stop = options["stop"]
    if stop is not None:
        if type(stop).__name__ not in _STOPS:
            raise OptionError(f"stop: {stop!r} is not one of {', '.join(_STOPS)}, and code is not saved; leave it out")
        options["stop"] = {"rule": type(stop).__name__, **asdict(stop)}
    if options["states"] is not None:
        options["states"] = [s.selections if isinstance(s, State) else s for s in options["states"]]
    meta = {
        "kind": KIND,
        "model": fingerprint(better.model),
        "task": better.task,
        "space": better.space,
        "options": options,
        "layers": [layer.rate for layer in plans[0].found.layers] if plans else None,
        "searched": list(better.options(plans[0]).layers) if plans else None,
        "image": [plans[0].graph.channels, *plans[0].graph.size] if plans else None,
        "channels": better.attention.channels if better.attention is not None else None,
        "preprocess": asdict(preprocess) if preprocess is not None else None,
    }
    return write_artefact(path, better.attention.state_dict() if better.attention is not None else {}, meta)


def load(path: str | Path, model: nn.Module, *, preprocess: Preprocess | None = None) -> Enhanced:
    """`better = unstride.load("better.safetensors", model)`: what was saved, around the same network.

    An ArtefactError where the file is damaged or foreign, or was saved for other weights. With `preprocess`, also where
    the images would be prepared in another way than when it was saved. What was saved is in `better.preprocess`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: got {type(model).__name__}, wanted a torch.nn.Module")
    tensors, meta = read_artefact(path, KIND)
    if meta.get("model") != (mine := fingerprint(model)):
        raise ArtefactError(
            f"{path} was saved for a model with fingerprint {str(meta.get('model'))[:12]}, this has {mine[:12]}. "
            "Give the model, with the weights, that it was fitted with, or fit again."
        )
    try:
        asked = _asked(meta["options"])
        task, space, channels = meta["task"], meta["space"], meta["channels"]
        validate(task, space, asked)
        better = Enhanced(model, task, space, asked, 512 << 20)
        stored = meta["preprocess"]
        better.preprocess = Preprocess(**{k: _tuples(v) for k, v in stored.items()}) if stored is not None else None
        if channels is not None:
            better.attention = Attention(channels)
            better.attention.load_state_dict(tensors)
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            better.attention.to(device).requires_grad_(False)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ArtefactError(f"{path} does not hold a usable enhanced model ({error}). Save it again.") from error
    if preprocess is not None and better.preprocess is not None and preprocess != better.preprocess:
        old = better.preprocess
        names = [f.name for f in fields(old) if getattr(preprocess, f.name) != getattr(old, f.name)]
        raise ArtefactError(
            f"{path} was fitted with other preprocessing ({', '.join(names)} differ): {better.preprocess}. "
            "Prepare the images in the same way, or fit again."
        )
    return better


def _asked(saved: dict[str, Any]) -> dict[str, Any]:
    asked = {**saved, "layers": _tuples(saved["layers"]), "states": _tuples(saved["states"])}
    if saved["stop"] is not None:
        asked["stop"] = _STOPS[saved["stop"]["rule"]](**{k: v for k, v in saved["stop"].items() if k != "rule"})
    return asked


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
