"""Two recipes on unlabelled images: only the images that they disagree on need a label.

    comparison = unstride.predicting.compare.compare("base.toml", "new.toml", "photos/", "to_label.csv")
    comparison.serve()                                     # label in a browser, or in any editor of CSV files
    print(compare("base.toml", "new.toml", "photos/", "to_label.csv", labels="to_label.csv"))

The gain in accuracy over all images is (corrected - broken) / images, and both happen only where answers differ. With
all disagreements labelled it is as exact as with all images labelled; with the first ones, in their random order, the
interval is wider.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unstride.data.labels import Classes
from unstride.errors import DataError, OptionError
from unstride.evaluation.decisions import MARGIN, Decision, decide
from unstride.evaluation.intervals import ConfidenceInterval, gain_from_labels
from unstride.models.class_names import class_map
from unstride.pipeline import Pipeline, open_pipeline
from unstride.predicting import labels as label_files
from unstride.predicting.inputs import ImageInputs, Survey
from unstride.predicting.labels import NEITHER, LabelRow
from unstride.predicting.run import predict
from unstride.predicting.summary import PredictSummary
from unstride.recipe.recipe import Recipe
from unstride.show.answers import class_name
from unstride.storage import files, strict_json
from unstride.storage.fingerprint import text_digest

_FINEST = 1e-6  # of probabilities in a file


@dataclass(frozen=True)
class Disagreement:
    """An image with two answers, as classes of the base recipe."""

    image: str
    base: int
    new: int


@dataclass(frozen=True)
class Comparison:
    """What two recipes answer. `print` shows the verdict, once there are labels.

    Attributes:
        images: that both recipes answered; `errors` could not be read or run.
        disagreements: in the order in which they are labelled, a random one.
        cost: of the new recipe, relative to the base recipe, in multiply-accumulates.
        out: the file with the disagreements that have to be labelled.
        labels: the label of each labelled disagreement, in order; -1 for none of the classes.
    """

    images: int
    errors: int
    disagreements: tuple[Disagreement, ...]
    classes: tuple[str, ...]
    cost: float
    out: Path
    inputs: Any
    seed: int = 0
    count: int | None = None
    margin: float = MARGIN
    labels: tuple[int, ...] = ()

    @property
    def written(self) -> tuple[Disagreement, ...]:
        """The disagreements that are in the file."""
        return self.disagreements[: self.count]

    @property
    def outcomes(self) -> list[int]:
        """Of each labelled disagreement: 1 corrected, -1 broken, 0 both wrong."""
        pairs = zip(self.disagreements, self.labels, strict=False)
        return [int(label == d.new) - int(label == d.base) for d, label in pairs]

    @cached_property
    def gain(self) -> ConfidenceInterval | None:
        """The gain in accuracy over all images; None without a label."""
        if self.disagreements and not self.labels:
            return None
        return gain_from_labels(self.outcomes, len(self.disagreements), self.images)

    @cached_property
    def decision(self) -> Decision | None:
        if self.gain is None:
            return None
        return decide(self.gain, self.images, self.cost, self.margin, "the base recipe")

    def rows(self) -> list[LabelRow]:
        """The lines of the file, without labels."""
        probability = len(self.written) / max(1, len(self.disagreements))
        rows = []
        for d in self.written:
            answers = [class_name(self.classes, d.base), class_name(self.classes, d.new)]
            first = _draw(self.seed, "order", d.image)[0] % 2  # the order says nothing of the recipe
            rows.append(LabelRow(d.image, probability, answers[first], answers[1 - first]))
        return rows

    def label_of(self, text: str) -> int:
        """The class of a label's text, -1 for "neither"; a DataError for anything else."""
        return label_files.class_of(text, Classes.of(self.classes or None))

    def serve(self, port: int = 0) -> None:
        """Show the disagreements in a browser, on this computer only, until everything is labelled or Ctrl-C."""
        from unstride.predicting.labelling import serve

        serve(self, port)

    def __str__(self) -> str:
        total, labelled = len(self.disagreements), len(self.labels)
        share = total / max(1, self.images)
        unread = f"; {self.errors:,} could not be read or run" if self.errors else ""
        lines = [f"{self.images:,} images{unread}. The recipes disagree on {total:,} of them ({share:.1%})."]
        if self.decision is None:
            lines.append(f"Label them in {self.out}: the first rows are enough for a first answer.")
            return "\n".join(lines)
        corrected, broken = self.outcomes.count(1), self.outcomes.count(-1)
        neither = labelled - corrected - broken
        lines.append(f"{labelled:,} labelled: {corrected:,} corrected, {broken:,} broken, {neither:,} both wrong.")
        lines.append(self._verdict(self.decision, total - labelled))
        return "\n".join(lines)

    def _verdict(self, decision: Decision, left: int) -> str:
        if decision.verdict != "inconclusive":
            return str(decision)
        if not left:
            labels = math.ceil((decision.more_images or 0) * len(self.disagreements) / self.images)
            return f"{decision} Only where the recipes disagree is a label needed: for about {labels:,} of these."
        plural = "" if left == 1 else "s"
        return f"Inconclusive: {decision.gain.describe()}. Label the remaining {left:,} disagreement{plural}."


