"""`unstride export SPEC OUT --recipe R`: fixed looks as a graph for other programs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from unstride.cli.options import AsJson, ImageSize, Spec, Task, Weights
from unstride.cli.recipes import Asked, takes_recipe


def register(app: typer.Typer) -> None:
    app.command()(export)


@takes_recipe()
def export(
    spec: Spec,
    out: Annotated[Path, typer.Argument(help="net.onnx or net.pt2.")],
    asked: Asked,
    weights: Weights = "default",
    task: Task = None,
    image_size: ImageSize = None,
    as_json: AsJson = False,
) -> None:
    """Write the model with a recipe's looks as one graph, for any batch; it is checked against the model first.

    A recipe with gates becomes a file for each stage and NAME.stages.json for unstride.exporting.run_stages. The
    graph takes prepared tensors; what lies outside their crop is not seen by its views.
    """
    from unstride import models
    from unstride.exporting import export as write

    loaded = models.load(spec, weights=weights)
    loaded = loaded.for_task(task or loaded.task or "classification")
    example = loaded.example(image_size)
    better = asked.enhanced(loaded, example, **({} if task is None else {"task": task}))
    files = [str(path) for path in write(better, example, out)]
    if as_json:
        size = list(map(int, example.shape[1:]))
        typer.echo(json.dumps({"spec": spec, "recipe": str(better.recipe), "input": ["B", *size], "files": files}))
        return
    typer.echo(str(better.recipe))
    typer.echo(
        f"takes (B, {', '.join(str(int(n)) for n in example.shape[1:])}), gives logits; checked against the model"
    )
    for file in files:
        typer.echo(f"wrote {file}")
