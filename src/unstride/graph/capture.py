"""model + example -> Graph: batch-dynamic, functional, and the user's model untouched."""

import contextlib
import functools
import os
import re
import traceback
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.utils import _pytree as pytree

from unstride.errors import CaptureError, InputError, ModelRaised, is_out_of_memory
from unstride.graph.evaluation import copied, own_module
from unstride.graph.freshness import Freshness
from unstride.graph.functional import functional
from unstride.graph.guards import Answers, constant_answers
from unstride.graph.ops import ancestors
from unstride.graph.tracing import tracing
from unstride.graph.verify import verify, verify_alone


@dataclass(frozen=True, eq=False)
class Graph:
    """What the model computes, one functional op after another, for any batch size.

    `nodes` are in topological order. `constants` holds parameters, buffers and other tensors by placeholder name: the
    user's own objects, so the graph computes with the numbers that are in them now, unless `is_live` is False.
    """

    fx: FxGraph
    image: Node
    constants: dict[str, Tensor]
    leaves: tuple[Any, ...]  # output leaves: nodes, or plain Python values
    out_spec: pytree.TreeSpec
    size: tuple[int, ...]  # (H, W) of images, (D, H, W) of volumes and clips, (L,) of signals
    channels: int
    dtype: torch.dtype
    device: torch.device
    self_modified: frozenset[str] = frozenset()  # names of what the model itself changes when it runs: caches, counters
    decided: tuple[Tensor, ...] = ()  # constants whose numbers the capture itself depends on
    is_live: bool = True  # False: `constants` are copies, see `graph.rewrite`

    @property
    def nodes(self) -> list[Node]:
        return [n for n in self.fx.nodes if n.op == "call_function"]

    @functools.cached_property
    def from_image(self) -> frozenset[Node]:
        """The image and every value (not size) that is computed from it."""
        found = {self.image}
        for n in self.nodes:
            if not isinstance(n.meta.get("val"), torch.SymInt) and any(i in found for i in n.all_input_nodes):
                found.add(n)
        return frozenset(found)

    @functools.cached_property
    def leaf_nodes(self) -> list[Node]:
        """The tensors among the output leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    def outputs(self, images: Tensor, only: Container[Node] | None = None) -> dict[Node, Any]:
        """The values of output leaves, by running the graph, or those of its nodes that make them."""
        wanted = {n for n in self.leaf_nodes if only is None or n in only}
        with torch.no_grad():
            found: dict[Node, Any] = {n: value for n, value in run_nodes(self, images, only) if n in wanted}
        given = {n: images if n is self.image else self.constants[n.name] for n in wanted if n.op == "placeholder"}
        return {**found, **given}

    @functools.cached_property
    def constant_leaves(self) -> list[Node]:
        """The output leaves that no image has to do with: a temperature, a table."""
        return [n for n in self.leaf_nodes if n not in self.from_image]

    def constant_outputs(self, count: int) -> dict[Node, Any]:
        """The values of these leaves for a batch of so many."""
        images = torch.zeros((), dtype=self.dtype, device=self.device).expand(count, self.channels, *self.size)
        return self.outputs(images, ancestors(self.constant_leaves))

    def index(self, leaf: Node) -> int:
        """Which of the output leaves a node is."""
        return next(i for i, x in enumerate(self.leaves) if x is leaf)

    def rebuild(self, leaves: list[Any]) -> Any:
        """Output leaves -> the structure that the model returns (tensor, tuple, dict, ModelOutput)."""
        return pytree.tree_unflatten(leaves, self.out_spec)

    def __repr__(self) -> str:
        shape = ", ".join(map(str, (self.channels, *self.size)))
        return f"Graph({len(self.nodes)} ops, image (B, {shape}), {len(self.leaves)} output(s))"


WITHOUT_STATES = (
    "States of strided layers need a captured graph: control flow and sizes that depend on pixel values, and a fixed "
    "batch size, stand in the way. Recipes without states (recipe='flip', gates, several networks) call the model "
    "itself: use one of them, or wrap the part that is a plain function of the image."
)
SHAPES = {1: "(B, C, L)", 2: "(B, C, H, W)", 3: "(B, C, D, H, W)"}
_CONVS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def wanted_axes(model: nn.Module) -> int:
    """How many spatial axes a model's input has, by its first convolution; without one, those of images."""
    return next((axes for m in model.modules() for kind, axes in _CONVS.items() if isinstance(m, kind)), 2)


