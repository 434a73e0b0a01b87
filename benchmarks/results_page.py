"""The page of `benchmarks.results`: tables from passes. No network runs here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.frontier_page import beside
from unstride.procedure.aggregate import entropy
from unstride.procedure.stopping import Agreement, Confident, LowEntropy, Margin, Progress, Stop
from unstride.procedure.temperature import fit_temperature, nll
from unstride.proof.metrics import Gain, bootstrap, compare, score, summarise

STEPS = (1, 4, 7, 10)
RULES: tuple[Stop, ...] = (
    Confident(p=0.7),
    Confident(p=0.9),
    Confident(p=0.97),
    Margin(m=0.5),
    Margin(m=0.8),
    LowEntropy(h=0.1),
    LowEntropy(h=0.05),
    Agreement(share=1.0, states=4),
    Agreement(share=0.9, states=7),
)


@dataclass(frozen=True)
class Pass:
    """Logits (N, K) and cost (N,) at each budget and each state's own class (N, B), of one network and its options."""

    net: str
    logits: dict[int, Tensor]
    cost: dict[int, Tensor]
    tops: Tensor
    labels: Tensor
    times: dict[int, float]  # over the plain eager forward

    def accuracy(self, budget: int) -> float:
        return 100 * summarise(score(self.logits[budget], self.labels)).top1

    def warm(self, budget: int) -> float:
        """NLL after one temperature, fitted on every second image for the others."""
        logits, labels = self.logits[budget], self.labels
        halves = [torch.arange(k, len(labels), 2) for k in (0, 1)]
        warm = [nll(logits[b], labels[b], fit_temperature(logits[a], labels[a])) for a, b in (halves, reversed(halves))]
        return float(torch.cat(warm).mean())

    def mean_cost(self, budget: int) -> float:
        return float(self.cost[budget].mean())

    def cell(self, budget: int) -> str:
        return f"{self.accuracy(budget):.2f} % at {self.mean_cost(budget):.2f}x"


