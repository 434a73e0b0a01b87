"""`unstride predict SPEC... IMAGES`: a few images explained on the screen, or any number of them in a table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import AsJson, BatchSize, Device, Plot, Task, Weights, weights_named
from unstride.cli.printing import print_table, screen
from unstride.cli.recipes import RecipeOptions, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from unstride.execution.prediction import Prediction
    from unstride.predicting.parts import PartRunner
    from unstride.predicting.reading import PreparedImage

TOGETHER = 8  # images that are explained as a batch
PARTLY = 3

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Models by SPEC (timm:NAME, torchvision:NAME, file.py:function, ...; default: those in the recipe file), "
        "then images: files, folders, globs, @LIST (a path on each line), tar shards, Parquet files, hf:FOLDER "
        "of a save_to_disk, s3:// or gs:// addresses.",
        metavar="[SPEC]... IMAGES...",
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(predict)


@takes_recipe
def predict(
    inputs: Inputs,
    recipe: RecipeOptions,
    weights: Weights = "default",
    task: Task = None,
    device: Device = "auto",
    top: Annotated[int, typer.Option(min=1, help="Classes to show, at most those of the model.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a table: .jsonl, .csv or .parquet. Masks go to OUT.masks/, other maps to OUT.maps/."),
    ] = None,
    batch_size: BatchSize = None,
    ray: Annotated[
        str | None, typer.Option(help="With --out: local, or the address of a Ray cluster that runs the parts.")
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Classify, segment or embed images: the base model's answer, the recipe's, its passes and their cost.

    With --out, any number of images becomes a table with one row each. Start the same command again after a crash: it
    continues. Several processes: torchrun --nproc-per-node 2 -m unstride predict ... --out TABLE in a shared folder.

    --plot out.png writes out-NAME.png for each of several images.

    Exit code 3: some images could not be read or run. They are printed, or, with --out, in the table. The others are
    done.
    """
    from unstride import show
    from unstride.predicting.run import open_runner

    specs, images = split_inputs(inputs)
    if plot is not None and out is not None:
        raise typer.BadParameter("--plot is for a few images, --out for many; give one of them")
    if ray is not None and out is None:
        raise typer.BadParameter("--ray needs --out")
    if plot is not None:
        show.check_target(plot)
    if out is not None:
        options = {"weights": weights_named(weights), "task": task, "device": device, **recipe.keywords()}
        _table(specs, images, out, as_json, top=top, batch_size=batch_size, ray=ray, **options)
        return
    pipeline = recipe.pipeline(specs, weights, task, device)
    if pipeline.untrained:
        typer.echo("unstride: some weights are random, so the answers mean nothing", err=True)
    runner = open_runner(pipeline, top, batch_size or TOGETHER)
    _explain(runner, images, top, plot, as_json)


def split_inputs(inputs: list[str]) -> tuple[list[str] | None, list[str]]:
    """Leading names of models, and images. Without models, None."""
    from unstride.predicting.names import is_model

    count = 0
    while count < len(inputs) and is_model(inputs[count]):
        count += 1
    if count == len(inputs):
        raise typer.BadParameter(f"no images: {inputs[-1]!r} is the name of a model. Give images after the models.")
    return inputs[:count] or None, inputs[count:]


def _table(specs: list[str] | None, images: list[str], out: Path, as_json: bool, **options: Any) -> None:
    import unstride

    done = unstride.predict(specs, images, out, progress=True, **options)
    if int(os.environ.get("RANK", 0)) == 0:
        typer.echo(strict_json.dumps(asdict(done)) if as_json else str(done))
    # torchrun would take any other code for a crash, and start the finished run again
    if done.errors and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise typer.Exit(PARTLY if done.errors < done.images else 1)


def _explain(runner: PartRunner, images: list[str], top: int, plot: Path | None, as_json: bool) -> None:
    from unstride.show.answers import described, headline

    classes = runner.pipeline.classes
    names = _PlotNames(plot, several=len(images) > 1 or not Path(images[0]).is_file())
    answers: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for image, p in _predictions(runner, images, failed):
        if isinstance(p, str):
            failed[image.name] = p
            continue
        answer = {"image": image.name, **described(p, classes, top)}
        answers.append(answer)
        if plot is not None:
            _draw(runner, image, p, names, answer)
        if not as_json:
            _show(answer, headline(p, classes), passes=not names.several)
    if as_json:
        head = {"spec": runner.pipeline.spec, "weights": runner.pipeline.weights, "task": runner.pipeline.task}
        bad = [{"image": name, "error": why} for name, why in failed.items()]
        recipe = str(runner.better.recipe)
        typer.echo(strict_json.dumps({**head, "recipe": recipe, "images": answers, "failed": bad}))
    if failed:
        for name, why in failed.items():
            typer.echo(f"unstride: {why if name in why else f'{name}: {why}'}", err=True)
        typer.echo(f"unstride: {len(failed)} of {len(failed) + len(answers)} could not be read or run", err=True)
        raise typer.Exit(PARTLY if answers else 1)


