"""`unstride predict SPEC IMAGE...`: plain against enhanced, image by image."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.options import Aggregate, Align, AsJson, Criterion, Order, Plot, Spec, Task, Weights, given

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from unstride.enhanced import Enhanced
    from unstride.models import Loaded
    from unstride.procedure.prediction import Prediction

TOGETHER = 8  # images of one size that are searched as a batch


def register(app: typer.Typer) -> None:
    app.command()(predict)


def predict(
    spec: Spec,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.", metavar="IMAGE...")],
    weights: Weights = "default",
    budget: Annotated[int, typer.Option(min=1, help="States per image; 1 is the plain model.")] = 10,
    task: Task = None,
    top: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
    plot: Plot = None,
    criterion: Criterion = None,
    aggregate: Aggregate = None,
    order: Order = None,
    align: Align = None,
    as_json: AsJson = False,
) -> None:
    """Classify or segment images: the plain answer, the enhanced one, the states used and what they cost.

    With --plot out.png, several images become out-NAME.png each.

    Exit code 3: some images could not be read; they are named, the others are done.
    """
    options = given(criterion, aggregate, order, align=align)
    from unstride import models, show

    if plot is not None:
        show.check_target(plot)
    loaded = models.load(spec, weights=weights)
    task = _task(task, loaded)
    loaded = loaded.for_task(task)
    names = _Names(plot, several=len(images) > 1 or images[0].is_dir())
    failed: dict[str, str] = {}
    answers: list[dict[str, Any]] = []
    asked = {"task": task, "budget": budget, **options}
    for answer in _answers(loaded, _opened(images, loaded, failed), asked, top, names):
        answers.append(answer)
        if not as_json:
            _show(answer, states=not names.several)
    if as_json:
        head = {"spec": spec, "weights": loaded.weights, "task": task, "budget": budget}
        bad = [{"image": name, "error": why} for name, why in failed.items()]
        typer.echo(json.dumps({**head, "images": answers, "failed": bad}))
    if failed:
        for why in failed.values():
            typer.echo(f"unstride: {why}", err=True)
        typer.echo(f"unstride: {len(failed)} of {len(failed) + len(answers)} could not be read", err=True)
        raise typer.Exit(3 if answers else 1)


def _task(task: str | None, loaded: "Loaded") -> str:
    from unstride.errors import OptionError
    from unstride.procedure.tasks import TASKS

    task = task or loaded.task or "classification"
    if task not in TASKS:
        raise OptionError(f"--task {task}: wanted one of {', '.join(TASKS)}")
    return task


def _answers(
    loaded: "Loaded",
    opened: Iterator[tuple[Path, "Image.Image", "Tensor"]],
    asked: dict[str, Any],
    top: int,
    names: "_Names",
) -> Iterator[dict[str, Any]]:
    """An answer for each image, with its picture where one is wanted."""
    import torch

    import unstride
    from unstride.show.answers import answer_of

    better: Enhanced | None = None
    for batch in _batches(opened, 1 if asked["task"] == "segmentation" else TOGETHER):
        x = torch.stack([tensor for _, _, tensor in batch])
        better = better or unstride.enhance(loaded.model, x[:1], **asked)
        for (path, image, tensor), prediction in zip(batch, better.explain(x), strict=True):
            answer = {"image": str(path), **answer_of(prediction, loaded.classes, top)}
            if names.target is not None:
                answer["plot"] = str(names.of(path))
                _picture(answer, path, image, tensor, prediction, better, loaded).savefig(answer["plot"])
            yield answer


def _picture(
    answer: dict[str, Any],
    path: Path,
    image: "Image.Image",
    tensor: "Tensor",
    prediction: "Prediction",
    better: "Enhanced",
    loaded: "Loaded",
) -> Any:
    from unstride import show
    from unstride.show.answers import headline

    title = f"{path.name}: {headline(answer)}"
    if better.task == "segmentation":
        return show.plot_segmentation(show.seen(loaded.preprocess, image), prediction, loaded.classes, title)
    rates = better.prepare(tensor[None]).found.space.rates
    return show.plot_classification(image, prediction, rates, loaded.classes, title)


def _opened(
    paths: list[Path], loaded: "Loaded", failed: dict[str, str]
) -> Iterator[tuple[Path, "Image.Image", "Tensor"]]:
    """Every image that can be read, with what the network sees; the others go to `failed` by name."""
    from unstride.errors import DataError
    from unstride.views.images import find_images, open_image

    seen: set[Path] = set()
    for argument in paths:
        try:
            found = find_images(argument)
        except DataError as error:
            failed[str(argument)] = str(error)
            continue
        for path in found:
            if path in seen:
                continue
            seen.add(path)
            try:
                image = open_image(path)
            except DataError as error:
                failed[str(path)] = str(error)
                continue
            yield path, image, loaded.preprocess(image)


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
    from rich.console import Console
    from rich.markup import escape

    from unstride.show.answers import headline

    console = Console(soft_wrap=True)
    console.print(f"[bold]{escape(answer['image'])}[/bold]  {escape(headline(answer))}")
    console.print(_classes_table(answer))
    if states:
        console.print(_states_table(answer))
    console.print(
        f"  {len(answer['states'])} states, {answer['cost']:.1f}x the MACs of a plain forward, agreement "
        f"{answer['agreement']:.0%}, spread {answer['spread']:.3f} nats, stopped: {answer['stopped']}"
    )
    if "plot" in answer:
        console.print(f"  picture: {escape(answer['plot'])}")
    console.print()


def _classes_table(answer: dict[str, Any]) -> Any:
    """The plain network's classes beside the enhanced one's; in segmentation, with their share of the picture."""
    from rich.markup import escape
    from rich.table import Table

    value = "share" if "changed" in answer else "probability"
    table = Table(box=None, padding=(0, 2, 0, 2))
    for name, justify in (("plain", "left"), ("", "right"), ("enhanced", "left"), ("", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for k in range(max(len(answer["plain"]), len(answer["enhanced"]))):
        row: list[str] = []
        for side in ("plain", "enhanced"):
            entry = answer[side][k] if k < len(answer[side]) else None
            row += ["", ""] if entry is None else [escape(entry["name"]), f"{entry[value]:.1%}"]
        table.add_row(*row)
    return table


def _states_table(answer: dict[str, Any]) -> Any:
    """Every state that was visited; in classification, with its own answer."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 2))
    own = "changed" not in answer
    for name, justify in (("state", "left"), ("criterion", "right"), ("weight", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    if own:
        table.add_column("its own answer")
        table.add_column("", justify="right")
    for s in answer["states"]:
        text = "(" + " ".join("0" if not any(x) else f"{x[0]},{x[1]}" for x in s["state"]) + ")"
        cells = [text, f"{s['criterion']:.3f}", f"{s['weight']:.1%}"]
        table.add_row(*cells, *([escape(s["name"]), f"{s['probability']:.1%}"] if own else []))
    return table
