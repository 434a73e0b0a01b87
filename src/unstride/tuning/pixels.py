"""What a network says at some labelled pixels of every image, in every look: segmentation recipes are simulated here.

A map of each look of each image would fill a disk, and neighbouring pixels say much the same: of each image a fixed
sample of labelled pixels is kept, as half-precision logits in the plain image's coordinates, a file for each image.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from unstride.data import Dataset
from unstride.data.batches import unpacked
from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, DataError
from unstride.evaluation.metrics import IGNORE, check_mask
from unstride.tasks.confidence import two_class
from unstride.procedure.batch import Batch
from unstride.procedure.gates import Gate, sureness
from unstride.procedure.looks import Look, total_stride
from unstride.procedure.plans import MULTIPLE
from unstride.procedure.tiles import Tiling, tile_means, tile_of
from unstride.procedure.windows import starts
from unstride.recipe.view import PLAIN, View
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.distributed import World
from unstride.storage.fingerprint import digest, fingerprint
from unstride.storage.progress import progress as show_progress
from unstride.tuning.candidates import Unit
from unstride.tuning.parts import check_finite, drawn, prepared, read
from unstride.tuning.pool import Work
from unstride.views.source import Canvas, PILImages, Source

KIND = "pixels, edges held"
SKEWED = 0.05  # a mask may have another size than its image, but not another shape


@dataclass(frozen=True, eq=False)
class Scene:
    """One labelled image, and what identifies it. `mask` (H, W): classes, 255 where there is none."""

    key: str
    source: Source
    mask: Tensor
    name: str = ""

    def check(self, better: Enhanced) -> None:
        """Its mask against the model's classes."""
        check_mask(self.mask, better.plan.classes, name=f"{self.name}: its mask")


def scenes(data: Dataset | Iterable[Any], like: Tensor, window: int | None = None) -> Iterator[Scene]:
    """A data set, or batches of (images, masks), image by image; with `window`, larger ones in such squares."""
    for scene in _images(data, like):
        if window is None or max(scene.source.size) <= window:
            yield scene
            continue
        x = scene.source.render(PLAIN)
        if tuple(x.shape[2:]) != tuple(scene.mask.shape):
            raise DataError("windows need images as large as their masks: a preprocessing that does not resize")
        h, w = (min(n, window) for n in x.shape[2:])
        for top in starts(x.shape[2], h, 0.0):
            for left in starts(x.shape[3], w, 0.0):
                cut = x[:, :, top : top + h, left : left + w]
                key = hashlib.sha256(f"{scene.key} {window} {top} {left}".encode()).hexdigest()[:24]
                yield Scene(key, Canvas(cut), scene.mask[top : top + h, left : left + w], scene.name)


def _images(data: Dataset | Iterable[Any], like: Tensor) -> Iterator[Scene]:
    if isinstance(data, Dataset):
        whole = prepared(data)
        for name, image, mask in read(data, range(len(data))):
            key = hashlib.sha256(repr((whole, name)).encode()).hexdigest()[:24]
            yield Scene(key, PILImages([image], data.preprocess, like), torch.as_tensor(mask), name)
        return
    seen = 0
    for batch in data:
        images, known = unpacked(batch, "data")
        if known.ndim != 3:
            raise DataError(f"masks: got {known.dtype} {tuple(known.shape)}, wanted classes (B, H, W), 255 for none")
        tall, wide = (a / b for a, b in zip(known.shape[1:], images.shape[2:], strict=True))
        if abs(tall / wide - 1) > SKEWED:
            raise DataError(f"masks of {tuple(known.shape[1:])} are no maps of images of {tuple(images.shape[2:])}")
        for own, mask in zip(images.to(like), known, strict=True):
            yield Scene(digest({"x": own[None], "y": mask})[:24], Canvas(own[None]), mask, f"image {seen}")
            seen += 1


@dataclass(frozen=True, eq=False)
class Said:
    """Of one image: logits (1 + U, P, K) of the plain look and each unit at P pixels, their classes, what each costs.

    `at` (P,): which tile a pixel is in; `sure` (rows, columns): the plain margin of each tile; `stands`: how many
    labelled pixels of the image one of these stands for.
    """

    logits: Tensor
    labels: Tensor
    at: Tensor
    sure: Tensor
    costs: Tensor  # (U,) of the whole image, in plain forwards
    size: tuple[int, int]
    stands: float
    pixels: Tensor  # (P,) where they lie, row by row
    filled: int  # what images are filled up to a multiple of
    stride: tuple[int, ...]
    shares: dict[tuple[View, float], float] = field(default_factory=dict)

    def share(self, view: View, gate: Gate, below: float) -> float:
        """Of a view's area that is computed for the tiles that are less sure; 1: the image is looked at whole."""
        if (view, below) not in self.shares:
            tiling = Tiling.of(view, gate, self.size, self.stride, self.filled)
            self.shares[view, below] = tiling.share(~(self.sure >= below))
        return self.shares[view, below]


