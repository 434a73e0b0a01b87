"""The page of `benchmarks.results`: tables from passes. No network runs here."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.frontier_page import beside
from benchmarks.nets import warm
from unstride.evaluation.metrics import Gain, compare, score, summarise
from unstride.procedure.aggregate import entropy
from unstride.procedure.stopping import Agreement, Confident, LowEntropy, Margin, Progress, Stop

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
        return float(warm(self.logits[budget], self.labels).mean())

    def mean_cost(self, budget: int) -> float:
        return float(self.cost[budget].mean())

    def cell(self, budget: int) -> str:
        return f"{self.accuracy(budget):.2f} % at {self.mean_cost(budget):.2f}x"


HEAD = (
    "| network | B | top-1 % | NLL | NLL, warm | ECE % | corrected / corrupted | gain, 95 % interval | verdict "
    "| MACs / plain | time / plain |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
TOP = """# The paper's procedure on real networks

{answer} What a flip at two forwards and recipes tuned for 1.5 gain stands in
the first table, from [the frontier](results-frontier.md). Other orders, weights, borders and the learned aggregation
are on the page of [ablations](results-ablations.md).

Made by the command below; weights and images are third parties' and not part of this project. The options were not
tuned on the test images.
Intervals are paired bootstrap intervals over images; MACs count every state, as a multiple of one
plain forward; time is over the plain eager forward, batches of 8, in turns; NLL, warm is after one temperature, fitted
on every second image for the others. Other pages: [test-time augmentation](results-tta.md),
[segmentation](results-segmentation.md).

```bash
{command}
```"""


def render(found: Sequence[Pass], command: str) -> str:
    out = [TOP.format(command=command, answer=_answer(found)), beside("results.md")]
    out += ["## Learning-free, default options", "\n".join(_free(found))]
    out += ["## Stopping early", STOPPING, "\n".join(_stopping(found))]
    return "\n\n".join(out) + "\n"


def _answer(passes: Sequence[Pass]) -> str:
    """What ten states bring, in a sentence."""
    gains = [compare(score(p.logits[1], p.labels), score(p.logits[10], p.labels)) for p in passes]
    costs, helped = [p.mean_cost(10) for p in passes], sum(g.low > 0 for g in gains)
    told = f"Ten states of the paper's search change accuracy by {100 * min(g.gain for g in gains):+.2f} to "
    told += f"{100 * max(g.gain for g in gains):+.2f} points at {min(costs):.1f} to {max(costs):.1f} plain forwards:"
    return f"{told} measurably better on {helped} of {len(passes)} networks, worse on {sum(g.high < 0 for g in gains)}."


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


def _free(passes: Sequence[Pass]) -> list[str]:
    out = [HEAD]
    for p in passes:
        out += [row(f"{p.net} (n = {len(p.labels)})", p, p, b) for b in sorted(p.logits)]
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


def _stopping(passes: Sequence[Pass]) -> list[str]:
    out = [_head("", *(p.net for p in passes)) + "\n" + "|---" * (1 + len(passes)) + "|"]
    out += [_line([f"B = {b}, all images", *(p.cell(b) for p in passes)]) for b in STEPS]
    out.append(_line(["the whole budget", *(f"B = {max(p.logits)}: {p.cell(max(p.logits))}" for p in passes)]))
    for rule in RULES:
        cells = (stopped(p, rule) for p in passes)
        out.append(_line([f"`{rule!r}`", *(f"{a:.2f} % at {c:.2f}x" for a, c in cells)]))
    return out


def _gain(g: Gain) -> str:
    return f"{100 * g.gain:+.2f} [{100 * g.low:+.2f}, {100 * g.high:+.2f}]"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*names: str) -> str:
    return _line(names)


STOPPING = """\
The rules on the running prediction of the search above (up to the largest budget measured), beside fixed budgets:
accuracy and mean cost over all images. An image stops at the first expansion after which the rule holds."""
