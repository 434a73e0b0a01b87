"""`unstride export SPEC... --recipe best.toml --out best.onnx`: a whole recipe as one file for other runtimes."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from unstride.cli.options import AsJson, ImageSize, Limit, Specs, Task, Weights
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json


def register(app: typer.Typer) -> None:
    app.command()(export)


@takes_recipe
def export(
    recipe: RecipeOptions,
    out: Annotated[Path, typer.Option(help="File to write: .onnx, or .pt2 for recipes without gates.")],
    specs: Specs = None,
    from_pixels: Annotated[
        bool, typer.Option("--from-pixels", help="Take uint8 images (B, H, W, 3), and prepare them in the file.")
    ] = False,
    quantize: Annotated[str | None, typer.Option(help="int8: quantise each network, calibrated with --images.")] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of images to check the file with, and to calibrate int8. Default: generated."),
    ] = None,
    limit: Limit = 256,
    image_size: ImageSize = None,
    weights: Weights = "default",
    task: Task = None,
    as_json: AsJson = False,
) -> None:
    """Write one file that runs the whole recipe without unstride and torch.

    Views, gates, all networks and the way their outputs are combined are in the file; each image stops as soon as it is
    confident. Outputs: what the model returns, confidence, pass_count and cost. The file is compared with the recipe on
    images before it is written.
    """
    import unstride

    pipeline = recipe.pipeline(specs, weights, task, None, execution="auto")
    options: dict[str, Any] = {
        "from_pixels": from_pixels,
        "quantize": quantize,
        "images": images,
        "checked": limit or 256,
    }
    written = unstride.export(pipeline, out, example=image_size, **options)
    if as_json:
        typer.echo(strict_json.dumps({"spec": pipeline.spec, **asdict(written), "path": str(out)}))
        return
    typer.echo(str(pipeline.better.recipe))
    typer.echo(str(written))
