"""README's table and image, docs/results-frontier.md, docs/results-tune.md, and what stands beside the rows of other
pages, from rows in benchmarks/*.csv alone.

python -m benchmarks.frontier_page
"""

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path

ROWS = Path(__file__).with_suffix("").with_name("frontier.csv")
RIVALS = ROWS.with_name("rivals.csv")
FREE = ROWS.with_name("free.csv")
ROOT = ROWS.parent.parent
SEGMENTATION = ROOT / "docs/results-segmentation-frontier.csv"  # rows of benchmarks.segmentation_frontier
PAGE, TUNE, README = (ROOT / p for p in ("docs/results-frontier.md", "docs/results-tune.md", "README.md"))
IMAGE = ROOT / "docs/images/frontier.svg"
REAL = ("ImageNet", "CIFAR")  # what the names of real networks begin with; the others are ours
HELD_OUT = "ImageNet efficientnet-lite1"  # nothing in this project was decided by looking at it
BEGIN, END = "<!-- the table of benchmarks.frontier_page -->", "<!-- end of the table -->"
Row = dict[str, str]
LOOK, RATE = "a plain look", "at the fastest rate"  # what bounds the time of a recipe
TIMED = 8  # images of the batches that every setting is timed in
HEAD = ("setting", "cost", "time", "accuracy %", "gain", "corrected / corrupted", "NLL", "NLL, warm", "looks")


def rows(path: Path = ROWS) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def nets(every: Sequence[Row], start: tuple[str, ...] = ("",)) -> dict[str, list[Row]]:
    names = {r["net"] for r in every if r["net"].startswith(start)}
    names = sorted(names, key=lambda n: (next((k for k, real in enumerate(REAL) if n.startswith(real)), 9), n))
    return {net: [r for r in every if r["net"] == net] for net in names}


def found(mine: Sequence[Row], *names: str) -> Row | None:
    """The best in accuracy of the named settings, as far as they were measured."""
    there = [r for r in mine if r["setting"] in names]
    return max(there, key=lambda r: float(r["gain"]), default=None)


def cell(row: Row | None, images: str) -> str:
    if row is None:
        return "-"
    gain, low, high = (100 * float(row[k]) for k in ("gain", "low", "high"))
    told = f"**{gain:+.2f}**" if low > 0 else f"{gain:+.2f}"
    gained = f"at {float(row['cost']):.2f}: {told} [{low:+.2f}, {high:+.2f}]"
    if row["images"] != images:  # its accuracy is that of other images
        return f"{gained} (first {row['images']})"
    return f"{100 * float(row['accuracy']):.2f} {gained}"


COLUMNS = (
    ("flip", ("flip",)),
    ("multi-scale or five-crop", ("multi-scale", "five-crop")),
    ("paper, 10 states", ("paper, 10 states",)),
    ("ours, tuned for 1.5", ("tuned for 1.5",)),
    ("ours, tuned for 4", ("tuned for 4",)),
)


