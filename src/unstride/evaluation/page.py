"""An evaluation as one self-contained page: what was gained, at which cost, on which images, in which layers.

unstride.evaluate("sample", "sample", limit=200, report="report.html")
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unstride.errors import DataError, NotWritten
from unstride.evaluation.measures import PERCENT
from unstride.evaluation.rows import Row
from unstride.evaluation.shards import Array, Shard
from unstride.evaluation.words import advice, doubts, measure, setting, stated
from unstride.evaluation.work import Job, answered
from unstride.geometry.report import Report
from unstride.tasks.confidence import two_class
from unstride.execution.prediction import at_size
from unstride.show.answers import class_map, class_name
from unstride.show.html import (
    Block,
    Facts,
    Measured,
    Note,
    Section,
    Table,
    Text,
    Thumbnail,
    Thumbnails,
    charts,
    layer_table,
    render_report,
)
from unstride.show.segmentation import strip
from unstride.storage.files import check_file, write_atomic

EXAMPLES = {"classification": 7, "segmentation": 3}  # of each kind
SIDE = 240  # pixels of a thumbnail


def check_report(path: Path) -> None:
    """Whether a page can be written there, asked before hours of work."""
    check_file(path, "report", (".html", ".htm"))


def write_report(path: Path, rows: Sequence[Row], whole: Shard, job: Job) -> None:
    """The page of one run; the images that changed are read and run once more. Where it cannot be written, that is a
    warning and not an error: the rows are there, and worth more than their page.
    """
    first, legend = rows[0], job.images.legend
    name = measure(first)
    unit = "points of" if first.measure.percent else "saved"
    about = (
        f"{first.images:,} images; weights: {first.weights}. Gain: {unit} {name} over the plain network on the same "
        "images, with its 95 % bootstrap interval. MACs and time in plain forwards."
    )
    told_of_all = (_table(rows), *_charts(rows, name), *_errors(first))
    sections = [
        Section("In short", (Facts(_facts(rows, name)), Text(_sentence(advice(rows))))),
        Section("Every setting", (*map(Note, doubts(rows)), Text(about), Text(_sentence(legend)), *told_of_all)),
        Section("Images that changed", tuple(_changed(rows, whole, job))),
        Section("What the network throws away", (_layers(job),)),
    ]
    told = f"{first.created}, {first.device}, torch {first.versions.get('torch', '?')}, run {first.run}"
    try:
        write_atomic(path, render_report(f"{first.spec} on {first.data}", sections, told).encode())
    except OSError as error:
        warnings.warn(NotWritten(f"report {path}: cannot be written ({error.strerror or error})"), stacklevel=3)


def measured(rows: Sequence[Row]) -> dict[str, list[Measured]]:
    """The points of the two charts: a line without views, one with them."""
    base, out = rows[0].quality, {}
    for views in dict.fromkeys(row.views for row in rows):
        out["unstride" if views == 1 else f"unstride in {views} views"] = [
            Measured(r.budget, r.quality, base + r.gain["low"], base + r.gain["high"], r.macs)
            for r in rows
            if r.views == views
        ]
    return out


def _charts(rows: Sequence[Row], name: str) -> tuple[Block, ...]:
    if all(row.budget == 1 for row in rows):  # looks, or views alone: no curve over the budget
        return ()
    return charts(name, measured(rows), "Bars: 95 % interval of the gain over the plain network. Dotted: plain.")


def _facts(rows: Sequence[Row], name: str) -> tuple[tuple[str, str], ...]:
    by = rows[0].measure
    out = [(by.shown(rows[0].quality), f"{name}, {stated(rows[0])}")]
    better = min if by.lower else max
    shown = [better(rows[1:], key=lambda row: row.quality)] if len(rows) > 1 else []
    shown += [row for row in rows if row.recommended and not row.plain and row not in shown]
    for row in shown:
        words = f"{name}, {stated(row)}, {row.macs:.1f}x MACs: {row.verdict}"
        out.append((by.shown(row.quality), words))
    return tuple(out)


def _table(rows: Sequence[Row]) -> Table:
    by = rows[0].measure
    shown = [(name, key) for name, key in by.columns if key in rows[0].metrics]  # older rows have no Dice
    scale = 100 if by.percent else 1
    changes = f"{by.counted or 'images'}: corrected / corrupted"
    heads = ("setting", shown[0][0], "gain, points" if by.percent else "saved", changes, "MACs", "time")
    cells = []
    for row in rows:
        values = [f"{100 * row.metrics[k]:.2f} %" if k in PERCENT else f"{row.metrics[k]:.4f}" for _, k in shown]
        g = row.gain
        gain = "" if row.plain else f"{scale * g['gain']:+.2f} [{scale * g['low']:+.2f}, {scale * g['high']:+.2f}]"
        changed = "" if row.plain or not by.counted else f"{g['corrected']:,} / {g['corrupted']:,}"
        time = "" if row.latency is None else f"{row.latency:.1f}x"
        cells.append((stated(row), values[0], gain, changed, f"{row.macs:.1f}x", time, *values[1:]))
    told = "; ".join(f"{setting(row)}: {row.verdict}" for row in rows if not row.plain)
    strong = frozenset(k for k, row in enumerate(rows) if row.recommended)
    caption = f"{_sentence(told)} The recommended row is stressed." if told else ""
    return Table((*heads, *(head for head, _ in shown[1:])), tuple(cells), caption, strong)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:].rstrip(".") + "."


def _errors(row: Row) -> tuple[Note, ...]:
    if not row.errors:
        return ()
    more = f", and {row.errors - len(row.error_names)} more" if row.errors > len(row.error_names) else ""
    return (Note(f"{row.errors:,} could not be evaluated: {'; '.join(row.error_names)}{more}"),)


def _layers(job: Job) -> Table:
    plan = job.better.plan
    found = plan.found
    return layer_table(Report(found.layers, found.left_out, found.unknown, None, plan.plain_macs, plan.graph.size))


# ----------------------------------------------------------------------------------------------- images that changed


def _changed(rows: Sequence[Row], whole: Shard, job: Job) -> list[Block]:
    """Corrected and corrupted images of the recommended setting, or of the best where that is the plain network."""
    others = [k for k, row in enumerate(rows) if not row.plain]
    if not others:
        return [Text("Only the plain network was evaluated.")]
    if job.task not in EXAMPLES:
        return [Text(f"Images are shown for {' and '.join(EXAMPLES)}; this is {job.task}.")]
    which = next((k for k in others if rows[k].recommended), max(others, key=lambda k: rows[k].quality))
    classify = job.task == "classification"
    score = _flips(whole, which) if classify else np.subtract(*whole.values["flips"][:, which].T.astype(np.int64))
    most = EXAMPLES[job.task]
    up, down = np.argsort(-score, kind="stable")[:most], np.argsort(score, kind="stable")[:most]
    chosen = [(k, "corrected") for k in up if score[k] > 0] + [(k, "corrupted") for k in down if score[k] < 0]
    if not chosen:
        return [Text(f"With {setting(rows[which])}, none turned from wrong to right or from right to wrong.")]
    thumbs = []
    for k, mark in chosen:
        try:
            show = _classified if classify else _segmented
            thumbs.append(show(job, int(whole.index[k]), which, mark, int(score[k])))
        except (DataError, OSError):  # it was there when it was evaluated
            continue
    words = (
        f"{setting(rows[which])}, as label: plain → enhanced."
        if classify
        else f"{setting(rows[which])}, those that gain and lose most. From left to right: image, labels, plain, "
        "enhanced, what changed (white: now right, red: now wrong)."
    )
    return [Thumbnails(tuple(thumbs), _sentence(words), wide=not classify)]


def _flips(whole: Shard, which: int) -> Array:
    """+1 where an image became right, -1 where it became wrong."""
    right = whole.values["top1"].astype(np.int64)
    return np.asarray(right[:, which] - right[:, 0])


def _answers(job: Job, index: int, which: int) -> tuple[Tensor, Tensor]:
    """Logits of one image: plain, and of a setting."""
    with torch.no_grad():
        found = answered(job, index)
    plain, better = (found[job.runner.settings[k]].logits[0] for k in (0, which))
    return plain, better


def _classified(job: Job, index: int, which: int, mark: str, _: int) -> Thumbnail:
    image, label = job.images[index].read()
    assert isinstance(label, int)
    image.thumbnail((SIDE, SIDE))
    seen = [int(two_class(logits[None])[0].argmax()) for logits in _answers(job, index, which)]
    truth, was, now = (class_name(job.images.classes, k) for k in (label, *seen))
    return Thumbnail(image, f"{truth}: {was} → {now}", mark)


def _segmented(job: Job, index: int, which: int, mark: str, gained: int) -> Thumbnail:
    item = job.images[index]
    image, truth = item.read()
    assert isinstance(truth, Tensor)
    logits = _answers(job, index, which)
    maps = [np.asarray(truth, np.int64)]
    for one in logits:
        maps.append(class_map(at_size(two_class(one[None]).float(), truth.shape)[0]))
    count = max(2, logits[0].shape[0])
    return Thumbnail(strip(image, maps, job.images.classes, count), f"{item.id}: {gained:+,} pixels right", mark)
