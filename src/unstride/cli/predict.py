"""`unstride predict SPEC INPUT...`: plain against enhanced, image by image, or all of them in a table."""

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import AsJson, Plot, Spec, Task, Weights, on_device
from unstride.cli.printing import print_table, screen
from unstride.cli.recipes import Asked, takes_recipe
from unstride.storage import strict_json

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from unstride.enhanced import Enhanced
    from unstride.models import LoadedModel
    from unstride.execution.prediction import Prediction

TOGETHER = 8  # images of one size that are searched as a batch
PARTLY = 3


def register(app: typer.Typer) -> None:
    app.command()(predict)


@takes_recipe()
def predict(
    spec: Spec,
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Image files, folders, @LIST (a path on each line), tar shards, or hf:FOLDER of a save_to_disk.",
            metavar="INPUT...",
        ),
    ],
    asked: Asked,
    weights: Weights = "default",
    task: Task = None,
    top: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a table: .jsonl, .csv or .parquet. Segmentation also writes OUT.masks/."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="With --out, images at once.")] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Classify or segment images: the plain answer, the enhanced one, the looks that were taken and what they cost.

    With --out, any number of images becomes a table with a row each. Start it again to go on after a crash. Several
    processes: torchrun --nproc-per-node 2 -m unstride predict ... (--out in a folder that all of them see).

    With --plot out.png, several images become out-NAME.png each.

    Exit code 3: some images could not be read or run; they are named (with --out in the table), the others are
    done (under torchrun 0, too).
    """
    from unstride import models, show

    if out is not None and plot is not None:
        raise typer.BadParameter("--plot is for a few images, --out for many; give one of them")
    if plot is not None:
        show.check_target(plot)
    loaded = on_device(models.load(spec, weights=weights))
    if loaded.untrained:
        typer.echo(f"unstride: {loaded.weights}: these weights know nothing of any image", err=True)
    task = _task(task, loaded, asked.recipe)
    if out is not None:
        _table(loaded, inputs, out, {"task": task, "top": top, "batch_size": batch_size, **asked.options()}, as_json)
        return
    loaded = loaded.for_task(task)
    names = _Names(plot, several=len(inputs) > 1 or not Path(inputs[0]).is_file())
    failed: dict[str, str] = {}
    answers: list[dict[str, Any]] = []
    options = {"task": task, "preprocess": loaded.preprocess, **asked.options()}
    recipe = ""
    for better, answer in _answers(loaded, _opened(inputs, loaded, failed), options, top, names, failed):
        answers.append(answer)
        recipe = str(better.recipe)
        if not as_json:
            _show(answer, states=not names.several)
    if as_json:
        head = {"spec": spec, "weights": loaded.weights, "task": task, "recipe": recipe}
        bad = [{"image": name, "error": why} for name, why in failed.items()]
        typer.echo(strict_json.dumps({**head, "images": answers, "failed": bad}))
    if failed:
        for why in failed.values():
            typer.echo(f"unstride: {why}", err=True)
        typer.echo(f"unstride: {len(failed)} of {len(failed) + len(answers)} could not be read or run", err=True)
        raise typer.Exit(PARTLY if answers else 1)


def _table(loaded: "LoadedModel", inputs: list[str], out: Path, options: dict[str, Any], as_json: bool) -> None:
    from dataclasses import asdict

    import unstride

    done = unstride.predict(loaded, inputs, out, progress=True, **options)
    if int(os.environ.get("RANK", 0)) == 0:
        typer.echo(strict_json.dumps(asdict(done)) if as_json else str(done))
    # torchrun would take any other code for a crash, and start the finished run again
    if done.errors and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise typer.Exit(PARTLY if done.errors < done.images else 1)


def _task(task: str | None, loaded: "LoadedModel", recipe: str | None) -> str:
    """What is asked for (also by a recipe), what the model is for, or what its output suggests, which is then told."""
    import warnings

    from unstride.errors import TaskAssumed
    from unstride.models.tasks import task_of
    from unstride.models.weights import place
    from unstride.recipe.saving import task_said

    task = task or task_said(recipe) or loaded.task
    found = task_of(task, loaded.model, loaded.example().to(*place(loaded.model)))
    if found.assumed:
        warnings.warn(TaskAssumed(str(found)), stacklevel=2)
    assert found.task is not None
    return found.task


def _answers(
    loaded: "LoadedModel",
    opened: Iterator[tuple[str, Any, "Tensor"]],
    options: dict[str, Any],
    top: int,
    names: "_Names",
    failed: dict[str, str],
) -> Iterator[tuple["Enhanced", dict[str, Any]]]:
    """An answer for each image, with its image where one is wanted."""
    from unstride.tasks.tasks import TASKS
    from unstride.show.answers import answer_of
    from unstride.show.style import save

    ready: Enhanced | None = None
    for batch in _batches(opened, 1 if TASKS[options["task"]].maps else TOGETHER):
        for (name, image, tensor), better, prediction in _explained(loaded, options, ready, batch, failed):
            ready = better
            answer = {"image": name, **answer_of(prediction, loaded.classes, top)}
            if names.target is not None:
                answer["plot"] = str(names.of(Path(name)))
                figure = _image(answer, Path(name), image, tensor, prediction, better, loaded)
                if save(figure, Path(answer["plot"])) is None:
                    del answer["plot"]
            yield better, answer


def _explained(
    loaded: "LoadedModel", options: dict[str, Any], better: "Enhanced | None", batch: list[Any], failed: dict[str, str]
) -> Iterator[tuple[Any, "Enhanced", "Prediction"]]:
    """Each image of a batch, the enhanced model and its prediction; one that the model cannot take goes to `failed`."""
    import torch

    from unstride.errors import InputError, ModelRaised
    from unstride.evaluation.loop import prepared
    from unstride.models.weights import place
    from unstride.recipe.view import PLAIN
    from unstride.views.source import PILImages

    x = torch.stack([tensor for _, _, tensor in batch]).to(*place(loaded.model))
    asked = {name: value for name, value in options.items() if name != "task"}
    try:
        better = better or prepared(loaded.model, x[:1], options["task"], asked)
        images = [image for _, image, _ in batch]
        found = better.explain(PILImages(images, loaded.preprocess, x, {PLAIN: x}))
    except (InputError, ModelRaised) as error:
        if len(batch) > 1:
            for one in batch:
                yield from _explained(loaded, options, better, [one], failed)
        else:
            failed[batch[0][0]] = f"{batch[0][0]}: {error}"
        return
    for item, prediction in zip(batch, found, strict=True):
        if prediction.problem is None:
            yield item, better, prediction
        else:
            failed[item[0]] = f"{item[0]}: {prediction.problem}"


def _image(
    answer: dict[str, Any],
    path: Path,
    image: "Image.Image",
    tensor: "Tensor",
    prediction: "Prediction",
    better: "Enhanced",
    loaded: "LoadedModel",
) -> Any:
    from unstride import show
    from unstride.show.answers import headline

    title = f"{path.name}: {headline(answer)}"
    if better.task in ("dense", "features"):
        return show.plot_map(show.seen(loaded.preprocess, image), prediction, title)
    if better.task not in ("classification", "segmentation"):
        raise OptionError(f"--plot shows classes and maps; this is {better.task}")
    if better.task == "segmentation":
        return show.plot_segmentation(show.seen(loaded.preprocess, image), prediction, loaded.classes, title)
    rates = better.prepare(tensor[None]).found.space.rates
    return show.plot_classification(image, prediction, rates, loaded.classes, title)


def _opened(inputs: list[str], loaded: "LoadedModel", failed: dict[str, str]) -> Iterator[tuple[str, Any, "Tensor"]]:
    """Every image that can be read, with what the network sees; the others go to `failed` by name."""
    from unstride.errors import DataError
    from unstride.predicting.inputs import entries
    from unstride.views.images import open_image

    seen: set[str] = set()
    for argument in inputs:
        name, before = argument, len(seen)
        try:
            for entry in entries([argument]):
                name = entry.name
                real = os.path.realpath(name)  # an image named twice is meant once
                if real in seen:
                    continue
                seen.add(real)
                try:
                    image = open_image(entry.fetch())
                    yield name, image, loaded.preprocess(image)
                except DataError as error:
                    failed[name] = str(error)
        except DataError as error:
            failed[argument] = str(error)
        if name == argument and len(seen) == before and argument not in failed:
            failed[argument] = f"{argument}: there is no image in it"


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Runs of images of one size, at most `size` together."""
    for _, run in groupby(items, key=lambda item: item[2].shape):
        batch: list[Any] = []
        for item in run:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch


