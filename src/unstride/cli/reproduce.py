"""`unstride reproduce NAME`: a table or figure of the paper, ours beside its own numbers."""

from pathlib import Path
from typing import Annotated

import typer

from unstride.cli.options import AsJson, Limit
from unstride.cli.printing import screen
from unstride.storage import strict_json


def register(app: typer.Typer) -> None:
    app.command()(reproduce)


def reproduce(
    name: Annotated[str, typer.Argument(help="A table or figure; `list` shows all of them.")],
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with the data sets, and with models.py or weights/ where needed.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="`sample`: the embedded network and images in place of all others.")
    ] = None,
    limit: Limit = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all formats, an image, and the runs (which can be resumed).")
    ] = None,
    format: Annotated[str, typer.Option(help="md, csv or latex.")] = "md",
    as_json: AsJson = False,
) -> None:
    """Run what a table or figure of the paper needs, and show ours beside the paper's own numbers."""
    from unstride import paper
    from unstride.paper import render
    from unstride.storage.files import check_folder

    if name == "list":
        _list(as_json)
        return
    if format not in render.FORMATS:
        raise typer.BadParameter(f"{format!r}: wanted one of {', '.join(render.FORMATS)}", param_hint="--format")
    if data not in (None, "sample"):
        raise typer.BadParameter(f"{data!r}: wanted sample, or a folder with --data-root", param_hint="--data")
    if data is not None and data_root is not None:
        raise typer.BadParameter("give either --data sample or --data-root, not both", param_hint="--data")
    exhibit = paper.get(name)
    place: paper.Place = paper.Nowhere()
    if data_root is not None:
        place = paper.Root(data_root, limit)
    elif data is not None:
        place = paper.Sample(limit)
    if out is not None:
        check_folder(out, "--out")
    result = paper.reproduce(exhibit, place, out, progress=not as_json)
    if out is not None:
        for path in render.write(result, out):
            typer.echo(f"wrote {path}", err=True)
    typer.echo(strict_json.dumps(result.to_json()) if as_json else render.FORMATS[format][1](result), nl=as_json)


def _list(as_json: bool) -> None:
    from unstride.paper import EXHIBITS
    from unstride.paper.reproducing import COUNTED

    found = []
    for exhibit in EXHIBITS.values():
        data = list(dict.fromkeys(data.removesuffix("-train") for _, data in exhibit.needs))
        counted = exhibit.make is None and any(cell.measure in COUNTED for cell in exhibit.cells)
        found.append(
            {
                "name": exhibit.name,
                "where": exhibit.where,
                "title": exhibit.title,
                "data": data,
                "without_data": "all" if exhibit.make is not None else "MACs" if counted else "nothing",
            }
        )
    if as_json:
        typer.echo(strict_json.dumps(found))
        return
    from rich.table import Table

    table = Table("name", "shows", "data")
    for row in found:
        needs = ", ".join(row["data"]) or "none"
        less = " (MACs: none)" if row["without_data"] == "MACs" else ""
        table.add_row(str(row["name"]), f"{row['where']}: {row['title']}", needs + less)
    table.columns[0].no_wrap = True
    screen().print(table)
