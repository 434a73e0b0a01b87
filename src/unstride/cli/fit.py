"""`unstride fit SPEC --data KIND:PATH --out FILE`: train the learned aggregation on labelled images."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import MOST, AsJson, Data, Limit, Seed, Spec, Split, Weights
from unstride.cli.recipes import Asked, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.data import Dataset
    from unstride.data.batches import Batches


def register(app: typer.Typer) -> None:
    app.command()(fit)


@takes_recipe("budget", "criterion", "aggregate")
def fit(
    spec: Spec,
    data: Data,
    asked: Asked,
    out: Annotated[Path, typer.Option(help="Where to save, e.g. better.safetensors.")],
    val: Annotated[
        str | None, typer.Option(help="Images to validate on, KIND:PATH; by default part of --data.")
    ] = None,
    val_fraction: Annotated[float, typer.Option(help="That part.")] = 0.2,
    split: Split = None,
    limit: Limit = None,
    weights: Weights = "default",
    budget: Annotated[
        int, typer.Option(min=2, max=MOST, help="States per image in training; any number may be used later.")
    ] = 30,
    epochs: Annotated[int, typer.Option(min=1, max=MOST, help="Passes over the images.")] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate; the paper's 1e-6 is for ImageNet's 20,000 images.")] = 1e-4,
    unseen: Annotated[bool, typer.Option(help="The network was not trained on these images.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, max=MOST, help="Images per step.")] = 32,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the learned aggregation and save it; the network stays as it is.

    A killed run goes on where it was when started again: its work lies in OUT.partial until it is done. Under
    torchrun the processes share the work. Exit code 3: done, but some images could not be read; they are named.
    """
    if limit == 1:
        raise typer.BadParameter("--limit 1: wanted at least 2, to train on and to validate on")
    from unstride import data as datasets
    from unstride import models
    from unstride.errors import OptionError
    from unstride.learning.fitting import fit as train
    from unstride.storage.distributed import world
    from unstride.storage.files import check_file, check_folder
    from unstride.storage.locks import exclusive

    if not 0 < val_fraction < 1:
        raise OptionError(f"--val-fraction {val_fraction}: wanted a number between 0 and 1")
    check_folder(out.parent, "--out")
    if out.parent.is_dir():
        check_file(out, "--out")
    loaded = models.load(spec, weights=weights)
    if loaded.task == "segmentation":
        raise OptionError(f"{spec} segments; the learned aggregation is for classification")
    images = datasets.load(data, loaded.preprocess, split, limit, classes=loaded.labels)
    typer.echo(images.legend, err=True)
    other = None if val is None else datasets.load(val, loaded.preprocess, classes=loaded.labels)
    loaders = _loaders(images, other, val_fraction, batch_size)
    better = asked.enhanced(loaded, next(iter(loaders[0]))[0][:1])
    if asked.recipe is not None and better.recipe.stages:
        raise OptionError(
            f"recipe {asked.recipe} has stages of looks; what is learned belongs to a search: take paper-learned"
        )
    work = out.with_name(out.name + ".partial")
    options: dict[str, Any] = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "budget": budget, "seed": seed}
    options["familiar"] = not unseen
    with world() as us, exclusive(work, us.leads):
        report = train(better, *loaders, **options, cache_dir=work)
        if us.leads:
            better.with_options(aggregate="attention", criterion="learned").save(out, loaded.preprocess)
            shutil.rmtree(work, ignore_errors=True)
            failed = {name: why for batches in loaders for name, why in batches.errors.items()}
            told = {"spec": spec, "weights": loaded.weights, "data": data, "out": str(out), "failed": failed}
            text = f"{report}{' (random weights)' * loaded.untrained}\nsaved {out}"
            typer.echo(strict_json.dumps({**told, **report.to_json()}) if as_json else text)
            _end(failed)


def _end(failed: dict[str, str]) -> None:
    for why in failed.values():
        typer.echo(f"unstride: {why}", err=True)
    if failed and "TORCHELASTIC_RUN_ID" not in os.environ:  # which would take another code for a crash
        raise typer.Exit(3)


def _loaders(
    images: "Dataset", other: "Dataset | None", fraction: float, batch_size: int
) -> tuple["Batches", "Batches"]:
    """What to train on and what to validate on: every so many-th image, where no others are given."""
    from unstride.data.batches import Batches

    if other is not None:
        return Batches(images, batch_size), Batches(other, batch_size)
    rows, every = range(len(images)), max(2, round(1 / fraction))
    mine, held = [i for i in rows if i % every], [i for i in rows if i % every == 0]
    return Batches(images, batch_size, mine), Batches(images, batch_size, held)
