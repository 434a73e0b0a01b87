"""ONNX graphs, written op by op. Values are names; names are unique in the whole file, subgraphs included."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unstride.errors import OptionError

OPSET, IR = 18, 9  # what torch, onnxruntime from 1.14 on, OpenVINO and onnxruntime-web read
Array = np.ndarray[Any, Any]


def extra(module: str) -> Any:
    """A module of the extra `onnx`, or an OptionError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(f"export: {module} is not installed. Run: pip install 'unstride[onnx]'") from error


@dataclass(eq=False)
class OnnxBuilder:
    """A graph under construction.

    Example: `y = b.op("Add", x, b.constant(1.0))`.
    """

    numbers: Iterable[int] = field(default_factory=itertools.count)
    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    _constants: dict[Any, str] = field(default_factory=dict)

    def inner(self) -> OnnxBuilder:
        """For a subgraph: it may read all values of this one."""
        return OnnxBuilder(self.numbers)

    def name(self, hint: str = "v") -> str:
        return f"{hint}_{next(iter(self.numbers))}"

    def ops(self, kind: str, *inputs: str, count: int = 1, **attributes: Any) -> list[str]:
        """An op with several results."""
        outputs = [self.name(kind) for _ in range(count)]
        self.nodes.append(extra("onnx").helper.make_node(kind, list(inputs), outputs, **attributes))
        return outputs

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, *inputs, **attributes)[0]

    def constant(self, value: Any, dtype: Any = None) -> str:
        """A number or an array; floats are float32, whole numbers int64. Equal ones are stored once."""
        array = np.asarray(value, dtype)
        if dtype is None:
            array = array.astype({"f": np.float32, "i": np.int64, "b": np.bool_}[array.dtype.kind])
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = name = self.name("constant")
            self.initializers.append(extra("onnx").numpy_helper.from_array(np.ascontiguousarray(array), name))
            if not array.ndim:  # ascontiguousarray makes a vector of a number
                del self.initializers[-1].dims[:]
        return self._constants[key]

    def graph(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        return extra("onnx").helper.make_graph(self.nodes, name, inputs, outputs, self.initializers)

    def info(self, name: str, dtype: str = "FLOAT", shape: Sequence[int | str | None] | None = None) -> Any:
        onnx = extra("onnx")
        return onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, dtype), shape)

    def reversed(self, x: str, axis: int) -> str:
        """`x` backwards along an axis."""
        return self.op("Slice", x, *(self.constant([v]) for v in (-1, -(2**62), axis, -1)))

    # -- control flow
    def condition(
        self,
        test: str,
        yes: Callable[[OnnxBuilder], Sequence[str]],
        no: Callable[[OnnxBuilder], Sequence[str]],
        dtype: str,
    ) -> list[str]:
        """The results of one of two branches; each branch holds its own constants."""
        made = []
        for build in (yes, no):
            inner = self.inner()
            results = [inner.op("Identity", value) for value in build(inner)]  # a branch gives values of its own
            made.append(inner.graph(self.name("branch"), [], [self.info(value, dtype) for value in results]))
        return self.ops("If", test, count=len(made[0].output), then_branch=made[0], else_branch=made[1])

    def switch(
        self, index: str, cases: Sequence[Callable[[OnnxBuilder], Sequence[str]]], dtype: str = "FLOAT"
    ) -> list[str]:
        """The results of the case with this number."""

        def build(inner: OnnxBuilder, first: int) -> Sequence[str]:
            if first == len(cases) - 1:
                return cases[first](inner)
            test = inner.op("Equal", index, inner.constant(first))
            return inner.condition(test, cases[first], lambda b: build(b, first + 1), dtype)

        return list(build(self, 0))


def values_at(b: OnnxBuilder, values: Array, index: str) -> str:
    """The entry of a list that is known when the file is written."""
    return b.op("Gather", b.constant(values), index, axis=0)


def spliced(b: OnnxBuilder, model: Any, inputs: Sequence[str]) -> list[str]:
    """Another model's graph inside this one, its weights as initializers of this graph; the names of its outputs."""
    onnx = extra("onnx")
    prefix = b.name("net") + "/"
    own = onnx.compose.add_prefix(model, prefix, rename_functions=False).graph
    for given, read in zip(inputs, own.input, strict=True):
        b.nodes.append(onnx.helper.make_node("Identity", [given], [read.name]))
    b.nodes.extend(own.node)
    b.initializers.extend(own.initializer)
    return [value.name for value in own.output]