def wanted_channels(model: nn.Module) -> int | None:
    """How many channels a model's input has, by its first convolution; None without one."""
    first = next((m for m in model.modules() if isinstance(m, tuple(_CONVS))), None)
    return None if first is None else int(first.in_channels)  # type: ignore[arg-type]


def capture(model: nn.Module, example: Tensor) -> Graph:
    """Export `model` once for all batch sizes at the example's image size.

    Example: `capture(resnet18(), torch.randn(1, 3, 224, 224))`.
    """
    model = own_module(model)
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.ndim < 3 or not example.numel():
        shape = f" {tuple(example.shape)} of {example.dtype}" if isinstance(example, Tensor) else ""
        wanted = SHAPES[wanted_axes(model)]
        raise InputError(f"example: got {type(example).__name__}{shape}, expected floats {wanted}, at least one image.")
    with torch.inference_mode(False), torch.no_grad():
        net, originals = copied(model)
        example = example[:1].clone().nan_to_num_(0.0, 0.0, 0.0)  # what is captured does not depend on the pixels
        # Export would specialise batch 1, so it sees two rows; they differ so that nothing folds into a constant.
        pair = torch.cat([example, example.flip(-1) + 0.01])
        before = Freshness(net, numbers=True)
        with calling(pair):
            expected = net(pair.clone())
        self_modified = frozenset(before.changes())
        program, asks = _export(net, pair)
        graph = _graph(program, pair, _Tensors(net, before.tensors.values(), originals), self_modified, asks)
        verify(graph, pair, expected)
        verify_alone(net, graph, pair, expected)
    return graph


@contextlib.contextmanager
def calling(images: Tensor) -> Iterator[None]:
    """Around a call of the user's own model: what it raises becomes a ModelRaised, unless memory ran out."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise model_raised(images, error) from error


def model_raised(images: Tensor, error: Exception) -> ModelRaised:
    """The model's own error, with what to do about it."""
    return ModelRaised(
        f"the model raised {type(error).__name__} on images of shape {tuple(images.shape)}: {error}. "
        "Pass images of the size, channels, dtype and device that the model accepts."
    )


def _export(model: nn.Module, pair: Tensor) -> tuple[torch.export.ExportedProgram, bool]:
    """The program, and whether its control flow depends on numbers in the model's tensors."""
    batch = ({0: torch.export.Dim.DYNAMIC},)
    with tracing():
        try:
            program = torch.export.export(model, (pair,), dynamic_shapes=batch, strict=False)
            _check_batch(program)
            return functional(program), False
        except CaptureError:
            raise
        except Exception as error:
            first = error
        answers = constant_answers(model, pair)
        # the slower tracer takes a few models that the first one does not
        try:
            with contextlib.nullcontext() if answers is None else Answers(answers):
                program = torch.export.export(model, (pair,), dynamic_shapes=batch, strict=answers is None)
                _check_batch(program)
                return functional(program), answers is not None
        except CaptureError:
            raise
        except Exception:  # what the first one says is clearer
            pass
    reason = next((line for line in str(first).splitlines() if line.strip()), type(first).__name__)
    raise CaptureError(
        f"torch.export cannot capture {type(model).__name__} with a dynamic batch: {reason.strip()[:300]}"
        f"{_line_in_model(first)}. {WITHOUT_STATES}"
    ) from first


def _check_batch(program: torch.export.ExportedProgram) -> None:
    """A CaptureError if the model asks how many images there are: the graph would answer for such a batch alone."""
    for guard in getattr(program, "_guards_code", ()):
        if re.search(r"size\(\)\[0\]", guard):
            asked = re.sub(r"L\[.*?\](\[0\])?\.size\(\)\[0\]", "batch size", guard)
            raise CaptureError(f"the model branches on the batch size ({asked}). {WITHOUT_STATES}")


