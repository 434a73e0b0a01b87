"""`unstride bench SPEC`: time, cost and memory of a recipe beside the base model in several forms, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import AsJson, Budgets, Device, ImageSize, Seed, Specs, Task, Weights, numbers
from unstride.cli.printing import print_table, screen
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.evaluation.bench import BenchResult
    from unstride.pipeline import Pipeline


def register(app: typer.Typer) -> None:
    app.command()(bench)


@takes_recipe
def bench(
    recipe: RecipeOptions,
    specs: Specs = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Images or folders, so that gates decide as they do on yours. Default: noise."),
    ] = None,
    image_size: ImageSize = None,
    batch_sizes: Annotated[str, typer.Option(help="Images per batch, such as 1,8.")] = "1,8",
    budgets: Budgets = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time for the measurement.")] = 60.0,
    weights: Weights = "any",
    task: Task = None,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how long a recipe takes, beside what it costs.

    Rows: the base model called directly (eager), in the memory format channels_last, in ONNX Runtime, and the recipe.
    They take turns, and times are multiples of the eager model's. A warning says where time is more than 1.25 times
    the cost. Time does not depend on weights and images, except through gates: give --images if the recipe has gates.
    """
    from unstride.evaluation.bench import bench as measure

    sizes = numbers("--batch-sizes", batch_sizes, 100_000)
    wanted = [] if budgets is None else numbers("--budgets", budgets)
    pipeline = recipe.pipeline(specs, weights, task, device)
    inputs = _images(pipeline, images, image_size, max(sizes), seed)
    result = measure(
        pipeline.better,
        inputs,
        budgets=wanted,
        batch_sizes=sizes,
        noise=not images,
        seconds=seconds,
        progress=True,
    )
    if as_json:
        typer.echo(strict_json.dumps({"spec": pipeline.spec, **result.to_json()}))
    else:
        _show(pipeline.spec, result)


def _images(pipeline: Pipeline, paths: Sequence[Path] | None, size: int | None, count: int, seed: int) -> Any:
    """The user's images, or noise; of several networks as PIL images, which each of them prepares for itself."""
    import numpy as np
    import torch
    from PIL import Image

    from unstride.models.weights import place
    from unstride.views.images import find_images, open_image

    if paths:
        if size is not None:
            raise typer.BadParameter("--image-size: the images have a size of their own, so leave it out.")
        return [open_image(path) for path in find_images(list(paths))[: max(16, count)]]
    example = pipeline.base.example(size)
    if len(pipeline.networks) > 1 and size is None:
        values = np.random.default_rng(seed).integers(0, 256, (max(16, count), 256, 256, 3), dtype=np.uint8)
        return [Image.fromarray(noise) for noise in values]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(max(16, count), *example.shape[1:], generator=generator).to(*place(pipeline.better.model))


def _show(spec: str, result: BenchResult) -> None:
    from rich.table import Table

    threads = f"{result.threads} thread{'' if result.threads == 1 else 's'}"
    table = Table(title=f"{spec}: {result.base_macs / 1e9:.3g} GMACs, {result.device}, {threads}")
    for title in ("", "batch", "time", "cost", "images/s", "memory", "own passes"):
        table.add_column(title, justify="right" if title else "left")
    size = None
    for row in result.rows:
        if row.batch_size != size:
            table.add_section()
            size = row.batch_size
        table.add_row(
            row.name,
            str(row.batch_size),
            str(row.time),
            "" if row.cost is None else f"{row.cost:.2f}",
            f"{row.images_per_second:.1f}",
            "" if row.memory is None else f"{row.memory:.2f}x",
            "" if row.alone is None else f"{row.alone:.2f}x",
        )
    console = screen()
    print_table(console, table)
    console.print(
        "time, memory: multiples of the eager model's; cost: in its forward passes; own passes: time as a multiple of "
        "the same passes run alone",
        highlight=False,
    )
    for row in result.rows:
        if row.warning:
            console.print(row.warning, markup=False, highlight=False)
    for reason in result.left_out:
        console.print(f"left out: {reason}", markup=False, highlight=False)
