"""docs/results/paper_claims.md from the rows that `benchmarks.claims` measured: `python -m benchmarks.claims_page`"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.claims import FAST, FITS, PLANS, ROWS, ClaimRow, read_rows
from unstride.paper import catalogue

PAGE = ROWS.with_suffix(".md")
NAMES = {
    "resnet20": "ResNet-20, CIFAR-10",
    "resnet56": "ResNet-56, CIFAR-10",
    "mobilenetv2": "MobileNetV2",
    "lite0": "EfficientNet-Lite0",
    "resnet50": "ResNet-50",
    "camvid": "DeepLabV3, CamVid",
}
LEARNED = ("learned, paper schedule", FAST)


Place = tuple[tuple[str, ...], str]  # row and column of a table of the paper


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and the comparison that tests it: `recipe` over `against`, or the other way round.

    Args:
        paper: its size there, in points; None where the paper prints none.
    """

    text: str
    paper: float | None
    exhibit: str
    recipe: str
    against: str
    reverse: bool = False


def printed(where: str, *pairs: tuple[Place, Place]) -> float:
    """What the paper prints for the better places less the worse ones, the mean over the table's networks."""
    numbers = {(c.row, c.column, c.group): c.paper for c in catalogue.get(where).cells if c.paper is not None}
    groups = {group for _, _, group in numbers}
    return mean(
        numbers[*better, group] - numbers[*worse, group]
        for better, worse in pairs
        for group in groups
        if (*better, group) in numbers and (*worse, group) in numbers
    )


def ablation(where: str, better: str, worse: str) -> float:
    return printed(where, (((better,), "top-1 %"), ((worse,), "top-1 %")))


def over_base(where: str, budget: int) -> float:
    rows = [(data, flip) for data in ("cityscapes", "ade20k") for flip in (["no"] if where == "plain" else ["yes"])]
    return printed("Table 6", *(((row, f"B = {budget}"), (row, "B = 1")) for row in rows))


def with_ours(exhibit: str, where: str, name: str, method: str, pairs: Sequence[tuple[int, int, int]]) -> list[Claim]:
    """Ours inside a TTA method against the method alone, at the same number of passes."""
    claims = []
    for total, views, states in pairs:
        row = "-" if where == "Table A6" else name
        size = printed(where, (((row, "yes"), f"B = {total}"), ((name, "no"), f"B = {total}")))
        inside = f"{views} views x {states} states" if views > 1 else f"{states} states of the image"
        text = f"{name}, {'standard' if 'standard' in exhibit else 'expanded'} policy: {inside} beat {total} views"
        claims.append(Claim(text, size, exhibit, f"{method}, {views} x {states}", f"{method}, {total} x 1"))
    return claims