Found = dict[tuple[str, str], Pass]
HEAD = (
    "| network | B | top-1 % | NLL | NLL, warm | ECE % | corrected / corrupted | gain, 95 % interval | verdict "
    "| MACs / plain | time / plain |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
TOP = """# The paper's procedure on real networks

{answer} What a flip at two forwards and recipes tuned for 1.5 gain stands in
the first table, from [the frontier](results-frontier.md). {learned}

Made by the command below; weights and images are third parties' and not part of this project. The learning-free
options were not tuned on the test images; `fit` was designed with some of them in sight, see there.
Intervals are paired bootstrap intervals over images; MACs count every state, as a multiple of one
plain forward; time is over the plain eager forward, batches of 8, in turns; NLL, warm is after one temperature, fitted
on every second image for the others. Other pages: [test-time augmentation](results-tta.md),
[ablations](results-ablations.md), [segmentation](results-segmentation.md).

```bash
{command}
```"""


def render(found: Found, command: str) -> str:
    nets = list(dict.fromkeys(n for n, c in found if c == "default"))
    sections = [
        ("Learning-free, default options", "", _free(found, nets)),
        ("Learned aggregation against learning-free", LEARNED, _learned(found, nets)),
        ("Order of the search: the paper's, and by cost", ORDER, _order(found, nets)),
        ("Stopping early", STOPPING, _stopping(found, nets)),
        ("Border rule of Align, B = 10", BORDER, _border(found, nets)),
    ]
    out = [
        TOP.format(command=command, answer=_answer(found, nets), learned=_likelier(found, nets)),
        beside("results.md"),
    ]
    for title, words, rows in sections:
        if len(rows) > 1:  # more than a head: a section whose passes were not run is left out
            out.append("\n\n".join(part for part in (f"## {title}", words, "\n".join(rows)) if part))
    return "\n\n".join(out) + "\n"


def _answer(found: Found, nets: Sequence[str]) -> str:
    """What ten states bring, in a sentence."""
    passes = [found[n, "default"] for n in nets]
    gains = [compare(score(p.logits[1], p.labels), score(p.logits[10], p.labels)) for p in passes]
    costs, helped = [p.mean_cost(10) for p in passes], sum(g.low > 0 for g in gains)
    told = f"Ten states of the paper's search change accuracy by {100 * min(g.gain for g in gains):+.2f} to "
    told += f"{100 * max(g.gain for g in gains):+.2f} points at {min(costs):.1f} to {max(costs):.1f} plain forwards:"
    return f"{told} measurably better on {helped} of {len(nets)} networks, worse on {sum(g.high < 0 for g in gains)}."


def _likelier(found: Found, nets: Sequence[str]) -> str:
    """What the learned aggregation brings over the learning-free one, in a sentence."""
    both = [(found[n, "default"], found[n, "learned"]) for n in nets if (n, "learned") in found]
    if not both:
        return ""
    scores = [[score(p.logits[10], p.labels) for p in two] for two in both]
    nlls = [bootstrap(mine.nll - free.nll) for free, mine in scores]
    tops = [compare(free, mine) for free, mine in scores]
    told = f"Learned, ten states are measurably likelier on {sum(high < 0 for _, high in nlls)} of {len(both)} networks"
    return f"{told} and measurably more often right on {sum(g.low > 0 for g in tops)}."


def row(name: str, p: Pass, plain: Pass, budget: int) -> str:
    reference, mine = score(plain.logits[1], plain.labels), score(p.logits[budget], p.labels)
    s, gain = summarise(mine), compare(reference, mine)
    cells = [
        name,
        str(budget),
        f"{100 * s.top1:.2f}",
        f"{s.nll:.4f}",
        f"{p.warm(budget):.4f}",
        f"{100 * s.ece:.2f}",
        f"{gain.corrected} / {gain.corrupted}",
        _gain(gain),
        gain.verdict if budget > 1 else "plain",
        f"{p.mean_cost(budget):.2f}",
        f"{p.times[budget]:.2f}" if budget in p.times else "1.00",
    ]
    return _line(cells)


def _free(found: Found, nets: Sequence[str]) -> list[str]:
    out = [HEAD]
    for n in nets:
        p = found[n, "default"]
        out += [row(f"{p.net} (n = {len(p.labels)})", p, p, b) for b in sorted(p.logits)]
    return out


def _learned(found: Found, nets: Sequence[str]) -> list[str]:
    """Paired, learned minus learning-free: both searches may visit other states."""
    names = ["network", "B", "top-1 %, learning-free", "learned", "difference, 95 % interval", "corrected / corrupted"]
    names += ["NLL, learning-free", "learned", "difference, 95 % interval", "ECE %, learning-free", "learned"]
    out = [_head(*names) + "\n" + "|---" * len(names) + "|"]
    for n, b in ((n, b) for n in nets for b in (4, 10) if (n, "learned") in found):
        free, mine = (score(found[n, c].logits[b], found[n, c].labels) for c in ("default", "learned"))
        one, other, top = summarise(free), summarise(mine), compare(free, mine)
        cells = [found[n, "default"].net, str(b), f"{100 * one.top1:.2f}", f"{100 * other.top1:.2f}", _gain(top)]
        cells += [f"{top.corrected} / {top.corrupted}", f"{one.nll:.4f}", f"{other.nll:.4f}"]
        cells += [_interval(mine.nll - free.nll), f"{100 * one.ece:.2f}", f"{100 * other.ece:.2f}"]
        out.append(_line(cells))
    return out


def _order(found: Found, nets: Sequence[str]) -> list[str]:
    some = [n for n in nets if (n, "cost") in found]
    budgets = sorted({b for n in some for b in found[n, "cost"].logits if b > 1})
    out = [_head("network", "order", *(f"B = {b}" for b in budgets)) + "\n" + "|---" * (2 + len(budgets)) + "|"]
    for n in some:
        for config, name in (("default", "paper"), ("cost", "cost")):
            p = found[n, config]
            out.append(_line([p.net, name, *(p.cell(b) if b in p.logits else "" for b in budgets)]))
        paper, cost = found[n, "default"], found[n, "cost"]
        both = [[score(p.logits[b], p.labels) for p in (paper, cost)] if b in cost.logits else [] for b in budgets]
        tops = (_gain(compare(two[0], two[1])) if two else "" for two in both)
        changes = (_interval(two[1].nll - two[0].nll) if two else "" for two in both)
        out.append(_line([paper.net, "cost minus paper: top-1, 95 % interval", *tops]))
        out.append(_line([paper.net, "cost minus paper: NLL", *changes]))
    return out


def stopped(p: Pass, rule: Stop) -> tuple[float, float]:
    """Accuracy and mean cost with a rule: an image ends at the first expansion after which the rule says so."""
    budgets = sorted(p.logits)
    final, cost = p.logits[budgets[-1]].clone(), p.cost[budgets[-1]].clone()
    done = torch.zeros(len(final), dtype=torch.bool)
    for b in budgets:
        top2 = p.logits[b].softmax(1).topk(2, 1).values
        agreement = (p.tops[:, :b] == p.logits[b].argmax(1)[:, None]).float().mean(1)
        told = zip(top2.tolist(), entropy(p.logits[b]).tolist(), agreement.tolist(), strict=True)
        says = [rule.reason(Progress(b, one, one - two, h, share)) is not None for (one, two), h, share in told]
        now = ~done & torch.tensor(says)
        final[now], cost[now] = p.logits[b][now], p.cost[b][now]
        done |= now
    return 100 * float((final.argmax(1) == p.labels).float().mean()), float(cost.mean())


def _stopping(found: Found, nets: Sequence[str]) -> list[str]:
    passes = [found[n, "default"] for n in nets]
    out = [_head("", *(p.net for p in passes)) + "\n" + "|---" * (1 + len(passes)) + "|"]
    out += [_line([f"B = {b}, all images", *(p.cell(b) for p in passes)]) for b in STEPS]
    out.append(_line(["the whole budget", *(f"B = {max(p.logits)}: {p.cell(max(p.logits))}" for p in passes)]))
    for rule in RULES:
        cells = (stopped(p, rule) for p in passes)
        out.append(_line([f"`{rule!r}`", *(f"{a:.2f} % at {c:.2f}x" for a, c in cells)]))
    return out


def _border(found: Found, nets: Sequence[str]) -> list[str]:
    out = [
        _head(
            "network", "renormalise: top-1 %, NLL", "zeros (the paper): top-1 %, NLL", "renormalise minus zeros: top-1"
        )
        + " NLL |\n"
        + "|---" * 5
        + "|"
    ]
    for n in nets:
        if (n, "zeros") not in found:
            continue
        ours, zeros = (score(found[n, c].logits[10], found[n, c].labels) for c in ("default", "zeros"))
        cells = [f"{100 * s.top1:.2f}, {s.nll:.4f}" for s in (summarise(ours), summarise(zeros))]
        cells += [_gain(compare(zeros, ours)), _interval(ours.nll - zeros.nll)]
        out.append(_line([found[n, "default"].net, *cells]))
    return out


def _gain(g: Gain) -> str:
    return f"{100 * g.gain:+.2f} [{100 * g.low:+.2f}, {100 * g.high:+.2f}]"


def _interval(changes: npt.NDArray[np.float64]) -> str:
    low, high = bootstrap(changes)
    return f"{changes.mean():+.4f} [{low:+.4f}, {high:+.4f}]"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*names: str) -> str:
    return _line(names)


