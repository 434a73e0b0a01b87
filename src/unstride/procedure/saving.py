"""What an enhanced model was asked for, and its learned aggregation, in one file; never the network itself."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from unstride.errors import ArtefactError, OptionError
from unstride.geometry.states import State
from unstride.jobs.artefacts import check_finite, read_artefact, write_artefact
from unstride.jobs.fingerprint import fingerprint
from unstride.procedure.aggregate import Attention
from unstride.procedure.options import validate
from unstride.procedure.stopping import Agreement, Confident, LowEntropy, Margin
from unstride.procedure.tasks import Plan
from unstride.views.images import Preprocess

KIND = "enhanced"
_STOPS = {rule.__name__: rule for rule in (Agreement, Confident, LowEntropy, Margin)}


@dataclass(frozen=True, eq=False)
class Saved:
    """What is kept of an enhanced model."""

    task: str
    space: str | None
    asked: dict[str, Any]
    attention: Attention | None
    preprocess: Preprocess | None


def write(
    path: str | Path, model: nn.Module, kept: Saved, plan: Plan | None = None, layers: tuple[int, ...] | None = None
) -> Path:
    """Into a file, with the network's fingerprint; of the `plan` that it ran with, what a reader may want to know."""
    options = dict(kept.asked)
    stop = options["stop"]
    if stop is not None:
        if type(stop).__name__ not in _STOPS:
            raise OptionError(f"stop: {stop!r} is not one of {', '.join(_STOPS)}, and code is not saved; leave it out")
        options["stop"] = {"rule": type(stop).__name__, **asdict(stop)}
    if options["states"] is not None:
        options["states"] = [s.selections if isinstance(s, State) else s for s in options["states"]]
    attention = kept.attention
    meta = {
        "kind": KIND,
        "model": fingerprint(model),
        "task": kept.task,
        "space": kept.space,
        "options": options,
        "layers": [layer.rate for layer in plan.found.layers] if plan is not None else None,
        "searched": list(layers) if layers is not None else None,
        "image": [plan.graph.channels, *plan.graph.size] if plan is not None else None,
        "channels": attention.channels if attention is not None else None,
        "preprocess": asdict(kept.preprocess) if kept.preprocess is not None else None,
    }
    return write_artefact(path, attention.state_dict() if attention is not None else {}, meta)


def read(path: str | Path, model: nn.Module, preprocess: Preprocess | None = None) -> Saved:
    """From a file, checked: whole, ours, for this network, and with this preprocessing where one is given."""
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
        stored = meta["preprocess"]
        old = Preprocess(**{k: _tuples(v) for k, v in stored.items()}) if stored is not None else None
        attention = None
        if channels is not None:
            check_finite(path, tensors)
            if channels != tensors["out"].numel():  # before so much memory is asked for
                raise ValueError(f"{channels} channels, but weights for {tensors['out'].numel()}")
            attention = Attention(channels)
            attention.load_state_dict(tensors)
            attention.requires_grad_(False)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise ArtefactError(f"{path} does not hold a usable enhanced model ({error}). Save it again.") from error
    if preprocess is not None and old is not None and preprocess != old:
        names = [f.name for f in fields(old) if getattr(preprocess, f.name) != getattr(old, f.name)]
        raise ArtefactError(
            f"{path} was fitted with other preprocessing ({', '.join(names)} differ): {old}. "
            "Prepare the images in the same way, or fit again."
        )
    return Saved(task, space, asked, attention, old)


def _asked(saved: dict[str, Any]) -> dict[str, Any]:
    asked = {**saved, "layers": _tuples(saved["layers"]), "states": _tuples(saved["states"])}
    if saved["stop"] is not None:
        asked["stop"] = _STOPS[saved["stop"]["rule"]](**{k: v for k, v in saved["stop"].items() if k != "rule"})
    return asked


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
