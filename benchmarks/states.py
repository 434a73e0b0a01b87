"""Single states beside the plain network, before (0 .. R - 1) and after (the side that loses least, the edge held).

`python -m benchmarks.states --assets DIR [--samples 1000] [--nets resnet50,cifar20] [--out docs/results-states.md]`:
other networks' sections of the page stay.

For every layer: the mean over its states of what each says alone, paired image by image with the plain answer.
Then the mean of the nearest states, of the plain network on crops moved by as much over the uncropped image, and of
the plain and the mirrored image.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import unstride
from benchmarks.nets import Bench, cifar, give, imagenet
from unstride.geometry.states import State, StateSpace
from unstride.procedure.tasks import Plan

NETS = ("cifar20", "cifar56", "mobilenetv2", "efficientnet-lite0", "resnet50")
NEAR, SIDE, BATCH = 6, 224, 10


def bench(assets: Path, name: str, samples: int) -> Bench:
    """Images whole (256 px) where there is something around the crop."""
    if name.startswith("cifar"):
        found = cifar(assets, int(name.removeprefix("cifar")))
        x, y = found.test
        return replace(found, test=(x[: 5 * samples], y[: 5 * samples]))  # they are small
    return imagenet(assets, name, samples, side=256)


def crop(x: Tensor, dy: int = 0, dx: int = 0) -> Tensor:
    """The centre, or the crop moved over the image."""
    if x.shape[2] <= SIDE:
        return x
    top, left = (x.shape[2] - SIDE) // 2 + dy, (x.shape[3] - SIDE) // 2 + dx
    return x[:, :, top : top + SIDE, left : left + SIDE]


def answers(plan: Plan, x: Tensor, states: Sequence[State], held: bool) -> Tensor:
    """Logits (S, B, K) of each state alone; the plain one is computed anyway. `held`: as looks take them."""
    run, target = (plan.engine_for(states) if held else plan.engine).start(x), plan.targets[0]
    (values,) = run.add([(i, s) for s in states for i in range(len(x))])
    return target.finish(values).unflatten(0, (len(states), len(x)))


def told(gain: Tensor, scale: float = 1.0, digits: int = 3) -> str:
    """A paired difference with its 95 % interval."""
    wide = 1.96 * float(gain.std()) / len(gain) ** 0.5
    mark = "**" if abs(float(gain.mean())) > wide else ""
    return f"{mark}{scale * float(gain.mean()):+.{digits}f}{mark} ± {scale * wide:.{digits}f}"


def single(space: StateSpace, layer: int, natural: bool) -> list[State]:
    found = space.natural(layer) if natural else space.selections(layer)
    return [space.zero.at(layer, s) for s in found if any(s)]


def section(assets: Path, name: str, samples: int) -> list[str]:
    found = bench(assets, name, samples)
    images, labels = found.test
    better = unstride.enhance(found.model, crop(images[:1]), space="logits")
    plan = better.prepare(crop(images[:1]))
    space = plan.found.space
    near = space.nearest(NEAR)
    paper = StateSpace(space.rates, space.strides).nearest(NEAR)
    alone = [s for layer in range(1, len(space.rates) + 1) for n in (False, True) for s in single(space, layer, n)]
    states = list(dict.fromkeys([space.zero, *alone, *near, *paper]))
    looks = list(dict.fromkeys([*(s for k in range(1, len(space.rates) + 1) for s in single(space, k, True)), *near]))
    far = [tuple(round(d) for d in space.displacement(s)) for s in looks] if images.shape[2] > SIDE else []
    logits, ours, crops, mirrors = [], [], [], []
    with torch.no_grad():
        for part in images.split(BATCH):
            logits.append(answers(plan, crop(part).contiguous(), states, held=False))
            ours.append(answers(plan, crop(part).contiguous(), looks, held=True))
            crops += [torch.stack([found.model(crop(part, *m).contiguous()) for m in far])] if far else []
            mirrors.append(found.model(crop(part).flip(-1)))
    said = dict(zip(states, torch.cat(logits, 1).float(), strict=True))
    held = dict(zip(looks, torch.cat(ours, 1).float(), strict=True))
    moved = dict(zip(looks, torch.cat(crops, 1).float(), strict=True)) if crops else {}
    nll = lambda x: F.cross_entropy(x, labels, reduction="none")  # noqa: E731
    right = lambda x: (x.argmax(1) == labels).float()  # noqa: E731
    plain = said[space.zero]

    def against(own: Sequence[Tensor]) -> str:
        worse = torch.stack([nll(x) for x in own]).mean(0) - nll(plain)
        points = torch.stack([right(x) for x in own]).mean(0) - right(plain)
        return f"{told(worse)} | {told(points, 100, 2)}"

    lines = [
        f"## {found.name}",
        "",
        f"{len(labels)} samples; plain: NLL {nll(plain).mean():.3f}, top-1 {100 * right(plain).mean():.1f} %.",
        "",
        "| layer | before | own NLL | top-1 | after | own NLL | top-1 | edge held: own NLL | top-1 | less crops |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for k, layer in enumerate(plan.found.layers, 1):
        before, after = (against([said[s] for s in single(space, k, n)]) for n in (False, True))
        sides = ["/".join(map(str, s)) for s in (range(layer.rate[0]), layer.sides[0])]
        more = against([held[s] for s in single(space, k, True)])
        gaps = [nll(held[s]) - nll(moved[s]) for s in single(space, k, True)] if moved else []
        less = told(torch.stack(gaps).mean(0)) if gaps else ""
        lines.append(f"| {k}: {layer.ops[0][0]} | {sides[0]} | {before} | {sides[1]} | {after} | {more} | {less} |")
    together = lambda own, chosen: torch.stack([own[s] for s in chosen]).softmax(-1).mean(0).log()  # noqa: E731
    loose, kept = together(said, near), together(held, near)
    means = f"{against([together(said, paper)])} | | {against([loose])} | {against([kept])}"
    lines.append(f"| mean of {NEAR} near | | {means} | |")
    if moved:
        same = together(moved, near)
        lines.append(f"| mean of crops moved as far | | | | | {against([same])} | | | |")
        less = " | ".join(f"{told(nll(x) - nll(same))} | {told(right(x) - right(same), 100, 2)}" for x in (loose, kept))
        lines.append(f"| near states less those crops | | | | | {less} | |")
    both = torch.stack([plain, torch.cat(mirrors)]).softmax(-1).mean(0).log()
    lines.append(f"| instead: mean of plain and mirror, 2 looks | | {against([both])} | | | | | | |")
    return [*lines, ""]


def answer(lines: Sequence[str]) -> str:
    """How many layers' states are measurably less likely than the plain network, before and after."""
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and line[2].isdigit()]
    before, after, held, behind = (sum(row[k].startswith("**+") for row in rows) for k in (2, 5, 7, 9))
    told = f"Alone, the states of {before} of {len(rows)} layers are measurably less likely than the plain network "
    told += f"with the paper's selections, of {after} with ours, of {held} where the edges of large maps are held, as "
    less = [line.split("|")[8].strip() for line in lines if line.startswith("| near states less")]
    told += f"looks do it; of {behind} measurably less likely than crops that are moved as far. "
    return told + f"The mean of near states differs from that of such crops by {', '.join(less)} NLL."


