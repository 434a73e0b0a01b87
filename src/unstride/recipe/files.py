"""A recipe as a small file that people can read: TOML (or JSON), checked when read; learned weights lie beside it.

write("tuned.toml", recipe, model=model, preprocess=preprocess, figures={"gain": 0.9})
read("tuned.toml").recipe == recipe
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from unstride.errors import ArtefactError, NotProved, OptionError, UnstrideError
from unstride.models.libraries import close_to
from unstride.procedure.gates import Gate, Stage
from unstride.procedure.stopping import Agreement, Confident, LowEntropy, Margin
from unstride.recipe.recipe import Recipe
from unstride.storage import strict
from unstride.storage.artefacts import write_file
from unstride.storage.fingerprint import check_model, fingerprint
from unstride.views.images import Preprocess
from unstride.views.policies import parse_view

VERSION = 1
LIMIT = 1 << 20  # bytes: a recipe is small
_STOPS = {rule.__name__: rule for rule in (Agreement, Confident, LowEntropy, Margin)}
_HEAD = ("version", "model", "preprocess", "figures")


@dataclass(frozen=True)
class Written:
    """What a file holds: the recipe, the network and preprocessing it was made for, the figures it was made by."""

    recipe: Recipe
    model: str | None = None  # fingerprint
    preprocess: Preprocess | None = None
    figures: Mapping[str, Any] = field(default_factory=dict, hash=False)
    path: Path | None = None
    task: str | None = None  # that of the recipe, where the file names one

    def check(self, model: nn.Module, preprocess: Preprocess | None = None) -> None:
        """Refuse another network, or images that are prepared in another way."""
        if self.model is not None:
            check_model(self.path, self.model, model)
        if preprocess is not None and self.preprocess is not None and preprocess != self.preprocess:
            old = self.preprocess
            names = [f.name for f in fields(old) if getattr(preprocess, f.name) != getattr(old, f.name)]
            raise ArtefactError(
                f"{self.path} was made with other preprocessing ({', '.join(names)} differ): {old}. "
                "Prepare the images in the same way, or tune again."
            )

    def warn(self) -> None:
        """Where the figures say that nothing was proved."""
        words = self.figures.get("verdict")
        if words is not None and self.figures.get("proved") is False:
            warnings.warn(f"{self.path}: {words}", NotProved, stacklevel=4)


def write(
    path: str | Path,
    recipe: Recipe,
    model: nn.Module | str | None = None,
    preprocess: Preprocess | None = None,
    figures: Mapping[str, Any] | None = None,
) -> Path:
    """The recipe in a file that is there whole or not at all. `model`: a module, or its fingerprint."""
    path = Path(path)
    check_name(path)
    data: dict[str, Any] = {"version": VERSION, **to_data(recipe)}
    if model is not None:
        data["model"] = {"fingerprint": model if isinstance(model, str) else fingerprint(model)}
    if preprocess is not None:
        data["preprocess"] = {k: v for k, v in preprocess.to_json().items() if v is not None}
    if figures:
        data["figures"] = _plain_figures(figures)
    text = strict.dumps(data, indent=1) + "\n" if path.suffix == ".json" else _toml(data)
    return write_file(path, text.encode())


def _plain_figures(value: Any) -> Any:
    """Figures as both forms can hold them: numpy's and torch's numbers as Python's, no None."""
    if isinstance(value, Mapping):
        return {str(k): _plain_figures(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain_figures(v) for v in value]
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, str | int | float):
        raise OptionError(f"figures: got {value!r}, wanted numbers and words, and lists and tables of them")
    return value


def check_name(path: str | Path) -> None:
    """The name says which of the two forms is written, and read again."""
    if Path(path).suffix not in (".toml", ".json"):
        raise OptionError(f"recipe file: got {Path(path).name}, wanted a name that ends in .toml or .json")


