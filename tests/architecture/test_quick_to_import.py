"""`import unstride` and `unstride --help` are quick: nothing heavy is loaded before it is needed."""

import json
import subprocess
import sys

from unstride.cli.main import COMMANDS

HEAVY = ("torch", "torchvision", "timm", "matplotlib", "sympy", "transformers", "PIL", "numpy", "jinja2", "rich")
HELP = "import unstride.cli.main as m; m.app({args!r}, standalone_mode=False)"


def loaded_by(code: str) -> set[str]:
    """Which of HEAVY are in a fresh interpreter after `code`."""
    program = (
        f"{code}\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr))


def cpu(*steps: str) -> list[float]:
    """CPU seconds of each step in one fresh interpreter, the least of three: other work only ever adds."""
    clock = "import time; t = [time.process_time()]\n"
    code = clock + "".join(f"{step}\nt.append(time.process_time())\n" for step in steps)
    code += "import sys; print([b - a for a, b in zip(t, t[1:])], file=sys.stderr)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return [min(seconds) for seconds in zip(*(json.loads(run.stderr) for run in runs), strict=True)]


def test_importing_unstride_loads_nothing_heavy():
    assert loaded_by("import unstride") == set()


def test_reaching_for_enhance_loads_torch_but_no_library_of_models_or_plots():
    assert loaded_by("import unstride; unstride.enhance") <= {"torch", "numpy", "sympy", "PIL"}  # sympy is torch's own


def test_no_help_loads_more_than_what_prints_it():
    pages = [["--help"], *([command, "--help"] for command in COMMANDS)]
    assert loaded_by("\n".join(HELP.format(args=args) for args in pages)) <= {"rich"}  # with which typer prints


def test_importing_unstride_and_its_help_cost_little():
    torch, unstride = cpu("import torch", "import unstride")
    (page,) = cpu(HELP.format(args=["--help"]))
    slow = max(1.0, torch)  # the limits are those of a machine that imports torch in about a second
    assert unstride < 0.5 * slow
    assert page < 0.7 * slow
