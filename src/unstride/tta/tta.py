"""`TTA(model)`: the views of an image through a model, plain or enhanced, merged into one output."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unstride.compat import import_torchvision
from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError, DataError, InputError, OptionError
from unstride.recipe import policies
from unstride.recipe.policies import Policy
from unstride.recipe.view import View, parse_view
from unstride.storage.artefacts import check_finite, read_artefact, write_artefact
from unstride.storage.fingerprint import check_model, fingerprint
from unstride.storage.progress import progress as show_progress
from unstride.tta import fitting, methods
from unstride.tta.cache import Block, LogitCache, Rows, model_key
from unstride.tta.methods import GPS, Merger, Method
from unstride.views import transforms

import_torchvision()
from torchvision.transforms.v2 import functional as F  # noqa: E402

KIND = "tta"
TASKS = ("classification", "segmentation")


class TTA(nn.Module):
    """`TTA(model, policy="standard", method="mean", budget=30, mean=(...), std=(...))(images)`: test-time augmentation.

    `model` is any module; with an enhanced one the search runs inside each view, so B_total = B_tta x B_ours. Views are
    run one by one, and only those whose weight is not 0. Images are (B, C, H, W), as the model takes them: `mean` and
    `std` (or `preprocess`, with both) say how they were normalised, since a view is made of the image itself;
    without them, images are in [0, 1].

    `crop`: what the model sees of each view, by default the whole size; the paper gives 256 px images and crops 224.
    `divisor`: the sides of scaled images are multiples of it, for segmentation nets that need that.
    `chunk`: at most so many images at once; halved by itself where memory runs out.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str | Path | Policy = "expanded",
        method: str | Method = "augtta",
        budget: int = 10,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        preprocess: Any = None,
        task: str = "classification",
        crop: int | tuple[int, int] | None = None,
        divisor: int = 1,
        chunk: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if task not in TASKS:
            raise OptionError(f"task {task!r} is not one of {', '.join(TASKS)}; a flip is recipe='flip' for every task")
        if preprocess is not None:
            mean, std = mean or preprocess.mean, std or preprocess.std
        self.mean, self.std = _normalisation(mean, std)
        self.policy = policies.get(policy, seed)
        self.views = self.policy.first(budget)
        self.method = methods.get(method)
        self.budget, self.task = budget, task
        self.crop = (crop, crop) if isinstance(crop, int) else None if crop is None else (int(crop[0]), int(crop[1]))
        self.divisor, self.chunk = divisor, chunk
        if divisor < 1 or (chunk is not None and chunk < 1) or (self.crop is not None and min(self.crop) < 1):
            raise OptionError(f"divisor, chunk and crop must be at least 1, not {divisor}, {chunk} and {crop}.")
        if task == "segmentation":
            self._check_segmentation()
        self.model = model
        self.training = model.training
        self.weights: Tensor | None
        self.register_buffer("weights", None if self.method.learned else methods.uniform(budget))

    def extra_repr(self) -> str:
        method = f"method={self.method.name!r}, space={self.method.space!r}"
        return f"{self.policy!r}, {method}, budget={self.budget}, task={self.task!r}"

    @property
    def used(self) -> tuple[View, ...]:
        """The views that a forward runs: those with a weight."""
        return tuple(view for view, runs in zip(self.views, self._runs(), strict=True) if runs)

    @torch.no_grad()
    def forward(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The merged output, in the type that the model returns. Anything but the images goes to the model as it is."""
        self._check_images(images)
        merger = Merger(self.method, self.budget, self.weights)
        rebuild: Callable[[Tensor], Any] | None = None
        target: transforms.Size | None = None
        size = (int(images.shape[-2]), int(images.shape[-1]))
        with _evaluating(self.model):
            for index, (view, runs) in enumerate(zip(self.views, self._runs(), strict=True)):
                if not runs:
                    continue
                logits, again = self._run(self.see(images, view), args, kwargs)
                rebuild, valid = rebuild or again, None
                if self.task == "segmentation":
                    target = target or transforms.out_size(view, logits, size, self.divisor)
                    logits, valid = transforms.undo(view, logits, size, target, self.divisor)
                merger.add(index, logits, valid)
        assert rebuild is not None
        return rebuild(merger.result())

    def see(self, images: Tensor, view: View) -> Tensor:
        """What the model is given for a view of images (B, C, H, W)."""
        size = self.crop or (int(images.shape[-2]), int(images.shape[-1]))
        padded = size[0] > images.shape[-2] or size[1] > images.shape[-1]  # with black, which is not 0 once normalised
        pixels = padded or transforms.needs_pixels(view)
        if pixels:
            images = self._to_pixels(images, transforms.changes_values(view))
        seen = (
            transforms.apply(view, images, size)
            if self.task == "classification"
            else transforms.transform(view, images, size, self.divisor)
        )
        if pixels and self.mean is not None and self.std is not None:
            seen = F.normalize(seen, list(self.mean), list(self.std))
        return seen

    def fit(
        self,
        loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        cache_dir: str | Path | None = None,
        epochs: int = 30,
        lr: float = 0.01,
        seed: int = 0,
        progress: bool = True,
    ) -> fitting.FitReport:
        """`report = tta.fit(loader)`: learn the weights from (images, labels) batches, normalised as for forward.

        The logits of all the views are computed once, into `cache_dir` (4 bytes x views x images x classes): a killed
        fit, and a fit with another method or budget, goes on from there. Without `val_loader` one image in five, drawn
        with `seed`, validates. A loader must give the same batches each time to find them in the cache: no shuffling,
        no random augmentation.
        """
        if self.task != "classification" or not self.method.learned:
            raise OptionError(
                f"nothing to fit: {self.method.name} for {self.task}. "
                "The learned methods are gps, gps-shanmugam, augtta and classtta, for classification."
            )
        if epochs < 1 or not lr > 0:
            raise OptionError(f"epochs must be at least 1 and lr above 0, not {epochs} and {lr}.")
        cache = LogitCache(cache_dir, model_key(self.model, self.mean, self.std, self.crop))
        with torch.no_grad(), _evaluating(self.model):
            blocks = self._blocks(loader, cache, "training views", progress)
            val_blocks = None if val_loader is None else self._blocks(val_loader, cache, "validation views", progress)
        train, val = _split(blocks, val_blocks, self.budget, seed)
        budgets = sorted({max(1, self.budget // 10), max(1, self.budget // 3), self.budget})
        with show_progress(f"fitting {self.method.name}", len(budgets) * (epochs + 1), progress) as advance:
            runs = {
                b: fitting.fit(
                    self.method, train.first(b), val.first(b), epochs, lr, seed, lambda note: advance(1, note)
                )
                for b in budgets
            }
        best = runs[self.budget]
        self.weights = best.weights.to(_device(self.model))
        rows = tuple(fitting.at_budget(self.method, b, run, train, val) for b, run in runs.items())
        return fitting.report(
            self.method, best, train, val, [str(v) for v in self.views], rows, cache.computed, cache.found
        )

    def save(self, path: str | Path) -> Path:
        """`tta.save("tta.safetensors")`: weights, views, preprocessing, the model's fingerprint (not the model)."""
        if self.weights is None:
            raise OptionError(f"{self.method.name} has no weights to save. Fit it first: tta.fit(loader).")
        meta = {
            "kind": KIND,
            "policy": {
                "name": self.policy.name,
                "seed": self.policy.seed,
                "views": [str(view) for view in self.views],
            },
            "method": self.method.name,
            "space": self.method.space,
            "length": self.method.length if isinstance(self.method, GPS) else None,
            "budget": self.budget,
            "task": self.task,
            "mean": self.mean,
            "std": self.std,
            "crop": self.crop,
            "divisor": self.divisor,
            "model": fingerprint(_inner(self.model)),
        }
        return write_artefact(path, {"weights": self.weights}, meta)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> "TTA":
        """`TTA.load("tta.safetensors", model)`: what was saved, around the same network, plain or enhanced."""
        tensors, meta = read_artefact(path, KIND)
        check_model(path, meta.get("model"), _inner(model))
        try:
            saved = meta["policy"]
            policy = Policy(saved["name"], tuple(parse_view(text) for text in saved["views"]), saved["seed"])
            method = methods.get(meta["method"])
            changes = {"space": meta["space"]} | ({"length": meta["length"]} if isinstance(method, GPS) else {})
            method = type(method)(**{**vars(method), **changes})
            options = {name: meta[name] for name in ("mean", "std", "task", "crop", "divisor")}
            tta = cls(model, policy, method, meta["budget"], **options)
            weights = tensors["weights"]
            fits = weights.ndim in (1, 2) and len(weights) == tta.budget and bool((weights >= 0).all())
            check_finite(path, tensors)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            raise ArtefactError(f"{path} does not hold a usable TTA ({error}). Save it again.") from error
        if not fits:
            raise ArtefactError(f"{path} has weights {tuple(weights.shape)} for {tta.budget} views. Save it again.")
        tta.weights = weights.to(_device(model))
        return tta

    def _runs(self) -> list[bool]:
        if self.weights is None or isinstance(self.method, methods.MaxTTA):
            return [True] * self.budget
        return (self.weights.reshape(self.budget, -1) > 0).any(1).tolist()

    def _run(
        self, images: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """The model's logits, a chunk at a time, and how to put logits into its kind of output."""
        if args or kwargs or self.chunk is None or len(images) <= self.chunk:
            try:
                return self._logits(self.model(images, *args, **kwargs))
            except torch.OutOfMemoryError:
                if args or kwargs or len(images) == 1:
                    raise
                self.chunk = (len(images) + 1) // 2  # not back up: the next batch would run out again
        parts = [self._run(part, args, kwargs) for part in images.split(self.chunk)]
        return torch.cat([logits for logits, _ in parts]), parts[0][1]

    def _logits(self, output: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        logits, rebuild = _unpack(output)
        wanted = 2 if self.task == "classification" else 4
        if logits.ndim != wanted:
            shape = "(B, K)" if wanted == 2 else "(B, K, H, W)"
            raise InputError(
                f"the model returned {tuple(logits.shape)}; task={self.task!r} needs logits {shape}. Is the task right?"
            )
        return logits, rebuild

    def _blocks(self, loader: Iterable[Any], cache: LogitCache, label: str, progress: bool) -> list[Block]:
        device = _device(self.model)
        blocks: list[Block] = []
        length = len(loader) * self.budget if isinstance(loader, Sized) else None
        with show_progress(label, length, progress) as advance:
            for batch in loader:
                images, labels = self._batch(batch)
                on_device = images.to(device)

                def compute(view: View, on_device: Tensor = on_device) -> Tensor:
                    return self._run(self.see(on_device, view), (), {})[0]

                blocks.append(cache.block(images, labels, self.views, compute, lambda: advance(1, "")))
        if not blocks:
            raise DataError("the loader gave no batch. Give one with (images, labels).")
        return blocks

    def _batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, tuple | list) or len(batch) < 2 or not isinstance(batch[0], Tensor):
            raise DataError(
                f"the loader must give (images, labels) with a tensor of images, not {type(batch).__name__}."
            )
        images, labels = batch[0], torch.as_tensor(batch[1])
        self._check_images(images)
        if labels.shape != images.shape[:1] or labels.is_floating_point():
            raise DataError(f"labels must be whole numbers ({len(images)},), not {labels.dtype} {tuple(labels.shape)}.")
        return images, labels

    def _check_images(self, images: Tensor) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
            came = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise InputError(f"images must be a tensor (B, C, H, W) with at least one image, not {came}.")
        if self.mean is not None and images.shape[1] != len(self.mean):
            raise InputError(f"images have {images.shape[1]} channels, mean and std have {len(self.mean)}.")

    def _check_segmentation(self) -> None:
        if self.method.learned:
            raise OptionError(f"{self.method.name} is for classification. For segmentation use method='mean' or 'max'.")
        if self.crop is not None:
            raise OptionError("crop is for classification: a segmentation output must cover the whole image.")
        for view in self.views:
            transforms.check_undo(view)

    def _to_pixels(self, images: Tensor, strict: bool) -> Tensor:
        """Un-normalised images in [0, 1] (uint8 stays as it is)."""
        if not images.is_floating_point():
            return images
        if self.mean is not None and self.std is not None:
            mean, std = (
                torch.tensor(v, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
                for v in (self.mean, self.std)
            )
            images = images * std + mean
        elif not strict:
            return images
        low, high = float(images.min()), float(images.max())
        if strict and not (low > -0.5 and high < 1.5):
            raise InputError(
                f"views that change colours need pixels in [0, 1], these are in [{low:.2f}, {high:.2f}]. "
                "Give TTA the mean and std that the images were normalised with."
            )
        return images.clamp(0, 1)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _inner(model: nn.Module) -> nn.Module:
    """The network itself: with or without a search around it, the weights of views mean the same."""
    return model.model if isinstance(model, Enhanced) else model


def _normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    if mean is None and std is None:
        return None, None
    if mean is None or std is None or len(mean) != len(std) or not all(s > 0 for s in std):
        raise OptionError(f"mean and std go together, one positive std per channel: mean={mean!r}, std={std!r}.")
    return tuple(map(float, mean)), tuple(map(float, std))


def _unpack(output: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The logits in a model's output, and how to put others in their place; the rest stays the first view's."""
    if isinstance(output, Tensor):
        return output, lambda logits: logits
    if isinstance(output, Mapping):
        key = next((k for k in ("out", "logits") if isinstance(output.get(k), Tensor)), None)
        if key is not None:
            return output[key], lambda logits: _with_item(output, key, logits)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        rest = list(output[1:])
        if hasattr(output, "_fields"):
            return output[0], lambda logits: type(output)(logits, *rest)
        return output[0], lambda logits: type(output)([logits, *rest])
    raise InputError(
        f"the model returned {type(output).__name__}; "
        "wanted a tensor, a tuple that starts with one, or a dict with 'out' or 'logits'."
    )


def _with_item(output: Any, key: str, value: Tensor) -> Any:
    output = copy.copy(output)
    output[key] = value
    return output


def _split(blocks: list[Block], val_blocks: list[Block] | None, budget: int, seed: int) -> tuple[Rows, Rows]:
    """Training and validation rows; without validation blocks, one image in five of the training ones."""
    classes = blocks[0].load().shape[-1]
    labels = torch.cat([block.labels for block in blocks + (val_blocks or [])])
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        low, high = int(labels.min()), int(labels.max())
        raise DataError(f"labels go from {low} to {high}, the model has {classes} classes: 0 to {classes - 1}.")
    if val_blocks is not None:
        return Rows(blocks, [None] * len(blocks), budget), Rows(val_blocks, [None] * len(val_blocks), budget)
    sizes = [len(block.labels) for block in blocks]
    total = sum(sizes)
    if total < 2:
        raise DataError(f"{total} image is not enough to fit and validate. Give more images, or a val_loader.")
    held = torch.zeros(total, dtype=torch.bool)
    held[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: max(1, total // 5)]] = True
    parts = held.split(sizes)
    return (
        Rows(blocks, [(~part).nonzero()[:, 0] for part in parts], budget),
        Rows(blocks, [part.nonzero()[:, 0] for part in parts], budget),
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back, whatever happens."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