def table(every: Sequence[Row]) -> str:
    """A row per network: accuracy at its cost, gain over plain with its interval; what is surely better is bold."""
    out = [
        "| network (images) | plain | " + " | ".join(name for name, _ in COLUMNS) + " |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for net, mine in nets(every, REAL).items():
        plain = mine[0]
        cells = [cell(found(mine, *names), plain["images"]) for _, names in COLUMNS]
        name = f"{net}, held out" if net == HELD_OUT else net
        start = (f"{name} ({int(plain['images']):,})", f"{100 * float(plain['accuracy']):.2f}")
        out.append("| " + " | ".join((*start, *cells)) + " |")
    return "\n".join(out)


BESIDE = ("plain", "flip", "five-crop", "multi-scale", "multi-scale, flip", "paper, 10 states", "default")
BESIDE += ("tuned for 1.5", "tuned for 4")
REAL_NETS = ("CIFAR-10 ResNet-20", "CIFAR-10 ResNet-56", "ImageNet MobileNetV2", "ImageNet efficientnet-lite0")
REAL_NETS += ("ImageNet ResNet-50",)
WITH_IT = {  # pages with rows of ours that want the usual ones beside them, and their networks
    "results.md": REAL_NETS,
    "results-tta.md": REAL_NETS[:3],
    "results-ablations.md": REAL_NETS[:3],
}


def beside(name: str) -> str:
    """A section of a page, between marks: on its networks, what a user would do instead, and what we would."""
    head = ("network (images)", *HEAD[:-1])
    out = [BEGIN, "## On the same networks: what one would do instead", ""]
    out += [
        "From [the frontier](results-frontier.md), which tells the looks of each row. Cost is in plain forwards, time"
    ]
    out += [f"over the plain eager forward, in batches of {TIMED}."]
    taken = times()
    out += ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for net, mine in nets(rows(), WITH_IT[name]).items():
        count = int(mine[0]["images"])
        chosen = [r for r in mine if r["setting"] in BESIDE]
        out += ["| " + " | ".join((f"{net} ({count:,})", *_cells(r, count, taken)[:-1])) + " |" for r in chosen]
    return "\n".join([*out, END])


def spliced(text: str, block: str, where: str) -> str:
    """The text with what lies between the marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{where}: the marks of the table are missing: {BEGIN} ... {END}")
    return before + block + after


def with_beside(page: Path) -> str:
    """The page with that section made anew."""
    return spliced(page.read_text(encoding="utf-8"), beside(page.name), page.name)


def readme(text: str, every: Sequence[Row]) -> str:
    """README with the table between its marks made anew."""
    return spliced(text, f"{BEGIN}\n{table(every)}\n{END}", "README.md")


def page(every: Sequence[Row]) -> str:
    """docs/results-frontier.md."""
    out = [
        "# The frontier",
        "",
        "What is best at each cost on real networks, and what a user would do instead at its own. "
        + answer(every)
        + " Where the interval of a gain covers zero, the setting cannot be told from plain on these images.",
        "",
        "![Gain over cost, one line for tuned recipes, points for everything else](images/frontier.svg)",
        "",
        "Tuned rows were chosen on one half of the images and measured on the other, both ways, and are means over "
        "several random halvings; their looks are the most frequent choices. Gains are in points, "
        "paired, with 95 % bootstrap intervals over images; cost is in plain forwards per image, by MACs; time is "
        f"over the plain eager forward, in batches of {TIMED}, run by unstride; the warm NLL is "
        "after one temperature that was fitted on the other half. Made by",
        "",
        "```bash",
        "python -m benchmarks.frontier --assets DIR    # networks and images, which are not in the project: the rows",
        "python -m benchmarks.free --assets DIR        # time",
        "python -m benchmarks.frontier_page            # this page, its image and README's table, from the rows",
        "```",
        "",
        "`default` is what `unstride.enhance(model, example)` does. `alone` rows are single looks without the plain "
        "one; `Field` shows more of the image than the usual crop, `Size` is the side that the network gets.",
    ]
    taken = times()
    for net, mine in nets(every).items():
        count = int(mine[0]["images"])
        out += ["", f"## {net}, {count:,} images", "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
        out += ["| " + " | ".join(_cells(r, count, taken)) + " |" for r in mine]
    return "\n".join(out) + "\n"


def answer(every: Sequence[Row]) -> str:
    """In a sentence: how often the tuned rows are ahead."""
    told = []
    for setting in ("tuned for 1.5", "tuned for 4"):
        ours = [r for r in every if r["setting"] == setting and r["net"].startswith(REAL)]
        if ours:
            gains = [100 * float(r["gain"]) for r in ours]
            sure = sum(float(r["low"]) > 0 for r in ours)
            costs = [float(r["cost"]) for r in ours]
            told.append(
                f"{setting}: {min(gains):+.2f} to {max(gains):+.2f} points at a mean cost of {min(costs):.2f} to "
                f"{max(costs):.2f}, measurable on {sure} of {len(ours)} networks"
            )
    return "; ".join(told).capitalize() + "."


GOALS = (  # which networks, at most this cost, at least so many points
    ("ImageNet", "ImageNet networks, pooled", 1.6, 1.0),
    ("ImageNet", "ImageNet networks, pooled", 4.0, 1.5),
    ("CIFAR-10 ResNet-20", "CIFAR-10 ResNet-20", 1.1, 0.5),
    ("CIFAR-10 ResNet-56", "CIFAR-10 ResNet-56", 1.1, 0.5),
    ("CIFAR-10 ResNet-20", "CIFAR-10 ResNet-20", 2.0, 1.0),
)


SLACK = 0.005  # of a mean cost: gates are set on other images than they are measured on


def tune_page(every: Sequence[Row], against: Sequence[Row], times: Sequence[Row]) -> str:
    """docs/results-tune.md: the goals, the time, and ours against each rival at the rival's own cost."""
    goals = [(words, *pooled(every, start, cost), cost, wanted) for start, words, cost, wanted in GOALS]
    reached = sum(gain >= wanted and spent <= cost + SLACK for _, gain, spent, cost, wanted in goals)
    older = [r for r in against if not several(r)]
    worse = [r for r in against if float(r["high"]) < 0]
    unlikely = [r for r in against if float(r["likelier_high"]) < 0]
    out = [
        "# Tuning on real networks",
        "",
        f"{reached} of {len(goals)} goals that were set beforehand are reached. Tuned for the very cost of a flip, "
        f"crops, scales or the paper's search, ours is measurably less accurate in {len(worse)} of {len(against)} "
        f"comparisons and measurably less likely in {len(unlikely)}{_named(unlikely)}. Everything was tuned on one "
        "half of the images and measured on the other, both ways, for several random halvings"
        + (f" ({len(older)} older rows for one of them)." if older else "."),
        "",
        "Made with [the frontier](results-frontier.md), by the same commands; rows in `benchmarks/rivals.csv`. How a "
        "recipe is chosen ([tuning](tuning.md)) was settled after looking at such rows: read them with that in mind.",
        "",
        "## Goals",
        "",
        "| networks | at a mean cost of at most | gain wanted | gain | cost | |",
        "|---|---|---|---|---|---|",
    ]
    for words, gain, spent, cost, wanted in goals:
        told = "reached" if gain >= wanted and spent <= cost + SLACK else "not reached"
        out.append(f"| {words} | {cost:g} | {wanted:+.1f} | {gain:+.2f} | {spent:.2f} | {told} |")
    out += ["", held_out(every), "", *in_time(times), "## Against what a user would do instead, at its own cost", ""]
    out += [
        "Ours less theirs, with 95 % intervals: points of accuracy, and how much lower the NLL is after a temperature."
    ]
    out += ["", "| network | instead | its cost | our cost | points | NLL lower by | our looks |", "|---" * 7 + "|"]
    for r in (r for rows_ in nets(against).values() for r in rows_):
        points = f"{100 * float(r['points']):+.2f} [{100 * float(r['low']):+.2f}, {100 * float(r['high']):+.2f}]"
        nll = f"{float(r['likelier']):+.4f} [{float(r['likelier_low']):+.4f}, {float(r['likelier_high']):+.4f}]"
        costs = (f"{float(r['cost']):.2f}", f"{float(r['ours']):.2f}")
        rival = r["rival"] if several(r) else f"{r['rival']} (older)"
        out.append("| " + " | ".join((r["net"], rival, *costs, points, nll, r["what"].replace(" | ", "; "))) + " |")
    out += [
        "",
        "## Segmentation",
        "",
        "CamVid: tuned on val frames, measured on test frames; VOC on one half and the other.",
        "From [the frontier of segmentation](results-segmentation-frontier.md), which has all rows.",
        "",
        *segmented(),
        "",
        "Ours, tuned for mIoU at its own cost, less what a user would do instead:",
        "",
        *segmented_against(),
    ]
    return "\n".join(out) + "\n"


def _named(unlikely: Sequence[Row]) -> str:
    told = [f"{r['net']} against {r['rival']}, by {-float(r['likelier']):.4f} NLL" for r in unlikely]
    return f" ({'; '.join(told)})" if told else ""


SEGMENTED = ("plain", "flip", "three scales", "two scales, flip", "six scales, flip", "near states")
SEGMENTED += ("tuned for 2, likelihood", "tuned for 5, likelihood", "tuned for 2, miou", "tuned for 5, miou")


def segmented() -> list[str]:
    """Networks that segment: what people do, and what was tuned on other images than it is measured on."""
    out = ["| network (images) | setting | cost | time | mIoU % | gain in mIoU |", "|---" * 6 + "|"]
    for r in rows(SEGMENTATION):
        if r["setting"] in SEGMENTED:
            gain, low, high = (100 * float(r[k]) for k in ("gain", "low", "high"))
            told = "" if r["setting"] == "plain" else f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]"
            spent = (f"{float(r['cost']):.2f}", f"{float(r['time']):.2f}")
            cells = (f"{r['net']} ({r['images']})", r["setting"], *spent, f"{100 * float(r['miou']):.2f}", told)
            out.append("| " + " | ".join(cells) + " |")
    return out