def compare(
    base: str | Path | Recipe | Pipeline,
    new: str | Path | Recipe | Pipeline,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    labels: str | Path | None = None,
    *,
    model: Any = None,
    weights: str | Path | None = "default",
    device: str | None = None,
    batch_size: int | None = None,
    count: int | None = None,
    margin: float = MARGIN,
    seed: int = 0,
    progress: bool = False,
) -> Comparison:
    """Find the images on which two recipes disagree, write them into a file, and read the labels of such a file.

    Args:
        base, new: recipe files, names, recipes or pipelines. A file names its networks.
        images: as `unstride.predict` takes them. They need no labels.
        out: a .csv with a row for each disagreement, in random order. Answers of both recipes stay in OUT.runs/, so
            that the next call computes nothing again. Labels that are in the file stay in it.
        labels: the file with labels: names of classes, or "neither". Rows at the end may be empty.
        model: of recipes that name no networks.
        count: write only so many of the disagreements.
        margin: the loss of accuracy that is acceptable where the new recipe is cheaper.
    """
    out = files.as_path(out, "out")
    files.check_file(out, "--out", (".csv",))
    if count is not None and (type(count) is not int or count < 1):
        raise OptionError(f"count: got {count!r}, expected a whole number from 1 on.")
    if not isinstance(margin, int | float) or not 0 <= margin <= 1:
        raise OptionError(f"margin: got {margin!r}, expected a share of the images from 0 to 1.")
    if type(seed) is not int:
        raise OptionError(f"seed: got {seed!r:.60}, expected a whole number.")
    options = {"weights": weights, "device": device}
    pipelines = [_opened(recipe, model, options) for recipe in (base, new)]
    to_base = _to_base_classes(*pipelines)
    survey = ImageInputs(images).survey()
    if survey.count == 0:
        raise DataError(f"{images}: there is no image")
    folder = out.with_name(out.name + ".runs")
    folder.mkdir(exist_ok=True)
    runs = [_predicted(pipeline, images, survey, folder, batch_size, progress) for pipeline in pipelines]
    answered, differing = _differing(folder, runs, to_base)
    if not answered:
        raise DataError(f"{images}: none of the images could be read or run. The errors are in {runs[0].out}.")
    order = tuple(sorted(differing, key=lambda d: _draw(seed, "draw", d.image)))
    errors, cost = runs[0].images - answered, _cost(*runs)
    result = Comparison(answered, errors, order, pipelines[0].classes, cost, out, images, seed, count, margin)
    if labels is not None:
        return replace(result, labels=_labels(result, files.as_path(labels, "labels")))
    label_files.update(out, result.rows())
    return result


def _differing(folder: Path, runs: Sequence[PredictSummary], to_base: dict[int, int]) -> tuple[int, list[Disagreement]]:
    """How many images both recipes answered, and those with different answers."""
    answered, differing = 0, []
    for (image, before), (name, after) in zip(*(_answers(Path(run.out)) for run in runs), strict=True):
        if image != name:
            raise DataError(f"{folder}: the tables have other images ({image}, {name}). Remove the folder.")
        if before is not None and after is not None:
            answered += 1
            if before != to_base.get(after, after):
                differing.append(Disagreement(image, before, to_base.get(after, after)))
    return answered, differing


