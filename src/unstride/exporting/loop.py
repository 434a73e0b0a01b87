"""One graph for a recipe: a loop over its passes, with every network, and its weights, once inside the loop's body.

for pass in passes:                      rows = all images
    outputs = network of the pass (view of the pass (images[rows]))
    total[rows] = total[rows] + weight * encode(outputs)
    rows = rows whose confidence is below the next gate;  stop if there are none
return decode(total / weight), confidence, pass_count, cost

Weights of the answer, passes and cost follow from the number of passes that an image took, so they are tables. Weights
lie inside the branch that uses them: runtimes do not fold or repack constants of an outer graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unstride.exporting.arithmetic import Arithmetic
from unstride.exporting.builder import IR, OPSET, Array, OnnxBuilder, extra, spliced, values_at
from unstride.exporting.passes import ExportPass, total_outputs, total_weights
from unstride.recipe.recipe import Recipe
from unstride.tasks.tasks import TASKS

RESERVED = ("confidence", "pass_count", "cost")
NEVER, ALWAYS = -1.0, 2.0  # thresholds that no image is below, and that all are below
THRESHOLDS = "gate_thresholds"  # the initializer that holds them
Step = Callable[[OnnxBuilder, str], str]  # of a value on a graph


@dataclass(frozen=True, eq=False)
class GraphPass:
    """A pass as the graph takes it.

    Attributes:
        unit: which of the networks.
        prepare: rows of the input -> what the network takes.
        back: of each output, how it is brought back over the base view.
        prepare_key, back_key: what tells different steps apart.
    """

    taken: ExportPass
    unit: int
    prepare: Step
    back: tuple[Step, ...]
    prepare_key: Any
    back_key: Any


@dataclass(frozen=True, eq=False)
class GraphPlan:
    """All that the graph is made of.

    Attributes:
        models: the networks as ONNX models.
        names, shapes: of the recipe's outputs, (B, ...) in the model's own shape.
        combined: of each output, its shape as it is combined, without the batch.
        image: (dtype, shape) of the input.
    """

    recipe: Recipe
    passes: Sequence[GraphPass]
    models: Sequence[Any]
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    combined: Sequence[tuple[int, ...]]
    image: tuple[str, list[int | str | None]]

    @property
    def exported(self) -> list[ExportPass]:
        return [p.taken for p in self.passes]

    @property
    def by_agreement(self) -> bool:
        return any(p.gate is not None and p.gate.by == "agreement" for p in self.exported)

    @property
    def measure(self) -> str | None:
        """What the output `confidence` is; None where the task has no such measure."""
        gates = TASKS[self.recipe.task].gates
        return "probability" if "probability" in gates else None

    def arithmetic(self, k: int) -> Arithmetic:
        shape = self.combined[k]
        return Arithmetic(TASKS[self.recipe.task], self.recipe.combine, shape[0] if shape else 1, len(shape) + 1)


def recipe_graph(plan: GraphPlan, metadata: Mapping[str, str]) -> Any:
    """The ONNX model."""
    onnx, b = extra("onnx"), OnnxBuilder()
    batch = b.op("Gather", b.op("Shape", "images"), b.constant(0), axis=0)
    state = _State.started(b, plan, batch)
    body = _Body(plan).graph(b.inner(), state)
    limit, begin = b.constant(len(plan.passes)), b.constant(True)
    after = b.ops("Loop", limit, begin, *state.values, count=len(state.values), body=body)
    outputs = _outputs(b, plan, state.with_values(after))
    dtype, shape = plan.image
    inputs = [b.info("images", dtype, shape)]
    graph = b.graph("recipe", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=_opsets(plan.models), ir_version=IR, producer_name="unstride")
    onnx.helper.set_model_props(model, dict(metadata))
    return model


def _opsets(models: Sequence[Any]) -> list[Any]:
    """Ours, and the domains of ops that networks bring."""
    found = {"": OPSET}
    for model in models:
        for entry in model.opset_import:
            found[entry.domain] = max(found.get(entry.domain, 0), entry.version)
    return [extra("onnx").helper.make_opsetid(domain, version) for domain, version in found.items()]


@dataclass(eq=False)
class _State:
    """What the loop carries: the rows that go on, how many passes each image took, a total for each output, votes."""

    plan: GraphPlan
    rows: str
    done: str
    totals: list[str]
    votes: str = ""

    @property
    def values(self) -> list[str]:
        return [self.rows, self.done, *self.totals, *([self.votes] if self.plan.by_agreement else [])]

    def with_values(self, values: Sequence[str]) -> _State:
        count = len(self.totals)
        votes = values[2 + count] if self.plan.by_agreement else ""
        return _State(self.plan, values[0], values[1], list(values[2 : 2 + count]), votes)

    def infos(self, b: OnnxBuilder, names: Sequence[str]) -> list[Any]:
        kinds = ["INT64", "INT64", *["FLOAT"] * (len(names) - 2)]
        return [b.info(name, kind, shape) for name, kind, shape in zip(names, kinds, self._shapes(), strict=True)]

    def _shapes(self) -> list[list[int | str | None]]:
        median = self.plan.recipe.combine == "median"
        totals: list[list[int | str | None]] = [
            ["batch", *([None] if median else []), *_encoded_shape(self.plan, k)] for k in range(len(self.totals))
        ]
        votes: list[list[int | str | None]] = [["batch", None]] if self.plan.by_agreement else []
        return [[None], ["batch"], *totals, *votes]

    @classmethod
    def started(cls, b: OnnxBuilder, plan: GraphPlan, batch: str) -> _State:
        rows = b.op("Range", b.constant(0), batch, b.constant(1))
        one = b.op("Unsqueeze", batch, b.constant([0]))

        def zeros(shape: Sequence[int]) -> str:
            dims = b.op("Concat", one, b.constant(np.array(shape, np.int64)), axis=0)
            return b.op("ConstantOfShape", dims, value=extra("onnx").helper.make_tensor("zero", 1, [1], [0.0]))

        median = [0] if plan.recipe.combine == "median" else []
        totals = [zeros([*median, *_encoded_shape(plan, k)]) for k in range(len(plan.names))]
        done = b.op("Mul", rows, b.constant(0))
        votes = zeros([_votes(plan)]) if plan.by_agreement else ""
        return cls(plan, rows, done, totals, votes)


def _encoded_shape(plan: GraphPlan, k: int) -> tuple[int, ...]:
    shape = plan.combined[k]
    return (int(np.prod(shape)) + 1,) if plan.recipe.combine == "directions" else tuple(shape)


def _votes(plan: GraphPlan) -> int:
    """Entries of the votes of an image."""
    shape, task = plan.combined[0], TASKS[plan.recipe.task]
    return int(np.prod(shape)) if not task.classes or not task.one_label else max(2, shape[0])


@dataclass(eq=False)
class _Body:
    plan: GraphPlan

    def graph(self, b: OnnxBuilder, outer: _State) -> Any:
        names = [b.name("carried") for _ in outer.values]
        state = outer.with_values(names)
        index = b.name("pass")
        outputs = self._network(b, index, b.op("Gather", "images", state.rows, axis=0))
        later = self._added(b, index, state, outputs)
        rows = self._gated(b, index, later)
        more = b.op("Greater", b.op("Size", rows), b.constant(0))
        results = [more, rows, *later.values[1:]]
        inputs = [b.info(index, "INT64", []), b.info(b.name("going"), "BOOL", []), *outer.infos(b, names)]
        outs = [b.info(more, "BOOL", []), *outer.infos(b, results[1:])]
        return b.graph("one_pass", inputs, outs)

    # -- one pass
    def _network(self, b: OnnxBuilder, index: str, rows: str) -> list[str]:
        """The outputs of the pass, brought back over the base view: of each (n, S, ...)."""
        plan = self.plan
        unit = values_at(b, np.array([p.unit for p in plan.passes]), index)
        return b.switch(unit, [self._unit(k, index, rows) for k in range(len(plan.models))])

    def _unit(self, k: int, index: str, rows: str) -> Callable[[OnnxBuilder], Sequence[str]]:
        own = [p if p.unit == k else None for p in self.plan.passes]

        def build(b: OnnxBuilder) -> Sequence[str]:
            (x,) = _chosen(b, index, own, lambda p: p.prepare_key, lambda p, inner: [p.prepare(inner, rows)])
            outputs = spliced(b, self.plan.models[k], [x])
            return _chosen(
                b,
                index,
                own,
                lambda p: p.back_key,
                lambda p, inner: [f(inner, o) for f, o in zip(p.back, outputs, strict=True)],
            )

        return build

    def _added(self, b: OnnxBuilder, index: str, state: _State, outputs: Sequence[str]) -> _State:
        """The totals with this pass in them."""
        plan = self.plan
        starts = values_at(b, np.array([p.starts for p in plan.exported]), index)
        temperatures = [p.stage.temperature(p.view) for p in plan.exported]
        temperature = None
        if any(t != 1 for t in temperatures):
            temperature = values_at(b, np.array(temperatures), index)
        totals = []
        for k, (total, output) in enumerate(zip(state.totals, outputs, strict=True)):
            scaled = output if temperature is None else b.op("Div", output, temperature)
            totals.append(self._total(b, k, index, state.rows, total, scaled, starts))
        votes = ""
        if plan.by_agreement:
            new = plan.arithmetic(0).votes(b, outputs[0])
            votes = _updated(b, state.votes, state.rows, starts, new, "Add")
        at = b.op("Unsqueeze", state.rows, b.constant([1]))
        count = b.op("Expand", b.op("Add", index, b.constant(1)), b.op("Shape", state.rows))
        done = b.op("ScatterND", state.done, at, count)
        return _State(plan, state.rows, done, totals, votes)

    def _total(self, b: OnnxBuilder, k: int, index: str, rows: str, total: str, output: str, starts: str) -> str:
        plan, combine = self.plan, self.plan.recipe.combine
        if combine == "median":
            return b.op("Concat", total, output, axis=1)
        encoded = plan.arithmetic(k).encode(b, output)
        reduce = "ReduceMax" if combine == "max" else "ReduceSum"
        if any(p.outputs > 1 for p in plan.exported):
            new = b.op(reduce, encoded, b.constant([1]), keepdims=0)
        else:
            new = b.op("Squeeze", encoded, b.constant([1]))
        if combine == "max":
            return _updated(b, total, rows, starts, new, "Max")
        weights = _padded([p.weight for p in plan.exported])
        if not (weights == 1).all():
            rank = len(_encoded_shape(plan, k))
            own = values_at(b, weights.reshape(*weights.shape, *[1] * (rank - 1)), index)
            new = b.op("Mul", new, own)
        return _updated(b, total, rows, starts, new, "Add")

    # -- the gate before the next pass
    def _gated(self, b: OnnxBuilder, index: str, state: _State) -> str:
        plan = self.plan
        gates = [*(p.gate for p in plan.exported[1:]), None]
        kinds = list(dict.fromkeys(gate.by for gate in gates if gate is not None))
        if not kinds:
            return b.op("Identity", state.rows)  # OpenVINO reads no loop that hands a value through
        below = [ALWAYS if gate is None or gate.below is None else gate.below for gate in gates]
        thresholds = b.name(THRESHOLDS)
        b.initializers.append(extra("onnx").numpy_helper.from_array(np.array(below, np.float32), thresholds))
        threshold = b.op("Gather", thresholds, index, axis=0)
        kind = values_at(b, np.array([0 if gate is None else 1 + kinds.index(gate.by) for gate in gates]), index)

        def going_on(by: str) -> Callable[[OnnxBuilder], Sequence[str]]:
            def build(inner: OnnxBuilder) -> Sequence[str]:
                confidence = _confidence(inner, plan, state, state.rows, by)
                low = inner.op("Not", inner.op("GreaterOrEqual", confidence, threshold))  # NaN is not confident
                return [inner.op("Compress", state.rows, low, axis=0)]

            return build

        return b.switch(kind, [lambda inner: [state.rows], *map(going_on, kinds)], "INT64")[0]


def _chosen(
    b: OnnxBuilder,
    index: str,
    own: Sequence[GraphPass | None],
    key: Callable[[GraphPass], Any],
    build: Callable[[GraphPass, OnnxBuilder], Sequence[str]],
) -> list[str]:
    """What a pass needs, of the different things that the passes of a unit need."""
    kinds: dict[Any, GraphPass] = {}
    for p in own:
        if p is not None:
            kinds.setdefault(key(p), p)
    if len(kinds) == 1:
        return list(build(next(iter(kinds.values())), b))
    places = list(kinds)
    which = values_at(b, np.array([0 if p is None else places.index(key(p)) for p in own]), index)

    def case(p: GraphPass) -> Callable[[OnnxBuilder], Sequence[str]]:
        return lambda inner: build(p, inner)

    return b.switch(which, [case(p) for p in kinds.values()])


def _updated(b: OnnxBuilder, total: str, rows: str, starts: str, new: str, op: str) -> str:
    """The total with these rows started anew, or with `new` joined to them."""
    joined = b.op(op, b.op("Gather", total, rows, axis=0), new)
    return b.op("ScatterND", total, b.op("Unsqueeze", rows, b.constant([1])), b.op("Where", starts, new, joined))


def _padded(weights: Sequence[Sequence[float]]) -> Array:
    """(P, 1 or K)."""
    most = max(map(len, weights))
    return np.array([list(w) * (most if len(w) == 1 else 1) for w in weights], np.float32)


# ------------------------------------------------------------------------------------------------------ results


def _value(b: OnnxBuilder, plan: GraphPlan, k: int, total: str, done: str) -> str:
    """The combined output of these images, after so many passes each."""
    combine = plan.recipe.combine
    if combine == "max":
        return total
    if combine == "median":
        return _median(b, total, sum(p.outputs for p in plan.exported))
    weights = total_weights(plan.exported).numpy()
    rank = len(_encoded_shape(plan, k))
    weight = values_at(b, weights.reshape(*weights.shape, *[1] * (rank - 1)), done)
    return plan.arithmetic(k).decode(b, b.op("Div", total, weight))


def _median(b: OnnxBuilder, outputs: str, count: int) -> str:
    """Of an even number of passes, the mean of the two in the middle."""
    ordered = b.ops("TopK", outputs, b.constant([count]), count=2, axis=1, largest=0)[0]
    low, high = (b.op("Gather", ordered, b.constant(k), axis=1) for k in ((count - 1) // 2, count // 2))
    return b.op("Div", b.op("Add", low, high), b.constant(2.0))


def _confidence(b: OnnxBuilder, plan: GraphPlan, state: _State, rows: str, by: str) -> str:
    """Of the answer so far of these rows."""
    done = b.op("Gather", state.done, rows, axis=0)
    value = _value(b, plan, 0, b.op("Gather", state.totals[0], rows, axis=0), done)
    votes, passes = "", ""
    if by == "agreement":
        votes = b.op("Gather", state.votes, rows, axis=0)
        passes = values_at(b, np.array(total_outputs(plan.exported)), done)
    return plan.arithmetic(0).confidence(b, value, by, votes, passes)


def _outputs(b: OnnxBuilder, plan: GraphPlan, state: _State) -> list[Any]:
    """The outputs of the model, confidence, pass_count and cost, with the infos that declare them."""
    infos = []
    temperature = plan.recipe.temperature
    for k, (name, shape) in enumerate(zip(plan.names, plan.shapes, strict=True)):
        value = _value(b, plan, k, state.totals[k], state.done)
        if k == 0:
            value = value if temperature == 1 else b.op("Div", value, b.constant(temperature))
            main = value
        if tuple(shape) != (plan.combined[k] if plan.recipe.combine != "directions" else _encoded_shape(plan, k)):
            value = b.op("Reshape", value, b.constant([0, *shape] if shape else [-1]))
        infos.append(_named(b, value, name, shape))
    if plan.measure is not None:
        infos.append(_named(b, plan.arithmetic(0).confidence(b, main, plan.measure), "confidence", ()))
    counts = np.cumsum([0, *(p.count for p in plan.exported)])
    costs = np.cumsum([0.0, *(p.cost for p in plan.exported)])
    infos.append(_named(b, values_at(b, counts, state.done), "pass_count", (), "INT64"))
    infos.append(_named(b, values_at(b, costs, state.done), "cost", ()))
    return infos


def _named(b: OnnxBuilder, value: str, name: str, shape: Sequence[int], dtype: str = "FLOAT") -> Any:
    b.nodes.append(extra("onnx").helper.make_node("Identity", [value], [name]))
    return b.info(name, dtype, ["batch", *shape])


def forced(model: Any, threshold: float) -> Any:
    """A copy of the model whose gates all have this threshold: NEVER or ALWAYS."""
    onnx = extra("onnx")
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for node in changed.graph.node:
        for attribute in node.attribute:
            for entry in attribute.g.initializer:
                if entry.name.startswith(THRESHOLDS):
                    values = np.full(tuple(entry.dims), threshold, np.float32)
                    entry.CopyFrom(onnx.numpy_helper.from_array(values, entry.name))
    return changed
