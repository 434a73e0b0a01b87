"""`unstride fit SPEC --data KIND:PATH --out FILE`: train the learned aggregation on labelled images."""

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from unstride.cli.parsing import MOST, SEEDS
from unstride.jobs import strict


def register(app: typer.Typer) -> None:
    @app.command()
    def fit(
        spec: Annotated[str, typer.Argument(help="A model, as for inspect.")],
        data: Annotated[str, typer.Option(help="Images to train on, KIND:PATH, e.g. imagenet:/data or folder:photos.")],
        out: Annotated[Path, typer.Option(help="Where to save, e.g. better.safetensors.")],
        val: Annotated[
            str | None, typer.Option(help="Images to validate on, KIND:PATH; by default part of --data.")
        ] = None,
        val_fraction: Annotated[float, typer.Option(help="That part.")] = 0.2,
        split: Annotated[str | None, typer.Option(help="Split of --data; by default the kind's own.")] = None,
        limit: Annotated[int | None, typer.Option(min=2, help="So many images of --data, spread evenly.")] = None,
        weights: Annotated[str, typer.Option(help="default (pretrained), random, or a file.")] = "default",
        budget: Annotated[
            int, typer.Option(min=2, max=MOST, help="States per image in training; any number may be used later.")
        ] = 30,
        epochs: Annotated[int, typer.Option(min=1, max=MOST, help="Passes over the images.")] = 20,
        lr: Annotated[
            float, typer.Option(help="Learning rate; the paper's 1e-6 is for ImageNet's 20,000 images.")
        ] = 1e-4,
        unseen: Annotated[bool, typer.Option(help="The network was not trained on these images.")] = False,
        batch_size: Annotated[int, typer.Option(min=1, max=MOST, help="Images per step.")] = 32,
        seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of the start, the order and the states.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Train the learned aggregation and save it; the network stays as it is.

        A killed run goes on where it was when started again: its work lies in OUT.partial until it is done. Under
        torchrun the processes share the work.

        Exit code 3: done, but some images could not be read; they are named.
        """
        import unstride
        from unstride import data as datasets
        from unstride import models
        from unstride.data.batches import Batches
        from unstride.errors import OptionError
        from unstride.jobs.distributed import world
        from unstride.jobs.locks import alone
        from unstride.jobs.outputs import check_file, check_folder
        from unstride.learning.fitting import fit as train

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
        if val is None:
            every = max(2, round(1 / val_fraction))
            rows = range(len(images))
            mine, held = [i for i in rows if i % every], [i for i in rows if i % every == 0]
            loaders = Batches(images, batch_size, mine), Batches(images, batch_size, held)
        else:
            other = datasets.load(val, loaded.preprocess, classes=loaded.labels)
            loaders = Batches(images, batch_size), Batches(other, batch_size)
        better = unstride.enhance(loaded.model, next(iter(loaders[0]))[0][:1])
        work = out.with_name(out.name + ".partial")
        options: dict[str, Any] = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "budget": budget, "seed": seed}
        options["familiar"] = not unseen
        with world() as us, alone(work, us.leads):
            report = train(better, *loaders, **options, cache_dir=work)
            if us.leads:
                learned = better.with_options(aggregate="attention", criterion="learned")
                learned.save(out, loaded.preprocess)
                shutil.rmtree(work, ignore_errors=True)
                failed = {name: why for batches in loaders for name, why in batches.errors.items()}
                if as_json:
                    told = {"spec": spec, "weights": loaded.weights, "data": data, "out": str(out), "failed": failed}
                    typer.echo(strict.dumps({**told, **report.to_json()}))
                else:
                    typer.echo(f"{report}{' (random weights)' * loaded.untrained}\nsaved {out}")
                for why in failed.values():
                    typer.echo(f"unstride: {why}", err=True)
                if failed:
                    raise typer.Exit(0 if "TORCHELASTIC_RUN_ID" in os.environ else 3)
