"""What is best at each cost on real networks: `python -m benchmarks.frontier --assets DIR [--nets resnet50 ...]`.

Tuned on one half of the images, measured on the other, both ways, for several random halvings: what is chosen is a
matter of chance, too, and their mean is of less of it. What the networks say is kept in `--cache`,
so a run goes on where it was. Writes benchmarks/frontier.csv, a row per network and setting, from which
`python -m benchmarks.frontier_page` makes the page. The paper's search is the dearest row: `--paper N` runs it on the
first N images only, `--paper 0` leaves its older rows.
"""

import argparse
import csv
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

import unstride  # noqa: F401  (before torchvision)
from benchmarks.frontier_page import RIVALS, ROWS
from benchmarks.nets import REAL, real
from unstride.enhanced import Enhanced, enhance
from unstride.evaluation.metrics import bootstrap
from unstride.procedure.temperature import fit_temperature, nll
from unstride.recipe import get
from unstride.storage.artefacts import read_artefact, write_artefact
from unstride.storage.distributed import World, world
from unstride.storage.fingerprint import fingerprint
from unstride.tuning.candidates import Unit, candidates, usual
from unstride.tuning.choose import Choice, choose, stages_of
from unstride.tuning.gather import gather
from unstride.tuning.parts import Part, parts
from unstride.tuning.pool import Pool
from unstride.tuning.simulate import simulate
from unstride.views.policies import IDENTITY

BUDGETS = (4, 10, 15)
HALVINGS = 5
TOLD = 2  # of the looks that were chosen
CEILINGS = (1.1, 1.25, 1.5, 1.6, 2.0, 3.0, 4.0, 5.0, 10.0)
FIELDS = ("net", "images", "setting", "cost", "accuracy", "gain", "low", "high", "corrected", "corrupted")
FIELDS += ("nll", "warm", "warm_gain", "warm_low", "warm_high", "what")
AGAINST = ("net", "images", "rival", "cost", "ours", "points", "low", "high")
AGAINST += ("likelier", "likelier_low", "likelier_high", "what")
Searched = dict[int, tuple[Tensor, Tensor]]


def pooled(
    assets: Path, net: str, cache: Path, limit: int | None, size: str, searched: int | None
) -> tuple[str, Pool, list[Unit], Searched]:
    found = real(assets, net, limit)
    canvas, _ = found.batches[0]
    better = enhance(found.model, canvas.rows([0]).see(IDENTITY), recipe="plain", task="classification")
    given = list(parts(found.batches, canvas.pixels.new_zeros(())))
    units = candidates(given[0].source, size, "classification")
    with world() as us:
        pool = gather(better, given, units, cache / net, us, True, False).pool
        return found.name, pool, units, search(better, given, searched, cache / net, us)


def search(better: Enhanced, given: list[Part], images: int | None, cache: Path, us: World) -> Searched:
    """The paper's search on the first images: per budget logits (N, K) and costs (N,), shard by shard in files."""
    better = better.with_options(recipe="paper")
    found: dict[int, list[tuple[Tensor, Tensor]]] = {b: [] for b in BUDGETS}
    name, seen = fingerprint(better.model)[:16], 0
    for k, part in enumerate(given):
        if images is not None and seen >= images:
            break
        seen += len(part.source)
        file = cache / f"paper-{name}-{part.key}.safetensors"
        if not file.is_file() and k % us.size == us.rank:
            curve = better.costs(part.source.see(IDENTITY), list(BUDGETS))
            tensors = {f"logits{b}": curve[b][0].float() for b in BUDGETS}
            tensors |= {f"cost{b}": torch.tensor(curve[b][1], dtype=torch.float64) for b in BUDGETS}
            write_artefact(file, tensors, {"kind": "paper"})
            print(f"searching: {seen}", flush=True)
    us.wait()
    seen = 0
    for part in given:
        if images is not None and seen >= images:
            break
        seen += len(part.source)
        tensors, _ = read_artefact(cache / f"paper-{name}-{part.key}.safetensors", "paper")
        for b in BUDGETS:
            found[b].append((tensors[f"logits{b}"], tensors[f"cost{b}"]))
    return {b: (torch.cat([x for x, _ in v]), torch.cat([c for _, c in v])) for b, v in found.items() if v}


