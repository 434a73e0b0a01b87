"""`enhance(model)` -> Enhanced: the module that users hold.

images -> views -> forward passes (model or graph) -> combined ... confident? stop : next stage -> the model's output
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.errors import InputError, OptionError, TaskAssumed
from unstride.execution.calibrate import Calibration, batches, calibrate, matched_stages, open_run
from unstride.execution.executors import Network
from unstride.execution.graph_executor import check_execution
from unstride.execution.independence import warn_of_batch_dependence
from unstride.execution.opening import check_budgets, check_networks, is_file, open_recipe, write_fitted
from unstride.execution.padding import cropped_output, sized
from unstride.execution.prediction import Prediction
from unstride.execution.record import Record
from unstride.execution.runner import StageResult, executors_for, run
from unstride.graph.capture import wanted_channels
from unstride.graph.evaluation import checked_module
from unstride.graph.keywords import image_argument
from unstride.graph.tracing import exporting
from unstride.method.attention import Attention
from unstride.models import LoadedModel
from unstride.models.class_names import class_map
from unstride.models.tasks import ASSUMED, known_task, task_of
from unstride.models.weights import place, under_model
from unstride.recipe.files import StoredNetwork, check_name, write
from unstride.recipe.presets import cascade
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN
from unstride.storage.fingerprint import fingerprint
from unstride.tasks.tasks import TASKS
from unstride.views.given import check_preprocess
from unstride.views.images import Preprocess
from unstride.views.source import Canvas, PILImages, Source, as_source, autocast, check_images

MOST_NETWORKS = 5


class Enhanced(nn.Module):
    """One or more networks and a recipe. Called like the model, it returns what the model returns.

    Example:
        better = unstride.enhance(model)
        logits = better(images)
        print(better.explain(images)[0])
    """

    is_enhanced = True  # so that it is not enhanced or captured again

    def __init__(
        self,
        networks: Mapping[str, Network],
        recipe: Recipe,
        attention: Attention | None = None,
        preprocess: Preprocess | None = None,
        assumed: str = "",
        view_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.networks = dict(networks)
        self.model = self.networks["base"].model
        self.others = nn.ModuleDict({n: net.model for n, net in self.networks.items() if net.model is not self.model})
        self.recipe, self.attention = recipe, attention
        self.view_weights = view_weights  # of each view and class, where they were fitted (ClassTTA)
        self.preprocess = check_preprocess(preprocess)  # how images are prepared; with it, PIL images are taken, too
        self.assumed = assumed  # what the output is taken for, if neither the user nor the model's library said it
        self.training = False  # it always runs as in evaluation
        self.register_load_state_dict_pre_hook(under_model)
        if recipe.tensors is not None and attention is None and view_weights is None:
            raise OptionError(
                f"recipe: what was fitted is in {recipe.tensors}, and only the recipe's file knows where that is. Pass "
                "the file: recipe='fitted.toml'."
            )
        missing = [name for name in recipe.networks if name not in self.networks]
        if missing:
            names = ", ".join(map(repr, self.networks))
            raise OptionError(f"recipe: it names the network {missing[0]!r}; the networks here are {names}.")
        if any(kind.__module__.startswith("transformers.") for kind in type(self.model).__mro__):
            self.__class__ = class_named(type(self.model).__name__)

    @property
    def task(self) -> str:
        """What the output means."""
        return self.recipe.task

    # -- use
    def forward(self, images: Any = None, **inputs: Any) -> Any:
        """What the model returns, after all passes of the recipe.

        Args:
            images: a tensor (B, C, H, W) as the model takes it, also by the model's own name for it
                (`pixel_values=...`); a `Canvas`, whose pixels around the crop views may use; or PIL images, where the
                preprocessing is known.
        """
        if (torch.jit.is_tracing() or torch.compiler.is_exporting()) and exporting():
            raise OptionError(
                "an enhanced model decides image by image, so torch cannot export it. Use unstride.export(better, "
                "example, 'net.onnx') or `unstride export`."
            )
        source = self._source(image_argument(self.model, images, inputs) if inputs or images is None else images)
        with autocast(source, self.recipe.precision):
            return self._base(source) if self.recipe.plain else self._run(source).returned()

    def run(
        self,
        images: Any,
        *,
        details: bool = False,
        open_gates: bool = False,
        budgets: Sequence[int] = (),
        batch_size: int | None = None,
    ) -> StageResult:
        """The combined output and the cost of each image.

        Args:
            details: keep every pass, as `explain` does.
            batch_size: images that run together; all by default. Images that pass a gate are packed into full batches.
        """
        if batch_size is not None and (type(batch_size) is not int or not 1 <= batch_size < 1e9):
            raise OptionError(f"batch_size: got {batch_size!r:.60}, expected a whole number of images, at least 1.")
        wanted = () if isinstance(budgets, list | tuple) and not budgets else check_budgets(budgets)
        source = self._source(images)
        with autocast(source, self.recipe.precision):
            return self._run(source, details, True, open_gates, wanted, batch_size)

    def explain(self, images: Any) -> list[Prediction]:
        """One Prediction for each image: the answer, the base model's, every pass, why it stopped, what it cost."""
        return self.run(images, details=True).predictions(self.assumed)

    def curve(self, images: Any, budgets: Sequence[int]) -> dict[int, tuple[Tensor, list[float]]]:
        """(main output, cost of each image) at several budgets from one search: a search to 15 contains that to 4."""
        wanted = check_budgets(budgets)
        search = self.recipe.search
        if search is None or len(self.recipe.stages) > 1:
            raise OptionError("curve: needs a recipe of one stage with a Search, such as recipe='paper'.")
        return self.replace(budget=max(wanted)).run(images, budgets=wanted).at_budgets()

    def calibrate(self, images: Any, cost: float | None = None) -> Calibration:
        """Set the gates from unlabelled images: to a mean cost in forward passes, or to the share each gate asks for.

        Views of other sizes are temperature-matched to the original view.

        Example: `print(better.calibrate(images, cost=1.5))`. `images`: what `better` takes, or batches of that.
        """
        if cost is not None and (not isinstance(cost, int | float) or isinstance(cost, bool) or not 0 < cost < 1e9):
            raise OptionError(f"calibrate: cost: got {cost!r}, expected a mean number of forward passes, such as 1.5.")
        stages, matches = self.recipe.stages, self.task == "classification"
        results = [self.run(batch, details=matches, open_gates=True) for batch in batches(images)]
        runs = [open_run(result, self._stride(result)) for result in results]
        found = calibrate(matched_stages(stages, results) if matches and results else stages, runs, cost)
        self.recipe = self.recipe.changed(stages=found.stages)
        return found

    # -- set up
    def prepare(self, example: Any) -> Enhanced:
        """Capture what the recipe needs for images of the example's size; recipes without states need nothing."""
        source = self._source(example)
        views = dict.fromkeys(view for stage in self.recipe.stages for view in stage.views)
        for executor in executors_for(self.recipe, self.networks):
            for view in views:
                executor.space(source.rows([0]).render(view))
        warn_of_batch_dependence(self.networks, source.render(PLAIN))
        return self

    def refresh(self) -> None:
        """Take the networks as they are now, where `execution` keeps copies of their weights."""
        for network in self.networks.values():
            network.captures.refresh()
            network.counted.clear()

    def replace(self, recipe: str | Path | Recipe | None = None, **changes: Any) -> Enhanced:
        """The same networks (captures shared) with another recipe, or with changes: `better.replace(budget=30)`."""
        opened = open_recipe(self.recipe if recipe is None else recipe, self.model, self.preprocess, self.task)
        same = self.view_weights if recipe is None or recipe == self.recipe else None
        return Enhanced(
            self.networks,
            opened.recipe.changed(**changes),
            opened.attention or self.attention,
            opened.preprocess,
            self.assumed,
            opened.view_weights if same is None else same,
        )

    def save(self, path: str | Path, preprocess: Preprocess | None = None) -> Path:
        """Write the recipe with the fingerprints of the networks: `unstride.enhance(model, recipe="better.toml")`."""
        check_name(path)
        path, prepared = Path(path), check_preprocess(preprocess) or self.preprocess
        recipe = self.recipe
        if self.attention is not None or self.view_weights is not None:
            beside = path.with_suffix(".safetensors")
            write_fitted(beside, self.attention, self.view_weights, fingerprint(self.model))
            recipe = recipe.changed(tensors=beside.name)
        stored = {}
        for name, network in self.networks.items():
            own = network.preprocess or (prepared if network.model is self.model else None)
            data = None if own is None else {k: v for k, v in own.to_json().items() if v is not None}
            stored[name] = StoredNetwork(None, fingerprint(network.model), data, network.classes)
        return write(path, recipe, stored)

    def train(self, mode: bool = True) -> Enhanced:
        """The networks always run as in evaluation; their own mode is not changed."""
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the model's: `better.config`, `better.num_classes`; every model has a device."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")
            if model is None or name.startswith("__"):
                raise
            if name in ("device", "dtype") and not hasattr(model, name):
                return dict(zip(("device", "dtype"), place(model), strict=True))[name]
            return getattr(model, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As any module; a class that was made for a name is made again."""
        made = super().__reduce_ex__(protocol)
        return made if type(self) is Enhanced else (blank, (type(self).__name__,), *made[2:])

    def __repr__(self) -> str:
        """What it does in a few lines; not the whole network."""
        weights = sum(p.numel() for p in self.parameters())
        names = ", ".join(dict.fromkeys(type(n.model).__name__ for n in self.networks.values()))
        lines = [f"Enhanced({names}, {weights:,} weights", *str(self.recipe).splitlines()]
        lines += [f"{self.assumed} ({ASSUMED})"] if self.assumed else []
        return "\n  ".join(lines) + "\n)"

    # -- inside
    def _source(self, images: Any) -> Source:
        pixels = images.pixels if isinstance(images, Canvas) else images
        if isinstance(pixels, Tensor) and pixels.dtype != torch.uint8:  # which as_source prepares, or refuses
            check_images(pixels, axes=self.networks["base"].axes)
            self._check_device(pixels)
        source = as_source(images, self.preprocess)
        if isinstance(source, PILImages) and source is not images:  # prepared here: where the model is, as it takes it
            device, dtype = place(self.model)
            return replace(source, like=torch.empty(0, device=device, dtype=dtype))
        return source

    def _check_device(self, images: Tensor) -> None:
        """An InputError for images on another device than the model, unless it is spread over several."""
        weight = next(self.model.parameters(), None)
        if weight is None or weight.device == images.device or isinstance(self.model, nn.DataParallel):
            return
        if len({p.device for p in self.model.parameters()}) == 1:
            raise InputError(
                f"images: got a tensor on {images.device}, and the model is on {weight.device}. Pass "
                f"images.to({str(weight.device)!r}), or move the model."
            )

    def _run(
        self,
        source: Source,
        details: bool = False,
        costs: bool = False,
        open_gates: bool = False,
        budgets: tuple[int, ...] = (),
        batch_size: int | None = None,
    ) -> StageResult:
        record = Record(self.recipe, len(source), details, costs or details, open_gates, budgets, batch_size)
        with torch.no_grad():
            return run(self.recipe, self.networks, source, record, self.attention, self.view_weights)

    def _base(self, source: Source) -> Any:
        """The model's own output, untouched."""
        network = self.networks["base"]
        output, _, crop = sized(network.model, source.render(PLAIN), TASKS[self.task].pads, network.forward)
        return output if crop is None else pytree.tree_map(lambda leaf: cropped_output(leaf, crop), output)

    def _stride(self, result: StageResult) -> tuple[int, ...] | None:
        """Pixels after which the network repeats itself, for windows."""
        frame = result.record.frame
        if frame is None:
            return None
        executor = executors_for(self.recipe, self.networks)[0]
        device, dtype = place(self.model)
        channels = wanted_channels(self.model) or 3
        return executor.stride(torch.zeros(1, channels, *frame.size, device=device, dtype=dtype))


@cache
def class_named(name: str) -> type[Enhanced]:
    """Enhanced with the name of a model's class, by which transformers' pipelines know what they can run."""
    return type(name, (Enhanced,), {"__module__": __name__})


def blank(name: str) -> Enhanced:
    """An Enhanced of that class, to be filled by pickle."""
    return class_named(name).__new__(class_named(name))


Model = nn.Module | LoadedModel


def enhance(
    model: Model | Sequence[Model] | Mapping[str, Model],
    example: Tensor | None = None,
    *,
    recipe: str | Path | Recipe = "default",
    task: str | None = None,
    preprocess: Preprocess | Mapping[str, Preprocess] | None = None,
    execution: str = "auto",
    **changes: Any,
) -> Enhanced:
    """Make one or more pretrained models better at test time, without training.

    Args:
        model: a model, or what `unstride.models.load` returns; or several: a list (named base, net2, ...) or a dict of
            names. Several make a cascade: each further network runs where the answer so far is uncertain.
        example: images as the model takes them; finds out what the output means, and prepares for their size.
        recipe: a name ("default", "flip", "paper", ...), a file (an error if it was made for another model), or a
            `Recipe`.
        task: what the output means; by default what the model's library says, or its shape suggests.
        preprocess: how images become tensors, of all networks or by name. With it, the result also takes PIL images,
            and views use the pixels that the crop leaves out.
        execution: "auto" calls the model directly where a stage has no states, and a graph with live weights where it
            has; "frozen" is a faster graph with copies of the weights; "compile" is frozen, with `torch.compile`.
        changes: fields of the recipe, or of its one Search, Near or Gate: `recipe="paper", budget=4`.

    Example: `better = unstride.enhance(model); logits = better(images)`
    """
    networks = _networks(model, preprocess, check_execution(execution))
    base = networks["base"].model
    if example is not None:
        example = check_images(example, "example", networks["base"].axes)[:1]
    recipe_says = isinstance(recipe, Recipe) or is_file(recipe)
    first = next(iter(named_models(model).values()))
    if task is None and not recipe_says and isinstance(first, LoadedModel):
        task = first.task
    guess = known_task(task, base, recipe_says) if example is None else task_of(task, base, example, recipe_says)
    opened = open_recipe(recipe, base, networks["base"].preprocess, guess.task)
    chosen = opened.recipe
    if opened.stored is not None:
        check_networks(opened.stored, {name: network.model for name, network in networks.items()})
        for name, stored in opened.stored.networks.items():
            if name in networks and stored.classes:
                networks[name].classes = stored.classes
    if recipe == "default" and len(networks) > 1:
        names = tuple(n for n in networks if n != "base" or networks["base"].name == "base")
        chosen = cascade(names, chosen.task)
    chosen = chosen.changed(**changes)
    better = Enhanced(networks, chosen, opened.attention, opened.preprocess, guess.assumed, opened.view_weights)
    if example is not None:
        better.prepare(example)
    if guess.assumed:
        warnings.warn(TaskAssumed(str(guess)), stacklevel=2)
    return better


def _networks(model: Any, preprocess: Any, execution: str) -> dict[str, Network]:
    """By name; the first is also called base. `preprocess`: of all, or by name."""
    named = named_models(model)
    own = dict(preprocess) if isinstance(preprocess, Mapping) else dict.fromkeys(named, preprocess)
    unknown = sorted(set(own) - set(named))
    if unknown:
        raise OptionError(f"preprocess: got {unknown[0]!r}, expected names of networks: {', '.join(named)}.")
    made: dict[str, Network] = {}
    first = next(iter(named.values()))
    for name, given in named.items():
        prepared, module = own.get(name), given
        classes: tuple[int, ...] = ()
        if isinstance(given, LoadedModel):
            module, prepared = given.model, prepared or given.preprocess
            known = first.classes if isinstance(first, LoadedModel) else ()
            classes = given.class_map or class_map(known, given.classes, given.spec)
        made[name] = Network(name, checked_module(module), check_preprocess(prepared), execution, classes)
    return {"base": next(iter(made.values())), **made} if "base" not in made else made


def named_models(model: Any) -> dict[str, Any]:
    """One or more models by name: a dict as it is, of a list base, net2, net3, ..."""
    if isinstance(model, Mapping):
        named = dict(model)
    elif isinstance(model, Iterable) and not isinstance(model, nn.Module | str):
        named = {("base" if k == 1 else f"net{k}"): m for k, m in enumerate(model, 1)}
    else:
        named = {"base": model}
    if not 1 <= len(named) <= MOST_NETWORKS or not all(isinstance(name, str) and name for name in named):
        raise InputError(f"model: got {len(named)} networks, expected 1 to {MOST_NETWORKS}, each with a name.")
    return named
