"""The paper's ablations on real networks: search range, aggregation, Align, criterion, budget, criterion of a state.

    python -m benchmarks.ablations --assets DIR --out docs/results-ablations.md

The runs are `unstride.paper`'s own, with these networks in place of the paper's: evaluated in shards under `--cache`,
so that a killed run goes on where it was. Pictures are written beside the page.
"""

import argparse
import csv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.frontier_page import beside
from benchmarks.nets import HALF, IMAGENET, cifar, imagenet
from unstride.data import Dataset
from unstride.data import load as load_data
from unstride.models import Loaded
from unstride.paper import Cell, Exhibit, Result, Run, Value
from unstride.paper.figures import STATES
from unstride.paper.render import picture
from unstride.paper.reproducing import Job
from unstride.proof import Row
from unstride.views.images import Preprocess

NETS = {"cifar20": "CIFAR-10 ResNet-20", "cifar56": "CIFAR-10 ResNet-56", "mobilenetv2": "ImageNet MobileNetV2"}
DATA = {"cifar20": "cifar10", "cifar56": "cifar10", "mobilenetv2": "imagenet"}
TEST = {"cifar20": 1000, "cifar56": 500, "mobilenetv2": 200}
FIT = {"cifar10": (800, 200), "imagenet": (80, 20)}  # training images to fit the attention on, and to validate
BUDGETS = (1, 2, 3, 4, 6, 8, 10, 13, 15)
B = 10  # of the tables
ALONE = 16  # states that are looked at alone, in lexicographic order: all of two layers


@dataclass(frozen=True)
class Assets:
    """The networks and images of `--assets` as a place for the paper's runs."""

    path: Path
    cache: Path
    note: str = ""
    lr: float | None = None

    def check(self, needs: Sequence[tuple[str, str]]) -> None:
        return

    def key(self, model: str, data: str) -> str:
        return model

    def load(self, model: str, data: str) -> Loaded:
        if data == "cifar10":
            net = cifar(self.path, int(model.removeprefix("cifar"))).model
            return Loaded(model, net, Preprocess(None, None, *IMAGENET), "classification", weights="third party")
        net = imagenet(self.path, model, limit=1).model
        return Loaded(model, net, Preprocess(None, 224, *HALF), "classification", weights="third party")

    def test(self, loaded: Loaded, data: str) -> Dataset:
        name = "test_even" if data == "cifar10" else "val_1k_256"
        return load_data(self._name(data, name), loaded.preprocess, limit=TEST[loaded.spec])

    def fitting(self, loaded: Loaded, data: str) -> tuple[Dataset, Dataset]:
        train, validation = FIT[data]
        whole = self._name(data, "train_5k" if data == "cifar10" else "train_500_256")
        both = load_data(whole, loaded.preprocess, limit=train + validation)
        every = (train + validation) // validation
        held = both.chosen[::every]
        return replace(both, chosen=[i for i in both.chosen if i not in held]), replace(both, chosen=held)

    def _name(self, data: str, part: str) -> str:
        if data == "cifar10":
            return f"npz:{self.path / 'cifar10' / part}.npz"
        folder = self.cache / part
        if not (folder / "labels.csv").exists():
            with zipfile.ZipFile(self.path / "imagenet" / f"{part}.zip") as archive:
                names = [n for n in archive.namelist() if not n.endswith("labels.csv")]
                archive.extractall(folder, names)
                (folder / "labels.csv").write_bytes(archive.read("labels.csv"))  # last: it says that all is there
        return f"csv:{folder / 'labels.csv'}"


def settings(net: str) -> dict[str, dict[str, Run]]:
    """The runs of each table, the default among them."""
    data = DATA[net]
    ours = Run(net, data, B)
    learned = Run(net, data, B, learned=True)
    spans = {"1 .. L": (1, 0), "1 .. L-1": (1, 1), "2 .. L": (2, 0), "2 .. L-1": (2, 1)}
    if data == "cifar10":  # two layers
        spans = {"1 and 2": (1, 0), "1": (1, 1), "2": (2, 0)}
    align = {
        "entropy": ours,
        "entropy, no Align": replace(ours, align=False),
        "mean": replace(ours, aggregate="mean"),
        "mean, no Align": replace(ours, aggregate="mean", align=False),
        "max": replace(ours, aggregate="max"),
        "attention, entropy criterion": replace(learned, criterion="entropy"),
    }
    if data == "cifar10":  # a fit of its own
        align["attention, entropy criterion, no Align"] = replace(learned, criterion="entropy", align=False)
    criteria = {
        "entropy": ours,
        "displacement": replace(ours, criterion="displacement"),
        "random": replace(ours, criterion="random"),
        "learned, attention": learned,
    }
    searched = {name: ours if span == _usual(net) else replace(ours, span=span) for name, span in spans.items()}
    return {"Layers that are searched": searched, "Aggregation and Align": align, "Criterion": criteria}