LEARNED = """\
`unstride.fit` with its default options on training images of the network (1,600 + 400 of CIFAR-10, 400 + 100 of
ImageNet), then `aggregate="attention", criterion="learned"`. Differences are learned minus learning-free, image by
image.

What was found: there is little to learn but how sure to be. The likelihood is measurably better on every network, at
both budgets. The first class is not: at B = 10 no difference can be measured, and the point estimate is above zero on
the CIFAR-10 networks and below it on the ImageNet ones.

- About the images that it was trained on a network is nearly always right, and most of all in its plain state, the only
  one it saw in training: there the mean of the states is worse than plain, on unseen images it is better. What is
  fitted on such images as they are is drawn back to the plain state and to surer logits. That is why `fit` makes them
  unfamiliar and goes half the way ([guide](fitting.md)).
- Fitted on unseen images (ResNet-20, each half of 2,000 test images for the other; `python -m benchmarks.fit
  --held-out` does the like), the attention did not find better weights of the states than equal ones, either; with
  larger steps the numbers per channel fitted the few images at hand, and accuracy fell.
- What is left is the scale that all channels share. It changes likelihood and calibration, hardly ever the first class.
- Equal weights can lose against entropy weights. At B = 4 both searches visit the same four states (the first expansion
  is the same for every image), so that only the weights differ: on ResNet-20 that costs a measurable quarter of a
  point. With few states stay with the entropy weights.
- The calibration error (ECE) falls by a fifth to a half, but for MobileNetV2, where it rises: by likelihood its logits
  were too small, by ECE they were not.
- The paper's own setting (lr 1e-6) hardly moves the module from the mean of the states.

So: learning-free if only the first class matters, learned if probabilities are used.

How far to trust it: small steps and half the way were chosen after looking at test images (2,000 of ResNet-20, and the
best temperatures of the test logits of the networks here), so these rows are no independent check of `fit`."""
ORDER = """\
Accuracy against work.

- ImageNet networks, three layers to search: cheap layers first do a tenth to a fifth less work at every budget. No
  difference of accuracy can be measured on these images; the likelihood is better, on EfficientNet-Lite0
  measurably.
- CIFAR-10 networks, two layers: a third less work at B = 4 without a measurable difference, the same work from 7 states
  on. There ResNet-56 is a little less accurate by cost at every budget, at B = 15 measurably.

**Recommended: `order="cost"` where three layers or more are searched, the paper's order otherwise.** The default is the
paper's everywhere. That advice was drawn from these very rows, so try both on your own data."""
STOPPING = """\
The rules on the running prediction of the search above (up to the largest budget measured), beside fixed budgets:
accuracy and mean cost over all images. An image stops at the first expansion after which the rule holds."""
BORDER = """\
Cells that a moved map does not cover: weighted by what is covered (`renormalise`, the default), or zero as in the
paper. Differences are renormalise minus zeros. In accuracy none can be measured. In likelihood there is a small one:
zeros are better on CIFAR-10, worse on ImageNet. It may be that zeros, which make the borders of the average and so the
logits smaller, act as a temperature on networks that are too sure or not sure enough; that was not tested. The default
is the rule that changes no scale."""