def read(path: str | Path) -> Written:
    """A recipe file, checked: version, every key, every value. Nothing in it is executed."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        if len(raw) > LIMIT:
            raise ArtefactError(f"{path}: {len(raw):,} bytes are too many for a recipe")
        text = raw.decode("utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else strict.loads(text)
    except OSError as error:
        near = _neighbours(path) if isinstance(error, FileNotFoundError) else ""
        raise ArtefactError(f"{path}: cannot be read ({error.strerror or error}){near}") from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is not valid {path.suffix[1:].upper() or 'TOML'} ({error})") from error
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int or version != VERSION:
        raise ArtefactError(f"{path}: got version {version!r}, this reads version {VERSION} of recipe files")
    try:
        head = {name: data.pop(name, None) for name in _HEAD}
        model = _table("model", head["model"], ("fingerprint",))
        prepared = head["preprocess"] and Preprocess.from_json(
            {"resize": None, "crop": None, **_table("preprocess", head["preprocess"])}
        )
        recipe, figures = from_data(data), _table("figures", head["figures"])
        task = recipe.task if "task" in data else None
        return Written(recipe, model.get("fingerprint"), prepared, figures, path, task)
    except UnstrideError as error:
        raise ArtefactError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} does not hold a usable recipe ({type(error).__name__}: {error})") from error


def _neighbours(path: Path) -> str:
    """Recipes with a like name in that folder, as a question."""
    return close_to(path.name, [file.name for file in path.parent.glob("*") if file.suffix in (".toml", ".json")])


def to_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data, without what has its default."""
    data: dict[str, Any] = {}
    usual = Recipe(task=recipe.task)
    for f in fields(recipe):
        value = getattr(recipe, f.name)
        if value == getattr(usual, f.name) and f.name not in ("name", "task"):
            continue
        if f.name == "stop":
            if type(value).__name__ not in _STOPS:
                raise OptionError(f"stop: {value!r} is not one of {', '.join(_STOPS)}, and code is not saved")
            value = {"rule": type(value).__name__, **asdict(value)}
        data["stage" if f.name == "stages" else f.name] = (
            [_plain_stage(s) for s in value] if f.name == "stages" else value
        )
    return data


def _plain_stage(stage: Stage) -> dict[str, Any]:
    data: dict[str, Any] = {"views": [v.spec() for v in stage.views], "states": stage.states}
    if stage.gate is not None:
        gate = {k: v for k, v in asdict(stage.gate).items() if v is not None}
        data["gate"] = gate if "tile" in gate else {k: v for k, v in gate.items() if k != "context"}
    return data | {k: list(v) for k in ("weights", "temperatures") if (v := getattr(stage, k))}


def from_data(data: dict[str, Any]) -> Recipe:
    """The inverse of `to_data`; what it does not know is refused by name."""
    data = dict(data)
    written = data.pop("stage", [])
    if not isinstance(written, list):
        raise OptionError("stage: wanted a list of tables, each below its own [[stage]]")
    stages = tuple(_stage(s) for s in written)
    stop = _table("stop", data.pop("stop", None))
    if stop:
        name = stop.pop("rule", None)
        if name not in _STOPS:
            raise OptionError(f"stop: got the rule {name!r}, wanted one of {', '.join(_STOPS)}")
        _table(f"stop rule {name}", stop, tuple(f.name for f in fields(_STOPS[name])))
    values = {name: _tuples(value) for name, value in data.items()}
    base = Recipe(task=values.pop("task", "classification"), stages=stages)
    if stop:
        values["stop"] = _STOPS[name](**stop)
    return replace(base, **values) if set(values) <= {f.name for f in fields(Recipe)} else base.changed(**values)


def _stage(data: dict[str, Any]) -> Stage:
    data = _table("a stage", data, tuple(f.name for f in fields(Stage)))
    views = data.pop("views", None)
    if not isinstance(views, list) or not all(isinstance(v, str) for v in views):
        raise OptionError(f"stage: got the views {views!r}, wanted a list such as ['plain', 'mirror']")
    gate = Gate(**_table("a gate", data.pop("gate"), tuple(f.name for f in fields(Gate)))) if "gate" in data else None
    return Stage(tuple(parse_view(v) for v in views), gate=gate, **data)


def _table(name: str, value: Any, known: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A table of a file, empty where there is none; a key that there is not is refused by its name."""
    if not isinstance(value, Mapping | None):
        raise OptionError(f"{name}: got {value!r}, wanted a table")
    for key in value or ():
        if known is not None and key not in known:
            raise OptionError(f"{name} has no {key!r}; there are {', '.join(known)}")
    return dict(value or {})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _toml(data: Mapping[str, Any]) -> str:
    """Plain values first, then tables, then lists of tables; TOML has no None, so nothing here is None."""
    tables = {k: v for k, v in data.items() if isinstance(v, Mapping)}
    lists = {k: v for k, v in data.items() if isinstance(v, list) and v and all(isinstance(x, Mapping) for x in v)}
    lines = [f"{k} = {_value(v)}" for k, v in data.items() if k not in tables and k not in lists]
    for name, entries in lists.items():
        for entry in entries:
            lines += ["", f"[[{name}]]", *(f"{k} = {_value(v)}" for k, v in entry.items())]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # nan and inf are TOML's own words, too
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