def _usual(net: str) -> tuple[int, int]:
    return (1, 0) if DATA[net] == "cifar10" else (2, 1)


def curve(net: str) -> list[Run]:
    return [Run(net, DATA[net], b) for b in BUDGETS]


HEAD = "| network | {} | top-1 % | gain over plain, 95 % interval | NLL | MACs / plain |\n" + "|---" * 6 + "|"


def line(net: str, name: str, row: Row) -> str:
    g = row.gain
    gain = f"{100 * g['gain']:+.2f} [{100 * g['low']:+.2f}, {100 * g['high']:+.2f}]"
    cells = [
        NETS[net],
        name,
        f"{100 * row.metrics['top1']:.2f}",
        "" if row.plain else gain,
        f"{row.metrics['nll']:.4f}",
    ]
    return "| " + " | ".join([*cells, f"{row.macs:.2f}"]) + " |"


def rank_correlation(values: Sequence[Value]) -> float:
    """Spearman's, of criterion and accuracy over the states; of equal values each has their mean rank."""

    def ranks(column: str) -> np.ndarray:
        x = np.array([float(v.ours or 0) for v in values if v.column == column])
        return (x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2

    return float(np.corrcoef(ranks("criterion"), ranks("top-1 %"))[0, 1])


def states(job: Job, net: str) -> tuple[Exhibit, list[Value]]:
    cells = [Cell(("entropy",), STATES, Run(net, DATA[net], ALONE), "top1")]
    if DATA[net] == "cifar10":
        cells.insert(0, Cell(("learned",), STATES, Run(net, DATA[net], ALONE, True), "top1"))
    title = f"States alone, {NETS[net]}"
    exhibit = Exhibit(
        f"criterion-{net}", "", title, ("criterion",), tuple(cells), shape="scatter", x="mean over the images"
    )
    return exhibit, [value for cell in cells for value in _kept(job, net, cell)]


def _kept(job: Job, net: str, cell: Cell) -> list[Value]:
    """`every_state`, once."""
    images = job.row(Run(net, DATA[net])).images
    file = job.folder / f"states-{net}-{cell.row[0]}-{images}.csv"
    if not file.exists():
        rows = [[v.row[1], v.column, v.ours, v.images] for v in job.every_state(cell)]
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows(rows)
    with file.open(newline="") as stream:
        return [Value((cell.row[0], s), column, float(x), images=int(n)) for s, column, x, n in csv.reader(stream)]


def measure(job: Job, net: str) -> None:
    runs = [run for table in settings(net).values() for run in table.values()]
    job.run([*curve(net), *runs])
    states(job, net)


# ---------------------------------------------------------------------------------------------------------------- page


WORDS = """\
None of these choices can be told from another by accuracy on so few images; the likelihood tells a few apart. Use the
defaults, and spend the compute on other looks first: a mirror and a wider view gain more than any choice made here.

On so few images accuracy does not tell the rows apart: every interval of a gain covers zero. Where the likelihood (NLL)
points the same way on every network, it says:

- Align is worth having: without it, entropy and mean are both slightly worse.
- The maximum over the states is the worst learning-free aggregation; entropy and mean are near each other.
- The entropy criterion does not guide the search to better states than the nearest ones (`displacement`), which give
  the better likelihood. A state's mean entropy does tell something of its accuracy, see the last section.
- Attention with the learned criterion has a better likelihood than the learning-free default on two networks, and a
  much worse one on ResNet-56. Fitted on images that this network knows by heart, as they are, it only learns to be
  surer; that is why `fit` makes such images unfamiliar by default ([results](results.md) have that fit).
- On MobileNetV2 ten states do not reach the last of five layers: rows with and without it are the same."""


def page(job: Job, nets: Sequence[str], folder: Path, command: str) -> str:
    counts = ", ".join(f"{NETS[n]} on {job.row(Run(n, DATA[n])).images:,} images" for n in nets)
    fits = ", ".join(f"{FIT[d][0]} + {FIT[d][1]} ({d})" for d in dict.fromkeys(DATA[n] for n in nets))
    out = ["# Results: ablations", "", WORDS, "", f"Made by `{command}`:"]
    out += ["weights and images are third parties' and not part of this project.", ""]
    out += [f"B = {B} states unless said otherwise, learning-free with default options but for what a table varies."]
    out += [
        f"{counts}.",
        "Intervals are paired bootstrap intervals over images: where those of two rows overlap widely,",
    ]
    out += ["the rows are not told apart."]
    out += [f"The attention is fitted on training images as they are (`familiar=False`), fit + validation: {fits}.", ""]
    out += [beside("results-ablations.md"), ""]
    for title in settings(nets[0]):
        out += [f"## {title}", "", HEAD.format(title.split()[0].lower())]
        for net in nets:
            out.append(line(net, "plain", job.row(Run(net, DATA[net]))))
            out += [line(net, name, job.row(run)) for name, run in settings(net)[title].items()]
        out.append("")
    out += ["## Accuracy against budget", "", "![Accuracy against budget](images/ablation-budget.png)", ""]
    out += ["| network | " + " | ".join(f"B = {b}" for b in BUDGETS) + " |", "|---" * (1 + len(BUDGETS)) + "|"]
    for net in nets:
        rows = [job.row(run) for run in curve(net)]
        cells = [f"{100 * row.metrics['top1']:.2f} at {row.macs:.1f}x" for row in rows]
        out.append(f"| {NETS[net]} | " + " | ".join(cells) + " |")
    _draw_curves(job, nets, folder / "images" / "ablation-budget.png")
    out += ["", "## Criterion of a state against its accuracy alone", ""]
    out += ["A point is a state, used alone on every image. The search would be well guided if a lower criterion went"]
    out += ["with a higher accuracy: a rank correlation near -1.", ""]
    for net in nets:
        exhibit, values = states(job, net)
        name = f"ablation-{exhibit.name}.png"
        picture(Result(exhibit, tuple(values), ())).savefig(folder / "images" / name)
        kinds = dict.fromkeys(v.row[0] for v in values)
        found = []
        for kind in kinds:
            mine = [v for v in values if v.row[0] == kind]
            top = [float(v.ours or 0) for v in mine if v.column == "top-1 %"]
            found.append(
                f"{kind}: rank correlation {rank_correlation(mine):+.2f} over {len(top)} states; the plain state "
                f"{top[0]:.2f} %, the others {min(top[1:]):.2f} to {max(top[1:]):.2f} %"
            )
        out += [f"{NETS[net]}, {'; '.join(found)}.", "", f"![{exhibit.title}](images/{name})", ""]
    return "\n".join(out)


def _draw_curves(job: Job, nets: Sequence[str], path: Path) -> None:
    cells = tuple(
        Cell((NETS[net], "gain over plain, points of top-1"), str(run.budget), run, "top1")
        for net in nets
        for run in curve(net)
    )
    labels = ("network", "measure")
    exhibit = Exhibit("budget", "", "Gain against budget", labels, cells, shape="lines", x="states, B")
    values = tuple(Value(c.row, c.column, 100 * job.row(c.run).gain["gain"]) for c in cells)
    picture(Result(exhibit, values, ())).savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--out", type=Path, required=True, help="the page; pictures go to images/ beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    (args.out.parent / "images").mkdir(parents=True, exist_ok=True)
    job = Job(Assets(args.assets, args.cache), args.cache, epochs=20, seed=0, progress=True)
    for net in args.nets:
        measure(job, net)
    command = "python -m benchmarks.ablations --assets DIR --out docs/results-ablations.md"
    command += "" if args.nets == list(NETS) else f" --nets {' '.join(args.nets)}"
    args.out.write_text(page(job, args.nets, args.out.parent, command))


if __name__ == "__main__":
    main()
