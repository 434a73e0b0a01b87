"""`unstride reproduce NAME`: a table or figure of the paper, our numbers beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unstride.cli.options import AsJson, DataOrNone, Device, Limit, Seed
from unstride.cli.printing import screen
from unstride.storage import strict_json

FORMATS = ("md", "csv", "latex")
SCHEDULES = ("paper", "fast")


def register(app: typer.Typer) -> None:
    app.command()(reproduce)


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="table1, 'Figure A2', a name such as imagenet-expanded, flowers102-finetune; `list` shows all."
        ),
    ],
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with the paper's data sets, and with weights/.")
    ] = None,
    data: DataOrNone = None,
    seeds: Annotated[
        int,
        typer.Option(min=1, max=100, help="How many trainings, each with other images and another start (paper: 5)."),
    ] = 1,
    schedule: Annotated[
        str | None, typer.Option(help="Training of the attention: paper (lr 1e-6) or fast. Default: fast for sample.")
    ] = None,
    limit: Limit = None,
    network: Annotated[
        str | None, typer.Option(help="Only this network, by the paper's name, such as ResNet18. Default: all.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of training. Default: the schedule's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for all formats, plots of figures and the runs. A killed run continues there."),
    ] = None,
    format: Annotated[str, typer.Option(help="md, csv or latex.")] = "md",
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what a table or figure of the paper shows, and print our numbers beside the paper's.

    With --data-root, on the paper's networks and data. With `--data sample`, a rehearsal on the embedded network and
    images. Without both, only what needs no data.

    `flowers102-finetune` trains the networks of Table 2 on Flowers102, and writes their weights into --data-root.
    """
    for option, value, known in (("--format", format, FORMATS), ("--schedule", schedule, (None, *SCHEDULES))):
        if value not in known:
            wanted = ", ".join(word for word in known if word)
            raise typer.BadParameter(f"got {value!r}, expected one of {wanted}.", param_hint=option)
    if data not in (None, "sample"):
        raise typer.BadParameter(
            f"got {data!r}, expected sample. Give the paper's data sets with --data-root.", param_hint="--data"
        )
    if data is not None and data_root is not None:
        raise typer.BadParameter("give either --data sample or --data-root, not both.", param_hint="--data")
    if name == "list":
        _list(as_json)
        return

    from unstride.paper import catalogue, render
    from unstride.paper.exhibits import only
    from unstride.paper.reproducing import reproduce as measure
    from unstride.storage.files import check_folder

    if out is not None:
        check_folder(out, "--out")
    source = None if data is None and data_root is None else _source(data_root, limit, schedule)
    if name.strip().lower() == catalogue.FINETUNE:
        _finetune(data_root, network, epochs, limit, seed, as_json)
        return
    exhibit = catalogue.get(name)
    chosen = exhibit if network is None else only(exhibit, network)
    result = measure(chosen, source, out, seeds=seeds, epochs=epochs, device=device, progress=not as_json)
    if out is not None:
        for path in render.write(result, out):
            typer.echo(f"wrote {path}", err=True)
    typer.echo(strict_json.dumps(result.to_json()) if as_json else render.FORMATS[format][1](result), nl=as_json)


def _source(data_root: Path | None, limit: int | None, schedule: str | None) -> Any:
    from unstride.paper.sources import EmbeddedSample, PaperFolder

    if data_root is None:
        return EmbeddedSample(limit, schedule or "fast")
    return PaperFolder(data_root, limit, schedule or "paper")


def _finetune(
    data_root: Path | None, network: str | None, epochs: int | None, limit: int | None, seed: int, as_json: bool
) -> None:
    from unstride.paper.finetune import NETWORKS, finetune

    if data_root is None:
        raise typer.BadParameter(
            "flowers102-finetune needs the data set and a folder for weights.", param_hint="--data-root"
        )
    done = []
    for name in NETWORKS if network is None else (network,):
        result = finetune(name, data_root, epochs=epochs, limit=limit, seed=seed, progress=not as_json)
        done.append(result)
        if not as_json:
            typer.echo(str(result))
    if as_json:
        typer.echo(strict_json.dumps([result.to_json() for result in done]))


def _list(as_json: bool) -> None:
    from unstride.paper.catalogue import EXHIBITS, FINETUNE
    from unstride.paper.reproducing import COUNTED

    found = []
    for exhibit in EXHIBITS.values():
        data = list(dict.fromkeys(data.removesuffix("-train") for _, data in exhibit.needs))
        counted = exhibit.make is None and any(cell.measure in COUNTED for cell in exhibit.cells)
        without = "all" if exhibit.make is not None else "MACs" if counted else "nothing"
        head = {"name": exhibit.name, "where": exhibit.where, "title": exhibit.title}
        found.append({**head, "data": data, "without_data": without})
    if as_json:
        typer.echo(strict_json.dumps(found))
        return
    from rich.table import Table

    table = Table("name", "in the paper", "shows", "needs")
    for row in found:
        needs = ", ".join(row["data"]) or "no data"
        less = " (MACs: no data)" if row["without_data"] == "MACs" else ""
        table.add_row(str(row["name"]), str(row["where"]), str(row["title"]), needs + less)
    table.add_row(FINETUNE, "before Table 2", "Fine-tune the four networks on Flowers102", "flowers102")
    table.columns[0].no_wrap = True
    screen().print(table)
