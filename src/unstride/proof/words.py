"""Rows in words, the same on the command line and in the report."""

from __future__ import annotations

from collections.abc import Sequence

from unstride.proof.rows import Row


def verdict(row: Row) -> str:
    """`budget 4: helps: +0.50 points ...`: one line on one row."""
    g = row.gain
    what = "images" if row.task == "classification" else "pixels"
    return (
        f"{setting(row)}: {row.verdict}: {g['gain'] * 100:+.2f} points of {measure(row)}, 95 % interval "
        f"{g['low'] * 100:+.2f} to {g['high'] * 100:+.2f}; {g['corrected']:,} {what} corrected, {g['corrupted']:,} "
        f"corrupted; {row.macs:.1f}x the MACs" + (f", {row.latency:.1f}x the time" if row.latency is not None else "")
    )


def advice(rows: Sequence[Row]) -> str:
    """Which setting to use, and why."""
    chosen = next(row for row in rows if row.recommended)
    best = max(rows, key=lambda row: row.quality)
    if chosen.plain:
        return (
            f"recommended: leave it off; nothing is measurably better than the plain network on these "
            f"{chosen.images:,} images"
        )
    same = "the best" if chosen is best else f"the cheapest that is not measurably below the best ({setting(best)})"
    return f"recommended: {setting(chosen)}, {same}, at {chosen.macs:.1f}x the MACs of a plain forward"


def setting(row: Row) -> str:
    """`plain`, `budget 4`, `budget 4 in 15 views`."""
    if row.plain:
        return "plain"
    return f"budget {row.budget}" + (f" in {row.views} views" if row.views > 1 else "")


def measure(row: Row) -> str:
    """The name of `row.quality`."""
    return "top-1" if row.task == "classification" else "mIoU"
