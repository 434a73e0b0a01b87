"""`unstride inspect SPEC`: what a model throws away."""

from typing import Annotated

import typer

from unstride.cli.printing import print_table, screen
from unstride.jobs import strict


def register(app: typer.Typer) -> None:
    @app.command()
    def inspect(
        spec: Annotated[
            str,
            typer.Argument(help="torchvision:NAME, timm:NAME, smp:ARCH:ENCODER, hf:CONFIG_OR_PATH, file.py:function"),
        ],
        image_size: Annotated[
            int | None, typer.Option(min=1, max=4096, help="Height and width; by default the model's own.")
        ] = None,
        weights: Annotated[
            str | None, typer.Option(help="default (pretrained), random, or a file. [what is here: all are alike]")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show what a model subsamples, what a state there costs, and what was left out and why."""
        import unstride
        from unstride import models

        loaded = models.load(spec, weights=weights)
        report = unstride.inspect(loaded.model, loaded.example(image_size))
        if as_json:
            typer.echo(strict.dumps(report.to_json()))
            return
        from rich.table import Table

        table = Table(
            title=f"{spec}: {report.states} states, {report.macs / 1e9:.2f} GMACs, {report.image[0]}x{report.image[1]}"
        )
        for name in ("layer", "rate", "ops", "stride", "map", "one more state costs"):
            table.add_column(name, overflow="fold")
        for layer in report.layers:
            table.add_row(
                str(layer.index),
                f"{layer.rate[0]}x{layer.rate[1]}",
                "\n".join(f"{path} ({kind})" for path, kind in layer.ops),
                f"{layer.stride[0]}x{layer.stride[1]}",
                f"{layer.map[0]}x{layer.map[1]}",
                f"{layer.cost:.0%} of a forward",
            )
        console = screen()
        print_table(console, table)
        if report.features is not None:
            console.print(f"features end at {report.features}; what follows is the head")
        for x in report.left_out:
            console.print(f"left out: {x.op}: {x.reason}", markup=False)
        for u in report.unknown:
            console.print(f"unknown: {u}; strided ops after it may be left out", markup=False)
