"""The images of a stage in one view, in parts that run together: whole images, or the windows around open tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from unstride.execution.captures import MULTIPLE, padded
from unstride.execution.executors import Executor, Passes
from unstride.execution.graph_executor import GraphPasses
from unstride.execution.tiles import Tiling, Window, spread
from unstride.recipe.stage import Gate, Stage
from unstride.recipe.view import PLAIN, View
from unstride.views.source import Source, back


@dataclass(frozen=True)
class Frame:
    """The base view that maps are brought back to: its size in pixels, and that of each output map."""

    size: tuple[int, ...]
    out_sizes: tuple[tuple[int, ...], ...]
    padded: bool = False

    @classmethod
    def of(cls, images: Tensor, outputs: Sequence[Tensor], padded: bool) -> Frame:
        axes = images.ndim - 2
        sizes = tuple(tuple(o.shape[-axes:]) for o in outputs)
        return cls(tuple(images.shape[2:]), sizes, padded)


@dataclass(frozen=True, eq=False)
class Part:
    """Some images in one view, or the windows of one image.

    Args:
        rows: which images of the batch.
        passes: begun by an earlier stage; None: to be started.
        windows: of one image, each a row of `images`.
        where: (1, 1, H, W), the share of each output pixel that these windows decide; None: everything.
    """

    rows: list[int]
    view: View
    images: Tensor
    passes: Passes | None = None
    tiling: Tiling | None = None
    windows: tuple[Window, ...] = ()
    where: Tensor | None = None

    def over_base(self, output: Tensor, frame: Frame | None, k: int = 0) -> Tensor:
        """An output of this view, brought back over the base view. Vectors are returned as they are."""
        if frame is None:
            return output
        axes = len(frame.size)
        if self.view == PLAIN and self.tiling is None and tuple(output.shape[-axes:]) == frame.out_sizes[k]:
            return output
        maps = output if output.ndim == 2 + axes else output.unsqueeze(1)
        if self.tiling is not None:
            maps = self.tiling.paste(maps, self.windows)
        maps = back(self.view, maps, frame.size, frame.out_sizes[k])
        return maps if output.ndim == maps.ndim else maps.squeeze(1)


def parts(
    source: Source,
    view: View,
    stage: Stage,
    executor: Executor,
    rows: Sequence[int],
    tiles: Mapping[int, Tensor] | None,
    gate: Gate | None,
    opened: Sequence[tuple[list[int], GraphPasses]] = (),
    frame: Frame | None = None,
    batch_size: int | None = None,
) -> Iterator[Part]:
    """All of `rows`, each once. An image that is mostly open tiles is taken whole.

    With a `batch_size`, so many images are rendered at a time, while those before them run.
    """
    whole = list(rows)
    if tiles is not None and gate is not None and frame is not None:
        tiling = tiling_for(view, gate, frame, executor.stride(source.rows(rows[:1]).render(PLAIN)))
        covers = {i: tiling.cover(where) for i, where in tiles.items()}
        whole = [i for i in rows if covers[i] is None]
        for i, windows in covers.items():
            if windows:
                yield _window_part(source, i, view, tiling, tuple(windows), tiles[i], frame)
    if opened:
        yield from _resumed(view, whole, opened)
    elif whole:
        start = 0
        for images in rendered(source, view, whole, batch_size or len(whole)):
            count = -(-len(images) // executor.rows_at_once(stage, images))
            for chunk in images.tensor_split(count):
                yield Part(whole[start : start + len(chunk)], view, chunk)
                start += len(chunk)


def rendered(source: Source, view: View, rows: Sequence[int], batch_size: int) -> Iterator[Tensor]:
    """These images in one view, so many at a time; the next ones are rendered by a thread while the caller works."""

    def render(chosen: Sequence[int]) -> Tensor:
        return (source if len(chosen) == len(source) else source.rows(chosen)).render(view)

    groups = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    if len(groups) == 1:
        yield render(rows)
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(render, groups[0])
        for following in [*groups[1:], None]:
            images = ahead.result()
            if following is not None:
                ahead = pool.submit(render, following)
            yield images


def _resumed(view: View, rows: Sequence[int], opened: Sequence[tuple[list[int], GraphPasses]]) -> Iterator[Part]:
    """The passes that an earlier stage began, with the images that are still of interest."""
    wanted = set(rows)
    for own, passes in opened:
        places = [k for k, row in enumerate(own) if row in wanted]
        if places:
            some = passes.subset(places)
            yield Part([own[k] for k in places], view, some.images, some)


def tiling_for(view: View, gate: Gate, frame: Frame, stride: Sequence[int] | None) -> Tiling:
    """How a view is cut into windows. A model that is called directly is taken to repeat itself every 32 pixels."""
    return Tiling.of(view, gate, frame.size, stride or (MULTIPLE,) * len(frame.size), MULTIPLE if frame.padded else 1)


def _window_part(
    source: Source, row: int, view: View, tiling: Tiling, windows: tuple[Window, ...], open_tiles: Tensor, frame: Frame
) -> Part:
    images = source.rows([row]).render(view)
    cut = tiling.cut(padded(images)[0] if frame.padded else images, windows)
    where = spread(open_tiles, tiling.size, frame.out_sizes[0], tiling.tile)[None, None].float()
    return Part([row], view, cut, None, tiling, windows, where.to(images.device))
