"""A recipe as a small file that people can read: TOML (or JSON), checked when read. Nothing in it is executed.

    write("tuned.toml", recipe, {"base": StoredNetwork("timm:resnet18", fingerprint(model))}, {"gain": 0.9})
    read("tuned.toml").recipe == recipe

`made` records the command, versions, threads and processor. What was fitted (attention, view weights per class) is in a
safetensors file beside it, named by `tensors`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unstride.errors import ArtefactError, Inconclusive, OptionError, UnstrideError
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Search, Stage
from unstride.storage import strict_json
from unstride.storage.artefacts import write_file
from unstride.storage.provenance import provenance

FORMAT = 1
LIMIT = 1 << 20  # bytes: a recipe is small
_STATES = {"near": Near, "search": Search}
_HEAD = ("format", "networks", "figures", "cost_of", "made")


@dataclass(frozen=True)
class StoredNetwork:
    """A network that a recipe names.

    Args:
        spec: how to load it, such as "timm:resnet18"; None: the caller brings it.
        fingerprint: of its weights.
        weights: "default", "random", or the path of a weights file.
        preprocess: how its images are prepared, as plain data.
        classes: of each class of the base network, the index of the same class here; () if they are the same.
    """

    spec: str | None = None
    fingerprint: str | None = None
    preprocess: Mapping[str, Any] | None = field(default=None, hash=False)
    classes: tuple[int, ...] = ()
    weights: str | None = None


@dataclass(frozen=True)
class StoredRecipe:
    """What a file contains: the recipe, the networks it was made for, the figures that it was chosen by."""

    recipe: Recipe
    networks: Mapping[str, StoredNetwork] = field(default_factory=dict, hash=False)
    figures: Mapping[str, Any] = field(default_factory=dict, hash=False)
    path: Path | None = None
    task: str | None = None  # of the recipe, where the file names one
    cost_of: str = "base"  # the network whose forward pass costs 1.0

    def warn(self) -> None:
        """Warn if the figures do not support the recipe."""
        verdict = self.figures.get("verdict")
        if verdict is not None and self.figures.get("decision", "use") != "use":
            warnings.warn(f"{self.path}: {verdict}", Inconclusive, stacklevel=4)
        if self.figures.get("moved") is False:
            text = "fitting did not move the weights from their start: this recipe gives the plain mean."
            warnings.warn(Inconclusive(f"{self.path}: {text}"), stacklevel=4)


def write(
    path: str | Path,
    recipe: Recipe,
    networks: Mapping[str, StoredNetwork] | None = None,
    figures: Mapping[str, Any] | None = None,
    cost_of: str = "base",
) -> Path:
    """Write the recipe into a file that is there whole or not at all."""
    check_name(path)
    path = Path(path)
    stored = networks if networks is not None else {}
    if not isinstance(recipe, Recipe):
        raise OptionError(f"recipe file: got {recipe!r:.80}, expected a Recipe.")
    if not isinstance(stored, Mapping) or not all(isinstance(n, StoredNetwork) for n in stored.values()):
        raise OptionError(f"recipe file: networks: got {networks!r:.80}, expected a StoredNetwork for each name.")
    if not isinstance(figures, Mapping | None):
        raise OptionError(f"recipe file: figures: got {figures!r:.80}, expected a table.")
    data: dict[str, Any] = {"format": FORMAT, **to_data(recipe)}
    if stored:
        data["cost_of"] = cost_of
        data["networks"] = {name: _compact(asdict(network)) for name, network in stored.items()}
    if figures:
        data["figures"] = plain_figures(figures)
    data["made"] = provenance()
    text = strict_json.dumps(data, indent=1) + "\n" if path.suffix == ".json" else _toml(data)
    return write_file(path, text.encode())


def plain_figures(value: Any) -> Any:
    """Figures as both forms can hold them: numpy's and torch's numbers as Python's, no None."""
    if isinstance(value, Mapping):
        return {str(k): plain_figures(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [plain_figures(v) for v in value]
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, str | int | float):
        raise OptionError(f"figures: got {value!r}, expected numbers and words, and lists and tables of them.")
    return value


def check_name(path: str | Path) -> None:
    """The name says which of the two forms is written and read."""
    if not isinstance(path, str | Path):
        raise OptionError(f"recipe file: got {path!r:.80}, expected a path that ends in .toml or .json.")
    if Path(path).suffix not in (".toml", ".json"):
        raise OptionError(f"recipe file: got {Path(path).name}, expected a name that ends in .toml or .json.")


def read(path: str | Path) -> StoredRecipe:
    """Read a recipe file and check its format, every key and every value."""
    if not isinstance(path, str | Path):
        raise OptionError(f"recipe file: got {path!r:.80}, expected a path.")
    path = Path(path)
    data = _parsed(path)
    given = data.get("format") if isinstance(data, dict) else None
    if type(given) is not int or given != FORMAT:
        raise ArtefactError(f"{path}: got format {given!r}, expected format {FORMAT} of recipe files.")
    try:
        head = {name: data.pop(name, None) for name in _HEAD}
        networks = {str(k): _network(v) for k, v in _table("networks", head["networks"]).items()}
        recipe, figures = from_data(data), _table("figures", head["figures"])
        task = recipe.task if "task" in data else None
        return StoredRecipe(recipe, networks, figures, path, task, str(head["cost_of"] or "base"))
    except UnstrideError as error:
        raise ArtefactError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ArtefactError(f"{path} does not contain a usable recipe ({type(error).__name__}: {error}).") from error


def _parsed(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        if len(raw) > LIMIT:
            raise ArtefactError(f"{path}: {len(raw):,} bytes are too many for a recipe, at most {LIMIT:,} are read.")
        text = raw.decode("utf-8")
        return tomllib.loads(text) if path.suffix == ".toml" else strict_json.loads(text)
    except OSError as error:
        near = _neighbours(path) if isinstance(error, FileNotFoundError) else ""
        raise ArtefactError(f"{path}: cannot be read ({error.strerror or error}).{near}") from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is not valid {path.suffix[1:].upper() or 'TOML'} ({error}).") from error


def _neighbours(path: Path) -> str:
    """A recipe with a similar name in that folder, as a question."""
    names = [file.name for file in path.parent.glob("*") if file.suffix in (".toml", ".json")]
    close = difflib.get_close_matches(path.name, names, 1)
    return f" Did you mean {close[0]!r}?" if close else ""


# ------------------------------------------------------------------------------------------------- nouns to plain data


def to_data(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data, without what has its default."""
    data: dict[str, Any] = {"name": recipe.name, "task": recipe.task}
    data |= {k: v for k, v in _changed(recipe, Recipe(task=recipe.task)).items() if k not in ("name", "task", "stages")}
    return data | {"stage": [_stage_data(stage) for stage in recipe.stages]}


def _changed(noun: Any, usual: Any) -> dict[str, Any]:
    values = {f.name: getattr(noun, f.name) for f in fields(noun)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def _stage_data(stage: Stage) -> dict[str, Any]:
    data = {"views": [str(v) for v in stage.views], **_changed(stage, Stage(stage.views))}
    if isinstance(stage.states, Near):
        data["states"] = {"near": {"count": stage.states.count}}
    elif isinstance(stage.states, Search):
        data["states"] = {"search": _search_data(stage.states)}
    if stage.gate is not None:
        data["gate"] = _gate_data(stage.gate)
    return _compact(data)


def _search_data(search: Search) -> dict[str, Any]:
    data = {"budget": search.budget, **_changed(search, Search())}
    return data | ({"until": _gate_data(search.until)} if search.until is not None else {})


def _gate_data(gate: Gate) -> dict[str, Any]:
    data = _compact(asdict(gate))
    return data if "tile" in data else {k: v for k, v in data.items() if k != "context"}


def _compact(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if v is not None and v != ()}


def from_data(data: Mapping[str, Any]) -> Recipe:
    """The inverse of `to_data`; an unknown key is an error that names it."""
    data = dict(data)
    stages = data.pop("stage", [{}])
    if not isinstance(stages, list):
        raise OptionError("stage: expected a list of tables, each below its own [[stage]].")
    _finite(data)
    values = _table("recipe", data, tuple(f.name for f in fields(Recipe) if f.name != "stages"))
    return Recipe(tuple(_stage(s) for s in stages), **values)


def _stage(data: Any) -> Stage:
    _finite(data)
    data = _table("stage", data, tuple(f.name for f in fields(Stage)))
    views = data.pop("views", ["plain"])
    if not isinstance(views, list) or not all(isinstance(v, str) for v in views):
        raise OptionError(f"stage: views: got {views!r}, expected a list such as ['plain', 'flip'].")
    states = data.pop("states", None)
    if isinstance(states, Mapping):
        states = _states(states)
    gate = _gate(data.pop("gate")) if "gate" in data else None
    return Stage(tuple(views), _tuples(states), gate=gate, **{name: _tuples(value) for name, value in data.items()})


def _states(data: Mapping[str, Any]) -> Near | Search:
    if len(data) != 1 or next(iter(data)) not in _STATES:
        raise OptionError(f"stage: states: got {dict(data)!r}, expected one table, near or search.")
    kind, values = next(iter(data.items()))
    noun = _STATES[kind]
    known = _table(kind, values, tuple(f.name for f in fields(noun)))
    if "until" in known:
        known["until"] = _gate(known["until"])
    made: Near | Search = noun(**{name: _tuples(value) for name, value in known.items()})
    return made


def _gate(data: Any) -> Gate:
    return Gate(**_table("gate", data, tuple(f.name for f in fields(Gate))))


def _network(data: Any) -> StoredNetwork:
    known = _table("network", data, tuple(f.name for f in fields(StoredNetwork)))
    for name in ("spec", "fingerprint", "weights"):
        if not isinstance(known.get(name), str | None):
            raise OptionError(f"network: {name}: got {known[name]!r}, expected text.")
    classes = known.pop("classes", [])
    if not isinstance(classes, list) or not all(type(k) is int and k >= 0 for k in classes):
        raise OptionError(f"network: classes: got {classes!r}, expected a list of class indices.")
    return StoredNetwork(classes=tuple(classes), **known)


def _table(name: str, value: Any, known: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A table of a file, empty where there is none; an unknown key is an error."""
    if not isinstance(value, Mapping | None):
        raise OptionError(f"{name}: got {value!r}, expected a table.")
    for key in value or ():
        if known is not None and key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"{name}: unknown field {key!r}.{hint} The fields are {', '.join(known)}.")
    return dict(value or {})


def _finite(data: Any) -> None:
    """Refuse NaN and numbers too large for any field."""
    for value in data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ():
        _finite(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and not abs(value) <= 1e9:  # NaN is not
            raise OptionError(f"got the number {str(value)[:20]}, expected at most 1e9.")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------- plain data to TOML


def _toml(data: Mapping[str, Any]) -> str:
    """Plain values first, then lists of tables, then tables."""
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
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML does not take as it is
    return str(value)