STANDARD, EXPANDED = PLANS["resnet20"].standard, PLANS["resnet20"].expanded
ALL = "1 .. L"
BEATEN = "layers 1 to L"
CLAIMS = {
    "Budget (Figure 5)": [
        Claim("10 states beat the network alone", None, "budget", "B = 10", "base model"),
        Claim("30 states beat the network alone", None, "budget", "B = 30", "base model"),
        Claim("30 states beat 4", None, "budget", "B = 30", "B = 4"),
    ],
    "Search space (Table 3)": [
        Claim(
            "layers 2 to L-1 beat all", ablation("Table 3", "2 .. L-1", ALL), "search space", "layers 2 to L-1", BEATEN
        ),
        Claim("layers 2 to L beat all", ablation("Table 3", "2 .. L", ALL), "search space", "layers 2 to L", BEATEN),
        Claim(
            "layers 1 to L-1 beat all", ablation("Table 3", "1 .. L-1", ALL), "search space", "layers 1 to L-1", BEATEN
        ),
    ],
    "Aggregation and Align (Table 4)": [
        Claim(
            "entropy weights beat the mean",
            ablation("Table 4", "entropy", "mean"),
            "aggregation",
            "aggregate=mean",
            "as printed",
            True,
        ),
        *[
            Claim(f"{name} beats {other}", ablation("Table 4", "learned", row), "learned", name, against)
            for name in LEARNED
            for other, row, against in (
                ("entropy weights", "entropy", "as printed"),
                ("the mean", "mean", "aggregate=mean"),
            )
        ],
        Claim("learning-free: Align beats no Align", None, "align", "align=none", "as printed", True),
    ],
    "Criterion (Table 5)": [
        Claim(
            "entropy beats a random order",
            ablation("Table 5", "entropy", "random"),
            "criterion",
            "criterion=random",
            "as printed",
            True,
        ),
        Claim(
            "entropy beats nearest first",
            ablation("Table 5", "entropy", "displacement"),
            "criterion",
            "criterion=displacement",
            "as printed",
            True,
        ),
        Claim(
            "learned beats entropy",
            ablation("Table 5", "learned", "entropy"),
            "learned criterion",
            "criterion=entropy",
            "learned",
            True,
        ),
        Claim(
            "learned beats a random order",
            ablation("Table 5", "learned", "random"),
            "learned criterion",
            "criterion=random",
            "learned",
            True,
        ),
    ],
    "Test-time augmentation at equal passes (Tables 1, A6, A7)": [
        *with_ours("TTA, standard", "Table A7", "MeanTTA", "meantta", STANDARD),
        *with_ours("TTA, standard", "Table A7", "MaxTTA", "maxtta", STANDARD),
        *with_ours("TTA, expanded", "Table A6", "MeanTTA", "meantta", ((30, 1, 30), (30, 1, 10))),
        *with_ours("TTA, learned", "Table 1", "GPS", "gps-shanmugam", EXPANDED),
        *with_ours("TTA, learned", "Table 1", "AugTTA", "augtta", EXPANDED),
        *with_ours("TTA, learned", "Table 1", "ClassTTA", "classtta", EXPANDED),
    ],
    "Segmentation (Table 6), mIoU": [
        Claim("4 states beat the network alone", over_base("plain", 4), "segmentation", "B = 4", "base model"),
        Claim("10 states beat the network alone", over_base("plain", 10), "segmentation", "B = 10", "base model"),
        Claim("flip and 4 states beat the flip", over_base("flip", 4), "segmentation", "flip, B = 4", "flip"),
    ],
}
SWITCHES = {
    "weights of the unaligned map": ("aggregation", "aggregate=entropy-unaligned"),
    "maximum over the states": ("aggregation", "aggregate=max"),
    "nearest downwards in Align": ("align", "align=nearest"),
    "renormalised border": ("align", "border=renormalise"),
    "criterion of the unaligned map": ("criterion", "criterion=entropy-unaligned"),
    "random order for each image": ("criterion", "criterion=random-per-image"),
    "literal stop, may exceed B": ("stop", "stop=literal"),
    "learned, four heads (against printed)": ("learned", "learned, fast, 4 heads"),
    "learned, no Align (against printed)": ("learned", "learned, fast, no Align"),
}