@dataclass(frozen=True, eq=False)
class Pixels:
    """All images together: probabilities (1 + U, M, K) at M pixels, and which image each is of."""

    units: tuple[Unit, ...]
    gate: Gate  # tile and context
    p: Tensor
    labels: Tensor
    image: Tensor
    at: Tensor
    said: tuple[Said, ...]

    @classmethod
    def of(cls, units: Sequence[Unit], gate: Gate, said: Sequence[Said]) -> Pixels:
        p = torch.cat([two_class(s.logits.float(), 2).softmax(2) for s in said], 1)
        count = [len(s.labels) for s in said]
        image = torch.arange(len(said)).repeat_interleave(torch.tensor(count))
        labels, at = (torch.cat([getattr(s, name) for s in said]) for name in ("labels", "at"))
        return cls(tuple(units), gate, p, labels, image, at, tuple(said))

    def __len__(self) -> int:
        return len(self.said)

    def rows(self, chosen: Sequence[int]) -> Pixels:
        """The same for some of the images."""
        number = torch.full((len(self),), -1)
        number[list(chosen)] = torch.arange(len(chosen))
        kept = (number[self.image] >= 0).nonzero()[:, 0]
        order = kept[number[self.image[kept]].argsort(stable=True)]
        said = tuple(self.said[i] for i in chosen)
        values = {n: getattr(self, n)[order] for n in ("labels", "at")}
        return replace(self, p=self.p[:, order], image=number[self.image[order]], said=said, **values)

    def count(self, unit: int) -> int:
        """Looks of a unit beside the plain one."""
        own = self.units[unit]
        return own.count - (1 if own.view == PLAIN else 0)

    def opened(self, below: float) -> Tensor:
        """(M,): which pixels are in a tile that looks again."""
        return torch.cat([(~(s.sure.flatten() >= below))[s.at] for s in self.said])

    def cost(self, unit: int, below: float | None) -> Tensor:
        """(N,): what a unit costs beside the plain look, where its tiles are less sure than that."""
        whole = torch.stack([s.costs[unit] for s in self.said])
        if below is None:
            return whole
        shares = torch.tensor(self.shares(unit, below), dtype=whole.dtype)
        again = self.units[unit].view == PLAIN  # a window begins with the plain state, which the whole has already
        return shares * (whole + (shares < 1) * again)

    def shares(self, unit: int, below: float) -> list[float]:
        """Of each image's area that a unit computes."""
        return [s.share(self.units[unit].view, self.gate, below) for s in self.said]


def looks_of(unit: Unit, work: Work) -> list[Look]:
    """A unit's looks beside the plain one."""
    plain = Look(PLAIN, work.near[0])
    return [look for s in work.near[: unit.count] if (look := Look(unit.view, s)) != plain]


