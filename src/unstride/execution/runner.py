"""The loop that runs every recipe: stages, views, states.

A flip, a cascade of networks, tiles of a map and the paper's search inside each view all pass through `run`. The images
of a stage come in parts that run together: whole images in one view, or the windows around open tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstride.execution.aggregation import AggregatedOutputs, StateOutputs, outputs_for
from unstride.execution.executors import Executor, ModelExecutor, Network, Part, Passes
from unstride.execution.graph_executor import GraphExecutor, GraphPasses
from unstride.execution.padding import MULTIPLE, padded, sized
from unstride.execution.prediction import Prediction
from unstride.execution.record import Frame, ModelOutput, Outputs, Record
from unstride.execution.tiles import Tiling, Window, spread
from unstride.geometry.states import State, StateSpace
from unstride.method.attention import Attention
from unstride.method.search import Searches, Selector, StateList, searched_layers
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Search, Stage
from unstride.recipe.view import PLAIN, View
from unstride.tasks.tasks import TASKS
from unstride.views.source import Source, back, for_network


@dataclass(frozen=True, eq=False)
class StageResult:
    """What became of a batch: the combined outputs, and the record of how they were made."""

    recipe: Recipe
    combined: Outputs
    record: Record

    @property
    def output(self) -> Tensor:
        """The main output of all images, divided by the recipe's temperature."""
        value = self.combined.value()
        return value if self.recipe.temperature == 1 else value / self.recipe.temperature

    @property
    def costs(self) -> list[float]:
        """Of each image, in `cost_unit`."""
        return [work / max(1, self.record.base_work) for work in self.record.work]

    @property
    def cost_unit(self) -> str:
        """What a cost of 1.0 is."""
        return self.record.cost_unit

    def returned(self) -> Any:
        """What the model returns, with the combined values in it."""
        base = ModelOutput.joined(self.record.structure)
        also = {index: torch.cat(values) for index, values in self.record.also.items()}
        return base.replaced([self.output, *(part.value() for part in self.combined.parts[1:])], also)

    def predictions(self, assumed: str = "") -> list[Prediction]:
        return self.record.predictions(self.output, assumed)

    def at_budgets(self) -> dict[int, tuple[Tensor, list[float]]]:
        """The outputs and costs at each of the record's budgets."""
        record, base = self.record, max(1, self.record.base_work)
        return {
            b: (outputs.value() / self.recipe.temperature, [m / base for m in record.macs_at_budget[b]])
            for b, outputs in record.at_budget.items()
        }


def run(
    recipe: Recipe,
    networks: Mapping[str, Network],
    source: Source,
    record: Record,
    attention: Attention | None = None,
    view_weights: Tensor | None = None,
) -> StageResult:
    """Every pass of a recipe, for a batch of images.

    Args:
        view_weights: (V, K), a weight for each view and class of a recipe of one stage, instead of the stage's own.
    """
    task, executors = TASKS[recipe.task], executors_for(recipe, networks)
    total = Outputs(recipe.combine, task, len(source))
    rows, tiles, gate = list(range(len(source))), None, None
    if record.costs:
        count_base(record, networks["base"], executors, source)
    for index, (stage, executor) in enumerate(zip(recipe.stages, executors, strict=True)):
        if stage.gate is not None:
            gate = stage.gate
            rows, tiles = record.gate(gate, total, rows, tiles)
        if not rows:
            break
        result, network = total, executor.network
        if stage.join == "replace":
            result, record.taken = Outputs(recipe.combine, task, len(source)), {}
            record.forget_answers(rows)
        prepared = for_network(source, network.preprocess)
        for view in stage.views:
            taken = record.taken.setdefault((stage.network, view), set())
            visited = set()
            for part in parts(prepared, view, stage, executor, rows, tiles, gate, record):
                space = executor.space(part.images)
                selector = selector_for(stage, space, task.maps, len(part.images), taken)
                requests = selector.propose({})
                if not requests:
                    continue
                passes = part.passes or executor.start(part.images)
                passes.keep_for(None if keep(record, index, executor, part, passes) else selector.levels)
                states = outputs_for(stage, passes, task, attention, record.details, frozenset(record.budgets))
                while requests:
                    states.add(requests, passes.run(requests))
                    selector.observe(requests)
                    visited |= {state for _, state in requests}
                    for image, reason in states.stopped():
                        selector.stop(image, reason)
                    requests = selector.propose(states.criterion)
                weight = stage.weight(view) if view_weights is None else view_weights[stage.views.index(view)][None]
                combine(index, stage, network, part, passes, states, result, record, weight)
                work = work_per_mac(executor, part.images) if record.timed else 1.0
                record.finished(index, stage, part, passes, states, selector, work)
            if not isinstance(stage.states, Search):
                taken |= visited
        if stage.join == "replace":
            total.replace(rows, result)
    return StageResult(recipe, total, record)


def combine(
    index: int,
    stage: Stage,
    network: Network,
    part: Part,
    passes: Passes,
    states: StateOutputs,
    result: Outputs,
    record: Record,
    view_weight: float | Tensor,
) -> None:
    """The outputs of one view's states into the result, brought back over the base view."""
    view, temperature = part.view, stage.temperature(part.view)
    first = index == 0 and view == stage.views[0]
    for k, (outputs, weight) in enumerate(states.outputs()):
        if first and not k:
            begin(record, part, passes, outputs)
        outputs = [over_base(part, o, record.frame, target) for target, o in enumerate(outputs)]
        outputs = outputs if not network.classes else [network.base_classes(o) for o in outputs]
        record.check_shape(network.name, view, outputs[0])
        calibrated = outputs if temperature == 1 else [o / temperature for o in outputs]
        result.add(part.rows, calibrated, weight * view_weight, part.where)
        record.answered(part.rows, outputs[0])
        if record.details:
            states.describe(k, outputs[0], result.value(part.rows), lambda o: over_base(part, o, record.frame))
    if isinstance(states, AggregatedOutputs):
        _aggregated(stage, part, states, record, view_weight)


