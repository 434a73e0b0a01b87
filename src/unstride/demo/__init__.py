"""`unstride demo`: everything shown is measured on the spot, with what is on the machine; what cannot run is said.

for part in run(Path("unstride-demo")):
    print(part.title, part.skipped or part.figures)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unstride.demo import garments, photographs, scenes, tuned
from unstride.demo.common import Say, percent
from unstride.errors import UnstrideError
from unstride.show.html import Block, Facts, Note, Section, Text, render_report
from unstride.storage.files import write_atomic


@dataclass(frozen=True)
class Part:
    """One part of the demo: what was measured (`figures`), how it is shown (`blocks`), or why it could not run."""

    name: str
    title: str
    figures: Any = None
    blocks: tuple[Block, ...] = ()
    skipped: str = ""
    seconds: float = 0.0


def run(out: Path, say: Say = lambda text: None) -> Iterator[Part]:
    """The parts, one by one as they are done; the last one writes the report. `say` hears what is being done."""
    out.mkdir(parents=True, exist_ok=True)
    done: list[Part] = []
    steps: tuple[tuple[str, str, Callable[[], tuple[Any, list[Block]]]], ...] = (
        ("scenes", "The best at twice the cost: an embedded segmenter, tuned", lambda: tuned.scenes_job(out, say)),
        ("garments", "An embedded classifier, tuned", lambda: tuned.garments_job(out, say)),
        ("segmentation", "The paper's procedure on the scenes", lambda: scenes.segmentation(out, say)),
        ("classification", "The paper's procedure on the garments", lambda: garments.classification(say)),
        ("photographs", "Photographs, plain against enhanced", lambda: photographs.photographs(out, say)),
        ("inspect", f"What {photographs.NETWORK} throws away", lambda: photographs.inspect_network(say)),
    )
    for name, title, step in steps:
        started = time.perf_counter()
        try:
            figures, blocks = step()
            part = Part(name, title, figures, tuple(blocks))
        except (UnstrideError, ImportError, OSError) as error:
            part = Part(name, title, skipped=str(error), blocks=(Note(f"This part could not run: {error}"),))
        part = replace(part, seconds=time.perf_counter() - started)
        done.append(part)
        yield part
    path = out / "report.html"
    seconds = sum(p.seconds for p in done)
    threads = torch.get_num_threads()
    told = f"Measured here in {seconds:.0f} s with {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}."
    short = _short(done)
    sections = [Section("In short", tuple(short))] if short else []
    sections += [Section(p.title, p.blocks) for p in done]
    page = render_report("unstride: the best that these networks can do, and its proof", sections, told)
    try:
        write_atomic(path, page.encode())
    except OSError as error:
        why = f"{path}: cannot be written ({error.strerror or error})"
        yield Part("report", "Report", skipped=why, blocks=(Note(why),))
        return
    yield Part("report", "Report", str(path), (Text(f"Everything in one page: {path.resolve()}"),))


def _short(done: Sequence[Part]) -> list[Block]:
    """The headline figures: plain, what a user would do instead, and ours."""
    out: list[Block] = []
    for name, key, words in (("scenes", "miou", "mIoU"), ("garments", "accuracy", "accuracy")):
        part = next(p for p in done if p.name == name)
        if not part.skipped:
            rows = part.figures["rows"]
            facts = tuple((percent(r[key]), f"{name}: {words}, {r['method']}, {r['cost']:.1f}x") for r in rows)
            told = f"{name}: measured on {part.figures['unseen']} that played no part in tuning. By those that did: "
            out += [Facts(facts), Text(told + part.figures["verdict"])]
    return out
