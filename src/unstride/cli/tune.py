"""`unstride tune SPEC... --data KIND:PATH --cost 1.5 --out best.toml`: the best recipe for a compute budget."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstride.cli.options import (
    AsJson,
    BatchSize,
    DataOrNone,
    Device,
    Limit,
    Seed,
    Specs,
    Split,
    Task,
    Weights,
    weights_named,
)
from unstride.cli.printing import terminal_width
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.tuning.result import Tuned
    from unstride.tuning.unlabelled import GatesOnly


def register(app: typer.Typer) -> None:
    app.command()(tune)


@takes_recipe
def tune(
    recipe: RecipeOptions,
    specs: Specs = None,
    data: DataOrNone = None,
    cost: Annotated[
        float, typer.Option(help="Mean cost of an image, in forward passes of the first model. It may be below 1.")
    ] = 1.5,
    out: Annotated[Path | None, typer.Option(help="Write the recipe there (.toml or .json).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page (.html) with the evidence.")] = None,
    images: Annotated[
        list[Path] | None, typer.Option(help="Images without labels, instead of --data: only the gates are set.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The baseline: a model, or a recipe. Default: the first model alone.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="Loss that is acceptable where the recipe is cheaper. Default: half a point.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The metric that decides. Default: the usual one.")] = None,
    group: Annotated[str | None, typer.Option(help="Column of csv data: patient, video or site.")] = None,
    max_time_ratio: Annotated[
        float | None, typer.Option(help="Upper bound of the measured time, as a multiple of the first model's.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps the passes: a killed run continues.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Write the recipe even if the verdict is to keep the baseline.")
    ] = False,
    partners: Annotated[str | None, typer.Option(help="auto: add smaller timm models to the one named.")] = None,
    weights: Weights = "default",
    task: Task = None,
    device: Device = "auto",
    split: Split = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Find the best recipe of one to five models for a compute budget, test it, and say whether to use it.

    With --recipe, that recipe is the baseline. Every pass is computed once: with --cache, another --cost or more images
    reuse what is there. Several processes: torchrun --nproc-per-node 2 -m unstride tune ... --cache FOLDER

    Exit codes: 0 done; 1 an error, explained; 2 wrong usage; 3 done, but some images could not be read.
    """
    _check(recipe, specs, data, images, against, out, report)
    from unstride.storage.distributed import launched
    from unstride.tuning.tune import tune as find

    tuned = find(
        list(specs or ()),
        list(images) if images else data,
        cost=cost,
        against=recipe.recipe or against,
        margin=margin,
        metric=metric,
        group=group,
        max_time_ratio=max_time_ratio,
        partners=partners,
        task=task,
        weights=weights_named(weights),
        device=device,
        cache=cache,
        batch_size=batch_size,
        limit=limit,
        split=split,
        seed=seed,
    )
    if launched().leads:  # one of several processes prints and writes
        _write_and_print(tuned, out, report, anyway, as_json)


def _check(
    recipe: RecipeOptions,
    specs: list[str] | None,
    data: str | None,
    images: list[Path] | None,
    against: str | None,
    out: Path | None,
    report: Path | None,
) -> None:
    """What cannot work is an error before the first forward pass."""
    from unstride.evaluation.report import check_report
    from unstride.recipe.files import check_name
    from unstride.storage.files import check_file

    if bool(data) == bool(images):
        raise typer.BadParameter("give --data with labels, or --images without")
    if not specs:
        raise typer.BadParameter("name one to five models")
    if recipe and (against or recipe.changes):
        raise typer.BadParameter("--recipe is the baseline here: give it alone, without --against and --set")
    if out is not None:
        check_file(out, "--out")
        check_name(out)
    if report is not None:
        if images:
            raise typer.BadParameter("--report needs labels: give --data")
        check_report(report)


def _write_and_print(
    tuned: "Tuned | GatesOnly", out: Path | None, report: Path | None, anyway: bool, as_json: bool
) -> None:
    from unstride.tuning.result import Tuned

    written: dict[str, str] = {}
    if report is not None and isinstance(tuned, Tuned):
        written["report"] = str(tuned.report(report))
    keeps = isinstance(tuned, Tuned) and tuned.decision.verdict == "keep"
    if out is not None and (anyway or not keeps):
        written["out"] = str(tuned.save(out, anyway))
    if as_json:
        typer.echo(strict_json.dumps({**tuned.to_json(), **written}))
        return
    typer.echo(tuned.text(terminal_width()) if isinstance(tuned, Tuned) else str(tuned))
    for path in written.values():
        typer.echo(f"wrote {path}")
    if out is not None and "out" not in written:
        typer.echo(f"{out} is not written, because the verdict is to keep the baseline. --anyway writes it.")