def begin(record: Record, part: Part, passes: Passes, outputs: Sequence[Tensor]) -> None:
    """The first view of the first stage, to which all others are brought back."""
    record.structure.append(passes.result())
    if record.task.maps:
        axes = part.images.ndim - 2
        sizes = tuple(tuple(o.shape[-axes:]) for o in outputs)
        record.frame = Frame(tuple(part.images.shape[2:]), sizes, passes.padded)


def keep(record: Record, index: int, executor: Executor, part: Part, passes: Passes) -> bool:
    """Keep passes that a later stage continues; their prefixes are shared."""
    stage, *later = record.recipe.stages[index:]
    going_on = any(s.network == stage.network and s.states is not None and part.view in s.views for s in later)
    wanted = going_on and not part.windows
    if wanted and part.passes is None:
        assert isinstance(passes, GraphPasses)  # as of every network that has states
        record.opened.setdefault((id(executor), part.view), []).append((part.rows, passes))
    return wanted


def _aggregated(
    stage: Stage, part: Part, states: AggregatedOutputs, record: Record, view_weight: float | Tensor
) -> None:
    """What only an aggregate has: outputs that follow from its map, and its value at smaller budgets."""
    alone = len(record.recipe.stages) == 1 and stage.views == (PLAIN,)
    if alone:
        for leaf, value in states.also().items():
            record.also.setdefault(leaf, []).append(value)
    if not record.budgets:
        return
    final = next(states.outputs())[0][0]
    for budget, outputs in record.at_budget.items():
        value = over_base(part, states.output_at(budget, final), record.frame) / stage.temperature(part.view)
        outputs.add(part.rows, [value], view_weight)
        for k, row in enumerate(part.rows):
            visited = [r.state for r in states.records[k]][:budget]
            record.macs_at_budget[budget][row] += sum(states.passes.state_macs(visited))


def count_base(record: Record, base: Network, executors: list[Executor], source: Source) -> None:
    """What cost 1.0 is: the MACs of one forward pass of the base model, or its time where MACs cannot be counted."""
    images = for_network(source.rows([0]), base.preprocess).render(PLAIN)
    executor = next((e for e in executors if e.network is base), None) or ModelExecutor(base, record.task)
    macs = executor.forward_macs(images)
    record.timed = macs == 1 or not all(e.network.counts_macs for e in executors)  # a graph without MACs costs 0
    record.base_work = macs * work_per_mac(executor, images) if record.timed else macs


def work_per_mac(executor: Executor, images: Tensor) -> float:
    """Measured nanoseconds for each MAC of a forward pass of one image of this size."""
    network = executor.network
    seconds = sized(network.model, images, executor.task.pads, network.forward_seconds)[0]
    return 1e9 * seconds / executor.forward_macs(images)


def executors_for(recipe: Recipe, networks: Mapping[str, Network]) -> list[Executor]:
    """How each stage runs: through its network's graph if a stage of that network has states, else the model itself.

    Dense features need the graph, which knows how tokens lie on the image.
    """
    task = TASKS[recipe.task]
    made: dict[tuple[Any, ...], Executor] = {}
    chosen = []
    for stage in recipe.stages:
        alike = [s for s in (stage, *recipe.stages) if s.network == stage.network and s.states is not None]
        like = alike[0] if alike else None
        key: tuple[Any, ...] = (stage.network,)
        if like is not None:
            key = (stage.network, like.state_space, like.pinned)
        elif task.name == "features":
            key = (stage.network, "", False)
        if key not in made:
            network = networks[stage.network]
            if len(key) > 1:
                network.captures.check()  # once for each batch
            direct = len(key) == 1
            made[key] = ModelExecutor(network, task) if direct else GraphExecutor(network, task, *key[1:])
        chosen.append(made[key])
    return chosen


def selector_for(stage: Stage, space: StateSpace, maps: bool, images: int, taken: Iterable[State] = ()) -> Selector:
    """`taken`: states of this view that an earlier stage has evaluated; a list does not evaluate them again."""
    if isinstance(stage.states, Search):
        search = stage.states
        layers = searched_layers(search.layers, space, maps)
        return Searches(space, layers, search.budget, search.stop, images)
    done = set(taken)
    return StateList([s for s in stage.listed(space) if s not in done], images)


def over_base(part: Part, output: Tensor, frame: Frame | None, k: int = 0) -> Tensor:
    """An output of this view, brought back over the base view. Vectors are returned as they are."""
    if frame is None:
        return output
    axes = len(frame.size)
    if part.view == PLAIN and part.tiling is None and tuple(output.shape[-axes:]) == frame.out_sizes[k]:
        return output
    maps = output if output.ndim == 2 + axes else output.unsqueeze(1)
    if part.tiling is not None:
        maps = part.tiling.paste(maps, part.windows)
    maps = back(part.view, maps, frame.size, frame.out_sizes[k])
    return maps if output.ndim == maps.ndim else maps.squeeze(1)


def parts(
    source: Source,
    view: View,
    stage: Stage,
    executor: Executor,
    rows: Sequence[int],
    tiles: Mapping[int, Tensor] | None,
    gate: Gate | None,
    record: Record,
) -> Iterator[Part]:
    """All of `rows`, each once. An image that is mostly open tiles is taken whole.

    With a batch size, so many images are rendered at a time, while those before them run.
    """
    whole, frame = list(rows), record.frame
    opened = record.opened.get((id(executor), view), [])
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
        for images in rendered(source, view, whole, record.batch_size or len(whole)):
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