def segmented_against() -> list[str]:
    """Ours, tuned for mIoU at the very cost of what a user would do instead, less that."""
    every = rows(SEGMENTATION)
    cost = {(r["net"], r["setting"]): float(r["cost"]) for r in every}
    out = ["| network | instead | its cost | our cost | points of mIoU | our looks |", "|---" * 6 + "|"]
    for r in (r for r in every if r["rival"]):
        points, low, high = (100 * float(r[k]) for k in ("to_rival", "to_rival_low", "to_rival_high"))
        costs = (f"{cost[r['net'], r['rival']]:.2f}", f"{float(r['cost']):.2f}")
        out.append(
            "| "
            + " | ".join((r["net"], r["rival"], *costs, f"{points:+.2f} [{low:+.2f}, {high:+.2f}]", r["what"]))
            + " |"
        )
    return out


def in_time(every: Sequence[Row]) -> list[str]:
    """What the recipe that was tuned for 1.5 takes, over the plain eager forward."""
    timed = [r for r in every if r["setting"] == "tuned for 1.5"]
    if not timed:
        return []
    large, small = ([r for r in timed if r["net"].startswith("ImageNet") == is_large] for is_large in (True, False))
    free, free_small = (sum(float(r["time"]) <= 1 for r in some) for some in (large, small))
    bounds = {(r["net"], r["batch"], r["setting"]): float(r["time"]) for r in every}

    def least(r: Row, bound: str) -> str:
        """What the recipe's cost would take, if that were all there is."""
        one = bounds.get((r["net"], r["batch"], bound))
        return "" if one is None else f"{one * float(r['cost']):.2f}"

    out = [
        "## In time",
        "",
        f"The recipe tuned for 1.5 takes no longer than the plain eager forward of the same batches in {free} of "
        f"{len(large)} rows of ImageNet networks, and in {free_small} of {len(small)} of networks for images of 32 "
        "pixels. Time is a multiple of that forward, in turns, over 32 images spread evenly over how sure the"
        " plain network is; every call looks for changes of the model, by the kernel's word where it watches "
        "memory for writes (Linux from 6.7 on, as here), else by reading all "
        "weights, which `with better.unchanged()` spares. Made by `python -m benchmarks.free --assets DIR`; rows, also "
        "of the other settings, in `benchmarks/free.csv`.",
        "",
        "What bounds it, where that was measured: `looks` is the cost times a plain look by our engine with no recipe "
        "around it (what is beyond that are gates, merging and the look for changes, and that fewer images go "
        "through the second look together); `MACs` is the cost times the plain network's MACs at the rate of a large "
        "convolution, the fastest of this machine. "
        f"{_room([r for r in timed if least(r, RATE)], least)}",
        "",
        "| network | batch | cost | time | looks | MACs | our looks |",
        "|---" * 7 + "|",
    ]
    for r in timed:
        numbers = (f"{float(r['cost']):.2f}", f"{float(r['time']):.2f}", least(r, LOOK), least(r, RATE))
        out.append("| " + " | ".join((r["net"], r["batch"], *numbers, r["what"])) + " |")
    return [*out, ""]


