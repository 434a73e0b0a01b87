"""What a network says about images in every look: shard by shard into files, so that a killed run goes on."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import pad

from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, DataError, UnstrideError
from unstride.procedure.batch import Batch
from unstride.procedure.looks import Look
from unstride.tasks.tasks import TASKS
from unstride.recipe.view import PLAIN, View
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.distributed import World
from unstride.storage.fingerprint import digest, fingerprint
from unstride.storage.progress import progress as show_progress
from unstride.tuning.candidates import Unit
from unstride.tuning.parts import Part, check_finite
from unstride.tuning.pool import Pool, Work
from unstride.tuning.timing import estimate
from unstride.views.source import Source

KIND = "looks, edges held"
PAPER = 10  # states of the paper's search, which stands beside ours


@dataclass(frozen=True, eq=False)
class Gathered:
    """A pool, and the paper's search on the same images: its answers (N, E) and costs (N,)."""

    pool: Pool
    paper: tuple[Tensor, Tensor] | None
    left_out: tuple[str, ...]  # units that the network refuses, and why
    seconds: float
    units: tuple[Unit, ...] = ()  # those that it takes


@contextmanager
def kept_in(cache_dir: str | Path | None, us: World) -> Iterator[Path]:
    """The folder for what the network says; without one of the user's, a temporary one that all processes see."""
    if cache_dir is not None:
        yield Path(cache_dir)
        return
    with ExitStack() as stack:
        folder = Path(us.share(stack.enter_context(TemporaryDirectory()) if us.leads else ""))
        if not folder.is_dir():
            raise DataError("processes on several machines have no temporary folder together: give cache_dir (--cache)")
        yield folder
        us.wait()  # until everybody has read it


def usable(better: Enhanced, source: Source, units: Sequence[Unit]) -> tuple[list[Unit], dict[View, Work], list[str]]:
    """The units that the network takes, and what work it is at each size; the rest with its reason."""
    work: dict[View, Work] = {}
    refused: dict[View, str] = {}
    kept: list[Unit] = []
    one = source.rows([0])
    for unit in [Unit(PLAIN), *units]:
        view = unit.view
        if view not in work and view not in refused:
            try:
                _, plan, _ = better.fitted(one.render(view))
                work[view] = Work.of(plan, max(u.count for u in [unit, *units] if u.view == view))
            except UnstrideError as error:
                if view == PLAIN:
                    raise
                refused[view] = str(error).splitlines()[0]
        if view in work and unit.count <= len(work[view].near):
            kept.append(unit)
    return kept[1:], work, [f"{view}: {why}" for view, why in refused.items()]


def looks_of(units: Sequence[Unit], work: dict[View, Work]) -> tuple[Look, ...]:
    """All looks of these units, the plain one first."""
    looks = [Look(u.view, s) for u in [Unit(PLAIN), *units] for s in work[u.view].near[: u.count]]
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
    works: dict[tuple[int, ...], dict[View, Work]] = {}  # images with maps may have sizes of their own
    left_out: list[str] = []
    for part in given:
        if part.source.size not in works:
            units, works[part.source.size], refused = usable(better, part.source, units)
            left_out += refused
    work, *others = works.values()
    looks = looks_of(units, work)
    asked = [(str(look.view), look.state.selections) for look in looks]
    name = hashlib.sha256(repr((fingerprint(better.model), better.task, asked, paper)).encode()).hexdigest()[:16]
    start = time.monotonic()

    def look(part: Part) -> dict[str, Tensor]:
        said = torch.stack([part.kept(one) for one in look_at(better, part.source, looks)])
        check_finite(said.transpose(0, 1), part.names)
        return {"logits": said, **(_paper(better, part) if paper else {})}

    def told(images: int) -> str:
        source = given[0].source
        kept = 4 * given[0].kept(better.plain(source.rows([0]).render(PLAIN))).shape[1]
        return estimate(better, source, kept, looks, work, images, paper)

    stored = _shards(look, name, given, folder, us, "looking" if show else "", told)
    count = torch.tensor([len(part.source) for part in given])
    order = list(works)
    pool = Pool(
        looks, _joined([s["logits"] for s in stored], 1), _joined([part.labels for part in given], 0, torch.nan), work,
        better.task, torch.tensor([part.stands for part in given]).repeat_interleave(count), tuple(others),
        torch.tensor([order.index(part.source.size) for part in given]).repeat_interleave(count),
    )  # fmt: skip
    beside = (_joined([s["paper"] for s in stored]), torch.cat([s["cost"] for s in stored])) if paper else None
    return Gathered(pool, beside, tuple(dict.fromkeys(left_out)), time.monotonic() - start, tuple(units))