@torch.no_grad()
def listen(better: Enhanced, scene: Scene, units: Sequence[Unit], gate: Gate, pixels: int | None) -> Said:
    """Every unit of looks at one image."""
    images, plan, crop = better.fitted(scene.source.render(PLAIN))
    moved = [s for unit in units for s in Work.of(plan, unit.count).near[: unit.count]]
    first = Batch(plan, plan.engine_for(moved).start(images), (PLAIN,), [0], crop)
    zero = plan.found.space.zero
    _, (plain,) = next(first.look(PLAIN, [zero], [0], first))
    check_finite(plain, [scene.name])
    chosen = sampled(scene, pixels)
    size = (int(scene.source.size[0]), int(scene.source.size[1]))
    assert gate.tile is not None
    maps, costs = [_at(plain, scene.mask, chosen)], []
    for unit in units:
        images, own, crop = better.fitted(scene.source.render(unit.view))
        work = Work.of(own, unit.count)
        states = [look.state for look in looks_of(unit, work)]
        batch = (
            first if unit.view == PLAIN else Batch(own, own.engine_for(states).start(images), (unit.view,), [0], crop)
        )
        _, (logits,) = next(batch.look(unit.view, states, [0], first))
        maps.append(_at(logits, scene.mask, chosen))
        seen = states if zero in states else [zero, *states]
        beside = work.macs(seen) - (work.macs([zero]) if unit.view == PLAIN else 0)
        costs.append(beside / plan.plain_macs)
    means = tile_means(sureness(plain, "margin"), size, gate.tile)[0].float().cpu()
    y, x = (tile_of(size[a], scene.mask.shape[a], gate.tile) for a in (0, 1))
    width = scene.mask.shape[1]
    at = y[chosen // width] * means.shape[1] + x[chosen % width]
    labels = scene.mask.flatten()[chosen].long()
    stands = float((scene.mask != IGNORE).sum()) / max(1, len(chosen))
    return Said(
        torch.stack(maps), labels, at, means, torch.tensor(costs, dtype=torch.float64), size, stands, chosen,
        1 if first.crop is None else MULTIPLE, total_stride(plan),
    )  # fmt: skip


def sampled(scene: Scene, pixels: int | None) -> Tensor:
    """Places of labelled pixels: all of them, or so many, the same every time."""
    return drawn(scene.mask.flatten() != IGNORE, scene.key, pixels)


def _at(logits: Tensor, mask: Tensor, chosen: Tensor) -> Tensor:
    """(P, K) of a map (1, K, h, w), laid over the mask."""
    if tuple(logits.shape[2:]) != tuple(mask.shape):
        logits = interpolate(logits.float(), mask.shape, mode="bilinear", align_corners=False)
    return logits[0].flatten(1)[:, chosen.to(logits.device)].T.half().cpu()


def gather_pixels(
    better: Enhanced, given: Sequence[Scene], units: Sequence[Unit], gate: Gate, pixels: int | None, folder: Path,
    us: World, show: bool, told: Callable[[int], str] | None = None,
) -> Pixels:  # fmt: skip
    """Everything once, into a file for each image; what is there already is not computed again.

    `told` says before the start what so many images will take.
    """
    asked = (fingerprint(better.model), [(str(u.view), u.states) for u in units], gate.tile, pixels)
    name = hashlib.sha256(repr(asked).encode()).hexdigest()[:16]
    files = [folder / f"{name}-{scene.key}.safetensors" for scene in given]
    missing = [i for i in range(len(given)) if _stored(files[i]) is None]
    mine = [i for i in missing if i % us.size == us.rank]
    if told is not None and show and us.leads and missing:
        print(told(len(missing)), file=sys.stderr, flush=True)
    with show_progress("looking", len(mine), show and us.leads and bool(mine)) as advance:
        for i in mine:
            _store(files[i], listen(better, given[i], units, gate, pixels))
            advance(1, "")
    us.wait()
    found = [_stored(file) for file in files]
    if any(f is None for f in found):
        raise DataError(f"{folder}: not all images can be read back; do all processes see the same folder?")
    return Pixels.of(units, gate, [f for f in found if f is not None])


def answer_pixels(
    better: Enhanced, given: Sequence[Scene], pixels: int | None, folder: Path, us: World, label: str
) -> tuple[Tensor, Tensor]:
    """Probabilities (M, K) and costs (N,) of a recipe as it runs, into files of `folder` as well."""
    name = hashlib.sha256(repr((fingerprint(better.model), better.signature, pixels)).encode()).hexdigest()[:16]
    files = [folder / f"{name}-{scene.key}.safetensors" for scene in given]
    mine = [i for i in range(len(given)) if i % us.size == us.rank and _read(files[i]) is None]
    with show_progress(label, len(mine), bool(label) and us.leads and bool(mine)) as advance:
        for scene, file in ((given[i], files[i]) for i in mine):
            logits, costs = better.looks(scene.source)
            said = _at(logits, scene.mask, sampled(scene, pixels))
            write_artefact(file, {"logits": said, "cost": torch.tensor(costs, dtype=torch.float64)}, {"kind": KIND})
            advance(1, "")
    us.wait()
    found = [tensors for tensors in map(_read, files) if tensors is not None]
    if len(found) < len(files):
        raise DataError(f"{folder}: not all images can be read back; do all processes see the same folder?")
    p = torch.cat([two_class(f["logits"].float(), 1).softmax(1) for f in found])
    return p, torch.cat([f["cost"] for f in found])


def _store(file: Path, said: Said) -> None:
    tensors = {name: getattr(said, name) for name in ("logits", "labels", "at", "sure", "costs", "pixels")}
    tensors["numbers"] = torch.tensor([*said.size, said.stands, said.filled, *said.stride], dtype=torch.float64)
    write_artefact(file, tensors, {"kind": KIND})


def _read(file: Path) -> dict[str, Tensor] | None:
    try:
        return read_artefact(file, KIND)[0] if file.is_file() else None
    except ArtefactError:
        return None  # damaged: made again


def _stored(file: Path) -> Said | None:
    tensors = _read(file)
    if tensors is None:
        return None
    h, w, stands, filled, *stride = tensors.pop("numbers").tolist()
    t: dict[str, Any] = dict(tensors)
    return Said(**t, size=(int(h), int(w)), stands=stands, filled=int(filled), stride=tuple(map(int, stride)))


@dataclass(frozen=True, eq=False)
class Seen:
    """A recipe on the pixels: merged probabilities (M, K), and what each image costs (N,)."""

    p: Tensor
    costs: Tensor


def simulate_pixels(pool: Pixels, units: Sequence[int], below: float | None = None) -> Seen:
    """The mean of the plain look and these units, where tiles are less sure than `below` (everywhere: None).

    An image whose windows would be as much work as the whole is looked at whole, as when it is run.
    """
    total, weight = pool.p[0].clone(), torch.ones(len(pool.labels), 1)
    costs = torch.ones(len(pool), dtype=torch.float64)
    opened = torch.ones(len(pool.labels), dtype=torch.bool) if below is None else pool.opened(below)
    for u in units:
        count = pool.count(u)
        where = opened
        if below is not None:
            whole = torch.tensor([share >= 1 for share in pool.shares(u, below)])
            where = opened | whole[pool.image]
        total[where] += count * pool.p[1 + u][where]
        weight[where] += count
        costs += pool.cost(u, below)
    return Seen(total / weight, costs)
