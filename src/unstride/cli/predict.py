"""`unstride predict SPEC IMAGE...`: plain against enhanced, image by image."""

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstride.cli.parsing import MOST, read_align
from unstride.cli.printing import print_table, screen
from unstride.jobs import strict

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from unstride.enhanced import Enhanced
    from unstride.models import Loaded
    from unstride.procedure.prediction import Prediction

TOGETHER = 8  # images of one size that are searched as a batch


def register(app: typer.Typer) -> None:
    @app.command()
    def predict(
        spec: Annotated[str, typer.Argument(help="A model, as for inspect; efficientnet-lite0 needs no hub.")],
        images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.", metavar="IMAGE...")],
        weights: Annotated[str, typer.Option(help="default (pretrained), random, or a file.")] = "default",
        budget: Annotated[int, typer.Option(min=1, max=MOST, help="States per image; 1 is the plain model.")] = 10,
        task: Annotated[
            str | None, typer.Option(help="classification or segmentation; by default the model's own.")
        ] = None,
        top: Annotated[int, typer.Option(min=1, help="Classes to show.")] = 5,
        plot: Annotated[
            Path | None, typer.Option(help="Write a picture; several images: out.png becomes out-NAME.png.")
        ] = None,
        criterion: Annotated[
            str | None, typer.Option(help="What the search follows: entropy, displacement, random. [entropy]")
        ] = None,
        aggregate: Annotated[
            str | None, typer.Option(help="How states are joined: entropy, mean, max. [entropy]")
        ] = None,
        order: Annotated[str | None, typer.Option(help="paper, or cost: cheap late layers first. [paper]")] = None,
        align: Annotated[str | None, typer.Option(help="on, off, or stitch (segmentation). [on]")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Classify or segment images: the plain answer, the enhanced one, the states used and what they cost.

        Exit code 3: some images could not be read; they are named, the others are done.
        """
        aligned = None if align is None else read_align(align)
        from unstride import models
        from unstride import show as plots
        from unstride.errors import OptionError
        from unstride.procedure.tasks import TASKS
        from unstride.show.answers import answer_of, headline

        if plot is not None:
            plots.check_target(plot)
        loaded = models.load(spec, weights=weights)
        task = task or loaded.task or "classification"
        if task not in TASKS:
            raise OptionError(f"--task {task}: wanted one of {', '.join(TASKS)}")
        loaded = loaded.for_task(task)
        failed: dict[str, str] = {}
        answers: list[dict[str, Any]] = []
        names = _Names(plot, several=len(images) > 1 or images[0].is_dir())
        asked = {"criterion": criterion, "aggregate": aggregate, "order": order, "align": aligned}
        options: dict[str, Any] = {"budget": budget, **{k: v for k, v in asked.items() if v is not None}}
        if loaded.untrained:
            typer.echo(f"unstride: {loaded.weights}: these weights know nothing of any image", err=True)
        better: Enhanced | None = None
        for batch in _batches(_opened(images, loaded, failed), 1 if task == "segmentation" else TOGETHER):
            for (path, image, tensor), ready, prediction in _explained(loaded, task, options, better, batch, failed):
                better = ready
                answer = {"image": str(path), **answer_of(prediction, loaded.classes, top)}
                if plot is not None:
                    answer["plot"] = str(names.of(path))
                    title = f"{path.name}: {headline(answer)}"
                    if task == "segmentation":
                        view = plots.seen(loaded.preprocess, image)
                        figure = plots.plot_segmentation(view, prediction, loaded.classes, title)
                    else:
                        rates = better.prepare(tensor[None]).found.space.rates
                        figure = plots.plot_classification(image, prediction, rates, loaded.classes, title)
                    if plots.save(figure, Path(answer["plot"])) is None:
                        del answer["plot"]
                answers.append(answer)
                if not as_json:
                    _show(answer, states=not names.several)
        if as_json:
            head = {"spec": spec, "weights": loaded.weights, "task": task, "budget": budget}
            bad = [{"image": name, "error": why} for name, why in failed.items()]
            typer.echo(strict.dumps({**head, "images": answers, "failed": bad}))
        if failed:
            for why in failed.values():
                typer.echo(f"unstride: {why}", err=True)
            typer.echo(f"unstride: {len(failed)} of {len(failed) + len(answers)} could not be read", err=True)
            raise typer.Exit(3 if answers else 1)


def _opened(
    given: list[Path], loaded: "Loaded", failed: dict[str, str]
) -> Iterator[tuple[Path, "Image.Image", "Tensor"]]:
    """Every image that can be read, with what the network sees; the others go to `failed` by name."""
    from unstride.errors import DataError
    from unstride.views.images import find_images, open_image

    seen: set[str] = set()
    for argument in given:
        try:
            paths = find_images(argument)
        except DataError as error:
            failed[str(argument)] = str(error)
            continue
        for path in paths:
            if (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            try:
                image = open_image(path)
                tensor = loaded.seen(image)
            except (DataError, OSError) as error:
                failed[str(path)] = str(error) if str(path) in str(error) else f"{path}: {error}"
                continue
            yield path, image, tensor


def _explained(
    loaded: "Loaded",
    task: str,
    options: dict[str, Any],
    better: "Enhanced | None",
    batch: list[Any],
    failed: dict[str, str],
) -> Iterator[tuple[Any, "Enhanced", "Prediction"]]:
    """Each image of a batch, the enhanced model and its prediction; one that the model cannot take goes to `failed`."""
    import torch

    from unstride.errors import InputError, ModelRaised
    from unstride.proof.loop import prepared

    x = torch.stack([tensor for _, _, tensor in batch])
    try:
        better = better or prepared(loaded.model, x[:1], task, options)
        found = better.explain(x)
    except (InputError, ModelRaised) as error:
        if len(batch) > 1:
            for one in batch:
                yield from _explained(loaded, task, options, better, [one], failed)
        else:
            failed[str(batch[0][0])] = f"{batch[0][0]}: {error}"
        return
    for item, prediction in zip(batch, found, strict=True):
        if not bool(torch.isfinite(prediction.logits).all()):
            failed[str(item[0])] = f"{item[0]}: the model's answer is not finite; half precision may have overflowed"
        else:
            yield item, better, prediction


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
    from rich.table import Table

    from unstride.show.answers import headline

    console = screen()
    console.print(f"[bold]{escape(answer['image'])}[/bold]  {escape(headline(answer))}")
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
    print_table(console, table)
    if states:
        inner = Table(box=None, padding=(0, 2, 0, 2))
        own = value == "probability"
        for name, justify in (("state", "left"), ("criterion", "right"), ("weight", "right")):
            inner.add_column(name, justify=justify)  # type: ignore[arg-type]
        if own:
            inner.add_column("its own answer")
            inner.add_column("", justify="right")
        for s in answer["states"]:
            text = "(" + " ".join("0" if not any(x) else f"{x[0]},{x[1]}" for x in s["state"]) + ")"
            cells = [text, f"{s['criterion']:.3f}", f"{s['weight']:.1%}"]
            inner.add_row(*cells, *([escape(s["name"]), f"{s['probability']:.1%}"] if own else []))
        print_table(console, inner)
    console.print(
        f"  {len(answer['states'])} states, {answer['cost']:.1f}x the MACs of a plain forward, agreement "
        f"{answer['agreement']:.0%}, spread {answer['spread']:.3f} nats, stopped: {answer['stopped']}"
    )
    if "plot" in answer:
        console.print(f"  picture: {escape(answer['plot'])}")
    console.print()
