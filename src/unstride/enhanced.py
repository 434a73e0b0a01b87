"""`enhance(model, example)` -> Enhanced: the module that users hold."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from unstride.engine.compiled import compile_segment
from unstride.engine.fused import Fuser, available
from unstride.engine.segments import as_it_is
from unstride.errors import InputError, ModelRaised, OptionError
from unstride.geometry.find import find_layers
from unstride.geometry.states import State
from unstride.graph.capture import capture, check_images, frozen_eval
from unstride.graph.optimise import channels_last, optimise
from unstride.procedure import saving
from unstride.procedure.aggregate import Attention
from unstride.procedure.options import Options, validate
from unstride.procedure.prediction import Prediction, Visited, compare_states, cropped, moved
from unstride.procedure.run import ImageRun, Outcome, finish, run_procedure
from unstride.procedure.saving import Saved
from unstride.procedure.search import default_layers
from unstride.procedure.stopping import Stop
from unstride.procedure.tasks import Plan, Target, make_plan
from unstride.views.images import Preprocess

TOGETHER = 512 << 20  # bytes that images which run together may take
MULTIPLE = 32  # what an image is padded to where the model takes only such sizes
Key = tuple[int, int, int, torch.dtype, torch.device]


class Enhanced(nn.Module):
    """A model that looks at what it would have thrown away. Returns what the model returns.

    Example:
        better = unstride.enhance(model, images[:1], budget=10)
        logits = better(images)
        print(better.explain(images)[0])
    """

    def __init__(
        self,
        model: nn.Module,
        task: str,
        space: str | None,
        options: dict[str, Any],
        max_bytes: int | None,
        optimise: bool | str = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.task, self.space, self.max_bytes, self.optimise = task, space, max_bytes, optimise
        self.asked = options
        self.plans: dict[Key, Plan] = {}
        self._versions: tuple[int, ...] = ()
        self.attention: Attention | None = None
        self.preprocess: Preprocess | None = None  # how images were prepared when this was saved; see unstride.load

    # -- set up
    def prepare(self, example: Tensor) -> Plan:
        """Capture and analyse the model for the example's size (once per size, dtype and device)."""
        images = check_images(example)
        versions = tuple(p._version for p in self.model.parameters())
        if versions != self._versions:  # the weights were changed: what was folded from them is stale
            self.plans.clear()
            self._versions = versions
        key = (images.shape[1], images.shape[2], images.shape[3], images.dtype, images.device)
        plan = self.plans.get(key)
        if plan is None:
            with torch.autocast(images.device.type, enabled=False):  # the graph is the model's; a run may be cast
                plan = self._plan(images[:1])
            self.plans[key] = plan
        return plan

    @property
    def plan(self) -> Plan:
        """How the size that was prepared first runs: layers, engine, where maps are aggregated."""
        return next(iter(self.plans.values()))

    def _plan(self, example: Tensor) -> Plan:
        graph, run_segment = capture(self.model, example), as_it_is
        if self.optimise:
            graph = optimise(graph)
        found = find_layers(graph)
        if self.optimise and found.mostly_convolutions:
            graph = channels_last(graph)
            run_segment = Fuser(found.layers) if available(graph.device, graph.dtype) else as_it_is
        if self.optimise == "compile":
            run_segment = compile_segment
        return make_plan(graph, found, self.task, self.space, self.max_bytes, run_segment)

    def options(self, plan: Plan) -> Options:
        """The asked options, made definite for this network."""
        asked = self.asked
        count = len(plan.found.layers)
        layers = asked["layers"] if asked["layers"] is not None else default_layers(plan.found.space, self.task)
        if not layers or min(layers) < 1 or max(layers) > count:
            raise OptionError(f"layers: got {tuple(layers)}, but this network has the layers 1 to {count}")
        states = asked["states"]
        if states is not None:
            states = tuple(dict.fromkeys(plan.found.space.parse(s) for s in states))
        if asked["aggregate"] == "attention" or asked["criterion"] == "learned":
            self.make_attention(plan)
        return Options(
            budget=asked["budget"] if states is None else len({*states, plan.found.space.zero}),
            layers=tuple(layers),
            criterion=asked["criterion"],
            aggregate=asked["aggregate"],
            align=asked["align"],
            border=asked["border"],
            order=asked["order"],
            seed=asked["seed"],
            states=states,
            stop=asked["stop"],
            attention=self.attention,
        )

    def make_attention(self, plan: Plan) -> None:
        """The attention for this network's map, untrained (it is the mean) unless there is one already."""
        if self.attention is None:
            self.attention = Attention(plan.channels).to(plan.graph.device)
        elif self.attention.channels != plan.channels:
            made, has = self.attention.channels, plan.channels
            raise OptionError(f"the attention was made for {made} channels, this map has {has}")

    # -- use
    def forward(self, images: Tensor) -> Any:
        """What the model returns, made from `budget` states of each image."""
        check_images(images)
        if self.asked["budget"] == 1 and self.asked["states"] is None:
            with frozen_eval(self.model):
                return self.model(images)
        return self.run(images, ())[0]

    def curve(self, images: Tensor, budgets: Sequence[int]) -> dict[int, Tensor]:
        """Logits of the main output at several budgets from one search: a search to 15 has visited the search to 4."""
        check_images(images)
        highest = max(budgets)
        wider = self.with_options(budget=highest)
        _, at, _, _ = wider.run(images, tuple(budgets))
        return at

    def explain(self, images: Tensor) -> list[Prediction]:
        """One Prediction per image: final and plain logits, the states visited, why it ended, what it cost."""
        check_images(images)
        _, _, predictions, _ = self.run(images, (), explain=True)
        return predictions

    def costs(self, images: Tensor, budgets: Sequence[int]) -> dict[int, tuple[Tensor, list[float]]]:
        """`curve`, and beside it each image's cost at each budget, as a multiple of a plain forward."""
        check_images(images)
        _, at, _, macs = self.with_options(budget=max(budgets)).run(images, tuple(budgets))
        return {b: (at[b], macs[b]) for b in budgets}

    def with_options(self, **changes: Any) -> "Enhanced":
        """The same model (captures and attention shared) with other options: `better.with_options(budget=30)`."""
        asked = {**self.asked, **changes}
        validate(self.task, self.space, asked)
        other = Enhanced(self.model, self.task, self.space, asked, self.max_bytes, self.optimise)
        other.plans, other._versions, other.attention = self.plans, self._versions, self.attention
        other.preprocess = self.preprocess
        return other

    def save(self, path: str | Path, preprocess: Preprocess | None = None) -> Path:
        """Options, learned aggregation and the network's fingerprint in a file for `unstride.load(path, model)`."""
        kept = Saved(self.task, self.space, self.asked, self.attention, preprocess or self.preprocess)
        plan = next(iter(self.plans.values()), None)
        return saving.write(path, self.model, kept, plan, self.options(plan).layers if plan is not None else None)

    @property
    def signature(self) -> str:
        """All options in one line: two enhanced models with the same weights and signature answer alike."""
        return f"{self.task} {self.space} " + " ".join(f"{k}={v!r}" for k, v in sorted(self.asked.items()))

    def train(self, mode: bool = True) -> "Enhanced":
        """The wrapped model always runs as in evaluation; its own mode is never touched."""
        self.training = mode
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy captures the model anew: graphs and packed weights can neither be copied nor sent elsewhere."""
        return {**self.__dict__, "plans": {}, "_versions": ()}

    # -- inside
    def run(
        self, images: Tensor, budgets: tuple[int, ...], explain: bool = False
    ) -> tuple[Any, dict[int, Tensor], list[Prediction], dict[int, list[float]]]:
        """All at once: the model's output, logits at each budget, predictions, and each image's cost at each budget."""
        images, plan, crop = self.fitted(images)
        options = self.options(plan)
        leaves: list[list[Any]] = []
        at: dict[int, list[Tensor]] = {b: [] for b in budgets}
        macs_at: dict[int, list[float]] = {b: [] for b in budgets}
        predictions: list[Prediction] = []
        with torch.no_grad():
            for part in images.tensor_split(-(-len(images) // self.images_at_once(plan, options, len(images)))):
                outcome = run_procedure(plan, part, options, budgets, explain)
                runs = outcome.runs
                leaves.append(self._leaves(plan, outcome, part))
                main = leaves[-1][plan.graph.index(plan.targets[0].leaf)]
                for b in budgets:
                    at[b].append(self._at(plan, outcome, b, main))
                    for r in runs:
                        visited = r.search.visited if options.states is None else [*options.states]
                        count = min(b, len(r.scores))
                        macs_at[b].append(
                            (plan.engine.trie_macs(visited[:count]) + self._head_macs(plan) * count) / plan.plain_macs
                        )
                if explain:
                    predictions += [
                        self._prediction(plan, options, r, m, main[k])
                        for k, (r, m) in enumerate(zip(runs, outcome.macs, strict=True))
                    ]
        joined = [torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*leaves, strict=True)]
        output = plan.graph.rebuild([cropped(leaf, crop) for leaf in joined])
        if crop is not None:
            predictions = [_cropped_prediction(p, crop) for p in predictions]
        return output, {b: cropped(torch.cat(v), crop) for b, v in at.items()}, predictions, macs_at

    def fitted(self, images: Tensor) -> tuple[Tensor, Plan, tuple[float, float] | None]:
        """A plan for this image size; segmentation pads to a multiple of 32 where the model takes no other size."""
        try:
            return images, self.prepare(images), None
        except ModelRaised as error:
            h, w = images.shape[2:]
            ph, pw = (-h) % MULTIPLE, (-w) % MULTIPLE
            if self.task != "segmentation" or (ph == 0 and pw == 0):
                raise
            padded = F.pad(images, (0, pw, 0, ph), mode="replicate" if min(h, w) > 1 else "constant")
            try:
                plan = self.prepare(padded)
            except ModelRaised:
                raise InputError(
                    f"the model does not take images of {h}x{w} ({error}); padding to {h + ph}x{w + pw} did not help: "
                    "resize or pad them to a size the model accepts"
                ) from error
            return padded, plan, (h / (h + ph), w / (w + pw))

    def images_at_once(self, plan: Plan, options: Options, count: int | None = None) -> int:
        """How many images may be under way together: what they hold must fit the memory bound, and not take more than
        twice what the plain network needs for all `count` images.
        """
        engine = plan.engine
        every = range(1, engine.depth + 1)
        stored = engine.prefix_bytes(every if options.states is not None else options.layers, options.budget)
        bound = TOGETHER if self.max_bytes is None else self.max_bytes
        if count is not None:
            bound = min(bound, 2 * count * engine.plain_bytes)
        return max(1, bound // (stored + engine.plain_bytes), (bound - engine.chunk_bytes) // max(1, stored))

    def _leaves(self, plan: Plan, outcome: Outcome, part: Tensor) -> list[Any]:
        leaves: list[Any] = list(plan.graph.leaves)
        for i, value in outcome.others.items():
            leaves[i] = value
        for k, (target, sums) in enumerate(zip(plan.targets, outcome.sums, strict=True)):
            like = self._like(plan, target, len(part), part.dtype)
            maps = sums.value()
            done = finish(plan, target, sums, maps, like)
            leaves[plan.graph.index(target.leaf)] = done
            if k == 0:
                for leaf, segment in plan.also:
                    tap = plan.unmap(maps, like, target)
                    leaves[plan.graph.index(leaf)] = segment(len(part), (), [tap])[0]
        seen = {
            leaf: i
            for i, leaf in enumerate(plan.graph.leaves)
            if isinstance(leaf, Node) and not isinstance(leaves[i], Node)
        }
        return [leaves[seen[leaf]] if isinstance(leaf, Node) else leaf for leaf in leaves]

    def _at(self, plan: Plan, outcome: Outcome, budget: int, main: Tensor) -> Tensor:
        """Main output with the first `budget` states; an image that stopped earlier keeps its final answer."""
        target, runs = plan.targets[0], outcome.runs
        rows = [i for i, r in enumerate(runs) if budget in r.at]
        out = main.clone()
        if rows:
            like = self._like(plan, target, len(rows), main.dtype)
            maps = torch.stack([runs[i].at[budget] for i in rows])
            out[rows] = finish(plan, target, outcome.sums[0], maps, like)
        return out

    @staticmethod
    def _like(plan: Plan, target: Target, rows: int, dtype: torch.dtype) -> Tensor:
        """What the target's tap looks like for so many images."""
        return torch.empty((rows, *plan.found.trace.shapes[target.tap][1:]), dtype=dtype, device="meta")

    def _head_macs(self, plan: Plan) -> int:
        return sum(t.head.macs for t in plan.targets if t.head is not None)

    def _prediction(self, plan: Plan, options: Options, r: ImageRun, macs: int, final: Tensor) -> Prediction:
        visited = (
            r.search.visited
            if options.states is None
            else list(dict.fromkeys([plan.found.space.zero, *options.states]))
        )
        shape = final.shape[1:]
        shifts = [moved(plan, s, (shape[0], shape[1])) if len(shape) == 2 else (0, 0) for s in visited]
        agreement, mutual = compare_states(r.logits, final, shifts)
        total = sum(r.weights) or 1.0
        states = tuple(
            Visited(s, c, w / total, logits)
            for s, c, w, logits in zip(visited, r.scores, r.weights, r.logits, strict=True)
        )
        return Prediction(
            final, r.logits[0], states, tuple(r.search.expansions), macs, plan.plain_macs, agreement, mutual, r.stopped
        )

    def extra_repr(self) -> str:
        asked = self.asked
        layers = asked["layers"]
        if layers is None and self.plans:
            layers = default_layers(self.plan.found.space, self.task)
        parts = [f"task={self.task!r}", f"budget={asked['budget']}", f"layers={layers}"]
        parts += [f"{k}={asked[k]!r}" for k in ("criterion", "aggregate", "align", "border", "order")]
        if self.plans:
            parts.append(f"space={self.plan.space!r}")
        parts += [f"stop={asked['stop']!r}"] if asked["stop"] is not None else []
        return ", ".join(parts)


