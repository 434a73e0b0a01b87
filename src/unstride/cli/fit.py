"""`unstride fit SPEC --data KIND:PATH --out fitted.toml`: fit numbers of a recipe on labelled images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstride.cli.options import (
    MOST,
    AsJson,
    BatchSize,
    Data,
    Device,
    Limit,
    Seed,
    Spec,
    Split,
    Weights,
    weights_named,
)
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.recipe.recipe import Recipe

METHODS = "attention (the paper's), gps, gps-shanmugam, augtta, classtta, meantta or maxtta"


def register(app: typer.Typer) -> None:
    app.command()(fit)


@takes_recipe
def fit(
    spec: Spec,
    data: Data,
    recipe: RecipeOptions,
    out: Annotated[Path, typer.Option(help="Recipe file to write (.toml or .json), such as fitted.toml.")],
    method: Annotated[str, typer.Option(help=f"{METHODS}.")] = "attention",
    schedule: Annotated[
        str, typer.Option(help="Training of the attention: paper (lr 1e-6), or fast (lr 3e-3, for few images).")
    ] = "paper",
    validation: Annotated[
        str | None,
        typer.Option(help="Images to validate on, KIND:PATH. Default: a fifth of --data, drawn by the seed."),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="States per image in training. Default: 30. For TTA: states of each view."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Heads of the attention.")] = 1,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Default: 5, or 30 for augtta and classtta.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Views of TTA: NAME:COUNT, such as expanded:100, or a file.")
    ] = "standard:30",
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps maps and logits for other seeds.")] = None,
    limit: Limit = None,
    split: Split = None,
    weights: Weights = "default",
    device: Device = "auto",
    batch_size: BatchSize = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Fit the paper's learned aggregation, or learned test-time augmentation, and write a recipe.

    The network does not change. Start a killed run again and it continues from OUT.partial. Under torchrun the
    processes share the work. Exit code 3: done, but some images could not be read; they are named.

    Use the result: unstride evaluate SPEC --recipe fitted.toml --data ...
    """
    from unstride.learning.fitting import fit as learn
    from unstride.storage.distributed import launched

    fitted = learn(
        spec,
        data,
        method=method,
        schedule=schedule,
        validation=validation,
        budget=budget,
        heads=heads,
        epochs=epochs,
        policy=policy,
        seed=seed,
        out=out,
        split=split,
        limit=limit,
        cache=cache,
        weights=weights_named(weights),
        device=device,
        batch_size=batch_size,
        recipe=_recipe(recipe, method),
    )
    if not launched().leads:
        return
    if as_json:
        typer.echo(strict_json.dumps({"spec": spec, "data": data, "out": str(out), **fitted.report.to_json()}))
    else:
        typer.echo(f"{fitted}\nSaved {out}.")


def _recipe(options: RecipeOptions, method: str) -> "str | Recipe | None":
    """What is fitted, with the changes of --set; None is the usual of the method."""
    from unstride.execution.opening import is_file
    from unstride.recipe.presets import get

    if not options.changes:
        return options.recipe
    if is_file(options.recipe):
        raise typer.BadParameter("--set changes recipes by name; change the file, or fit another recipe.")
    usual = "paper-learned" if method == "attention" else "plain"
    return get(options.recipe or usual).changed(**options.changes)