def _room(timed: Sequence[Row], least: Callable[[Row, str], str]) -> str:
    """In how many rows the eager forward leaves no room for more looks."""
    full, all_looks = (sum(float(least(r, bound)) > 1 for r in timed) for bound in (RATE, LOOK))
    return (
        f"By its looks alone the recipe is beyond the eager forward in {all_looks} of these {len(timed)} rows, by its "
        f"MACs in {full}: there the eager forward is so near to what the machine can multiply that nothing exact fits."
    )


def times() -> dict[tuple[str, str], str]:
    """Network and setting -> time over the plain eager forward, in batches of 8."""
    return {(r["net"], r["setting"]): f"{float(r['time']):.2f}" for r in rows(FREE) if int(r["batch"]) == TIMED}


def several(r: Row) -> bool:
    """Whether a row is of several halvings: it says how often its looks were chosen."""
    return re.search(r"\(\d+ of \d+\)", r["what"]) is not None


def pooled(every: Sequence[Row], start: str, cost: float) -> tuple[float, float]:
    """Mean gain in points, over images, and mean cost, of the rows that were tuned for this cost."""
    kin = [r for r in every if r["net"].startswith(start) and r["net"] != HELD_OUT]
    mine = [r for r in kin if r["setting"] == f"tuned for {cost:g}"]
    count = sum(int(r["images"]) for r in mine)
    gain, spent = (sum(int(r["images"]) * float(r[k]) for r in mine) / count for k in ("gain", "cost"))
    return 100 * gain, spent