class _Names:
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


def _show(answer: dict[str, Any], states: bool) -> None:
    from rich.markup import escape

    from unstride.show.answers import headline

    console = screen()
    console.print(f"[bold]{escape(answer['image'])}[/bold]  {escape(headline(answer))}")
    print_table(console, _classes_table(answer))
    if states:
        print_table(console, _states_table(answer))
    console.print(
        f"  {len(answer['states'])} {_looks(answer)}, {answer['cost']:.1f}x the MACs of a plain forward, agreement "
        f"{answer['agreement']:.0%}, spread {answer['spread']:.3f}{_unit(answer)}, stopped: {answer['stopped']}"
    )
    if "plot" in answer:
        console.print(f"  image: {escape(answer['plot'])}")
    console.print()


def _unit(answer: dict[str, Any]) -> str:
    """Of the spread: classes have a mutual information, numbers a deviation in their own unit."""
    return "" if "value" in answer["enhanced"][0] else " nats"


def _of(entry: dict[str, Any]) -> str:
    """The number beside a name, as it is read."""
    return f"{entry['value']:.4g}" if "value" in entry else f"{entry.get('share', entry.get('probability')):.1%}"


def _looks(answer: dict[str, Any]) -> str:
    if len(answer["states"]) == 1:
        return "look"
    return "states" if len({s["view"] for s in answer["states"]}) == 1 else "looks"


def _classes_table(answer: dict[str, Any]) -> Any:
    """The plain network's classes beside the enhanced one's; in segmentation, with their share of the image."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 2))
    for name, justify in (("plain", "left"), ("", "right"), ("enhanced", "left"), ("", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for k in range(max(len(answer["plain"]), len(answer["enhanced"]))):
        row: list[str] = []
        for side in ("plain", "enhanced"):
            entry = answer[side][k] if k < len(answer[side]) else None
            row += ["", ""] if entry is None else [escape(entry["name"]), _of(entry)]
        table.add_row(*row)
    return table


def _states_table(answer: dict[str, Any]) -> Any:
    """Every look that was taken; in classification, with its own answer."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 2))
    own, views = "changed" not in answer, len({s["view"] for s in answer["states"]}) > 1
    heads = [*([("view", "left")] if views else []), ("state", "left"), ("criterion", "right"), ("weight", "right")]
    for name, justify in heads:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    if own:
        table.add_column("its own answer")
        table.add_column("", justify="right")
    for s in answer["states"]:
        text = "(" + " ".join("0" if not any(x) else ",".join(map(str, x)) for x in s["state"]) + ")"
        cells = [*([escape(s["view"])] if views else []), text, f"{s['criterion']:.3f}", f"{s['weight']:.1%}"]
        table.add_row(*cells, *([escape(s["name"]), _of(s)] if own else []))
    return table