def _joined(found: Sequence[Tensor], dim: int = 0, fill: float = 0.0) -> Tensor:
    """One after the other; of maps with fewer known pixels the rest is filled."""
    most = max(one.shape[-1] for one in found)
    if all(one.ndim <= dim + 1 or one.shape[-1] == most for one in found):
        return torch.cat(list(found), dim)
    return torch.cat([pad(one, (0, most - one.shape[-1]), value=fill) for one in found], dim)


def answers(better: Enhanced, given: Sequence[Part], folder: Path, us: World, show: bool) -> tuple[Tensor, Tensor]:
    """Answers (N, E) and costs (N,) of a recipe as it runs, into files of `folder` as well."""
    learned = "" if better.attention is None else digest(dict(better.attention.state_dict()))
    name = hashlib.sha256(repr((fingerprint(better.model), better.signature, learned)).encode()).hexdigest()[:16]

    def ask(part: Part) -> dict[str, Tensor]:
        found, costs = better.looks(part.source)
        return {"logits": part.kept(found), "cost": torch.tensor(costs, dtype=torch.float64)}

    stored = _shards(ask, name, given, folder, us, "your recipe" if show else "")
    return _joined([s["logits"] for s in stored]), torch.cat([s["cost"] for s in stored])


def _shards(
    make: Callable[[Part], dict[str, Tensor]],
    name: str,
    given: Sequence[Part],
    folder: Path,
    us: World,
    label: str,
    told: Callable[[int], str] | None = None,
) -> list[dict[str, Tensor]]:
    """What is made of each part, each process its share; what is there already is not made again.

    `told` says before the start what so many images will take.
    """
    files = [folder / f"{name}-{part.key}.safetensors" for part in given]
    missing = [i for i in range(len(given)) if _stored(files[i]) is None]
    mine = [i for i in missing if i % us.size == us.rank]
    total = sum(len(given[i].source) for i in mine)
    if told is not None and label and us.leads and missing:
        print(told(sum(len(given[i].source) for i in missing)), file=sys.stderr, flush=True)
    with show_progress(label, total, bool(label) and us.leads and total > 0) as advance:
        for i in mine:
            write_artefact(files[i], make(given[i]), {"kind": KIND})
            advance(len(given[i].source), "")
    us.wait()
    stored = [found for found in map(_stored, files) if found is not None]
    if len(stored) < len(files):
        raise DataError(f"{folder}: not all shards can be read back; do all processes see the same folder?")
    return stored


@torch.no_grad()
def look_at(better: Enhanced, source: Source, looks: Sequence[Look]) -> Tensor:
    """Outputs (L, N, ...) of these looks, the plain one first, each view prepared once."""
    found: dict[Look, Tensor] = {}
    rows = list(range(len(source)))
    plain: Batch | None = None  # maps are laid over the plain view's
    for view in dict.fromkeys(look.view for look in looks):
        states = [look.state for look in looks if look.view == view]
        images, plan, crop = better.fitted(source.render(view))
        engine = plan.engine_for(states)
        together = plan.engine.images_at_once(range(1, plan.engine.depth + 1), len(states))
        parts: dict[Look, list[Tensor]] = {}
        for start in range(0, len(rows), together):
            part = rows[start : start + together]
            batch = Batch(plan, engine.start(images[start : start + together]), (view,), part, crop)
            plain = (plain or batch) if TASKS[better.task].maps else batch
            for of, (values, *_) in batch.look(view, states, part, plain):
                parts.setdefault(Look(view, of[0]), []).append(values.float().cpu())
        found |= {look: torch.cat(values) for look, values in parts.items()}
    return torch.stack([found[look] for look in looks])


def _paper(better: Enhanced, part: Part) -> dict[str, Tensor]:
    answers, costs = better.with_options(recipe="paper").costs(part.source.render(PLAIN), [PAPER])[PAPER]
    return {"paper": part.kept(answers), "cost": torch.tensor(costs, dtype=torch.float64)}


def _stored(file: Path) -> dict[str, Tensor] | None:
    try:
        return read_artefact(file, KIND)[0] if file.is_file() else None
    except ArtefactError:
        return None  # damaged: made again