def _predictions(
    runner: PartRunner, images: list[str], failed: dict[str, str]
) -> Iterator[tuple[PreparedImage, Prediction | str]]:
    """A few images at a time; an input without any image goes to `failed`."""
    from unstride.errors import DataError
    from unstride.predicting.inputs import ImageInputs

    prepare = runner.preparation
    there = []
    for text in images:
        try:
            ImageInputs(text)
            there.append(text)
        except DataError as error:
            failed[text] = str(error)
    if not there:
        return
    inputs = ImageInputs(there)
    prepared = (prepare(index, entry) for index, entry in enumerate(inputs))
    count = 0
    while group := list(islice(prepared, TOGETHER)):
        count += len(group)
        yield from sorted(runner.predictions(group), key=lambda pair: pair[0].index)
    if not count:
        failed[", ".join(there)] = "there is no image in it"


def _draw(runner: PartRunner, image: PreparedImage, p: Prediction, names: _PlotNames, answer: dict[str, Any]) -> None:
    from unstride import show
    from unstride.recipe.view import PLAIN
    from unstride.show.answers import headline
    from unstride.show.style import as_image

    target = names.of(Path(image.name))
    shown = as_image(runner.pipeline.base.preprocess, image.views[PLAIN])
    title = f"{Path(image.name).name}: {headline(p, runner.pipeline.classes)}"
    if show.save(p.plot(shown, runner.pipeline.classes, title), target) is not None:
        answer["plot"] = str(target)


class _PlotNames:
    """out.png for one image; out-cat.png, out-dog.png, out-cat-2.png for several."""

    def __init__(self, target: Path | None, several: bool) -> None:
        self.target, self.several = target, several
        self.used: set[Path] = set()

    def of(self, image: Path) -> Path:
        assert self.target is not None
        if not self.several:
            return self.target
        name, k = self.target.with_stem(f"{self.target.stem}-{image.stem}"), 1
        while name in self.used:
            k += 1
            name = self.target.with_stem(f"{self.target.stem}-{image.stem}-{k}")
        self.used.add(name)
        return name


def _show(answer: dict[str, Any], headline: str, passes: bool) -> None:
    from rich.markup import escape

    console = screen()
    console.print(f"[bold]{escape(answer['image'])}[/bold]  {escape(headline)}")
    print_table(console, _classes_table(answer))
    if passes:
        print_table(console, _passes_table(answer))
    count = len(answer["passes"])
    unit = "" if "value" in answer["answer"][0] else " nats"
    console.print(
        f"  {count} pass{'es' * (count != 1)}, cost {answer['cost']:.2f} forward passes of the base model, agreement "
        f"{answer['agreement']:.0%}, spread {answer['spread']:.3f}{unit}, stopped: {escape(answer['stopped'])}"
    )
    if "plot" in answer:
        console.print(f"  plot: {escape(answer['plot'])}")
    console.print()


def _number(entry: dict[str, Any]) -> str:
    return f"{entry['value']:.4g}" if "value" in entry else f"{entry.get('share', entry.get('probability')):.1%}"


def _classes_table(answer: dict[str, Any]) -> Any:
    """The base model's classes beside the recipe's; in segmentation, with their share of the image."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 2))
    table.add_column("base model")
    table.add_column("", justify="right")
    table.add_column("recipe")
    table.add_column("", justify="right")
    for k in range(max(len(answer["base"]), len(answer["answer"]))):
        cells: list[str] = []
        for side in ("base", "answer"):
            entry = answer[side][k] if k < len(answer[side]) else None
            cells += ["", ""] if entry is None else [escape(entry["name"]), _number(entry)]
        table.add_row(*cells)
    return table


def _passes_table(answer: dict[str, Any]) -> Any:
    """Every pass; where an answer is a class or a number, with its own answer."""
    from rich.markup import escape
    from rich.table import Table

    passes = answer["passes"]
    several = {name: len({str(p[name]) for p in passes}) > 1 for name in ("network", "view", "state")}
    searched = any(p["criterion"] is not None for p in passes)
    own = "name" in passes[0]
    heads = [name for name, shown in several.items() if shown] + ["criterion"] * searched + ["weight"]
    table = Table(box=None, padding=(0, 2, 0, 2))
    table.add_column("pass", justify="right")
    for name in heads:
        table.add_column(name, justify="right" if name in ("criterion", "weight") else "left")
    if own:
        table.add_column("its own answer")
        table.add_column("", justify="right")
    for number, p in enumerate(passes, 1):
        state = "(" + " ".join("0" if not any(x) else ",".join(map(str, x)) for x in p["state"]) + ")"
        criterion = "" if p["criterion"] is None else f"{p['criterion']:.3f}"
        shown = {**p, "state": state, "criterion": criterion, "weight": f"{p['weight']:.1%}"}
        answered = [escape(p["name"]), _number(p)] if own else []
        table.add_row(str(number), *(escape(str(shown[name])) for name in heads), *answered)
    return table
