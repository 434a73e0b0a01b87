"""The demo, part by part. What cannot run is named, and the rest runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unstride.demo import photographs, states, tuning
from unstride.demo.parts import DemoPart, DemoSize, Say
from unstride.errors import UnstrideError
from unstride.exporting.writing import export
from unstride.show.html import Block, Note, Section, Text, render_report
from unstride.storage.artefacts import write_file
from unstride.tuning.result import Tuned

NEXT = (
    "unstride tune timm:mobilenetv2_100 timm:resnet50 --data folder:LABELLED_IMAGES --cost 1.5 --out recipe.toml",
    "unstride predict NEW_IMAGES --recipe recipe.toml --out answers.csv",
    "unstride export --recipe recipe.toml --out recipe.onnx",
)
Made = tuple[Any, list[Block]]


def run(out: Path, size: DemoSize | None = None, say: Say = lambda text: None) -> Iterator[DemoPart]:
    """The parts, each as soon as it is done; the last writes the report. `say` is told what is being done."""
    out.mkdir(parents=True, exist_ok=True)
    size, kept, done = size or DemoSize(), list[Tuned](), list[DemoPart]()

    def classifiers() -> Made:
        tuned, figures, blocks = tuning.classifiers(out, size, say)
        kept.append(tuned)
        return figures, blocks

    steps: tuple[tuple[str, str, Callable[[], Made]], ...] = (
        ("classifiers", "Two classifiers: the large one only where it is needed", classifiers),
        ("segmenter", "A segmenter: what beats a flip", lambda: tuning.segmenter(out, size, say)),
        ("states", "The paper: other states of the strided layers", lambda: states.states(out, size, say)),
        ("network", "What an ImageNet network throws away", lambda: photographs.network(out, size, say)),
        ("files", "One recipe, one file", lambda: _files(out, kept, say)),
    )
    for name, title, step in steps:
        started = time.perf_counter()
        try:
            figures, blocks = step()
            part = DemoPart(name, title, figures, tuple(blocks))
        except (UnstrideError, ImportError) as error:
            part = DemoPart(name, title, skipped=str(error), blocks=(Note(f"This part could not run: {error}"),))
        done.append(replace(part, seconds=time.perf_counter() - started))
        yield done[-1]
    yield _report(out, done)


def _files(out: Path, kept: Sequence[Tuned], say: Say) -> Made:
    """The tuned cascade as a recipe file, and as one ONNX file that is checked against it."""
    if not kept:
        raise UnstrideError("there is no tuned recipe, because the first part could not run.")
    tuned = kept[0]
    recipe = tuned.save(out / "recipe.toml", anyway=True)
    page = tuned.report(out / "tuning.html")
    say("exporting the tuned recipe, and checking the file")
    exported = export(tuned.pipeline, out / "recipe.onnx")
    words = (
        f"{recipe.name} is the tuned cascade: read it, edit it, use it with --recipe. {page.name} is its evidence. "
        f"{exported.path.name} runs all of it, networks and gates, without torch ({exported.size / 1e6:.1f} MB; "
        "compared with the recipe before it was written)."
    )
    files = {"recipe": str(recipe), "evidence": str(page), "onnx": str(exported.path)}
    return files, [Text(words)]


def _report(out: Path, done: Sequence[DemoPart]) -> DemoPart:
    path = out / "report.html"
    threads = torch.get_num_threads()
    seconds = sum(part.seconds for part in done)
    subtitle = (
        f"Measured here in {seconds:.0f} s with {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}."
    )
    commands = [Text("With your own model and images:"), *map(Text, NEXT)]
    sections = [*(Section(part.title, part.blocks) for part in done), Section("Next", tuple(commands))]
    try:
        write_file(path, render_report("unstride: more from the networks you have", sections, subtitle).encode())
    except UnstrideError as error:
        return DemoPart("report", "Report", skipped=str(error), blocks=(Note(str(error)),))
    where = Text(f"All of this as one page: {path.resolve()}")
    return DemoPart("report", "Next", {"report": str(path), "next": list(NEXT)}, (where, *commands))
