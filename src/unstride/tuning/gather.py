"""What a network says about pictures in every look: shard by shard into files, so that a killed run goes on."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.data import Dataset
from unstride.data.batches import unpacked
from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, DataError, InputError, UnstrideError
from unstride.jobs.artefacts import read_artefact, write_artefact
from unstride.jobs.distributed import World
from unstride.jobs.fingerprint import digest, fingerprint
from unstride.jobs.progress import progress as show_progress
from unstride.procedure.batch import Batch
from unstride.procedure.looks import Look
from unstride.tuning.candidates import Unit
from unstride.tuning.pool import Pool, Work
from unstride.tuning.timing import estimate
from unstride.views.canvas import Canvas, Pictures, Source, as_source
from unstride.views.policies import IDENTITY, View
from unstride.views.volumes import Volume

KIND = "looks"
SHARD = 64  # pictures
PAPER = 10  # states of the paper's search, which stands beside ours


@dataclass(frozen=True, eq=False)
class Part:
    """Some labelled pictures, and what identifies them."""

    key: str
    source: Source
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Gathered:
    """A pool, and the paper's search on the same pictures: its logits (N, K) and costs (N,)."""

    pool: Pool
    paper: tuple[Tensor, Tensor] | None
    left_out: tuple[str, ...]  # units that the network refuses, and why
    seconds: float


def parts(data: Dataset | Iterable[Any], like: Tensor) -> Iterator[Part]:
    """A data set, or batches of (images, labels) -> parts of at most 64 pictures."""
    if isinstance(data, Dataset):
        for start in range(0, len(data), SHARD):
            items = [data[i] for i in range(start, min(start + SHARD, len(data)))]
            read = []
            for item in items:
                try:
                    read.append((item.id, *item.read()))
                except (DataError, OSError) as error:
                    print(f"left out: {item.id}: {error}")
            if read:
                key = hashlib.sha256(repr((data.fingerprint(), [r[0] for r in read])).encode()).hexdigest()[:24]
                pictures = [r[1] for r in read if not isinstance(r[1], Volume)]  # volumes have masks, not classes
                source = Pictures(pictures, data.preprocess, like)
                yield Part(key, source, torch.tensor([int(r[2]) for r in read]))
        return
    for batch in data:
        images, known = unpacked(batch, "data")
        canvas = as_source(images)
        if not isinstance(canvas, Canvas) or known.ndim != 1:
            raise InputError("a loader must give tensors (B, C, H, W) or Canvas batches, with a label for each image")
        pixels = canvas.pixels.to(like)
        for start in range(0, len(pixels), SHARD):
            own = pixels[start : start + SHARD]
            part = Canvas(own, canvas.box, preprocess=canvas.preprocess)
            yield Part(digest({"x": own})[:24], part, known[start : start + SHARD])


def usable(better: Enhanced, source: Source, units: Sequence[Unit]) -> tuple[list[Unit], dict[View, Work], list[str]]:
    """The units that the network takes, and what work it is at each size; the rest with its reason."""
    work: dict[View, Work] = {}
    refused: dict[View, str] = {}
    kept: list[Unit] = []
    one = source.rows([0])
    for unit in [Unit(IDENTITY), *units]:
        view = unit.view
        if view not in work and view not in refused:
            try:
                _, plan, _ = better.fitted(one.see(view))
                work[view] = Work.of(plan, max(u.count for u in [unit, *units] if u.view == view))
            except UnstrideError as error:
                if view == IDENTITY:
                    raise
                refused[view] = str(error).splitlines()[0]
        if view in work and unit.count <= len(work[view].near):
            kept.append(unit)
    return kept[1:], work, [f"{view}: {why}" for view, why in refused.items()]


def looks_of(units: Sequence[Unit], work: dict[View, Work]) -> tuple[Look, ...]:
    """All looks of these units, the plain one first."""
    looks = [Look(u.view, s) for u in [Unit(IDENTITY), *units] for s in work[u.view].near[: u.count]]
    return tuple(dict.fromkeys(looks))


