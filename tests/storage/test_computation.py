"""A change of what a model computes changes its key; nothing else does."""

import enum
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from unstride.storage.computation import describe_computation
from unstride.storage.fingerprint import computation_key, text_digest

PROBE = torch.zeros(1, 3, 8, 8)

SOURCE = """
import enum
from pathlib import Path
import torch
from torch import nn
import helper
from helper import scaled

SCALE = 2.0
TABLE = {"act": nn.ReLU}

class Mode(enum.Enum):
    A = 1
    B = 2

class Config:
    __slots__ = ("mode", "function")
    def __init__(self):
        self.mode, self.function = Mode.A, abs

def closure(amount):
    return lambda x: x + amount

class Base(nn.Module):
    offset = 0.0
    def extra(self, x):
        return x + self.offset
    def forward(self, x):
        return scaled(self.after(self.extra(self.act(self.conv(x))))) * SCALE

class Net(Base):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 2, 3, padding=1), TABLE["act"]()
        self.after, self.config, self.names = closure(0.5), Config(), {"a", "b", "c"}

def make():
    torch.manual_seed(0)
    return Net().eval()
"""
HELPER = "def scaled(x):\n    return x * inner(x)\ndef inner(x):\n    return 1.0\n"
SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import net
from unstride.storage.computation import describe_computation
from unstride.storage.fingerprint import computation_key
print(*describe_computation(net.make()), computation_key(net.make(), torch.zeros(1, 3, 8, 8)), sep="\\n")
"""


def key_of(folder: Path, source: str = SOURCE, helper: str = HELPER, probe: bool = True) -> str:
    """The key in this process, from files loaded anew."""
    return lines_of(folder, source, helper, probe)[-1]


def lines_of(folder: Path, source: str = SOURCE, helper: str = HELPER, probe: bool = True) -> list[str]:
    """What the key is made of, and the key."""
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(source)
    (folder / "helper.py").write_text(helper)
    modules = {}
    for name, text in (("helper", helper), ("net", source)):
        module = types.ModuleType(name)
        module.__file__ = str(folder / f"{name}.py")
        sys.modules[name] = modules[name] = module
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    try:
        key = computation_key(modules["net"].make(), PROBE if probe else None)
        return [*describe_computation(modules["net"].make()), key]
    finally:
        for name in modules:
            del sys.modules[name]


CHANGES = {
    "forward": ("* SCALE", "* SCALE + 1e-9"),
    "global": ("SCALE = 2.0", "SCALE = 2.0000001"),
    "closure": ("closure(0.5)", "closure(0.50000001)"),
    "code of a closure": ("x + amount", "x - -amount"),
    "activation": ('"act": nn.ReLU', '"act": nn.GELU'),
    "class attribute": ("offset = 0.0", "offset = 1e-9"),
    "method of a parent": ("x + self.offset", "x + self.offset * 1.0"),
    "enum in slots": ("Mode.A, abs", "Mode.B, abs"),
    "function in slots": ("Mode.A, abs", "Mode.A, max"),
    "set": ('{"a", "b", "c"}', '{"a", "b", "d"}'),
    "weights": ("manual_seed(0)", "manual_seed(1)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_code_changes_the_key(tmp_path: Path, change: str) -> None:
    before, after = CHANGES[change]
    assert before in SOURCE
    assert key_of(tmp_path, SOURCE.replace(before, after), probe=False) != key_of(tmp_path, probe=False)


def test_a_change_in_a_file_that_is_imported_changes_the_key(tmp_path: Path) -> None:
    assert key_of(tmp_path, helper=HELPER.replace("1.0", "1.5"), probe=False) != key_of(tmp_path, probe=False)


def test_another_process_another_folder_and_a_forward_pass_change_nothing(tmp_path: Path) -> None:
    here = lines_of(tmp_path / "one")
    key_of(tmp_path / "two")
    for seed, folder in (("1", "one"), ("2", "two")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == "\n".join(here).splitlines()


def test_compiling_some_model_in_the_same_process_changes_nothing() -> None:
    """torch.compile replaces methods of nn.Module, for all models and for good."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    before = computation_key(model, PROBE)
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2))
    assert computation_key(model, PROBE) == before


def test_methods_that_a_library_adds_to_modules_change_nothing() -> None:
    """transformers does."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    before = computation_key(model, PROBE)
    nn.Module.added = torch.nn.functional.relu  # type: ignore[attr-defined]
    try:
        assert computation_key(model, PROBE) == before
    finally:
        del nn.Module.added  # type: ignore[attr-defined]


def test_what_only_the_outputs_show_changes_the_key(tmp_path: Path) -> None:
    """A file that the model reads when it is called."""
    (tmp_path / "gain.txt").write_text("1.0")
    source = SOURCE.replace("* SCALE", f"* float(Path({str(tmp_path / 'gain.txt')!r}).read_text())")
    before = key_of(tmp_path, source)
    assert key_of(tmp_path, source) == before
    (tmp_path / "gain.txt").write_text("-1.0")
    assert key_of(tmp_path, source) != before


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


def test_patches_hooks_and_attributes_change_the_key(monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm2d(4)).eval()
    model.config = types.SimpleNamespace(kind=Kind.ONE)
    keys = [computation_key(model)]
    model(PROBE)
    assert computation_key(model) == keys[0]

    def changed() -> None:
        keys.append(computation_key(model))
        assert len(set(keys)) == len(keys)

    model[2].p = 0.25
    changed()
    model.config.kind = Kind.TWO
    changed()
    model[1].inplace = True
    changed()
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    changed()
    handle.remove()
    assert computation_key(model) == keys[-2]
    model[1].forward = lambda x: x.relu()
    changed()
    monkeypatch.setattr(nn.BatchNorm2d, "_check_input_dim", lambda self, x: None)
    changed()
    model[3].running_mean += 1
    changed()
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    changed()
    handle.remove()
    assert computation_key(model) == keys[-2]


def test_the_probe_does_not_touch_the_model_or_the_random_numbers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    torch.manual_seed(0)
    before, state = model[1].running_mean.clone(), torch.random.get_rng_state()
    for mode in (True, False):
        computation_key(model.train(mode), PROBE)
        assert torch.equal(model[1].running_mean, before) and model.training is mode
    assert torch.equal(torch.random.get_rng_state(), state)
    assert computation_key(model, torch.zeros(1, 7, 8, 8))  # a probe that the model does not take


def test_text_digest_is_of_values_not_of_their_order() -> None:
    assert text_digest({"a": 1, "b": [2, None]}) == text_digest({"b": [2, None], "a": 1}) != text_digest({"a": 1})
    with pytest.raises(TypeError):
        text_digest({"a": object()})