PAGE = """# Single states, before and after

{answer}

Of the selections s and s - R that take one phase, "before" takes the paper's, 0 to R - 1, and "after" the one that
loses least at the layer's ops (see `StateSpace.natural`); with the edge held, the outermost cells of a map of 48 or
more stay where they are and what lies between them moves, and an image goes on beyond its end
(`geometry/natural.py`). Own NLL and top-1 (points) of a layer's states, each alone, in the mean, less the plain
network's on the same samples, with 95 % intervals; bold where 0 lies outside. On the right, less the own NLL of the
plain network on the crop moved as far over the uncropped image: what a state loses beyond having moved. The last rows
are means over probabilities of {near} looks, the plain one among them; the very last of 2, the plain and the mirrored
image, at 2 forwards.

    python -m benchmarks.states --assets DIR --out docs/results-states.md

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kept = args.out.read_text(encoding="utf-8").split("\n## ")[1:] if args.out and args.out.exists() else []
    sections = {text.splitlines()[0]: [*f"## {text}".strip().splitlines(), ""] for text in kept}
    for name in args.nets.split(","):  # network by network, in the place of its older section: it takes a while
        lines = section(args.assets, name, args.samples)
        sections[lines[0].removeprefix("## ")] = lines
        every = [line for some in sections.values() for line in some]
        give(PAGE.format(near=NEAR, answer=answer(every)) + "\n".join(every), args.out)


if __name__ == "__main__":
    main()
