"""`unstride evaluate SPEC --data KIND:PATH`: what it gains on your data, what it costs, and whether to use it."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from unstride.cli.parsing import MOST, SEEDS, numbers, read_align
from unstride.cli.printing import print_table, screen
from unstride.jobs import strict
from unstride.proof.rows import Row
from unstride.proof.words import advice, verdict

PLAIN, PARTLY = 0, 3


def register(app: typer.Typer) -> None:
    @app.command()
    def evaluate(
        spec: Annotated[
            str,
            typer.Argument(
                help="torchvision:NAME, timm:NAME, smp:ARCH:ENCODER, hf:CONFIG_OR_PATH, file.py:function, sample"
            ),
        ],
        data: Annotated[
            str,
            typer.Option(
                help="imagenet, flowers102, cifar10, cifar100, folder, csv, npz, hf, cityscapes, ade20k or masks, "
                "each as KIND:PATH; or sample, sample-segmentation."
            ),
        ],
        budget: Annotated[
            str, typer.Option(help="States per image, all from one pass. The plain network is always measured, too.")
        ] = "1,4,10,15",
        task: Annotated[str | None, typer.Option(help="classification or segmentation; by default the data's.")] = None,
        fitted: Annotated[Path | None, typer.Option(help="What `unstride fit` saved for this model.")] = None,
        criterion: Annotated[
            str | None, typer.Option(help="entropy, displacement, random or learned. [entropy, or as fitted]")
        ] = None,
        aggregate: Annotated[
            str | None, typer.Option(help="entropy, mean, max or attention. [entropy, or as fitted]")
        ] = None,
        order: Annotated[str | None, typer.Option(help="In which order the search expands layers. [paper]")] = None,
        layers: Annotated[
            str | None, typer.Option(help="Layers to search, such as 2-4; by default the paper's.")
        ] = None,
        align: Annotated[str | None, typer.Option(help="on, off, or stitch (segmentation). [on]")] = None,
        flip: Annotated[bool, typer.Option("--flip", help="The same as --tta flip.")] = False,
        tta: Annotated[
            str | None, typer.Option(help="flip, POLICY:VIEWS such as standard:15, or the file of a fitted TTA.")
        ] = None,
        tta_method: Annotated[str, typer.Option(help="mean or max.")] = "mean",
        weights: Annotated[
            str, typer.Option(help="default (pretrained), random (which says nothing of accuracy), or a file.")
        ] = "default",
        split: Annotated[str | None, typer.Option(help="Part of the data; by default the usual one.")] = None,
        limit: Annotated[int | None, typer.Option(min=1, help="So many images, spread over the whole.")] = None,
        batch_size: Annotated[int | None, typer.Option(min=1, max=MOST, help="Images at once.")] = None,
        seed: Annotated[
            int, typer.Option(min=0, max=SEEDS, help="Of the bootstrap, the random criterion and Cutout.")
        ] = 0,
        out: Annotated[
            Path | None,
            typer.Option(help="Folder of the rows, and of what a killed run goes on from. [runs/SPEC-KIND]"),
        ] = None,
        report: Annotated[
            Path | None, typer.Option(help="Write a page (.html) with the curves and the images that changed.")
        ] = None,
        plot: Annotated[Path | None, typer.Option(help="Write a picture of accuracy over budget and cost.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Measure on labelled images what unstride gains and costs, and say in words whether it helps.

        Start it again to go on after a crash. Several processes:
        torchrun --nproc-per-node 2 -m unstride evaluate ... (--out must be a folder that all of them see).

        Exit codes: 0 done; 1 an error, explained; 2 wrong usage; 3 done, but some images could not be evaluated (under
        torchrun 0, too: it takes any other code for a crash).
        """
        if flip and tta is not None:
            raise typer.BadParameter("--flip is --tta flip; give one of them")
        asked: dict[str, Any] = {
            "criterion": criterion,
            "aggregate": aggregate,
            "order": order,
            "layers": None if layers is None else tuple(numbers("--layers", layers)),
            "align": None if align is None else read_align(align),
        }
        options = {name: value for name, value in asked.items() if value is not None}
        budgets = numbers("--budget", budget)
        folder = out if out is not None else Path("runs") / _slug(spec, data)

        from unstride import enhanced, models
        from unstride import proof as evaluation
        from unstride import show as plots

        if plot is not None:
            plots.check_target(plot)
        loaded = _placed(models.load(spec, weights))
        if fitted is not None:
            better = enhanced.load(fitted, loaded.model, preprocess=loaded.preprocess)
            loaded = dataclasses.replace(loaded, model=better)
        rows = evaluation.evaluate(
            loaded,
            data,
            budgets,
            task=task,
            tta="flip" if flip else tta,
            tta_method=tta_method,
            out=folder,
            report=report,
            batch_size=batch_size,
            limit=limit,
            split=split,
            seed=seed,
            progress=True,
            **options,
        )
        if int(os.environ.get("RANK", 0)) == 0:
            if plot is not None:
                plot = plots.save(evaluation.plot_rows(rows), plot)
            written = {"report": report, "plot": plot}
            made = {name: str(path) for name, path in written.items() if path is not None}
            if as_json:
                typer.echo(strict.dumps({"rows": [row.to_json() for row in rows], "out": str(folder), **made}))
            else:
                _show(rows, folder, made)
        # torchrun would take any other code for a crash, and start the finished run again
        raise typer.Exit(PARTLY if rows[0].errors and "TORCHELASTIC_RUN_ID" not in os.environ else PLAIN)


