"""Runs a notebook cell by cell in this process, and keeps what its cells print and show.

python docs/_tools/notebook.py examples/tour.ipynb        # writes the outputs into the file
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, as the format stores them. An error in a cell is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    codes = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_outputs("".join(source), names, number) for number, source in enumerate(codes, 1)]


def _outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, name = io.StringIO(), f"cell {number}"
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)  # type: ignore[attr-defined]
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": _shown(value)}
        )
    return outputs


def _shown(value: Any) -> dict[str, Any]:
    """What a notebook shows of the last value of a cell."""
    if hasattr(value, "_repr_svg_"):
        return {"image/svg+xml": value._repr_svg_().splitlines(keepends=True), "text/plain": [type(value).__name__]}
    if hasattr(value, "savefig"):  # a figure of matplotlib
        stream = io.BytesIO()
        value.savefig(stream, format="png", dpi=60, bbox_inches="tight")
        return {"image/png": base64.b64encode(stream.getvalue()).decode(), "text/plain": ["Figure"]}
    return {"text/plain": repr(value).splitlines(keepends=True)}


def main(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(cells, run(notebook), strict=True), 1):
        cell.update(outputs=outputs, execution_count=number)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