# What runs around a user's model: torch, this package, Python's own library.
_NOT_THE_MODEL = (f"{os.sep}torch{os.sep}", str(Path(__file__).parent.parent), contextlib.__file__, functools.__file__)


def _line_in_model(error: Exception) -> str:
    """The line of the user's model that cannot be captured: the one that torch names, or the last that ran."""
    named = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error).partition("following call raised")[2])
    calls = named or [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    own = [call for call in calls if not any(folder in call[0] for folder in _NOT_THE_MODEL)]
    return f" ({own[-1][0]}, line {own[-1][1]}, in {own[-1][2]})" if own else ""


class _Tensors:
    """The user's own tensors, by what export calls them."""

    def __init__(self, net: nn.Module, tensors: Iterable[Tensor], originals: dict[int, Tensor]) -> None:
        self.originals = originals
        self.named = {
            **dict(net.named_parameters(remove_duplicate=False)),
            **dict(net.named_buffers(remove_duplicate=False)),
        }
        self.by_memory = {_memory(t): t for t in tensors if t.layout is torch.strided}

    def find(self, target: str, exported: Tensor) -> Tensor:
        """Export hands on parameters and buffers by name, and other tensors as views of the same memory."""
        t = self.named.get(target)
        if t is None:
            t = self.by_memory.get(_memory(exported), exported) if exported.layout is torch.strided else exported
        return self.originals.get(id(t), t)


def _memory(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def _graph(
    program: torch.export.ExportedProgram, pair: Tensor, tensors: _Tensors, self_modified: frozenset[str], asks: bool
) -> Graph:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # sympy: only where a graph is captured

    signature = program.graph_signature
    state = {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    constants = {placeholder: tensors.find(target, state[target]) for placeholder, target in names.items()}
    fx = program.graph
    image = next(n for n in fx.nodes if n.op == "placeholder" and n.name == signature.user_inputs[0])
    outputs = list(next(n for n in fx.nodes if n.op == "output").args[0])
    kinds = [spec.kind.name for spec in signature.output_specs]
    leaves = tuple(o for o, kind in zip(outputs, kinds, strict=True) if kind == "USER_OUTPUT")
    out_spec: Any = program.call_spec.out_spec
    for n in fx.nodes:
        if n.op == "get_attr":
            raise CaptureError(f"{n.name}: the model chooses a branch while it runs (torch.cond). {WITHOUT_STATES}")
        if free_unbacked_symbols(n.meta.get("val")):
            raise CaptureError(
                f"the size of {n.name} depends on pixel values: states of such a model cannot be compared. "
                "Wrap the part that gives outputs of a fixed size."
            )
    read = {n.name for n in fx.nodes if n.op == "placeholder" and n.users}
    decided = [t for name, t in constants.items() if asks or (name in read and not t.is_floating_point())]
    graph = Graph(
        fx=fx,
        image=image,
        constants=constants,
        leaves=leaves,
        out_spec=out_spec,
        size=tuple(int(n) for n in pair.shape[2:]),
        channels=int(pair.shape[1]),
        dtype=pair.dtype,
        device=pair.device,
        self_modified=self_modified,
        decided=tuple(decided),
    )
    if not any(n in graph.from_image for n in graph.leaf_nodes):
        raise CaptureError(
            "the model returns no tensor that depends on the image; unstride needs logits or a logit map"
        )
    return graph


def run_nodes(graph: Graph, images: Tensor, only: Container[Node] | None = None) -> Iterator[tuple[Node, Any]]:
    """Execute node by node, yielding each node with its value; a value is dropped after its last use.

    `only`: these nodes, and nothing else (they must hold all that they read).
    """
    nodes = [n for n in graph.nodes if only is None or n in only]
    env: dict[Node, Any] = {}
    for n in graph.fx.nodes:
        if n.op == "placeholder":
            env[n] = images if n is graph.image else graph.constants.get(n.name)
    last: dict[Node, Node] = {}
    for n in nodes:
        for source in n.all_input_nodes:
            last[source] = n
    for n in nodes:
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda a: env[a])
        value = n.target(*args, **kwargs)  # type: ignore[operator]
        env[n] = value
        yield n, value
        for source in n.all_input_nodes:
            if last[source] is n:
                env.pop(source, None)