@dataclass(frozen=True, eq=False)
class Answers:
    """Of each image (N,): whether it is right, its cost, its NLL, and that after a temperature fitted on others.

    Of several halvings these are means.
    """

    right: Tensor
    costs: Tensor
    nll: Tensor
    warm: Tensor

    def __getitem__(self, rows: slice) -> "Answers":
        return Answers(*(getattr(self, f.name)[rows] for f in fields(self)))


class Halves:
    """Random halves of a pool, each measured by what was chosen on the other, several times over."""

    def __init__(self, net: str, pool: Pool, units: list[Unit], paper: Searched) -> None:
        self.net, self.pool, self.paper = net, pool, paper
        self.units = [u for u in units if u.view in self.pool.work]
        assert self.pool.labels is not None
        self.labels = self.pool.labels
        n = len(self.pool)
        orders = [torch.randperm(n, generator=torch.Generator().manual_seed(k)) for k in range(HALVINGS)]
        self.halvings = [(order[: n // 2], order[n // 2 :]) for order in orders]
        self.plain = self._fixed(self.pool.plain, torch.ones(n, dtype=torch.float64))
        self._tuned: dict[float, tuple[Answers, str]] = {}

    def rows(self) -> list[dict[str, object]]:
        out = [self._row("plain", self.plain, "")]
        alone = {f"alone: {u}": [u] for u in self.units if u.states == "plain"}
        for name, units in usual(self.units).items():
            out.append(self._row(name, self._fixed(*self._mixed(units)), ", ".join(map(str, units))))
        for name, units in alone.items():
            look = next(x for x in self.pool.looks if x.view == units[0].view)
            costs = torch.full((len(self.pool),), self.pool.cost([look]), dtype=torch.float64)
            out.append(self._row(name, self._fixed(self.pool.logits[self.pool.index[look]], costs), ""))
        for unit in self.units:
            if unit.states != "plain":
                out.append(self._row(f"near states: {unit}", self._fixed(*self._mixed([unit])), ""))
        for budget, found in self.paper.items():
            out.append(self._row(f"paper, {budget} states", self._fixed(*found), ""))
        default = simulate(self.pool, get("default").stages)
        out.append(self._row("default", self._fixed(default.logits, default.costs), str(get("default").stages[1])))
        for ceiling in CEILINGS:
            out.append(self._row(f"tuned for {ceiling:g}", *self.tuned(ceiling)))
            print(self.net, out[-1]["setting"], out[-1]["gain"], out[-1]["cost"], out[-1]["what"], flush=True)
        return out

    def _mixed(self, units: list[Unit]) -> tuple[Tensor, Tensor]:
        stages = [type(s)(s.views, s.states) for s in stages_of(Choice(tuple(units)), self.pool)]
        done = simulate(self.pool, stages)
        return done.logits, done.costs

    def tuned(self, ceiling: float) -> tuple[Answers, str]:
        """What was chosen on one half, on the other; and which looks those were, the most frequent first."""
        if ceiling not in self._tuned:
            total = torch.zeros(4, len(self.pool), dtype=torch.float64)
            what: Counter[str] = Counter()
            for halves in self.halvings:
                for one, other in (halves, halves[::-1]):
                    fitted, test = self.pool.rows(one), self.pool.rows(other)
                    choice = choose(fitted, self.units, ceiling)
                    stages = stages_of(choice, fitted)
                    done = simulate(test, stages, choice.merge)
                    temperature = fit_temperature(simulate(fitted, stages, choice.merge).logits, self.labels[one])
                    labels = self.labels[other]
                    right = (done.logits.argmax(1) == labels).double()
                    both = nll(done.logits, labels), nll(done.logits, labels, temperature)
                    total[:, other] += torch.stack([right, done.costs.double(), *both])
                    what[str(choice)] += 1
            told = [f"{name} ({count} of {2 * HALVINGS})" for name, count in what.most_common(TOLD)]
            rest = ["others"] if len(what) > TOLD else []
            self._tuned[ceiling] = Answers(*(total / HALVINGS)), " | ".join(told + rest)
        return self._tuned[ceiling]

    def _fixed(self, logits: Tensor, costs: Tensor) -> Answers:
        """Of what was not chosen; its temperature is fitted on the same halves as that of what was."""
        n = len(logits)
        labels, total = self.labels[:n], torch.zeros(n, dtype=torch.float64)
        for halves in self.halvings:
            for one, other in (halves, halves[::-1]):
                fit, test = one[one < n], other[other < n]
                total[test] += nll(logits[test], labels[test], fit_temperature(logits[fit], labels[fit]))
        right = (logits.argmax(1) == labels).double()
        return Answers(right, costs.double(), nll(logits, labels), total / len(self.halvings))

    def rivals(self) -> list[dict[str, object]]:
        """Ours, tuned for the very cost of what a user would do instead, less that: paired, image by image."""
        theirs = {name: self._fixed(*self._mixed(units)) for name, units in usual(self.units).items()}
        theirs |= {f"paper, {budget} states": self._fixed(*found) for budget, found in self.paper.items()}
        out = []
        for name, other in theirs.items():
            n, cost = len(other.right), float(other.costs.mean())
            mine, what = self.tuned(cost)
            mine = mine[:n]
            points, likelier = (mine.right - other.right).numpy(), (other.warm - mine.warm).numpy()
            numbers = [cost, float(mine.costs.mean()), points.mean(), *bootstrap(points)]
            numbers += [likelier.mean(), *bootstrap(likelier)]
            values = (self.net, n, name, *(round(float(v), 5) for v in numbers), what)
            out.append(dict(zip(AGAINST, values, strict=True)))
        return out

    def _row(self, setting: str, mine: Answers, what: str) -> dict[str, object]:
        """Against the plain network on the same images: all, or the first ones that were answered."""
        plain = self.plain[: len(mine.right)]
        change, likelier = (mine.right - plain.right).numpy(), (plain.warm - mine.warm).numpy()
        corrected, corrupted = (round(float((sign * change).clip(0).sum()), 1) for sign in (1, -1))
        values = (self.net, len(change), setting, round(float(mine.costs.mean()), 4))
        values += tuple(round(float(v), 5) for v in (mine.right.mean(), change.mean(), *bootstrap(change)))
        values += (corrected, corrupted)
        numbers = (mine.nll.mean(), mine.warm.mean(), likelier.mean(), *bootstrap(likelier))
        return dict(zip(FIELDS, (*values, *(round(float(v), 5) for v in numbers), what), strict=True))


def merge_rows(path: Path, fields: tuple[str, ...], new: list[dict[str, object]]) -> None:
    """Rows of a measured network take the place of its older ones; those of a search that was not run stay."""
    net, what = new[0]["net"], next((k for k in ("setting", "rival") if k in fields), "net")
    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
    others = [r for r in old if r["net"] != net]
    searched = any(str(r[what]).startswith("paper") for r in new)
    kept = [] if searched else [r for r in old if r["net"] == net and r[what].startswith("paper")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows([*others, *new, *kept])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="folder with the networks and images")
    parser.add_argument("--cache", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--nets", nargs="+", default=list(REAL), choices=REAL)
    parser.add_argument("--limit", type=int, help="so many images instead of all")
    parser.add_argument("--pool", default="medium")
    parser.add_argument("--paper", type=int, help="so many images for the paper's search instead of all")
    args = parser.parse_args()
    for net in args.nets:
        found = pooled(args.assets, net, args.cache, args.limit, args.pool, args.paper)
        halves = Halves(*found)
        merge_rows(ROWS, FIELDS, halves.rows())
        merge_rows(RIVALS, AGAINST, halves.rivals())


if __name__ == "__main__":
    main()
