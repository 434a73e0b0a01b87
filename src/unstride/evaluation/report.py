"""Rows as one self-contained page: the decision, gain against cost, the images and the classes that changed.

write_report("report.html", rows, {"resnet18": before, "flip": after}, data, scoring)

The page needs nothing from elsewhere, and prints well. `tune` writes its own with the same function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unstride.data.batches import FromBatches
from unstride.errors import ArtefactError, DataError, NotWritten
from unstride.evaluation.decisions import Decision
from unstride.evaluation.intervals import PairedCounts, paired_gain
from unstride.evaluation.labelled import Data
from unstride.evaluation.metric_names import shown, unit_of
from unstride.evaluation.metrics import Array, reliability
from unstride.evaluation.plots import gain_against_cost
from unstride.evaluation.rows import Row, decision_of, describe_cost
from unstride.evaluation.scoring import Scoring, Stats, count
from unstride.execution.prediction import at_size
from unstride.show.answers import class_map, class_name
from unstride.show.charts import Chart, Point, Series
from unstride.show.html import (
    Block,
    Facts,
    Figure,
    Note,
    Section,
    Table,
    Text,
    Thumbnail,
    Thumbnails,
    render_report,
)
from unstride.show.segmentation import strip
from unstride.storage.artefacts import write_file
from unstride.storage.files import check_file
from unstride.tasks.tasks import two_class

EXAMPLES = 8  # images of each kind
SIDE = 200  # pixels of a thumbnail
CLASSES = 12  # that gain most, and that lose most

Strip = Callable[[int], Image.Image]  # of an image by its index: what both predict for it


def check_report(path: str | Path) -> None:
    """An error if a page cannot be written there, raised before hours of work."""
    check_file(Path(path), "report", (".html", ".htm"))


def write_report(
    path: str | Path,
    rows: Sequence[Row],
    stats: Mapping[str, Stats],
    data: Data,
    scoring: Scoring,
    indices: NDArray[np.int64] | None = None,
    margin: float | None = None,
    decision: Decision | str | None = None,
    chosen: str | None = None,
    draw: Strip | None = None,
    title: str = "",
) -> Path:
    """Write the page; a NotWritten warning where that is impossible.

    Args:
        rows: the baseline is the one without a gain.
        stats: of the images, by the rows' names; at least the baseline's and the chosen one's.
        indices: of each image in the stats, its index in the data. By default they are all of the data.
        margin: as in `decision_of`, where no `decision` is given.
        decision: the sentence at the top.
        chosen: name of the row that is compared with the baseline; by default the last one.
        draw: draws both predictions of an image, for maps; see `strip_of`.
    """
    baseline = next(row for row in rows if row.gain is None)
    row = next(r for r in rows if r.name == chosen) if chosen is not None else rows[-1]
    sections = [_decision_section(rows, baseline, row, decision, margin), _rows_section(rows, row)]
    if row is not baseline and {row.name, baseline.name} <= set(stats):
        before, after = stats[baseline.name], stats[row.name]
        places = np.arange(count(before)) if indices is None else indices
        sections += [
            Section("Images that changed", _examples(data, scoring, before, after, places, draw)),
            *_reliability(before, after, baseline.name, row.name),
            *_classes(scoring, before, after),
        ]
    sections.append(_provenance(row))
    about = row.provenance
    heading = title or f"{about.get('model', row.name)} on {about.get('data', data.name)}"
    page = render_report(heading, sections, f"{row.images:,} images, {row.metric} compared with {baseline.name}")
    try:
        write_file(Path(path), page.encode())
    except ArtefactError as error:  # the figures are not lost with the page
        warnings.warn(NotWritten(str(error)), stacklevel=3)
    return Path(path)


# ---------------------------------------------------------------- sections
def _decision_section(
    rows: Sequence[Row], baseline: Row, row: Row, decision: Decision | str | None, margin: float | None
) -> Section:
    if decision is None and row is not baseline:
        decision = decision_of(row, rows, margin)
    facts = [(shown(baseline.metric, baseline.value), f"{baseline.metric} of {baseline.name}")]
    if row is not baseline:
        facts.append((shown(row.metric, row.value), f"{row.metric} of {row.name}"))
        facts.append((describe_cost(row.cost), f"expected cost, {row.cost_unit}"))
    return Section("Decision", (Text(str(decision or "Only the baseline was measured.")), Facts(tuple(facts))))


def _rows_section(rows: Sequence[Row], row: Row) -> Section:
    figure = Figure(gain_against_cost(rows, {row.name}), "gain against cost", "Every alternative, named at the right.")
    unit, scale = unit_of(row.metric)
    base = next(other for other in rows if other.gain is None)
    lines = []
    for other in rows:
        gain, interval = ("", "") if other.gain is None else _split(other.gain.describe(unit, scale), unit)
        counts = ("", "") if other.gain is None else (f"{other.corrected:,}", f"{other.broken:,}")
        time = f"{other.seconds / base.seconds:.2f}" if other.seconds and base.seconds else ""
        lines.append(
            (other.name, shown(row.metric, other.value), gain, interval, *counts, describe_cost(other.cost), time)
        )
    titles = ("", row.metric, f"gain, {unit}", "95 % CI", "corrected", "broken", "cost (95 % CI)", "time")
    strong = frozenset(k for k, other in enumerate(rows) if other is row)
    words = f"Time is a multiple of that of {base.name}. Cost is in {row.cost_unit}."
    return Section(
        "Gain against cost", (figure, Table(titles, tuple(lines), words, strong), *_other_metrics(rows, row))
    )


def _split(described: str, unit: str) -> tuple[str, str]:
    """The estimate, and the interval."""
    estimate, _, interval = described.partition(f" {unit} (")
    return estimate, interval.partition(" CI ")[2].rstrip(")")


def _other_metrics(rows: Sequence[Row], row: Row) -> list[Table]:
    names = [name for name in row.metrics if name != row.metric and all(name in other.metrics for other in rows)]
    lines = tuple((other.name, *(shown(name, other.metrics[name]) for name in names)) for other in rows)
    return [Table(("", *names), lines)] if names else []


def strip_of(data: Data, scoring: Scoring, outputs: Callable[[int], Sequence[Tensor]]) -> Strip:
    """Draws an image with its labels, and the class maps that two recipes give it.

    Args:
        outputs: of an image by its index, the logits (K, h, w) before and after.
    """

    def draw(index: int) -> Image.Image:
        assert not isinstance(data, FromBatches)
        image, target = data[index].read()
        assert not isinstance(target, int)
        maps = [target, *(class_map(at_size(two_class(o[None]).float(), target.shape)[0]) for o in outputs(index))]
        known = np.unique(np.asarray(target))
        count = max(len(scoring.classes), 2, int(known[known != scoring.ignore].max(initial=0)) + 1)
        return strip(image, [np.asarray(m, np.int64) for m in maps], scoring.classes, count)

    return draw


def _examples(
    data: Data, scoring: Scoring, before: Stats, after: Stats, places: NDArray[np.int64], draw: Strip | None
) -> tuple[Block, ...]:
    """Corrected images beside broken ones."""
    if isinstance(data, FromBatches):
        return (Text("Images are shown for data that is named, not for batches."),)
    better, worse = scoring.changed(before, after)
    change = scoring.loss(after) - scoring.loss(before)
    sides: list[Block] = []
    for mark, rows, sign in (("corrected", better, 1), ("broken", worse, -1)):
        order = sorted(np.flatnonzero(rows), key=lambda k: sign * change[k])[:EXAMPLES]
        drawn = [_thumbnail(data, int(places[k]), _caption(scoring, before, after, int(k)), mark, draw) for k in order]
        thumbs = tuple(thumb for thumb in drawn if thumb is not None)
        if thumbs:
            sides.append(Thumbnails(thumbs, f"{int(rows.sum()):,} {mark}", wide=draw is not None))
    if not sides:
        return (Text("No image is corrected or broken."),)
    parts = " Each strip: image, labels, before, after, and what changed." if draw is not None else ""
    return (Text(f"Those that change most are shown.{parts}"), *sides)


def _thumbnail(data: Any, index: int, caption: str, mark: str, draw: Strip | None) -> Thumbnail | None:
    try:
        image = draw(index) if draw is not None else data[index].image().convert("RGB")
    except (DataError, OSError):  # it was there when it was measured
        return None
    if draw is None:
        image.thumbnail((SIDE, SIDE))
    return Thumbnail(image, caption or data[index].id, mark)


def _caption(scoring: Scoring, before: Stats, after: Stats, k: int) -> str:
    if "predicted" in before:
        names = [class_name(scoring.classes, int(s[name][k])) for s, name in _labels(before, after)]
        return f"{names[0]}: {names[1]} → {names[2]}"
    was, now = (float(scoring.loss({n: np.asarray(v) for n, v in s.items()})[k]) for s in (before, after))
    return f"error {was:.3g} → {now:.3g}" if "pairs" not in before else ""


def _labels(before: Stats, after: Stats) -> list[tuple[Stats, str]]:
    return [(before, "label"), (before, "predicted"), (after, "predicted")]


def _reliability(before: Stats, after: Stats, *names: str) -> list[Section]:
    """Confidence against accuracy, before and after."""
    if "confidence" not in before:
        return []
    charts = []
    for name, stats in zip(names, (before, after), strict=True):
        bins = reliability(stats["confidence"], stats["correct"])
        own = Series("measured", tuple(Point(c, a, label=f"{n:,} images") for c, a, n in bins))
        ideal = Series("calibrated", (Point(0.0, 0.0), Point(1.0, 1.0)))
        charts.append(Chart(name, "confidence", "accuracy", (own, ideal)))
    return [Section("Reliability before and after", (*charts, Text("A calibrated model lies on the diagonal.")))]


# ---------------------------------------------------------------- classes
def _classes(scoring: Scoring, before: Stats, after: Stats) -> list[Section]:
    was, now = scoring.by_class(before), scoring.by_class(after)
    if was is None or now is None or len(was) < 2:
        return []
    size = max(len(was), len(now))
    was, now = (np.pad(v, (0, size - len(v)), constant_values=np.nan) for v in (was, now))
    change = now - was
    known = np.flatnonzero(np.isfinite(change) & (change != 0))
    if not len(known):
        return [Section("Classes", (Text("No class changes."),))]
    order = known[np.argsort(change[known], kind="stable")]
    listed = list(dict.fromkeys([*order[:CLASSES], *order[-CLASSES:]]))
    sizes = _class_sizes(before, size)
    lines = tuple(
        (
            class_name(scoring.classes, int(k)),
            f"{sizes[k]:,}" if sizes is not None else "",
            f"{100 * was[k]:.1f}",
            f"{100 * now[k]:.1f}",
            f"{100 * change[k]:+.1f}",
        )
        for k in listed
    )
    table = Table(("class", "images", "before, %", "after, %", "change, points"), lines)
    losers = losing_classes(scoring, before, after, change)
    return [Section("Classes", (*losers, table))]


def losing_classes(scoring: Scoring, before: Stats, after: Stats, change: Array) -> tuple[Note, ...]:
    """A warning that names the classes that lose: those that lose significantly, or at least 5 points of 20 images."""
    losers = []
    for k in np.flatnonzero(change < 0):
        if "predicted" in before:
            rows = np.asarray(before["label"]) == k
            pairs = PairedCounts.from_correct(np.asarray(before["correct"])[rows], np.asarray(after["correct"])[rows])
            gain = paired_gain(pairs)
            worse = gain.high < 0 or (gain.estimate <= -0.05 and int(rows.sum()) >= 20)
        else:
            worse = change[k] <= -0.01
        if worse:
            losers.append((float(change[k]), class_name(scoring.classes, int(k))))
    if not losers:
        return ()
    named = ", ".join(f"{name} ({100 * c:+.1f} points)" for c, name in sorted(losers)[:CLASSES])
    more = f", and {len(losers) - CLASSES} more" if len(losers) > CLASSES else ""
    return (Note(f"Classes that lose: {named}{more}. Check them before you use the recipe."),)


def _class_sizes(stats: Stats, size: int) -> NDArray[np.int64] | None:
    return np.bincount(np.asarray(stats["label"]), minlength=size) if "label" in stats else None


def _provenance(row: Row) -> Section:
    """What it takes to measure it again."""
    about = {k: v for k, v in row.provenance.items() if v not in ("", None)}
    lines = [
        (str(k), ", ".join(f"{n} {x}" for n, x in v.items()) if isinstance(v, Mapping) else str(v))
        for k, v in about.items()
    ]
    return (
        Section("How it was measured", (Table(("what", "value"), tuple(lines)),))
        if lines
        else Section("How it was measured", (Text("On the images of this run."),))
    )
