"""`unstride tune SPEC --data KIND:PATH --cost 1.5 --out recipe.toml`: the best that can be done at that cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstride.cli.options import AsJson, Limit, Seed, Spec, Task, Weights
from unstride.cli.recipes import Asked, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.models import LoadedModel
    from unstride.tuning.tuned import Tuned


def register(app: typer.Typer) -> None:
    app.command()(tune)


@takes_recipe()
def tune(
    spec: Spec,
    asked: Asked,
    data: Annotated[str | None, typer.Option(help="Labelled images, KIND:PATH (folder:DIR, csv:FILE, ...).")] = None,
    images: Annotated[
        list[Path] | None, typer.Option(help="Images without labels: sets the gates for --cost, proves nothing.")
    ] = None,
    cost: Annotated[float, typer.Option(help="Mean cost of an image, in plain forwards.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Write the recipe there (.toml or .json), for --recipe.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page (.html) there.")] = None,
    pool: Annotated[str, typer.Option(help="How many looks are tried: small, medium or large.")] = "medium",
    task: Task = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Of classes likelihood (the default), accuracy, or, of maps, miou; other tasks have one each."
        ),
    ] = None,
    guard: Annotated[
        float | None,
        typer.Option(help="Points, or per cent of an error: refuse a recipe that may lose more, with 95 % confidence."),
    ] = None,
    paper: Annotated[bool, typer.Option(help="Measure the paper's search, too: the dearest row.")] = True,
    limit: Limit = None,
    window: Annotated[int | None, typer.Option(help="Pixels: larger images are tuned in such squares (maps).")] = None,
    weights: Weights = "default",
    cache: Annotated[Path | None, typer.Option(help="Folder for what the network said; a killed run goes on.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Find the best recipe for a network under a mean cost, on labelled images, with its proof, or leave it alone.

    With --recipe, or the options that change one, yours is measured beside the others: one more row of the table.

    Exit codes: 0 done; 1 an error, explained; 2 wrong usage; 3 done, but some images could not be read.
    """
    if (data is None) == (not images):
        raise typer.BadParameter("give --data with labels, or --images without")
    if images and asked:
        raise typer.BadParameter("a recipe is measured beside the others, which needs labels: give --data")
    labelled = {"--report": report, "--objective": objective, "--guard": guard, "--window": window, "--cache": cache}
    labelled |= {"--pool": pool if pool != "medium" else None, "--no-paper": None if paper else paper}
    if images and (given := [name for name, value in labelled.items() if value is not None]):
        raise typer.BadParameter(f"{given[0]} is for labelled images: give --data, or leave it out")
    from unstride import models
    from unstride.recipe.files import check_name
    from unstride.storage.files import check_file

    for path, name in ((out, "--out"), (report, "--report")):
        if path is not None:
            check_file(path, name)
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"--report: got {report.name}, wanted a page that ends in .html")
    if out is not None:
        check_name(out)
    loaded = models.load(spec, weights=weights)
    if images:
        _settle(loaded, images, cost, task, limit, out, as_json)
        return
    from unstride.storage.distributed import launched
    from unstride.tuning.tune import tune as find

    assert data is not None
    tuned = find(
        loaded, data, cost, task=task, pool=pool, objective=objective, guard=guard, paper=paper, limit=limit,
        window=window, cache_dir=cache, seed=seed, progress=True, **asked.options(),
    )  # fmt: skip
    if launched().leads:  # one of several processes prints and writes
        _tell(tuned, f"{spec} on {data}", out, report, as_json)


def _tell(tuned: "Tuned", title: str, out: Path | None, report: Path | None, as_json: bool) -> None:
    made = {}
    if out is not None:
        made["out"] = str(tuned.save(out))
    if report is not None:
        from unstride.tuning.page import page

        report.write_text(page(tuned, title), encoding="utf-8")
        made["report"] = str(report)
    if as_json:
        typer.echo(strict_json.dumps({**tuned.to_json(), **made}))
        return
    typer.echo(str(tuned))
    for written in made.values():
        typer.echo(f"wrote {written}")


def _settle(
    loaded: "LoadedModel", images: list[Path], cost: float, task: str | None, limit: int | None, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Gates for a mean cost, from images alone; of several processes, the first does it all."""
    from unstride.storage.distributed import launched
    from unstride.tuning.unlabelled import settle

    if not launched().leads:
        return
    settled = settle(loaded, images, cost, task=task, limit=limit, progress=True)
    made = {} if out is None else {"out": str(settled.save(out))}
    typer.echo(strict_json.dumps({**settled.to_json(), **made}) if as_json else str(settled))
    if made and not as_json:
        typer.echo(f"wrote {made['out']}")
