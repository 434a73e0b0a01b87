"""Labelled images by name, for every task.

    data = load("imagenet:/data/imagenet", preprocess, limit=1000)
    x, target = data.tensors(0)  # (C, H, W), and a class or a mask (H, W) with 255 where there is no label

The name is KIND:PATH:

    imagenet     val/ and train/ with a folder per class (wnid); or a flat val/ beside torchvision's meta.bin
    flowers102   torchvision's flowers-102/: jpg/, imagelabels.mat, setid.mat
    cifar10      torchvision's own files, also cifar100
    folder       a folder per class: its name is the model's name of it; of a model without names, in sorted order as
                 torchvision's ImageFolder
    csv          lines of path,label; paths are relative to the file, labels are the model's names or class numbers;
                 with a first row of titles, more columns: `group`, or any other that says which images belong together
    npz          arrays x, uint8 (N, H, W, 3) or (N, H, W), and y (N,)
    hf           saved by datasets' save_to_disk
    cityscapes   leftImg8bit/ and gtFine/
    ade20k       ADEChallengeData2016/: images/ and annotations/
    masks        images/ and masks/, or SPLIT/images and SPLIT/masks, index or palette PNGs;
                 optional classes.txt with a name per line, and ignore.txt with the value of pixels without a label
    depth        images/ and depth/, 16-bit PNG (0: not measured; scale.txt: what they are divided by) or .npy
    labels       a CSV with titles path,NAME,NAME,... and 0 or 1 below each name: several labels for an image
    values       a CSV with titles path,TITLE,... and numbers: what a regression should give
    pairs        a CSV with titles query,match and two images that belong together in each row: for embeddings

Where a class is all that is known, it also says which images belong together: class folders serve embeddings.

or `sample` and `sample-segmentation`, the embedded ones. Listing is quick; an image is decoded when it is read, so that
a damaged one is an error (DataError, with its name) of that item only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from unstride.data import classification, segmentation, targets
from unstride.data.items import Item, Listing, item_key
from unstride.data.labels import Classes, legend, match
from unstride.errors import DataError, OptionError, SpecError
from unstride.models.libraries import close_to
from unstride.storage.contents import FileDigests
from unstride.storage.fingerprint import text_digest
from unstride.tasks.tasks import TASKS as MEANING
from unstride.views.images import Preprocess

__all__ = ["KINDS", "TASKS", "Dataset", "Item", "load"]

KINDS = {**classification.KINDS, **segmentation.KINDS, **targets.KINDS}
TASKS = dict.fromkeys(classification.KINDS, "classification") | dict.fromkeys(segmentation.KINDS, "segmentation")
TASKS |= targets.TASKS


@dataclass(frozen=True)
class Dataset:
    """Items in a fixed order. `data[i]` is listed, not decoded; `data.tensors(i)` is what a model wants."""

    name: str
    task: str
    preprocess: Preprocess
    listing: Listing
    chosen: Sequence[int]

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, or () where only numbers are known."""
        return self.listing.classes

    @property
    def legend(self) -> str:
        """Which label means which class, in one line: the first few, and how many there are."""
        if self.task in ("dense", "regression") or self.name.startswith("pairs:"):
            return f"targets: {self.task}"
        return legend(self.listing)

    def serving(self, task: str | None) -> Dataset:
        """The same for another task that its labels say enough for: of one class, an embedding can be judged."""
        return replace(self, task=task) if (self.task, task) == ("classification", "embedding") else self  # type: ignore[arg-type]

    @property
    def groups(self) -> tuple[str, ...]:
        """Of each image, which group it belongs to, from the column `group` of a table; () without one."""
        return self.column("group") if "group" in self.listing.columns else ()

    def column(self, title: str) -> tuple[str, ...]:
        """What a column of the table says of each image: `data.column("patient")`."""
        columns = self.listing.columns
        if title not in columns:
            there = f"there are {', '.join(columns)}" if columns else "a csv: file with a first row of titles has some"
            raise DataError(f"{self.name}: there is no column {title!r}; {there}")
        return tuple(columns[title][index] for index in self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Item:
        return self.listing.item(self.chosen[index])

    def __iter__(self) -> Iterator[Item]:
        return (self[i] for i in range(len(self)))

    def labelled(self) -> tuple[list[str], list[int]]:
        """Of each image its id and its class, where that is one number; nothing is decoded."""
        known = [(item.id, item.target) for item in self if isinstance(item.target, int)]
        return [name for name, _ in known], [label for _, label in known]

    def tensors(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Item -> (C, H, W) as the model wants it, and its class, or its mask (H, W) at the size of the file."""
        image, target = self[index].read()
        return self.preprocess(image), target

    def keys(self, digests: FileDigests | None = None) -> list[str]:
        """What identifies each image with its target, whatever the path of the data set."""
        digests = digests or FileDigests()
        return [item_key(item, self.listing.stamp, digests) for item in self]

    def files(self) -> Iterator[Path]:
        """All files of the images and targets."""
        return (file for item in self for file in item.files)

    def fingerprint(self, digests: FileDigests | None = None) -> str:
        """Of the images and targets in their order, by contents; never of the path."""
        what = [self.task, self.classes, self.listing.stamp, self.keys(digests)]
        return text_digest(what)[:16]

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.task}, {len(self)} images, {len(self.classes) or 'unnamed'} classes)"


def check_limit(limit: int | None) -> None:
    """Refuse a limit that is no positive number of images."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise OptionError(f"limit is {limit!r}; expected a positive number of images")


def load(
    name: str,
    preprocess: Preprocess,
    split: str | None = None,
    limit: int | None = None,
    classes: int | Sequence[str] | None = None,
    ignore: int | None = None,
) -> Dataset:
    """The data set `name`, KIND:PATH (see the module's text).

    split    which part; default: the one that the kind is usually evaluated on
    limit    so many images, spread evenly over the whole, because data sets are often sorted by class
    classes  of the model, their names in its order or how many: labels become its numbers, and one that it cannot
             predict is an error that names the image, the row or the folder
    ignore   in `masks`, the value of pixels without a label, beside 255
    """
    if not isinstance(name, str):
        raise SpecError(f"data {name!r} is {type(name).__name__}; expected KIND:PATH")
    if not isinstance(preprocess, Preprocess):
        raise OptionError(f"preprocess is {type(preprocess).__name__}; expected unstride.Preprocess, as the model's")
    if not isinstance(split, str | None):
        raise OptionError(f"split is {split!r}; expected its name")
    kind, _, path = name.partition(":")
    if kind not in KINDS:
        kinds = ", ".join(k if k.startswith("sample") else f"{k}:PATH" for k in KINDS)
        near = _kind_of(name) or close_to(kind, KINDS)
        raise SpecError(f"data {name!r} is not understood; expected one of {kinds}{near}")
    if bool(path) == kind.startswith("sample"):
        raise SpecError(f"data {name!r}: expected {kind if kind.startswith('sample') else f'{kind}:PATH'}")
    check_limit(limit)
    task = TASKS[kind]
    if MEANING[task].maps and preprocess.crop is not None:
        raise OptionError(
            f"the preprocessing crops to {preprocess.crop}, but a mask needs the whole image: use crop=None"
        )
    if ignore is not None and kind != "masks":
        raise OptionError(f"ignore is {ignore}, but {kind} says itself which pixels have no label; leave it out")
    if limit is not None and kind == "pairs":
        raise OptionError("limit: a pair needs both of its images; give a shorter table")
    known = Classes.of(classes)
    listing = KINDS[kind](Path(path), split, known.count, **({"ignore": ignore} if kind == "masks" else {}))
    total = len(listing.entries)
    if not total:
        raise DataError(f"{name}: no image found" + (f" in split {split!r}" if split else ""))
    if task in ("classification", "segmentation"):
        listing = match(name, listing, known)
    elif task == "multilabel":
        listing = targets.match_labels(name, listing, known)
    count = min(limit or total, total)
    return Dataset(name, task, preprocess, listing, [i * total // count for i in range(count)])


def _kind_of(name: str) -> str:
    """Where a path came without its kind, what was probably meant, as a question."""
    path, likely = Path(name), ""
    try:
        if name and path.is_dir():
            likely = "masks" if (path / "masks").is_dir() and (path / "images").is_dir() else "folder"
        elif path.is_file():
            likely = {".csv": "csv", ".npz": "npz"}.get(path.suffix, "")
    except (OSError, ValueError):  # what no path can be
        return ""
    return f"; did you mean {likely}:{name}?" if likely else ""