@dataclass(frozen=True)
class Gain:
    """In points, with its 95 % interval; of several seeds, the means."""

    value: float
    low: float
    high: float

    @property
    def significant(self) -> int:
        """1: significantly better, -1: significantly worse, 0: neither."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        text = f"{self.value + 0.0:+.1f} ({self.low:+.1f} to {self.high:+.1f})"  # no -0.0
        return f"**{text}**" if self.significant else text


def gain(rows: Sequence[ClaimRow], network: str, claim: Claim) -> Gain | None:
    """What was measured of a claim on a network."""
    wanted = (network, claim.exhibit, claim.recipe, claim.against)
    own = [r for r in rows if (r.network, r.exhibit, r.recipe, r.against) == wanted]
    if not own:
        return None
    value, low, high = (mean(getattr(r, name) for r in own) for name in ("gain", "low", "high"))
    return Gain(-value, -high, -low) if claim.reverse else Gain(value, low, high)


def page(rows: Sequence[ClaimRow]) -> str:
    networks = [name for name in PLANS if any(r.network == name for r in rows)]
    found = {
        (claim, n): g for claims in CLAIMS.values() for claim in claims for n in networks if (g := gain(rows, n, claim))
    }
    counts = {sign: sum(g.significant == sign for g in found.values()) for sign in (1, 0, -1)}
    same = sum(g.value > 0 for g in found.values() if not g.significant)
    alone = [found[claim, n] for claim, n in found if claim.against == "base model"]
    lines = [
        "# Do the paper's claims hold?",
        "",
        f"**Of {len(found)} comparisons {counts[1]} are significantly as the paper claims, {counts[-1]} are "
        f"significantly the opposite, and {counts[0]} are inconclusive** ({same} of these point the paper's way). "
        f"Against the network alone, states gain {min(g.value for g in alone):+.1f} to "
        f"{max(g.value for g in alone):+.1f} points.",
        "",
        "Command: `python -m benchmarks.claims --assets DIR` (`--nets` and `--limit`: fewer networks and images), then "
        "`python -m benchmarks.claims_page`. The first table says how much was measured. Accuracy in points, better "
        "over worse as the paper claims it, on the same images, with the paired 95 % interval; bold where it excludes "
        "zero. *Paper*: the mean over the networks of its table. Learned rows are the mean over their seeds, each "
        "trained on its own draw of training images. All rows: [paper_claims.csv](paper_claims.csv).",
        "",
        *images(rows, networks),
        "",
    ]
    head = "| claim | paper | " + " | ".join(NAMES[n] for n in networks) + " |"
    for title, claims in CLAIMS.items():
        body = [
            f"| {c.text} | {'' if c.paper is None else f'{c.paper:+.2f}'} | "
            + " | ".join(str(found.get((c, n), "")) for n in networks)
            + " |"
            for c in claims
            if any((c, n) in found for n in networks)
        ]
        if body:
            lines += [f"## {title}", "", head, "|---" * (2 + len(networks)) + "|", *body, ""]
    return "\n".join([*lines, *switches(rows, networks), *learning(rows, networks), *missing(rows)]).rstrip() + "\n"


def images(rows: Sequence[ClaimRow], networks: Sequence[str]) -> list[str]:
    """How much was measured of each network, from its rows."""
    lines = [
        "| network | images | images, learned | images, TTA | attention learned on | TTA learned on | "
        "base accuracy, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in networks:
        own = [r for r in rows if r.network == name]
        views = [r for r in own if r.exhibit.startswith("TTA")]
        learned = [r for r in own if r.exhibit.startswith("learned")]
        rest = [r for r in own if r not in views and r not in learned]
        first = next(r for r in own if r.against == "base model")
        counts = [max((r.images for r in part), default=0) for part in (rest, learned, views)]
        counts += [max((r.learned_on for r in part), default=0) for part in (learned, views)]
        cells = " | ".join(f"{count:,}" if count else "-" for count in counts)
        lines.append(f"| {NAMES[name]} | {cells} | {first.accuracy - first.gain:.1f} |")
    return lines


def switches(rows: Sequence[ClaimRow], networks: Sequence[str]) -> list[str]:
    lines = ["## Switches", "", "Gain over the paper as printed, 10 states.", ""]
    lines += ["| switch | " + " | ".join(NAMES[n] for n in networks) + " |", "|---" * (1 + len(networks)) + "|"]
    for name, (exhibit, recipe) in SWITCHES.items():
        cells = [gain(rows, n, Claim(name, None, exhibit, recipe, "as printed")) for n in networks]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    return [*lines, ""]


def learning(rows: Sequence[ClaimRow], networks: Sequence[str]) -> list[str]:
    """What the seeds of the learned aggregation gave."""
    lines = []
    for name in networks:
        means = {r.images: f"{r.nll:.4f}" for r in rows if (r.network, r.recipe) == (name, "aggregate=mean")}
        for kind in FITS:
            own = [r for r in rows if (r.network, r.recipe, r.against) == (name, kind, "aggregate=mean")]
            if own:
                moved = sum(r.moved for r in own)
                lines.append(
                    f"| {NAMES[name]} | {kind} | {len(own)} of {FITS[kind][0]} | {moved} of {len(own)} | "
                    f"{_spread([r.gain for r in own], '+.2f')} | {_spread([r.nll for r in own], '.4f')} | "
                    f"{means.get(own[0].images, 'other images')} |"
                )
    if not lines:
        return []
    head = [
        "| network | aggregation | seeds | moved from the mean | gain over the mean, points | NLL | NLL, mean |",
        "|---|---|---|---|---|---|---|",
    ]
    note = (
        "Mean and standard deviation over the seeds; the paper's own spread is below 0.05 points. Where a fit did not "
        "move from the mean, its gain comes from the order of the search alone, which the learned criterion decides."
    )
    return ["## Seeds of the learned aggregation", "", note, "", *head, *lines, ""]


def _spread(values: Sequence[float], digits: str) -> str:
    """`+1.00 ± 1.41`; of one value, itself."""
    return f"{mean(values):{digits}}" + (f" ± {stdev(values):{digits.lstrip('+')}}" if len(values) > 1 else "")


def missing(rows: Sequence[ClaimRow]) -> list[str]:
    """What the program has and these rows do not."""
    lines = []
    absent = [NAMES[name] for name in PLANS if not any(r.network == name for r in rows)]
    if absent:
        lines.append(f"- Networks: {'; '.join(absent)}.")
    measured = {(r.exhibit, r.recipe, r.against) for r in rows}
    for title, claims in CLAIMS.items():
        without = [c.text for c in claims if (c.exhibit, c.recipe, c.against) not in measured]
        if without:
            lines.append(f"- {title}: {'all' if len(without) == len(claims) else '; '.join(without)}.")
    return ["## Not measured", "", *lines] if lines else []


def main() -> None:
    PAGE.write_text(page(read_rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