def _opened(recipe: Any, model: Any, options: dict[str, Any]) -> Pipeline:
    pipeline = recipe if isinstance(recipe, Pipeline) else open_pipeline(model, recipe=recipe, **options)
    if pipeline.task != "classification":
        raise OptionError(
            f"compare: got a recipe for {pipeline.task}, expected classification. For other tasks use `unstride "
            "evaluate` with labelled images."
        )
    return pipeline


def _to_base_classes(base: Pipeline, new: Pipeline) -> dict[int, int]:
    """Of each class of the new recipe, the same class of the base recipe; empty if they are the same."""
    return {k: own for own, k in enumerate(class_map(base.classes, new.classes, new.spec))}


def _predicted(
    pipeline: Pipeline, images: Any, survey: Survey, folder: Path, batch_size: int | None, progress: bool
) -> PredictSummary:
    """The answers of one recipe in a table that is named by all that they depend on."""
    key = [pipeline.key(pipeline.base.example()), survey.digest]
    table = folder / f"{text_digest(strict_json.loads(strict_json.dumps(key)))[:16]}.jsonl"
    return predict(pipeline, images, table, top=1, batch_size=batch_size, progress=progress)


def _answers(table: Path) -> Iterator[tuple[str, int | None]]:
    """(image, class) of each row; None where there was an error."""
    with table.open() as lines:
        for line in lines:
            row = strict_json.loads(line)
            yield row["image"], None if row["error"] is not None else row["classes"][0]


def _cost(base: PredictSummary, new: PredictSummary) -> float:
    if not base.base_macs or not new.base_macs:  # the MACs of a network that is not counted
        return 1.0
    return new.cost * new.base_macs / (base.cost * base.base_macs)


def _draw(seed: int, what: str, image: str) -> bytes:
    """Random bytes that depend on the seed and the image only: the order survives other images and other recipes."""
    return hashlib.sha256(f"{seed}|{what}|{image}".encode()).digest()


def _labels(result: Comparison, path: Path) -> tuple[int, ...]:
    """The labels of a file, checked: of these images, in the order that was drawn, without gaps."""
    labels: list[int] = []
    gap = ""
    for line, row in _in_order(result, path):
        if not row.label:
            gap = gap or f"line {line} ({row.image})"
        elif gap:
            raise DataError(
                f"{path}: {gap} has no label, but line {line} has one. Labels count in the order of the file, so that "
                f"they are a random part: label that image, too, or write {NEITHER!r} where no answer is right."
            )
        else:
            try:
                labels.append(result.label_of(row.label))
            except DataError as error:
                raise DataError(f"{path}, line {line}: {error}") from error
    if result.disagreements and not labels:
        raise DataError(f"{path}: no row has a label. Write the class of each image into the column `label`.")
    return tuple(labels)


def _in_order(result: Comparison, path: Path) -> list[tuple[int, LabelRow]]:
    """(line, row) in the order that was drawn; the file may be sorted in any way, but it must have all its rows."""
    rows = label_files.read(path)
    places = {d.image: k for k, d in enumerate(result.disagreements)}
    share = len(rows) / max(1, len(places))
    for line, row in rows.items():
        if row.image not in places:
            raise DataError(
                f"{path}, line {line}: the recipes do not disagree on {row.image}, or it is not among the images. Give "
                "the file that this comparison wrote."
            )
        if abs(row.probability - share) > _FINEST:
            raise DataError(
                f"{path}, line {line}: its probability is {row.probability:g}, but {len(rows):,} of {len(places):,} "
                "disagreements are in the file. Give a file with all the rows that this comparison wrote."
            )
    order = sorted((places[row.image], line) for line, row in rows.items())
    if [place for place, _ in order] != list(range(len(order))):
        raise DataError(f"{path}: its images were drawn with another seed than {result.seed}. Give that seed.")
    return [(line, rows[line]) for _, line in order]
