"""`enhance(model, example)` -> Enhanced: the module that users hold. The whole flow is in this file.

image -> views -> looks -> engine -> gates ... -> merged -> what the model returns
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.errors import InputError, OptionError, TaskAssumed
from unstride.graph.capture import check_images, exporting, wanted_axes
from unstride.graph.keywords import the_image
from unstride.graph.twin import own_module
from unstride.models.tasks import ASSUMED, task_of
from unstride.models.weights import place, under_model
from unstride.procedure import assemble
from unstride.procedure.aggregate import Attention
from unstride.procedure.calibrate import Calibration, Opened, calibrate
from unstride.procedure.familiar import warn_seen
from unstride.procedure.features import finer_features
from unstride.procedure.gates import Stage
from unstride.procedure.looks import Looked, Looking, Seen, matched_stages, part_prices
from unstride.procedure.meaning import TASKS
from unstride.procedure.options import Options, each_budget
from unstride.procedure.plans import Crop, Plans, Setup, check_run
from unstride.procedure.prediction import Prediction, cropped
from unstride.procedure.search import default_layers
from unstride.procedure.tasks import Plan
from unstride.recipe import Recipe
from unstride.recipe.recipe import EITHER, SEARCH
from unstride.recipe.saving import Saved, opened, read_saved, write_saved
from unstride.views.canvas import Canvas, Source, as_source, batches, casting
from unstride.views.images import Preprocess
from unstride.views.policies import IDENTITY


class Enhanced(nn.Module):
    """A model that looks again at what it would have thrown away. Returns what the model returns.

    Example:
        better = unstride.enhance(model, images[:1])
        logits = better(images)
        print(better.explain(images)[0])
    """

    is_enhanced = True  # so that it is not captured again

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        max_bytes: int | None = None,
        optimise: bool | str = True,
        preprocess: Preprocess | None = None,
    ) -> None:
        super().__init__()
        check_run(max_bytes, optimise)
        self.model, self.recipe, self.max_bytes, self.optimise = model, recipe, max_bytes, optimise
        self.preprocess = preprocess  # how images are prepared; with it, PIL images can be given
        self._plans = Plans(model, self._setup)
        self.attention: Attention | None = None
        self.training = False  # it always runs as in evaluation
        self.register_load_state_dict_pre_hook(under_model)
        self.assumed = ""  # what the output is taken for, where neither the user nor the model's library said it

    @property
    def task(self) -> str:
        return self.recipe.task

    # -- set up
    @property
    def _setup(self) -> Setup:
        return self.recipe.task, self.recipe.space, self.max_bytes, self.optimise

    @property
    def plans(self) -> Plans:
        """What was captured of the model as it is, for every image size that was used."""
        if self._plans.model is not self.model or self._plans.setup != self._setup:
            self._plans = Plans(self.model, self._setup)
        return self._plans

    def prepare(self, example: Tensor) -> Plan:
        """Capture and analyse the model for the example's size (once per size, dtype and device)."""
        return self.plans.of(example)

    @property
    def plan(self) -> Plan:
        """How the size that was prepared first runs: layers, engine, where maps are aggregated."""
        if not self.plans:
            raise InputError("nothing is prepared yet: call better.prepare(images), or use it once")
        return next(iter(self.plans.values()))

    def options(self, plan: Plan) -> Options:
        """The recipe's search, made definite for this network."""
        asked, count = self.recipe, len(plan.found.layers)
        layers = asked.layers if asked.layers is not None else default_layers(plan.found.space, self.task)
        if not layers or min(layers) < 1 or max(layers) > count:
            raise OptionError(f"layers: got {tuple(layers)}, but this network has the layers 1 to {count}")
        states = asked.states
        if states is not None:
            states = tuple(dict.fromkeys(plan.found.space.parse(s) for s in states))
        if asked.aggregate == "attention" or asked.criterion == "learned":
            self.make_attention(plan)
        return Options(
            budget=asked.budget if states is None else len({*states, plan.found.space.zero}),
            layers=tuple(layers),
            criterion=asked.criterion,
            aggregate=asked.aggregate,
            align=asked.align,
            border=asked.border,
            order=asked.order,
            seed=asked.seed,
            states=states,
            stop=asked.stop,
            attention=self.attention,
        )

    def make_attention(self, plan: Plan) -> None:
        """The attention for this network's map, untrained (it is the mean) unless there is one already."""
        with self.plans.lock:
            if self.attention is None:
                self.attention = Attention(plan.channels).to(plan.graph.device)
        self.attention.check(plan.channels)

    # -- use
    def forward(self, images: Any = None, **inputs: Any) -> Any:
        """What the model returns, after all the looks of the recipe.

        `images`: a tensor (B, C, H, W) as the model takes it, also by the model's own name for it (`pixel_values=...`);
        a `Canvas`, whose pixels around the crop views may use; or PIL images, where the preprocessing is known.
        """
        if exporting():
            raise OptionError(
                "an enhanced model decides image by image, so it is not one graph: use unstride.export("
                "better, example, 'net.onnx') or `unstride export`, which write the looks of its recipe"
            )
        source = self._source(the_image(self.model, images, inputs) if inputs or images is None else images)
        with casting(source, self.recipe.precision):
            if self.recipe.plain:
                return self.plans.plain(source.see(IDENTITY))
            if self.recipe.searches:
                return self.run(source.see(IDENTITY), ())[0]
            return self._answer(*self._looked(source))

    def features(self, images: Any, finer: int = 1) -> Tensor:
        """Dense features (B, C, h, w) after the looks of the recipe, with `task="features"`; tokens come as their map.

        Example: `better.features(images, finer=2)`: states half a cell apart, stitched to (B, C, 2 h, 2 w).
        """
        if self.task != "features":
            raise OptionError(f"task is {self.task!r}: give unstride.enhance(model, example, task='features')")
        source = self._source(images)
        with casting(source, self.recipe.precision):
            if finer == 1:
                return self._main(*self._looked(source))
            seen, plan, _ = self.fitted(source.see(IDENTITY))
            return finer_features(plan, seen, finer)

    def explain(self, images: Any) -> list[Prediction]:
        """One Prediction per image: final and plain logits, the looks that were taken, why it ended, what it cost."""
        source = self._source(images)
        with casting(source, self.recipe.precision):
            if self.recipe.stages or self.task == "features":
                looked, plan, crop = self._looked(source, explain=True)
                found = assemble.looked_predictions(looked, self._main(looked, plan, crop))
            else:
                found = self.run(source.see(IDENTITY), (), explain=True)[2]
            return [replace(p, assumed=self.assumed) for p in found]

    def curve(self, images: Tensor, budgets: Sequence[int]) -> dict[int, Tensor]:
        """Logits of the main output at several budgets from one search: a search to 15 has visited the search to 4."""
        return {b: logits for b, (logits, _) in self.costs(images, budgets).items()}

    def costs(self, images: Tensor, budgets: Sequence[int]) -> dict[int, tuple[Tensor, list[float]]]:
        """`curve`, and beside it each image's cost at each budget, as a multiple of a plain forward."""
        asked = each_budget(budgets)
        with casting(self._source(images), self.recipe.precision):
            _, at, _, macs = self.with_options(budget=max(asked)).run(images, asked)
        return {b: (at[b], macs[b]) for b in asked}

    def looks(self, images: Any) -> tuple[Tensor, list[float]]:
        """Main logits after the recipe's looks or search, and each image's cost in plain forwards."""
        source = self._source(images)
        if not self.recipe.stages:
            seen = source.see(IDENTITY)
            count = self.options(self.fitted(seen)[1]).budget  # of states that are given, as many as there are
            return self.costs(seen, [count])[count]
        with casting(source, self.recipe.precision):
            looked, plan, crop = self._looked(source)
            return self._main(looked, plan, crop), [m / looked.plain_macs for m in looked.macs]

    def stage_costs(self, images: Tensor) -> list[float]:
        """What one image costs, in plain forwards, after each stage if all gates open, or after the search."""
        if self.recipe.searches:
            return [self.explain(images[:1])[0].cost]
        looked = self._looked(self._source(images[:1]), gated=False)[0] if self.recipe.stages else None
        return [1.0] if looked is None else [m / looked.plain_macs for m in looked.spent]

    def calibrate(self, images: Any, cost: float | None = None) -> Calibration:
        """Set the gates from unlabelled images: to a mean cost in plain forwards, or to the share each gate asks for.

        Example: `print(better.calibrate(images, cost=1.5))`. `images`: what `better` takes, or batches of that.
        Views that speak louder than the plain one (larger sizes do) are brought to its temperature.
        """
        if not self.recipe.stages:
            raise OptionError("this recipe has no stages, so there are no gates to set; take recipe='default'")
        stages, loud = self.recipe.stages, self.task == "classification"
        runs, seen = list[Opened](), list[Seen]()
        for source in map(self._source, batches(images)):
            run = self._looked(source, explain=loud, gated=False)[0]
            runs.append(Opened(run.sure, part_prices(stages, run)))
            seen += run.seen
        found = calibrate(matched_stages(stages, seen) if loud else stages, runs, cost)
        self.recipe = self.recipe.changed(stages=found.stages)
        return found

    def doubts(self, images: Any, states: int = 9) -> str | None:
        """Without labels: which looks (near states, the recipe's own views) are unfamiliar to this network, or None.

        Example: `print(better.doubts(images))`. A few dozen images are enough.
        """
        if self.task != "classification":
            raise OptionError(f"doubts are told for classification, this is {self.task}")
        views = tuple(dict.fromkeys(v for s in self.recipe.stages for v in s.views if v != IDENTITY))
        stages = (Stage(states=f"near:{states}"), *(Stage((v,)) for v in views))
        asked = self.with_options(recipe=Recipe(task=self.task, stages=stages))
        return warn_seen([asked._looked(s, explain=True)[0].seen for s in map(self._source, batches(images))])

    def unchanged(self) -> AbstractContextManager[None]:
        """For a stream of single images: whether the model was changed is asked around the block, not at every call.

        Example: `with better.unchanged(): answers = [better(x) for x in stream]`. If it was, the block raises.
        """
        return self.plans.unchanged()

    def with_options(self, **changes: Any) -> Enhanced:
        """The same model (captures and attention shared) with other options: `better.with_options(budget=30)`.

        `recipe` names another one to start from; options of a search, given to the default recipe, ask for the paper's.
        """
        base = changes.pop("recipe", self.recipe)
        if base is self.recipe and base.name == "default" and set(changes) & set(SEARCH):
            base, changes = "paper", {name: getattr(self.recipe, name) for name in EITHER} | changes
        max_bytes, optimise = changes.pop("max_bytes", self.max_bytes), changes.pop("optimise", self.optimise)
        kept = opened(base, self.model, changes.pop("preprocess", self.preprocess), self.task)
        other = Enhanced(self.model, kept.recipe.changed(**changes), max_bytes, optimise, kept.preprocess)
        other._plans = self.plans  # plans of another setup will be made anew
        other.attention = kept.attention or self.attention
        other.assumed = self.assumed if other.task == self.task else ""
        return other

    def save(self, path: str | Path, preprocess: Preprocess | None = None) -> Path:
        """Recipe, learned aggregation and the network's fingerprint in a file for `unstride.load(path, model)`."""
        kept = Saved(self.recipe, self.attention, preprocess or self.preprocess, self.max_bytes, self.optimise)
        return write_saved(path, self.model, kept, next(iter(self.plans.values()), None))

    @property
    def signature(self) -> str:
        """All options in one line: two enhanced models with the same weights and signature answer alike."""
        return repr(self.recipe)

    def train(self, mode: bool = True) -> Enhanced:
        """The wrapped model always runs as in evaluation; its own mode is never touched."""
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        """What is not ours is the model's: `better.config`, `better.num_classes`; and every model has a device."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")
            if model is None or name.startswith("__"):
                raise
            if name in ("device", "dtype") and not hasattr(model, name):
                return dict(zip(("device", "dtype"), place(model), strict=True))[name]
            return getattr(model, name)

    # -- inside
    def _source(self, images: Any) -> Source:
        pixels = images.pixels if isinstance(images, Canvas) else images
        if isinstance(pixels, Tensor):
            check_images(pixels, axes=wanted_axes(self.model))
        return as_source(images, self.preprocess)

    def _looked(self, source: Source, explain: bool = False, gated: bool = True) -> tuple[Looked, Plan, Crop]:
        def at_once(plan: Plan, states: int) -> int:
            return plan.engine.images_at_once(range(1, plan.engine.depth + 1), states, self.max_bytes)

        with torch.no_grad():
            stages, merge, task = self.recipe.stages or (Stage(),), self.recipe.merge, TASKS[self.task]
            looked = Looking(self.plans.once(), at_once, stages, merge, explain, gated, task).run(source)
        return looked, looked.plain[0].plan, looked.plain[0].crop

    def _main(self, looked: Looked, plan: Plan, crop: Crop) -> Tensor:
        return assemble.main_output(plan, self.recipe.warmed(looked.merged.logits()))

    def _answer(self, looked: Looked, plan: Plan, crop: Crop) -> Any:
        leaves = assemble.looked_leaves(plan, looked, self._main(looked, plan, crop))
        return assemble.returned(plan, leaves, crop, len(looked.macs), merged=True)

    def run(
        self, images: Tensor, budgets: tuple[int, ...], explain: bool = False
    ) -> tuple[Any, dict[int, Tensor], list[Prediction], dict[int, list[float]]]:
        """The search, all at once: the model's output, logits at each budget, predictions, costs at each budget."""
        images, plan, crop = self.fitted(images)
        options = self.options(plan)
        parts = images.tensor_split(-(-len(images) // self.images_at_once(plan, options, len(images))))
        leaves, at, predictions, macs = assemble.searched(plan, parts, options, budgets, explain, self.recipe.warmed)
        output = assemble.returned(plan, leaves, crop, len(images))
        predictions = predictions if crop is None else [assemble.cropped_prediction(p, crop) for p in predictions]
        return output, {b: cropped(logits, crop) for b, logits in at.items()}, predictions, macs

    def plain(self, images: Tensor) -> Tensor:
        """The main logits of the user's own model, untouched."""
        leaves, plan = pytree.tree_leaves(self.plans.plain(images)), self.fitted(images)[1]
        logits: Tensor = leaves[plan.graph.index(plan.targets[0].leaf)]
        return logits

    def fitted(self, images: Tensor) -> tuple[Tensor, Plan, Crop]:
        """A plan for this image size; segmentation pads to a multiple of 32 where the model takes no other size."""
        return self.plans.fitted(images)

    def images_at_once(self, plan: Plan, options: Options, count: int | None = None) -> int:
        """How many images may be searched together."""
        layers = options.layers if options.states is None else range(1, plan.engine.depth + 1)
        return plan.engine.images_at_once(layers, options.budget, self.max_bytes, count)

    def __repr__(self) -> str:
        """What it does in a few lines, and what it takes the model's output for; not the whole network."""
        weights = sum(p.numel() for p in self.model.parameters())
        lines = [f"Enhanced({type(self.model).__name__}, {weights:,} weights", *str(self.recipe).splitlines()]
        if self.plans:
            if self.recipe.searches and self.recipe.states is None and self.recipe.layers is None:
                lines.append(f"layers={default_layers(self.plan.found.space, self.task)}")
            lines.append(self.plan.reads + (f" ({ASSUMED})" if self.assumed else ""))
        return "\n  ".join(lines) + "\n)"


def enhance(
    model: nn.Module,
    example: Tensor,
    budget: int | None = None,
    *,
    recipe: str | Path | Recipe | None = None,
    max_bytes: int | None = None,
    optimise: bool | str = True,
    preprocess: Preprocess | None = None,
    **options: Any,
) -> Enhanced:
    """Make a pretrained model better at test time, without training it.

    Example: `better = unstride.enhance(model, images[:1]); logits = better(images)`

    `recipe`: what is done, by name ("default", "flip", "paper", ...), from a file (refused where it was made for
    another model), or a `Recipe`; further arguments change its fields (`enhance(model, example, recipe="paper",
    budget=4)`), and are those of the paper's search where no recipe is named. `max_bytes` bounds memory, if need be by
    computing things again. `optimise=False` runs the captured graph without exact rewrites, `optimise="compile"` hands
    its segments to `torch.compile`. `task`: what the output means (the guide "Tasks"); by default "auto", what the
    model's library says or its shape suggests. `preprocess` says how images become tensors: with it, `better` takes
    PIL images, and views use what the crop leaves out.
    """
    model = own_module(model)
    asked = {**options, **({} if budget is None else {"budget": budget})}
    if not isinstance(recipe, str | Path | Recipe | None):
        raise OptionError(f"recipe: got {recipe!r}, wanted a name such as 'default', a file, or a Recipe")
    recipe = ("paper" if set(asked) & set(SEARCH) else "default") if recipe is None else recipe
    example = check_images(example, "example", wanted_axes(model))[:1]
    own = isinstance(recipe, Recipe) or Path(recipe).suffix in (".toml", ".json", ".safetensors")
    told = task_of(asked.pop("task", "auto"), model, example, own)
    kept = opened(recipe, model, preprocess, told.task)
    better = Enhanced(model, kept.recipe.changed(**asked), max_bytes, optimise, kept.preprocess)
    better.attention, better.assumed = kept.attention, told.assumed
    _, plan, _ = better.fitted(example)
    better.options(plan)
    if told.assumed:
        warnings.warn(TaskAssumed(str(told)), stacklevel=2)
    return better


def load(path: str | Path, model: nn.Module, *, preprocess: Preprocess | None = None) -> Enhanced:
    """`better = unstride.load("better.safetensors", model)` (or "tuned.toml"): what was saved, around the same network.

    An ArtefactError where the file is damaged or foreign, or was saved for other weights. With `preprocess`, also where
    the images would be prepared in another way than when it was saved. What was saved is in `better.preprocess`.
    """
    model, written = own_module(model), Path(path).suffix in (".toml", ".json")
    kept = opened(path, model, preprocess) if written else read_saved(path, model, preprocess)
    better = Enhanced(model, kept.recipe, kept.max_bytes, kept.optimise, kept.preprocess)
    better.attention = kept.attention
    return better