def gather(
    better: Enhanced,
    given: Sequence[Part],
    units: Sequence[Unit],
    folder: Path,
    us: World,
    show: bool,
    paper: bool = True,
) -> Gathered:
    """Everything once, into files of `folder`; what is there already is not computed again."""
    units, work, left_out = usable(better, given[0].source, units)
    looks = looks_of(units, work)
    name = hashlib.sha256(
        repr((fingerprint(better.model), [(look.view.spec(), look.state.selections) for look in looks], paper)).encode()
    ).hexdigest()[:16]
    start = time.monotonic()

    def look(source: Source) -> dict[str, Tensor]:
        return {"logits": look_at(better, source, looks), **(_paper(better, source) if paper else {})}

    def told(pictures: int) -> str:
        return estimate(better, given[0].source, looks, work, pictures, paper)

    stored = _shards(look, name, given, folder, us, "looking" if show else "", told)
    labels = torch.cat([p.labels for p in given])
    pool = Pool(looks, torch.cat([s["logits"] for s in stored], 1), labels, work)
    beside = (torch.cat([s["paper"] for s in stored]), torch.cat([s["cost"] for s in stored])) if paper else None
    return Gathered(pool, beside, tuple(left_out), time.monotonic() - start)


def answers(better: Enhanced, given: Sequence[Part], folder: Path, us: World, show: bool) -> tuple[Tensor, Tensor]:
    """Logits (N, K) and costs (N,) of a recipe as it runs, into files of `folder` as well."""
    learned = "" if better.attention is None else digest(dict(better.attention.state_dict()))
    name = hashlib.sha256(repr((fingerprint(better.model), better.signature, learned)).encode()).hexdigest()[:16]

    def ask(source: Source) -> dict[str, Tensor]:
        found = better.explain(source)
        costs = torch.tensor([p.cost for p in found], dtype=torch.float64)
        return {"logits": torch.stack([p.logits for p in found]).float().cpu(), "cost": costs}

    stored = _shards(ask, name, given, folder, us, "your recipe" if show else "")
    return torch.cat([s["logits"] for s in stored]), torch.cat([s["cost"] for s in stored])


def _shards(
    make: Callable[[Source], dict[str, Tensor]],
    name: str,
    given: Sequence[Part],
    folder: Path,
    us: World,
    label: str,
    told: Callable[[int], str] | None = None,
) -> list[dict[str, Tensor]]:
    """What is made of each part, each process its share; what is there already is not made again.

    `told` says before the start what so many pictures will take.
    """
    files = [folder / f"{name}-{part.key}.safetensors" for part in given]
    mine = [i for i in range(len(given)) if i % us.size == us.rank and _stored(files[i]) is None]
    total = sum(len(given[i].source) for i in mine)
    if told is not None and label and us.leads and total:
        print(told(total), file=sys.stderr, flush=True)
    with show_progress(label, total, bool(label) and us.leads and total > 0) as advance:
        for i in mine:
            write_artefact(files[i], make(given[i].source), {"kind": KIND})
            advance(len(given[i].source), "")
    us.wait()
    stored = [found for found in map(_stored, files) if found is not None]
    if len(stored) < len(files):
        raise DataError(f"{folder}: not all shards can be read back; do all processes see the same folder?")
    return stored


@torch.no_grad()
def look_at(better: Enhanced, source: Source, looks: Sequence[Look]) -> Tensor:
    """Logits (L, N, K) of these looks, each view prepared once."""
    found: dict[Look, Tensor] = {}
    rows = list(range(len(source)))
    for view in dict.fromkeys(look.view for look in looks):
        states = [look.state for look in looks if look.view == view]
        images, plan, crop = better.fitted(source.see(view))
        together = plan.engine.images_at_once(range(1, plan.engine.depth + 1), len(states), better.max_bytes)
        parts: dict[Look, list[Tensor]] = {}
        for start in range(0, len(rows), together):
            part = rows[start : start + together]
            batch = Batch(plan, plan.engine.start(images[start : start + together]), (view,), part, crop)
            for of, (logits, *_) in batch.look(view, states, part, batch):
                parts.setdefault(Look(view, of[0]), []).append(logits.float().cpu())
        found |= {look: torch.cat(values) for look, values in parts.items()}
    return torch.stack([found[look] for look in looks])


def _paper(better: Enhanced, source: Source) -> dict[str, Tensor]:
    logits, costs = better.with_options(recipe="paper").costs(source.see(IDENTITY), [PAPER])[PAPER]
    return {"paper": logits.float().cpu(), "cost": torch.tensor(costs, dtype=torch.float64)}


def _stored(file: Path) -> dict[str, Tensor] | None:
    try:
        return read_artefact(file, KIND)[0] if file.is_file() else None
    except ArtefactError:
        return None  # damaged: made again