def _slug(spec: str, data: str) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{Path(spec).name}-{data.partition(':')[0]}")


def _placed(loaded: Any) -> Any:
    """On this process's GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        loaded.model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}")
    return loaded


def _show(rows: list[Row], folder: Path, made: dict[str, str]) -> None:
    console = screen()
    if rows[0].task == "segmentation":
        print_table(console, _paper_table(rows))
    print_table(console, _table(rows))
    for row in rows:
        if not row.plain:
            console.print(verdict(row), markup=False, highlight=False)
    console.print(advice(rows), markup=False, highlight=False)
    if rows[0].errors:
        count = rows[0].errors
        console.print(f"{count:,} image{'s' * (count > 1)} could not be evaluated:", markup=False, highlight=False)
        for name in rows[0].error_names:
            console.print(f"  {name}", markup=False, highlight=False)
    for name, path in ({"rows": str(folder / "rows.jsonl")} | made).items():
        console.print(f"{name}: {path}", markup=False, highlight=False)


def _table(rows: list[Row]) -> Any:
    from rich.table import Table

    first = rows[0]
    shown: dict[str, str] = (
        {"top1": "top-1", "top5": "top-5", "nll": "NLL", "ece": "ECE", "brier": "Brier"}
        if first.task == "classification"
        else {"miou": "mIoU", "aacc": "aAcc", "macc": "mAcc"}
    )
    percent = {"top1", "top5", "miou", "aacc", "macc"}
    several = any(row.views > 1 for row in rows)
    table = Table(title=f"{first.spec} on {first.data}: {first.images:,} images")
    heads = [*(["views"] if several else []), "budget", *shown.values(), "gain", "+", "-", "MACs", "time", "verdict"]
    for head in heads:
        table.add_column(head, justify="left" if head == "verdict" else "right", no_wrap=True)
    for row in rows:
        values = [f"{row.metrics[k] * 100:.2f}" if k in percent else f"{row.metrics[k]:.4f}" for k in shown]
        g = row.gain
        table.add_row(
            *([str(row.views)] if several else []),
            "plain" if row.plain else str(row.budget),
            *values,
            ""
            if row.plain
            else f"{g['gain'] * 100:+.2f} [{g['low'] * 100:+.2f}, {g['high'] * 100:+.2f}]".replace("[", r"\["),
            "" if row.plain else f"{g['corrected']:,}",
            "" if row.plain else f"{g['corrupted']:,}",
            f"{row.macs:.2f}x",
            "" if row.latency is None else f"{row.latency:.2f}x",
            _remarks(row),
        )
    return table


def _remarks(row: "Row") -> str:
    from unstride.proof.words import untrained

    random = untrained(row)
    parts = [row.verdict * (not row.plain), f"({random})" * bool(random), "(recommended)" * row.recommended]
    return " ".join(part for part in parts if part)


def _paper_table(rows: list[Row]) -> Any:
    """mIoU in the shape of the paper's table: with and without the views, budget by budget."""
    from rich.table import Table

    from unstride.proof.words import untrained

    tta = rows[0].options["tta"]
    name = "TTA" if tta is None else tta["policy"]
    table = Table(title=f"mIoU: {rows[0].spec} on {rows[0].data}")
    budgets = list(dict.fromkeys(row.budget for row in rows))
    for head in (name, *("plain" if b == 1 else f"B = {b}" for b in budgets)):
        table.add_column(head, justify="right", no_wrap=True)
    for views in dict.fromkeys(row.views for row in rows):
        cells = [f"{row.metrics['miou'] * 100:.2f}" for row in rows if row.views == views]
        random = f" ({untrained(rows[0])})" if untrained(rows[0]) else ""
        table.add_row(("without" if views == 1 else "with") + random, *cells)
    return table