def held_out(every: Sequence[Row]) -> str:
    """The network that was looked at only when everything was settled."""
    mine = [r for r in every if r["net"] == HELD_OUT]
    told = [f"{name}: {cell(r, mine[0]['images'])}" for name in BESIDE[1:] if (r := found(mine, name)) is not None]
    return (
        f"{HELD_OUT} is not among them: nothing in this project was decided by looking at it. Accuracy in % at its "
        f"cost, and gain: {'; '.join(told)}."
    )


def _cells(r: Row, count: int, taken: dict[tuple[str, str], str]) -> tuple[str, ...]:
    gain, low, high = (100 * float(r[k]) for k in ("gain", "low", "high"))
    told = "" if r["setting"] == "plain" else f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]"
    changed = "" if r["setting"] == "plain" else " / ".join(f"{float(r[k]):.0f}" for k in ("corrected", "corrupted"))
    name = r["setting"] if int(r["images"]) == count else f"{r['setting']} (first {int(r['images']):,})"
    name += " (older, one halving)" if name.startswith("tuned") and not several(r) else ""
    spent = "1.00" if r["setting"] == "plain" else taken.get((r["net"], r["setting"]), "")
    numbers = (f"{float(r['cost']):.2f}", spent, f"{100 * float(r['accuracy']):.2f}", told, changed)
    return (name, *numbers, f"{float(r['nll']):.4f}", f"{float(r['warm']):.4f}", r["what"].replace(" | ", "; "))


MARKS = {"flip": "o", "five-crop": "s", "multi-scale": "^", "multi-scale, flip": "v", "paper": "x", "default": "*"}


def draw(every: Sequence[Row], path: Path) -> None:
    """A panel per network: gain over cost, our line, everything else as points."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "unstride"  # the same rows, the same bytes
    from matplotlib import pyplot

    of = nets(every, REAL)
    figure, panels = pyplot.subplots(1, len(of), figsize=(3.1 * len(of), 3.4), squeeze=False, layout="constrained")
    for panel, (net, mine) in zip(panels[0], of.items(), strict=True):
        ours = sorted((r for r in mine if r["setting"].startswith("tuned")), key=lambda r: float(r["cost"]))
        x = [1.0, *(float(r["cost"]) for r in ours)]
        panel.axhline(0, color="0.8", linewidth=1, zorder=0)
        panel.plot(x, [0.0, *(100 * float(r["gain"]) for r in ours)], "-", color="C3", label="ours, tuned", zorder=3)
        panel.fill_between(
            x, *([0.0, *(100 * float(r[k]) for r in ours)] for k in ("low", "high")), color="C3", alpha=0.12, zorder=1
        )
        for k, (name, mark) in enumerate(MARKS.items()):
            points = [
                r for r in mine if r["setting"] == name or (r["setting"].startswith(name + ", ") and name == "paper")
            ]
            panel.plot(
                [float(r["cost"]) for r in points],
                [100 * float(r["gain"]) for r in points],
                mark, color=f"C{(0, 1, 2, 4, 7, 3)[k]}", label=name, markersize=7, zorder=2,
            )  # fmt: skip
        panel.set(title=net, xlabel="cost, plain forwards", xscale="log", xticks=[1, 2, 4, 8], xlim=(0.95, 13))
        panel.set_xticklabels(["1", "2", "4", "8"])
        panel.minorticks_off()
    panels[0][0].set_ylabel("gain in accuracy, points")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    every = rows()
    PAGE.write_text(page(every), encoding="utf-8")
    TUNE.write_text(tune_page(every, rows(RIVALS), rows(FREE)), encoding="utf-8")
    draw(every, IMAGE)
    README.write_text(readme(README.read_text(encoding="utf-8"), every), encoding="utf-8")
    for other in map(PAGE.with_name, WITH_IT):
        other.write_text(with_beside(other), encoding="utf-8")


if __name__ == "__main__":
    main()