def enhance(
    model: nn.Module,
    example: Tensor,
    budget: int = 10,
    *,
    task: str = "classification",
    layers: Iterable[int] | None = None,
    criterion: str = "entropy",
    aggregate: str = "entropy",
    space: str | None = None,
    align: bool | str = True,
    border: str = "renormalise",
    order: str = "paper",
    states: Iterable[State | Sequence[Any]] | None = None,
    stop: Stop | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    optimise: bool | str = True,
) -> Enhanced:
    """Make a pretrained model better at test time, without training it.

    Example: `better = unstride.enhance(model, images[:1], budget=10); logits = better(images)`

    `budget` counts the states of each image, the plain network's included: 1 is the model itself. The rest has sensible
    defaults; see the guide "choosing options". `max_bytes` bounds memory, if need be by computing things again.
    `optimise=False` runs the captured graph without exact rewrites, `optimise="compile"` hands its segments to
    `torch.compile`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: got {type(model).__name__}, wanted a torch.nn.Module")
    asked: dict[str, Any] = {
        "budget": budget,
        "layers": tuple(layers) if layers is not None else None,
        "criterion": criterion,
        "aggregate": aggregate,
        "align": align,
        "border": border,
        "order": order,
        "states": tuple(states) if states is not None else None,
        "stop": stop,
        "seed": seed,
    }
    validate(task, space, asked, optimise)
    better = Enhanced(model, task, space, asked, max_bytes, optimise)
    _, plan, _ = better.fitted(check_images(example, "example")[:1])
    better.options(plan)
    return better


def load(path: str | Path, model: nn.Module, *, preprocess: Preprocess | None = None) -> Enhanced:
    """`better = unstride.load("better.safetensors", model)`: what was saved, around the same network.

    An ArtefactError where the file is damaged or foreign, or was saved for other weights. With `preprocess`, also where
    the images would be prepared in another way than when it was saved. What was saved is in `better.preprocess`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: got {type(model).__name__}, wanted a torch.nn.Module")
    kept = saving.read(path, model, preprocess)
    better = Enhanced(model, kept.task, kept.space, kept.asked, 512 << 20)
    better.preprocess = kept.preprocess
    if kept.attention is not None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        better.attention = kept.attention.to(device)
    return better


def _cropped_prediction(p: Prediction, crop: tuple[float, float]) -> Prediction:
    states = tuple(replace(v, logits=cropped(v.logits, crop)) for v in p.states)
    maps = {name: cropped(getattr(p, name), crop) for name in ("logits", "plain", "spread")}
    return replace(p, states=states, **maps)
