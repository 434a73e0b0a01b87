"""What tuning found, on a page of its own: the verdict, gain over cost, the table, the recipe."""

from __future__ import annotations

from unstride.show.charts import Chart, Point, Series
from unstride.show.html import Facts, Section, Table, Text, render_report
from unstride.tuning.certificate import Saved
from unstride.tuning.tuned import Line, Tuned


def page(tuned: Tuned, title: str) -> str:
    """A self-contained page without scripts."""
    plain, asked = tuned.lines[0], tuned.lines[tuned.at]
    facts = (
        (plain.shown, f"{tuned.metric}, plain"),
        (asked.shown, f"{tuned.metric}, {asked.name}, on images its choice did not see"),
        (f"{asked.cost:.2f}", "plain forwards per image"),
    )
    shown = Table(tuned.head, tuple(line.cells() for line in tuned.lines), strong=frozenset({tuned.at}))
    return render_report(
        title,
        [
            Section("Verdict", (Text(tuned.verdict), Facts(facts))),
            Section("Gain over cost", (frontier_chart(list(tuned.lines)),)),
            Section(
                "Everything that was compared",
                (
                    Text(f"On {plain.certificate.images:,} labelled images; {tuned.reading}."),
                    shown,
                    *map(Text, tuned.notes),
                ),
            ),
            Section("The recipe", (*(Text(line) for line in str(tuned.recipe).splitlines()), Text(_next(tuned)))),
        ],
    )


def _next(tuned: Tuned) -> str:
    """What to do with it."""
    if tuned.recipe.plain:
        return "Nothing to run: the network as it is."
    return (
        "Run it from its file: unstride predict SPEC IMAGES --recipe FILE --out answers.csv, or "
        "unstride.enhance(model, example, recipe=FILE); check it on other images: unstride evaluate SPEC --data "
        "KIND:PATH --recipe FILE."
    )


def frontier_chart(lines: list[Line]) -> Chart:
    """Gain over cost: one line for what was tuned, a point for everything a user would do instead."""
    ours = tuple(_point(line) for line in lines if line.name.startswith("tuned"))
    others = [Series(line.name, (_point(line),)) for line in lines[1:] if not line.name.startswith("tuned")]
    start = Point(1.0, 0.0, label="plain")
    series = (Series("tuned", (start, *ours)), *others)
    unit = "%" if isinstance(lines[0].certificate, Saved) else "points"
    title = "What was tuned, on images that its choice did not see"
    return Chart(title, "cost, plain forwards", "gain", series, 0.0, unit=unit)


def _point(line: Line) -> Point:
    return Point(line.cost, line.certificate.gain, line.certificate.low, line.certificate.high, line.name)
